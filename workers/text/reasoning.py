"""Separates a model's reasoning from its answer, by the marks around the reasoning.

Marks come from the operator's model folder or setting, never from a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from penstock.workers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Marks:
    """The texts that a model writes before and after its reasoning."""

    opening: str
    closing: str


# As published with: DeepSeek-R1, Qwen3, QwQ, GLM-4.5, MiniMax-M2, OLMo 3 and many more; Magistral;
# Seed-OSS; Command A Reasoning; EXAONE Deep; Kimi-VL; OpenThinker; Gemma 4.
PUBLISHED = (
    Marks("<think>", "</think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<thought>", "</thought>"),
    Marks("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    Marks("<|begin_of_thought|>", "<|end_of_thought|>"),
    Marks("<|channel>thought", "<channel|>"),
)
HARMONY = Marks("<|channel|>analysis<|message|>", "<|end|>")  # harmony.py reads it
_GRANITE = Marks("Here is my thought process:", "Here is my response:")
# By the names of vLLM's --reasoning-parser.
NAMED: Mapping[str, Marks] = MappingProxyType(
    {
        **dict.fromkeys(("deepseek_r1", "qwen3", "glm45", "minimax_m2", "olmo3"), PUBLISHED[0]),
        "mistral": PUBLISHED[1],
        "seed_oss": PUBLISHED[2],
        "granite": _GRANITE,
        "gemma4": PUBLISHED[7],
        **dict.fromkeys(("harmony", "openai_gptoss"), HARMONY),
    }
)
MAX_BLANK = 256  # characters of white space before an opening mark
TAIL_TOKENS = 48  # of a prompt, in which a template may open or close the reasoning


def marks_in(setting: str) -> Marks:
    """The two marks of the setting `reasoning_marks`. Raises ConfigError."""
    if setting in NAMED:
        return NAMED[setting]
    parts = setting.split(" ")
    if len(parts) != 2 or not all(parts) or parts[0] == parts[1]:
        raise ConfigError(
            "reasoning_marks must be auto, none, two marks separated by one space, such as "
            f"'<think> </think>', or one of {', '.join(NAMED)}; got {setting!r}"
        )
    return Marks(*parts)


class Start(Enum):
    """The state at the beginning of an answer."""

    MAYBE = 0  # reasoning comes first if the answer begins with the opening mark
    INSIDE = 1  # the prompt has opened the reasoning
    AFTER = 2  # the prompt has closed it: there is none


def start_of(marks: Marks, tail: str) -> Start:
    """The state of an answer to a prompt that ends with `tail`."""
    tail = tail.rstrip()
    if tail.endswith(marks.opening):
        return Start.INSIDE
    return Start.AFTER if tail.endswith(marks.closing) else Start.MAYBE


class ReasoningReader:
    """Splits one answer into reasoning and answer text, however the text is cut into pieces.

    The marks, and line breaks next to them, belong to neither. Reasoning that is never closed
    extends to the end. Linear in the text; it holds back at most a part of a mark, and breaks.
    """

    def __init__(self, marks: Marks, start: Start):
        self._marks = marks
        self._state = start
        self._may_open = start is not Start.AFTER  # some models repeat what the prompt has opened
        self._held = ""  # may be a part of a mark
        self._num_breaks = 0  # line breaks at the end of the reasoning so far
        self._skips_breaks = True  # at the beginning of the reasoning or the answer
        self.num_taken = 0  # characters decided so far that are not part of the answer

    @property
    def is_inside(self) -> bool:
        return self._state is Start.INSIDE

    def feed(self, text: str) -> tuple[str, str]:
        """What `text` adds to the reasoning, and to the answer."""
        if self._state is Start.AFTER:
            return "", self._answer(text)
        self._held += text
        if self._may_open:
            begun, opening = self._held.lstrip(), self._marks.opening
            num_blank = len(self._held) - len(begun)
            if begun.startswith(opening):
                self._take(num_blank + len(opening))
                self._state = Start.INSIDE
            elif opening.startswith(begun) and num_blank <= MAX_BLANK:
                return "", ""
            self._may_open = False
            if self._state is Start.MAYBE:
                self._state, self._skips_breaks = Start.AFTER, False
                held, self._held = self._held, ""
                return "", held
        thought = self._reasoning()
        if self.is_inside:
            return thought, ""
        held, self._held = self._held, ""
        return thought, self._answer(held)

    def finish(self) -> tuple[str, str]:
        """The text that was held back, at the end of the answer."""
        held, self._held = self._held, ""
        if not self.is_inside:
            return "", held
        self.num_taken += len(held)
        return self._thought(held) if held else "", ""

    def _reasoning(self) -> str:
        """The held reasoning, up to a possible part of the closing mark."""
        closing = self._marks.closing
        at = self._held.find(closing)
        if at >= 0:
            thought = self._thought(self._take(at))
            self._take(len(closing))
            self._state, self._skips_breaks = Start.AFTER, True
            return thought
        longest = min(len(closing) - 1, len(self._held))
        kept = next((n for n in range(longest, 0, -1) if self._held.endswith(closing[:n])), 0)
        return self._thought(self._take(len(self._held) - kept))

    def _thought(self, text: str) -> str:
        """`text` without the breaks around the reasoning; breaks inside follow with later text."""
        body = text.rstrip("\n")
        num_breaks = len(text) - len(body)
        if not body:
            self._num_breaks += num_breaks
            return ""
        if self._skips_breaks:
            body, self._num_breaks, self._skips_breaks = body.lstrip("\n"), 0, False
        body = "\n" * self._num_breaks + body
        self._num_breaks = num_breaks
        return body

    def _answer(self, text: str) -> str:
        if self._skips_breaks and text:
            kept = text.lstrip("\n")
            self.num_taken += len(text) - len(kept)
            self._skips_breaks = not kept
            return kept
        return text

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        self.num_taken += num_chars
        return taken
