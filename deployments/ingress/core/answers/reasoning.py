"""Splits reasoning from the answer, for calls that ask for it.

For a structured answer, the grammar is extended by the reasoning that precedes it; the whole is
compiled, and bounded, as any other grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.deployments.ingress.core.call import Call, ChatPrompt
from penstock.workers.request import RequestError, SamplingParams
from penstock.workers.structured_spec import (
    WHITE_SPACE,
    StructuredKind,
    StructuredSpec,
    json_in_grammar,
    with_ascii_classes,
)
from penstock.workers.text.harmony import (
    CHANNEL,
    END,
    MESSAGE,
    START,
    TOKENS,
    HarmonyReader,
    start_in,
)
from penstock.workers.text.reasoning import (
    HARMONY,
    PUBLISHED,
    TAIL_TOKENS,
    Marks,
    ReasoningReader,
    Start,
    marks_in,
    start_of,
)
from penstock.workers.text.tokenizer import Tokenizer

_BREAKS = r"/\n{0,4}/"  # after the closing mark; they are no part of the answer
_ESCAPED = re.compile(r"\\.|/|\n|::", re.DOTALL)


def find_marks(setting: str | None, tokenizer: Tokenizer) -> Marks | None:
    """The marks of a model; None: it has none.

    `setting`: None, both marks with a space between, or 'auto': published ones that the chat
    template writes or that are tokens of their own. Raises ConfigError.
    """
    if setting is None:
        return None
    if setting == "auto":
        template = tokenizer.chat_template or ""
        if CHANNEL in template and MESSAGE in template:
            return HARMONY
        known = (m for m in PUBLISHED if m.closing in template or _are_tokens(m, tokenizer))
        return next(known, None)
    return marks_in(setting)


def _are_tokens(marks: Marks, tokenizer: Tokenizer) -> bool:
    return all(tokenizer.token_id(mark) is not None for mark in (marks.opening, marks.closing))


@dataclass(frozen=True, slots=True)
class ReasoningSplit:
    """How the answers of one call are split into reasoning and text."""

    marks: Marks
    start: Start  # whether the prompt has opened or closed the reasoning

    @property
    def shown(self) -> frozenset[str]:
        """Tokens that must be rendered so that the marks are found."""
        if self.marks == HARMONY:
            return frozenset(TOKENS)
        return frozenset((self.marks.opening, self.marks.closing))

    def reader(self) -> ReasoningReader | HarmonyReader:
        """A reader for one answer."""
        if self.marks == HARMONY:
            return HarmonyReader(self.start)
        return ReasoningReader(self.marks, self.start)

    def params(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """`params` with its structured output applied after the reasoning. Raises RequestError."""
        if params.structured is None:
            return params
        spec = after_reasoning(params.structured, self.marks, self.start, tokenizer)
        if (problem := spec.problem()) is not None:
            raise RequestError(f"{spec.param} {problem}", param=spec.param)
        return replace(params, structured=spec)


def split_of(
    call: Call, prompt_ids: Sequence[int], marks: Marks | None, tokenizer: Tokenizer
) -> ReasoningSplit | None:
    """The split that `call` asks for; None: it asks for none, or the model has no marks."""
    wants_split = call.options.splits_reasoning and isinstance(call.prompt, ChatPrompt)
    if marks is None or not wants_split:
        return None
    tail = tokenizer.decode(prompt_ids[-TAIL_TOKENS:])
    return ReasoningSplit(marks, start_in(tail) if marks == HARMONY else start_of(marks, tail))


def after_reasoning(
    spec: StructuredSpec, marks: Marks, start: Start, tokenizer: Tokenizer
) -> StructuredSpec:
    """`spec`, applied only after the reasoning. It must have been checked before.

    Raises RequestError naming its field for a grammar in GBNF, which cannot be part of another.
    """
    if start is Start.AFTER:
        return spec
    if marks == HARMONY:
        return _in_harmony(spec, start, tokenizer)
    opening = grammar_item(marks.opening, tokenizer)
    first = "reasoning" if start is Start.INSIDE else f"({opening} reasoning)?"
    lines = [f"start: {first} answer", f"reasoning: thought {_BREAKS}"]
    lines.append(_up_to("thought", marks.closing, tokenizer))
    text = "\n".join([*lines, f"answer: {_answer(spec)}"])
    return replace(spec, kind=StructuredKind.GRAMMAR, text=text, lenient=False)


def _in_harmony(spec: StructuredSpec, start: Start, tokenizer: Tokenizer) -> StructuredSpec:
    """`spec` as the text of the channel final, or as the call of a tool, after an analysis."""
    channel, message, begun = (grammar_item(text, tokenizer) for text in (CHANNEL, MESSAGE, START))
    head = "" if spec.param == "tools" else f'{channel} "final" {message} '
    analysis = "" if start is Start.INSIDE else f'{channel} "analysis" {message} '
    thought = f'{analysis}thought {begun} "assistant"'
    lines = [
        f"start: {thought if start is Start.INSIDE else f'({thought})?'} {head}answer",
        _up_to("thought", END, tokenizer),
        f"answer: {_answer(spec)}",
    ]
    return replace(spec, kind=StructuredKind.GRAMMAR, text="\n".join(lines), lenient=False)


def grammar_item(text: str, tokenizer: Tokenizer) -> str:
    """`text` in a rule of a Lark grammar; a special token is no text, and is named by its id."""
    if tokenizer.is_special(text):
        return f"<[{tokenizer.token_id(text)}]>"
    return json.dumps(text)


def _up_to(name: str, end: str, tokenizer: Tokenizer) -> str:
    """A rule for any text up to `end`, and `end`. A special token ends any text by itself."""
    if tokenizer.is_special(end):
        return f"{name}: /(?s:.*)/ {grammar_item(end, tokenizer)}"
    return f"{name}[suffix={json.dumps(end)}]: /(?s:.*)/"


def _answer(spec: StructuredSpec) -> str:
    """The right side of a Lark rule for what `spec` allows."""
    match spec.kind:
        case StructuredKind.JSON_OBJECT | StructuredKind.JSON_SCHEMA:
            schema = json.loads(spec.text) if spec.text else {"type": "object"}
            schema["x-guidance"] = {"whitespace_pattern": WHITE_SPACE, "lenient": spec.lenient}
            return f"%json {json_in_grammar(schema)}"
        case StructuredKind.REGEX:
            return f"/{_ESCAPED.sub(_escape, with_ascii_classes(spec.text))}/"
        case StructuredKind.CHOICE:
            return " | ".join(map(json_in_grammar, json.loads(spec.text)))
        case StructuredKind.GRAMMAR:
            if "::=" in spec.text:
                raise RequestError(
                    f"{spec.param}: this model reasons before it answers, and a GBNF grammar "
                    "cannot follow that; write it in Lark",
                    param=spec.param,
                )
            return f"%lark {{\n{spec.text}\n}}"


def _escape(match: re.Match[str]) -> str:
    """What may not stand as it is between the slashes of a Lark expression."""
    written = {"/": r"\/", "\n": r"\n", "\\\n": r"\n", "::": r":\x3a"}
    return written.get(match[0], match[0])
