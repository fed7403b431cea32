"""Bodies of completions with one thing wrong, drawn at random. All of them must be refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

FAR = 2**31 - 1
GOOD: dict[str, Any] = {"model": "builtin", "prompt": "It was", "max_tokens": 4}
VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, 1e308, "hot", [], {}, True),
    "top_p": (0.0, -1, 1.5, "x"),
    "min_p": (-0.1, 2),
    "top_k": (-2, "x", 1.5),
    "max_tokens": (-1, -(2**31), FAR, "many", [1]),
    "min_tokens": (-1, FAR),
    "repetition_penalty": (0.0, -1.0, 1e6),
    "presence_penalty": (-2.5, 1e30),
    "frequency_penalty": (2.5, -1e30),
    "n": (0, -1, 9, FAR, "two"),
    "logprobs": (-1, 21, FAR),
    "stop": (["x"] * 17, [""], ["x" * 257], [5], {"a": 1}),
    "stop_token_ids": ([FAR], [-1], [5] * 129, ["a"]),
    "logit_bias": ({str(FAR): 1.0}, {"-1": 1.0}, {"x": 1}, [1]),
    "prompt": ([], [5, FAR], [-1, 5], {}, 5, "a " * 50_000),
    "seed": (2**63, "x", 1.5),
    "model": ("../../etc/passwd", "m" * 10_000, 5),
    "guided_json": ("{" * 10, "[1]", '{"$ref": "http://a/"}'),
    "guided_regex": ("[", "(?=a)a", r"(a)\1"),
    "mood": (1,),
    "stream": ("perhaps", 3),
}
BYTES = (
    b"",
    b"{",
    b"[1]",
    b"nonsense",
    b"[" * 50_000,
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "top_p": Infinity}',
)


def hostile_bodies(rng: random.Random, num: int) -> Iterator[tuple[str, bytes]]:
    """`num` pairs of what is wrong and the body."""
    for _ in range(num):
        if rng.random() < 0.15:
            content = rng.choice(BYTES)
            yield f"bytes {content[:20]!r}", content
            continue
        name = rng.choice(list(VALUES))
        value = rng.choice(VALUES[name])
        yield f"{name} = {str(value)[:40]}", json.dumps({**GOOD, name: value}).encode()
