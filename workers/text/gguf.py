"""The tokenizer and the chat template in a GGUF file, as an object of the `tokenizers` library.

A file holds the vocabulary and the merges, and names the rule by which text is split before them
(`tokenizer.ggml.pre`). A split by another rule gives ids that look right and are not: a rule that
is not known here is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from penstock.workers.errors import ConfigError
from penstock.workers.gguf.config import end_ids, token_id
from penstock.workers.gguf.header import GgufHeader

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # kinds of tokens in tokenizer.ggml.token_type
MAX_PIECE_CHARS = 256  # of a SentencePiece token: its splits are tried; real ones have 16
_SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_OTHERS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How text is split before byte-level BPE.

    `pattern`: of the pieces; None: GPT-2's. `ignores_merges`: a piece that is a token is taken
    whole. `adds_bos`: where the file does not say.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_OF_LLAMA3 = SplitRule(_LLAMA3, ignores_merges=True, adds_bos=True)
_OF_QWEN2 = SplitRule(_QWEN2, nfc=True)
_OF_DIGITS = SplitRule(single_digits=True)
# By tokenizer.ggml.pre.
SPLIT_RULES: Mapping[str, SplitRule] = MappingProxyType(
    {
        **dict.fromkeys(("gpt-2", "olmo"), SplitRule()),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _OF_DIGITS),
        **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _OF_LLAMA3),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _OF_QWEN2),
        "tekken": SplitRule(_TEKKEN, ignores_merges=True, adds_bos=True),
    }
)


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """`special_tokens` as templates name them: bos_token, eos_token, …"""

    backend: Backend
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def tokenizer_of(header: GgufHeader) -> GgufTokenizer:
    """The tokenizer in a file. Raises ConfigError naming the file and the key."""
    tokens = _texts(header, "tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens):
        raise ConfigError(f"{header.file}: tokenizer.ggml.tokens is empty, or has a token twice")
    model = header.metadata.get("tokenizer.ggml.model")
    makers = {"gpt2": _byte_level, "llama": _pieces}
    if not isinstance(model, str) or model not in makers:
        raise ConfigError(
            f"{header.file}: tokenizer.ggml.model {model!r} is not supported; supported are "
            f"{', '.join(makers)}"
        )
    special = _special_tokens(header, tokens)
    try:
        backend, adds_bos = makers[model](header, vocabulary)
        _add_tokens(header, backend, tokens, special)
        _add_ends(header, backend, special, adds_bos)
    except ConfigError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{header.file}: its tokenizer cannot be used: {error}") from error
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{header.file}: tokenizer.chat_template is no text")
    return GgufTokenizer(backend, special, end_ids(header), template)


def _byte_level(header: GgufHeader, vocabulary: dict[str, int]) -> tuple[Backend, bool]:
    """Byte-level BPE, and whether it begins a text with the token for that, unless told."""
    name = header.metadata.get("tokenizer.ggml.pre")
    rule = SPLIT_RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        raise ConfigError(
            f"{header.file}: tokenizer.ggml.pre {name!r} is not supported; supported are "
            f"{', '.join(SPLIT_RULES)}: give the model's safetensors checkpoint, or a file that a "
            "current llama.cpp made"
        )
    merges = [_halves(header, text) for text in _texts(header, "merges")]
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=rule.ignores_merges))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] * rule.single_digits
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, rule.adds_bos


def _pieces(header: GgufHeader, vocabulary: dict[str, int]) -> tuple[Backend, bool]:
    """SentencePiece's BPE: characters without a token become bytes."""
    scores = header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, tuple) or len(scores) != len(vocabulary):
        raise ConfigError(f"{header.file}: tokenizer.ggml.scores are not one for each token")
    unknown = token_id(header, "unknown_token_id")
    backend = Backend(
        models.BPE(
            vocabulary,
            _merges_by_score(header, vocabulary, scores),
            unk_token=None if unknown is None else list(vocabulary)[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = _flag(header, "add_space_prefix", True)
    spaces: list[Any] = [normalizers.Prepend(_SPACE)] * has_prefix
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", _SPACE)])
    last: list[Any] = [decoders.Strip(" ", 1, 0)] * has_prefix
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return backend, True


def _merges_by_score(
    header: GgufHeader, vocabulary: dict[str, int], scores: tuple[float, ...]
) -> list[tuple[str, str]]:
    """All splits of a token into two others, those of tokens with higher scores first."""
    merges: list[tuple[str, str]] = []
    for token in sorted(vocabulary, key=lambda token: -scores[vocabulary[token]]):
        if len(token) > MAX_PIECE_CHARS:
            raise ConfigError(
                f"{header.file}: token {vocabulary[token]} has {len(token)} characters; "
                f"{MAX_PIECE_CHARS} are the most"
            )
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(a, b) for a, b in splits if a in vocabulary and b in vocabulary]
        merges += sorted(known, key=lambda split: (vocabulary[split[0]], vocabulary[split[1]]))
    return merges


def _add_tokens(
    header: GgufHeader, backend: Backend, tokens: list[str], special: Mapping[str, str]
) -> None:
    """Tokens that are found in a text before it is split."""
    kinds = header.metadata.get("tokenizer.ggml.token_type", (1,) * len(tokens))
    if not isinstance(kinds, tuple) or len(kinds) != len(tokens):
        raise ConfigError(f"{header.file}: tokenizer.ggml.token_type is not one for each token")
    always = set(special.values())
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, kinds)
        if token and (kind in (UNKNOWN, CONTROL, USER_DEFINED) or token in always)
    ]
    backend.add_tokens(added)


def _add_ends(
    header: GgufHeader, backend: Backend, special: Mapping[str, str], adds_bos: bool
) -> None:
    """Begin and end each text with the tokens for that, if the file or the family says so."""
    first, last = special.get("bos_token"), special.get("eos_token")
    before = [first] if first and _flag(header, "add_bos_token", adds_bos) else []
    after = [last] if last and _flag(header, "add_eos_token", False) else []
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)]
    if before or after:
        ids = [(token, backend.token_to_id(token)) for token in {*before, *after}]
        steps.append(
            processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)
        )
    backend.post_processor = processors.Sequence(steps)


def _special_tokens(header: GgufHeader, tokens: list[str]) -> dict[str, str]:
    named = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = token_id(header, f"{key}_token_id")
        if index is not None:
            if index >= len(tokens):
                raise ConfigError(
                    f"{header.file}: tokenizer.ggml.{key}_token_id is {index}, which is no token"
                )
            named[f"{name}_token"] = tokens[index]
    return named


def _halves(header: GgufHeader, merge: str) -> tuple[str, str]:
    first, _, second = merge[1:].partition(" ")
    if not merge or not second:
        raise ConfigError(f"{header.file}: tokenizer.ggml.merges has {merge!r}, which is no pair")
    return merge[0] + first, second


def _texts(header: GgufHeader, name: str) -> list[str]:
    value = header.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list):
        raise ConfigError(f"{header.file}: tokenizer.ggml.{name} is missing, or no list of texts")
    return value


def _flag(header: GgufHeader, name: str, default: bool) -> bool:
    value = header.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ConfigError(f"{header.file}: tokenizer.ggml.{name} is {value!r}; true or false is")
    return value
