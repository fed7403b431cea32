"""Attacks on and between processes: V4, V5 B, V8, V10, V11, V14, V22 of the review."""

from __future__ import annotations

import asyncio
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import penalties
from benchmarks.faults.findings.server import Finding
from penstock.deployments.gate.server import GateServer
from penstock.deployments.gate.types import GateSetup
from penstock.deployments.gate.wire import report_from
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.dispatch.pool import WorkerPool
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.protos.penstock.internal.v1 import gate_pb2
from penstock.workers.channel.framing import HEADER
from penstock.workers.channel.server import ChannelServer
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.thread import EngineThread
from penstock.workers.experts import writer
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, RequestError, SamplingParams
from penstock.workers.stats import EngineStats, WorkerInfo
from penstock.workers.structured.grammar import NUM_HELPERS, GrammarCompiler
from penstock.workers.structured_spec import StructuredKind, StructuredSpec
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model

ADDRESS_S = 3.0  # for so long a worker that is gone stays listed
STUCK_S = 7.0
FLAP_S = 5.0
VOCAB, DISTINCT = 151_936, 128_000
OLD = GateSetup(host="127.0.0.1", max_queued=10, generation=1)
NEW = GateSetup(host="127.0.0.1", max_queued=20, admission="reserve_max", generation=2)
WRITER = """
import sys, time
from pathlib import Path
from penstock.workers.experts import writer
partial, descriptor = writer._locked_file(Path(sys.argv[1]))
writer._reserve(descriptor, 64 << 20, Path(sys.argv[1]).parent)
print(partial, flush=True)
time.sleep(300)
"""


def run() -> Iterator[Finding]:
    yield asyncio.run(_rogue_worker())
    yield _busy_helpers()
    yield _penalties()
    yield asyncio.run(_two_settings())
    yield _stuck_engine()
    yield _killed_writer()
    yield _step_times()


class _NoEngine:
    """A worker's engine that computes nothing."""

    is_stalled = False

    def submit(self, request: Request) -> None:
        del request

    def cancel(self, request_id: str) -> None:
        del request_id

    def stats(self) -> EngineStats:
        return EngineStats(num_blocks=10, block_size=16, max_num_seqs=4)


class _Rogue:
    """Listens at the address of a worker that is gone, and answers as a worker does."""

    def __init__(self, info: WorkerInfo):
        self._info = info
        self.heard = b""
        self.bodies: set[str] = set()

    async def serve(self, reader: asyncio.StreamReader, writer_: asyncio.StreamWriter) -> None:
        number = 0

        def say(message: pb.DownMessage) -> None:
            nonlocal number
            data = message.SerializeToString()
            writer_.write(HEADER.pack(len(data), number) + data)
            number += 1

        say(pb.DownMessage(challenge=pb.Challenge(nonce=bytes(32))))
        try:
            while True:
                head = await reader.readexactly(HEADER.size)
                body = await reader.readexactly(HEADER.unpack(head)[0])
                self.heard += body
                message = pb.UpMessage.FromString(body)
                self.bodies.add(str(message.WhichOneof("body")))
                if message.HasField("hello"):
                    own = pb.Welcome(model="m", max_model_len=2048, proof=message.hello.proof)
                    say(pb.DownMessage(epoch=message.epoch, heard=1, welcome=own))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer_.close()


async def _rogue_worker() -> Finding:
    channel = ChannelServer("127.0.0.1", "m", 2048)
    engine: Any = _NoEngine()
    channel.start(engine)
    info, pool = channel.info, WorkerPool("ingress-1", lost_wait_s=1.0)
    pool.update([info])
    while not pool.num_connected:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(channel.stop)
    rogue = _Rogue(info)
    listener = await asyncio.start_server(rogue.serve, *_host_port(info.address))
    request = Request("r", (11, 22, 33), SamplingParams())
    deltas = [each async for each in pool.generate(AdmissionRequest(request))]
    await asyncio.sleep(ADDRESS_S)
    await pool.close()
    listener.close()
    has_token = info.token.encode() in rogue.heard or bytes.fromhex(info.token) in rogue.heard
    after = (
        f"token heard: {has_token}; heard: {', '.join(sorted(rogue.bodies))}; the client got "
        f"{deltas[-1].error}"
    )
    figures = {"token heard": has_token, "messages": sorted(rogue.bodies)}
    return Finding("V4", "a listener on a dead worker's address", after, figures)


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _busy_helpers() -> Finding:
    """A schema while the helpers stand still, and again when they run."""
    tokenizer = Tokenizer.load(resolve_model("builtin"))
    compiler = GrammarCompiler(tokenizer.to_json, vocab_size=8192, eos_token_ids=(0,))
    helpers = [compiler._idle.get() for _ in range(NUM_HELPERS)]
    for helper in helpers:
        helper.ask({"kind": "regex", "text": "a", "lenient": False})
        if helper._process is not None:
            helper._process.send_signal(signal.SIGSTOP)
        compiler._idle.put(helper)
    spec = StructuredSpec(StructuredKind.REGEX, "b{3}")
    outcomes = []
    for _ in range(NUM_HELPERS + 1):
        try:
            compiler.matcher(spec)
            outcomes.append("served")
        except RequestError as error:
            outcomes.append(error.code)
    compiler.close()
    attack = "a trivial grammar while both helpers stand still, then again"
    return Finding("V5 B", attack, ", then ".join(outcomes), {"outcomes": outcomes})


