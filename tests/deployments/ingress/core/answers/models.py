"""Tokenizers with other chat templates and further tokens, for tests of how answers are read."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

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
