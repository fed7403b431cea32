"""Honest streams: a fixed set of calls over and over, whose answers and pauses are kept.

Half of them are HTTP with SSE, half are gRPC. A call is greedy or seeded, so its answer is known.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

from penstock.deployments.client import AsyncClient, ClientError

NUM_PROMPTS = 8
MAX_TOKENS = 120
PROMPTS = ("The sea was", "A letter came", "In the garden", "The road to", "My friend said")


@dataclass
class Record:
    """What the streams saw from `began_s` on."""

    began_s: float = field(default_factory=time.monotonic)
    gaps_s: list[float] = field(default_factory=list)  # between tokens
    firsts_s: list[float] = field(default_factory=list)  # to the first token
    num_answers: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, sent_s: float, arrivals: list[float]) -> None:
        self.num_answers += 1
        self.firsts_s.append(arrivals[0] - sent_s)
        self.gaps_s += [later - earlier for earlier, later in pairwise(arrivals)]


class Streams:
    """Several streams at a time, each one call after the other; `record` takes what they see."""

    def __init__(self, http_url: str, grpc_target: str, key: str):
        self._http = httpx.AsyncClient(
            base_url=http_url, timeout=120, headers={"authorization": f"Bearer {key}"}
        )
        self._grpc = AsyncClient(grpc_target, api_key=key)
        self._expected: dict[int, str] = {}
        self.record = Record()

    async def learn(self) -> None:
        """Have each call answered alone: what its answer must be."""
        for number in range(NUM_PROMPTS):
            self._expected[number], _ = await self._over_grpc(number)

    async def close(self) -> None:
        await self._http.aclose()
        await self._grpc.close()

    async def run(self, number: int) -> None:
        """One stream after the other, until cancelled."""
        way = self._over_http if number % 2 else self._over_grpc
        while True:
            call, sent_s, record = number % NUM_PROMPTS, time.monotonic(), self.record
            try:
                text, arrivals = await way(call)
            except (httpx.HTTPError, ClientError, ValueError) as error:
                record.wrong.append(f"{way.__name__} {call}: {error!r}")
                await asyncio.sleep(0.5)
                continue
            if text != self._expected[call]:
                record.wrong.append(f"{way.__name__} {call}: {text!r}")
            record.add(sent_s, arrivals)
            number += 2  # another call, by the same way

    async def _over_grpc(self, call: int) -> tuple[str, list[float]]:
        text, arrivals = "", []
        async for piece in self._grpc.generate(
            PROMPTS[call % len(PROMPTS)],
            temperature=float(call % 2),
            seed=call,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
        ):
            arrivals.append(time.monotonic())
            text += piece.text
        return text, arrivals

    async def _over_http(self, call: int) -> tuple[str, list[float]]:
        body = {
            "model": "builtin",
            "prompt": PROMPTS[call % len(PROMPTS)],
            "temperature": float(call % 2),
            "seed": call,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        text, arrivals = "", []
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"{response.status_code} {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if chunk.get("error"):
                        raise ValueError(str(chunk["error"]))
                    arrivals.append(time.monotonic())
                    text += chunk["choices"][0]["text"]
        return text, arrivals
