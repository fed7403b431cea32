"""Text to token ids and back, for one model.

The `tokenizers` library alone reads tokenizer.json, so that a process which only needs text imports
neither torch nor transformers; transformers is imported only if that file is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.workers.errors import ConfigError
from penstock.workers.gguf.header import find_gguf, read_header
from penstock.workers.request import RequestError
from penstock.workers.text.chat_template import ChatTemplate, Message
from penstock.workers.text.detokenizer import (
    WINDOW,
    ByteLevelDetokenizer,
    Detokenizer,
    PieceDetokenizer,
    WindowDetokenizer,
    bytes_of_byte_level,
    bytes_of_piece,
    piece_rules,
)
from penstock.workers.text.gguf import tokenizer_of


class Tokenizer:
    """One model's tokenizer and chat template. Safe to use from several threads."""

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        response_template: Mapping[str, Any] | None = None,
    ):
        """`special_tokens` as templates name them: bos_token, eos_token, … `variables`: of the chat
        template, for conversations that do not set them. `response_template`: how the model's
        repository says that answers are read."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = eos_token_ids
        self.bos_token_id: int | None = backend.token_to_id(special_tokens.get("bos_token", ""))
        added = backend.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._special = frozenset(token.content for token in added.values() if token.special)
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else None
        self._is_byte_level = decoder is not None and decoder["type"] == "ByteLevel"
        self._rules = piece_rules(decoder)
        # Caches by what is rendered: skip special tokens or not, and which are always shown.
        self._bytes: dict[tuple[bool, frozenset[str]], dict[int, bytes]] = {}
        self._spelt: dict[int, bytes] = {}
        self._template = ChatTemplate(chat_template, special_tokens) if chat_template else None
        self._variables = dict(variables or {})
        self.response_template = response_template

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """Read the tokenizer of a model folder, or of the GGUF file at `path` or in it.

        `chat_template` None: the model's own. Raises ConfigError naming what is wrong.
        """
        folder = Path(path)
        if (gguf := find_gguf(folder)) is not None:
            found = tokenizer_of(read_header(gguf))
            return cls(
                found.backend,
                special_tokens=found.special_tokens,
                eos_token_ids=found.eos_token_ids,
                chat_template=chat_template or found.chat_template,
                variables=variables,
            )
        config = _read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # older checkpoints keep them apart
            config |= _read_json(folder / "special_tokens_map.json")
        special_tokens = _special_tokens(config)
        backend = _load_backend(folder)
        _add_missing_tokens(backend, config, special_tokens)
        eos: int | list[int] | None = None
        for name in ("generation_config.json", "config.json"):
            if eos is None:
                eos = _read_json(folder / name).get("eos_token_id")
        if eos is None:
            eos = backend.token_to_id(special_tokens.get("eos_token", ""))
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos or ()),
            chat_template=chat_template or _chat_template(folder, config),
            variables=variables,
            response_template=_response_template(config),
        )

    def to_json(self) -> str:
        """The text of a tokenizer.json, with every token that this tokenizer knows."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with or without the special tokens that the tokenizer adds.

        Releases the GIL for most of its time.
        """
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    @cached_property
    def prefix_ids(self) -> list[int]:
        """The special tokens that `encode` puts before a text."""
        first = self.encode("a", add_special_tokens=False)[0]
        whole = self.encode("a")
        return whole[: whole.index(first)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`; an unknown id has none."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's string for each id; "" for an unknown id."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        after: Sequence[int] = (),
        shown: frozenset[str] = frozenset(),
    ) -> Detokenizer:
        """A new detokenizer for one answer. Its cost per token does not grow with the answer.

        `after`: the token ids that the answer continues. A continuation keeps the leading space
        that some tokenizers drop at the beginning of a text. `shown`: special tokens that are
        always rendered.
        """
        skipped = self._special - shown if skip_special_tokens else frozenset()

        def piece(token_id: int) -> str | None:
            token: str | None = self._backend.id_to_token(token_id)
            return None if token in skipped else token

        if self._is_byte_level:
            known = self._bytes.setdefault((skip_special_tokens, shown), {})

            def token_bytes(token_id: int) -> bytes:
                value = known.get(token_id)
                if value is None:
                    value = known[token_id] = bytes_of_byte_level(piece(token_id) or "")
                return value

            return ByteLevelDetokenizer(token_bytes)
        if self._rules is not None:
            return PieceDetokenizer(self._rules, piece, is_start=not after)
        return WindowDetokenizer(self.decode, piece, after=after[-WINDOW:])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, special or not; b"" for an unknown id.

        They may be an incomplete character. The leading space that a decoder drops at the beginning
        of a text is included.
        """
        spelt = self._spelt.get(token_id)
        if spelt is None:
            spelt = self._spelt[token_id] = self._spell(token_id)
        return spelt

    def _spell(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token in self._special:
            return token.encode()
        if self._is_byte_level:
            return bytes_of_byte_level(token)
        if self._rules is not None:
            return bytes_of_piece(token, self._rules)
        return self.decode([token_id]).encode()

    @cached_property
    def max_token_bytes(self) -> int:
        """The most UTF-8 bytes of any known token."""
        return max(len(token.encode()) for token in self._backend.get_vocab())

    def token_id(self, token: str) -> int | None:
        """The id of an added token, such as a control token; None if `token` is not one."""
        return self._added.get(token)

    def is_special(self, token: str) -> bool:
        return token in self._special

    @property
    def special_texts(self) -> frozenset[str]:
        """The special tokens."""
        return self._special

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template."""
        return None if self._template is None else self._template.source

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def renders_tools(self) -> bool:
        """Whether the chat template renders tools, and so calls and their results."""
        return self._template is not None and self._template.knows_tools

    @property
    def template_variables(self) -> frozenset[str]:
        """The variables that the chat template reads in addition to messages and tools."""
        return frozenset() if self._template is None else self._template.variables

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continues_last: bool = False,
    ) -> str:
        """The prompt text of a conversation; to be encoded without special tokens.

        `continues_last`: as for `ChatTemplate.render`.

        Raises RequestError: chat_template_missing, or chat_template_error as `ChatTemplate.render`.
        """
        if self._template is None:
            raise RequestError(
                "this model has no chat template; send a prompt to /v1/completions, or Generate",
                param="messages",
                code="chat_template_missing",
            )
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables={**self._variables, **(variables or {})},
            continues_last=continues_last,
        )


def _load_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error
    from transformers import AutoTokenizer  # costs seconds, and torch

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"no tokenizer can be read from {folder}: {error}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ConfigError(
            f"the tokenizer of {folder} runs in Python only; convert it to a tokenizer.json"
        )
    return backend


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … by name."""
    named = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            named[name] = text
    return named


def _add_missing_tokens(
    backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Add tokens that only tokenizer_config.json declares, in the order of their ids, as
    transformers does."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    extra = extra.values() if isinstance(extra, dict) else extra
    special = [*special_tokens.values()]
    special += [value["content"] if isinstance(value, dict) else value for value in extra]
    declared = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    tokens = {fields["content"]: AddedToken(**fields) for _, fields in declared}
    for text in special:
        tokens.setdefault(text, AddedToken(text, special=True)).special = True
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for text, token in tokens.items() if text not in known])


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The default template: chat_template.jinja if it exists, else the one in
    tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _response_template(config: Mapping[str, Any]) -> dict[str, Any] | None:
    given = config.get("response_template")
    return given if isinstance(given, dict) else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} should hold a JSON object")
    return value
