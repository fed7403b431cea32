"""The row about bad requests, and their bodies: one thing wrong in each, drawn at random."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx

from benchmarks.faults.child import Child
from benchmarks.faults.table import inside
from benchmarks.faults.table.house import Plan, house, over_grpc
from benchmarks.faults.table.rows import Scale, Seen, row

PROMPT = "It was a bright morning, and"

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


@row(
    24,
    "Storm of bad requests",
    injected="10,000 requests with one thing wrong (values, types, ids, schemas, bytes), while "
    "good "
    "ones are compared",
    promised="each is refused with 4xx; the processes are the same, and good answers do not change",
)
async def bad_requests(scale: Scale, seen: Seen) -> None:
    rng = random.Random(scale.seed)
    num, at_once = scale.of(200, 10_000), 16
    async with house(Plan(prepare=inside.nothing)) as made:
        expected = [(await over_grpc(made.target, PROMPT, seed=n)).content for n in range(4)]
        is_over = asyncio.Event()

        async def good() -> None:
            n = 0
            while not is_over.is_set():
                got = await over_grpc(made.target, PROMPT, seed=n % 4)
                seen.count("good answers compared")
                seen.check(got.content == expected[n % 4], f"a good request got {got.error or got}")
                n += 1

        bodies = iter(hostile_bodies(rng, num))

        async def bad() -> None:
            for name, content in bodies:
                try:
                    answer = await made.http.post(
                        f"{made.url}/v1/completions",
                        content=content,
                        headers={"content-type": "application/json"},
                    )
                except httpx.HTTPError as error:
                    seen.check(False, f"{name}: {type(error).__name__}")
                    continue
                seen.count("bad requests")
                is_refused = 400 <= answer.status_code < 500
                seen.check(is_refused, f"{name}: {answer.status_code} {answer.text[:80]}")

        goods = [asyncio.ensure_future(good()) for _ in range(2)]
        await asyncio.gather(*(bad() for _ in range(at_once)))
        is_over.set()
        await asyncio.gather(*goods)
        children: list[Child[Any]] = [*made.workers, *made.ingresses]
        seen.check(all(each.is_alive for each in children), "a process has ended")
        await made.check_free(seen)
