"""The built-in model, its tokenizer, and a compiler of grammars over its tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.structured.grammar import GrammarCompiler
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model


@functools.cache
def model() -> Decoder:
    torch.set_num_threads(1)
    return load_model(resolve_model("builtin"), weights="fp32", progress=False)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model("builtin"))


@contextmanager
def open_compiler() -> Iterator[GrammarCompiler]:
    config = model().config
    made = GrammarCompiler(
        lambda: tokenizer().to_json(),
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
    )
    yield made
    made.close()