def _penalties() -> Finding:
    torch.set_num_threads(1)
    found = penalties.measured(SamplingParams(**penalties.CASES["all three"]), DISTINCT, VOCAB)
    after = f"{found['kept_ms']:.2f} ms a token; by lists, in the same run, {found['lists_ms']:.0f}"
    return Finding("V8", f"all penalties after {DISTINCT:,} different ids", after, found)


async def _two_settings() -> Finding:
    """Two ingresses with different settings at one gate."""
    gate = GateServer(OLD)
    clients = [GateClient(name, partial(gate.where, s)) for name, s in (("a", OLD), ("b", NEW))]
    running = [asyncio.ensure_future(each.run()) for each in clients]
    while not all(each.is_connected for each in clients):
        await asyncio.sleep(0.01)
    service, num_both, num_looks = gate.service, 0, 0
    until_s = time.monotonic() + FLAP_S
    while time.monotonic() < until_s:
        for setup in (OLD, NEW):
            await gate.where(setup)
        num_both += all(each.is_connected for each in clients)
        num_looks += 1
        await asyncio.sleep(0.01)
    is_same = gate.service is service
    for each in running:
        each.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await gate.close()
    share = num_both / num_looks
    after = f"both connected {100 * share:.0f} % of the time; state kept: {is_same}"
    return Finding("V10", "two ingresses of different settings, 5 s", after, {"share": share})


def _stuck_engine() -> Finding:
    """All blocks are lost, and a request waits for some."""
    model = load_model(resolve_model("builtin"), weights="fp32", progress=False)
    engine = Engine(EngineConfig(num_blocks=64, max_num_seqs=4), model)
    while engine.pool.num_available:
        engine.pool.allocate()
    thread = EngineThread(engine, lambda _: None, num_threads=1)
    thread.start()
    thread.submit(Request("r", (1, 2, 3), SamplingParams(max_tokens=4)))
    began_s, used_s, seen_s = time.monotonic(), time.process_time(), math.inf
    while time.monotonic() - began_s < STUCK_S:
        if thread.is_stalled or not thread.alive:
            seen_s = min(seen_s, time.monotonic() - began_s)
        time.sleep(0.05)
    cores = (time.process_time() - used_s) / STUCK_S
    thread.stop()
    told = "not reported" if math.isinf(seen_s) else f"reported as stalled after {seen_s:.1f} s"
    after = f"{told}: its requests go elsewhere; {100 * cores:.0f} % of a core"
    return Finding("V11", "an engine that turns without progress", after, {"after s": seen_s})


def _killed_writer() -> Finding:
    """kill -9 while experts are written; then the next store starts."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pst-finding-") as name:
        folder = Path(name)
        command = [sys.executable, "-c", WRITER, str(folder / "a.experts")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.communicate()
        left = sum(each.stat().st_blocks * 512 for each in folder.iterdir()) >> 20
        num_removed = writer.remove_partial_files(folder)
        still = sum(each.stat().st_blocks * 512 for each in folder.iterdir()) >> 20
    after = f"{left} MiB left by it, {still} MiB after the next start ({num_removed} file removed)"
    return Finding("V14", "kill -9 while experts are written", after, {"left MiB": still})


def _step_times() -> Finding:
    """A report whose step takes no time."""
    message = gate_pb2.WorkerReport(epoch=1)
    message.report.step_s = 1e-300
    taken = report_from(message).step_s
    return Finding("V22", "a report with step_s 1e-300", f"taken as {taken:g} s", {"step s": taken})
