"""Rows about what lies below: the clock, the checkpoint, signals, and time that passes."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.faults.child import Child
from benchmarks.faults.table import inside
from benchmarks.faults.table.house import House, Plan, house, over_grpc
from benchmarks.faults.table.rows import CannotInject, Scale, Seen, row
from penstock.workers.models.loader import load_model
from penstock.workers.weights.hub import resolve_model

PROMPT = "It was a bright morning, and"
JUMPS_S = (3600.0, -7200.0, 90_000.0, -172_800.0)
DRAIN_S = 30.0


class Loading(Child[None]):
    """A process that loads a checkpoint. `greeting`: the error, or "loaded"."""

    def __init__(self, folder: Path):
        super().__init__(_load, folder)


def _load(pipe: Connection, folder: Path) -> None:
    try:
        load_model(str(folder), weights="fp32", progress=False)
        pipe.send("loaded")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _header_of(file: Path) -> tuple[dict[str, Any], int]:
    data = file.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + size]), size


def _truncated(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def _huge_header(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(struct.pack("<Q", 1 << 40) + data[8:])


def _shapes_swapped(file: Path) -> None:
    """One tensor's shape is read the other way; the header keeps its length."""
    header, size = _header_of(file)
    name = next(n for n, t in header.items() if n != "__metadata__" and len(set(t["shape"])) == 2)
    header[name]["shape"] = header[name]["shape"][::-1]
    data = file.read_bytes()
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    file.write_bytes(data[:8] + text[:size] + data[8 + size :])


def _flipped_in_header(file: Path) -> None:
    """One bit of a byte of the header: an offset becomes another one."""
    data = bytearray(file.read_bytes())
    at = data.index(b'"data_offsets":[') + len('"data_offsets":[')
    data[at] ^= 1
    file.write_bytes(data)


CORRUPTIONS: dict[str, Callable[[Path], None]] = {
    "truncated": _truncated,
    "a header of a terabyte": _huge_header,
    "a shape swapped": _shapes_swapped,
    "a bit of an offset flipped": _flipped_in_header,
}


@row(
    19,
    "Corrupt checkpoint",
    injected="a file cut in half, a header of a terabyte, a swapped shape, a flipped bit in an "
    "offset",
    promised="refused before it serves, by an error that names the file or the tensor",
)
async def corrupt_checkpoint(scale: Scale, seen: Seen) -> None:
    for name, corrupt in CORRUPTIONS.items():
        with tempfile.TemporaryDirectory(prefix="pst-model-") as folder:
            copy = Path(folder) / "model"
            shutil.copytree(resolve_model("builtin"), copy)
            file = next(copy.glob("*.safetensors"))
            corrupt(file)
            header = _names_of(resolve_model("builtin"))
            loading = await asyncio.to_thread(Loading, copy)
            words = str(loading.greeting)
            await asyncio.to_thread(loading.kill)
            seen.note(name, words.replace(str(copy), "DIR")[:160])
            seen.check(words != "loaded", f"{name}: it was loaded")
            is_named = file.name in words or any(each in words for each in header)
            seen.check(is_named, f"{name}: {words[:120]!r} names no file and no tensor")


def _names_of(folder: Path) -> list[str]:
    header, _ = _header_of(next(folder.glob("*.safetensors")))
    return [name for name in header if name != "__metadata__"]


@row(
    21,
    "Clock jumps",
    injected="the wall clocks of a worker and of the ingress, under streams with deadlines: +1 h, "
    "-2 h, +25 h, -48 h",
    promised="equal ids, no deadline fires, no metric is negative",
)
async def clock_jumps(scale: Scale, seen: Seen) -> None:
    async with house(Plan(settings={"admission": "optimistic"})) as made:
        expected = (await made.post(PROMPT, seed=3, max_tokens=300)).json()["choices"]
        for seconds in JUMPS_S[: scale.of(2, 4)]:
            running = [
                asyncio.ensure_future(
                    made.post(
                        PROMPT,
                        seed=3,
                        max_tokens=300,
                        headers={"x-request-timeout-ms": "60000"},
                    )
                )
                for _ in range(3)
            ]
            await asyncio.sleep(0.2)
            children: list[Child[Any]] = [*made.workers, *made.ingresses]
            for child in children:
                try:
                    at_s = await asyncio.to_thread(child.ask, partial(_jump, seconds))
                except EOFError:
                    raise CannotInject("no library that moves the clock is loaded") from None
                if at_s is None:
                    raise CannotInject("no library that moves the clock is loaded")
            seen.count("jumps")
            for answer in await asyncio.gather(*running):
                seen.count("answers compared")
                is_same = answer.status_code == 200 and answer.json()["choices"] == expected
                seen.check(is_same, f"after {seconds:+.0f} s: {answer.status_code}")
            after = await made.post(PROMPT, seed=3, max_tokens=300)
            seen.check(after.json().get("choices") == expected, f"after it: {after.text[:100]}")
        metrics = await asyncio.to_thread(made.ingresses[0].ask, _negative_metrics)
        seen.note("negative metrics", metrics)
        seen.check(not metrics, f"negative: {metrics}")
        await made.check_free(seen)


