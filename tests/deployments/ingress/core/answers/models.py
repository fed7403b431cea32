"""For tests of how answers are read: tokenizers with other chat templates and further tokens, and
the calls that a parser finds."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.deployments.ingress.core.answers.tool_forms.form_parser import ToolParser
from penstock.workers.text.tokenizer import Tokenizer
from tests.deployments.serving import tokenizer

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
RENDERS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + PLAIN


def model_of(template: str | None, *tokens: AddedToken, **options: Any) -> Tokenizer:
    """The built-in tokenizer with another template, and further tokens."""
    backend = Backend.from_str(tokenizer().to_json())
    backend.add_tokens(list(tokens))
    known = tokenizer()
    return Tokenizer(
        backend,
        special_tokens=known.special_tokens,
        eos_token_ids=known.eos_token_ids,
        chat_template=template,
        **options,
    )


def read_calls(parser: ToolParser, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text, and name and arguments of each call, of an answer that comes in these parts."""
    found = [*map(parser.feed, parts), parser.finish()]
    calls: list[tuple[str, str]] = []
    ids = set()
    for _, pieces in found:
        for piece in pieces:
            if piece.name is not None:
                assert piece.index == len(calls) and piece.call_id not in ids
                ids.add(piece.call_id)
                calls.append((piece.name, piece.arguments))
            else:
                assert piece.call_id is None
                name, arguments = calls[piece.index]
                calls[piece.index] = (name, arguments + piece.arguments)
    return "".join(text for text, _ in found), calls