def _jump(seconds: float, parts: Any) -> float | None:
    try:
        return inside.jump(parts, seconds)
    except AttributeError:
        return None


def _negative_metrics(parts: Any) -> list[str]:
    """Names of histograms and counters of the ingress that have a negative value."""
    from penstock.deployments.ingress.metrics.collector import PenstockCollector

    collector = PenstockCollector(
        parts.listeners.core.metrics, lambda: (), parts.gate, parts.pool.lost_requests, None
    )
    samples = [each for metric in collector.collect() for each in metric.samples]
    return sorted({each.name for each in samples if np.isfinite(each.value) and each.value < 0})


@row(
    13,
    "SIGTERM",
    injected="SIGTERM of an ingress under streams, with a notice of 1 s; a client that asks on",
    promised="/ready 503 at once while /live is 200; running streams end with equal ids; later "
    "requests are refused, none is cut; exit 0; its ports are free",
)
async def sigterm(scale: Scale, seen: Seen) -> None:
    settings = {"drain_notice_s": 1.0, "drain_s": DRAIN_S}
    async with house(Plan(num_ingresses=0 + 1, settings=settings)) as made:
        expected = [await over_grpc(made.target, PROMPT, seed=n, max_tokens=700) for n in range(4)]
        for _ in range(scale.of(1, 30)):
            ingress = made.ingresses[0]
            running = [
                asyncio.ensure_future(over_grpc(made.target, PROMPT, seed=n, max_tokens=700))
                for n in range(4)
            ]
            await asyncio.sleep(0.3)
            ingress.send(signal.SIGTERM)
            began_s = time.monotonic()
            async with asyncio.timeout(5):
                while (await made.http.get(f"{made.url}/ready")).status_code == 200:
                    await asyncio.sleep(0.005)
            seen.most("not ready after s", time.monotonic() - began_s)
            live = await made.http.get(f"{made.url}/live")
            seen.check(live.status_code == 200, f"/live: {live.status_code}")
            await _ask_until_closed(made, seen)
            for got, right in zip(await asyncio.gather(*running), expected, strict=True):
                seen.count("answers compared")
                seen.check(got.content == right.content, f"a running stream: {got.error}")
            ended = await asyncio.to_thread(ingress.join, DRAIN_S + 5)
            seen.most("ended after s", time.monotonic() - began_s)
            seen.check(ended and ingress.exit_code == 0, f"exit {ingress.exit_code}")
            made.ingresses.clear()
            await made.add_ingress()
            await made.ready()
        seen.check(seen.facts["not ready after s"] <= 0.2, "/ready did not turn at once")
        await made.check_free(seen)


async def _ask_until_closed(made: House, seen: Seen) -> None:
    """Requests on new connections are served until the port is closed; none is cut."""
    while True:
        async with httpx.AsyncClient(timeout=30) as fresh:
            body = {"model": "builtin", "prompt": PROMPT, "max_tokens": 2}
            try:
                answer = await fresh.post(f"{made.url}/v1/completions", json=body)
            except httpx.ConnectError:
                return
            except httpx.TransportError as error:
                # The port closed between the connect and the request: nothing was begun.
                seen.count(f"at the close: {type(error).__name__}")
                return
            seen.count(f"asked during the notice: {answer.status_code}")
            seen.check(
                answer.status_code in (200, 503), f"a later request got {answer.status_code}"
            )
