"""What the token channel costs in CPU time: in the clear beside under TLS, in one run.

Two processes. This one is a worker: its thread pushes the deltas of one step after the other into
an Outbox, as the engine's thread does, one token a stream. The other one is an ingress that parses
each message. Both kinds of connection stand at once and take turns; steps are `--pause-us` apart,
so that the ingress keeps up and no step waits for it. CPU time is counted, by thread, not wall
time: a busy machine changes the figures little.

    python -m benchmarks.cluster.channel_cpu
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import record
from penstock.deployments.security.authority import make_all
from penstock.deployments.security.cluster_links import ClusterCertificate
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.channel.encrypted import message_connection
from penstock.workers.channel.framing import MessageConnection, connected
from penstock.workers.channel.peer import Outbox
from penstock.workers.request import Delta

KINDS = ("clear", "TLS")
EPOCH = 1


def run_ingress(pipe: Connection, address: str, folder: str) -> None:
    asyncio.run(_ingress(pipe, address, folder))


async def _ingress(pipe: Connection, address: str, folder: str) -> None:
    """Connect once in each kind; at each word of the worker, say the loop's CPU seconds so far."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    num_tokens = 0

    def take(data: bytes) -> None:
        nonlocal num_tokens
        num_tokens += len(pb.DownMessage.FromString(data).step.token_ids)
        ready.set()

    for kind in KINDS:
        tls = None
        if kind == "TLS":
            tls = ClusterCertificate(folder, "ingress").client_end("worker")
        ready.clear()
        message_connection(
            loop, await connected(address), tls, on_message=take, on_end=lambda _: None
        )
        await ready.wait()
    while await asyncio.to_thread(pipe.recv):
        await asyncio.sleep(0.1)  # what is under way arrives
        pipe.send((time.thread_time(), num_tokens))


class Worker:
    """The worker's end of both connections, on an event loop of its own."""

    def __init__(self, folder: str):
        self.outboxes: dict[str, Outbox] = {}
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def start(self) -> None:
        """Returns once the ingress has connected in each kind."""
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        for kind in KINDS:
            connection, _ = self._listener.accept()
            opening = asyncio.run_coroutine_threadsafe(self._open(kind, connection), self._loop)
            opening.result(10)

    async def _open(self, kind: str, connection: socket.socket) -> None:
        tls = None
        if kind == "TLS":
            tls = ClusterCertificate(self._folder, "worker").server_end("ingress")
        made: MessageConnection = message_connection(
            asyncio.get_running_loop(),
            connection,
            tls,
            on_message=lambda _: None,
            on_end=lambda _: None,
            on_room=lambda: self.outboxes[kind].flush(),
        )
        self.outboxes[kind] = Outbox(made, EPOCH)
        made.send(pb.DownMessage(epoch=EPOCH, step=pb.Step()).SerializeToString())


def push_steps(outbox: Outbox, num_tokens: int, num_steps: int, pause_s: float) -> float:
    """CPU seconds of this thread in `push`, for each step."""
    used_s = 0.0
    for step in range(num_steps):
        addressed = [(n + 1, Delta("", [300 + (step + n) % 4000])) for n in range(num_tokens)]
        began_s = time.thread_time()
        outbox.push(addressed)
        used_s += time.thread_time() - began_s
        time.sleep(pause_s)
    return used_s / num_steps


def measure(args: argparse.Namespace, worker: Worker, pipe: Connection) -> list[dict[str, Any]]:
    """One row for each round, size and kind: microseconds of CPU for each step, at both ends."""

    def ingress() -> tuple[float, int]:
        pipe.send(True)
        said: tuple[float, int] = pipe.recv()
        return said

    rows = []
    for number in range(args.rounds + 1):
        for num_tokens in args.tokens:
            for kind in KINDS[:: 1 if number % 2 else -1]:
                before_s, tokens_before = ingress()
                step_s = push_steps(
                    worker.outboxes[kind], num_tokens, args.steps, args.pause_us / 1e6
                )
                after_s, tokens_after = ingress()
                assert tokens_after - tokens_before == args.steps * num_tokens, "a token is missing"
                row = {"round": number, "tokens": num_tokens, "kind": kind}
                row["engine_us"] = 1e6 * step_s
                row["ingress_us"] = 1e6 * (after_s - before_s) / args.steps
                rows.append(row)
    return [row for row in rows if row["round"]]  # the first one warms up


def summary(rows: list[dict[str, Any]], tokens: list[int]) -> list[dict[str, Any]]:
    """For each number of tokens: medians over the rounds, and what TLS adds."""
    found = []
    for num_tokens in tokens:
        line: dict[str, Any] = {"tokens": num_tokens}
        for end in ("engine", "ingress"):
            pairs = {
                kind: [
                    row[f"{end}_us"]
                    for row in rows
                    if (row["tokens"], row["kind"]) == (num_tokens, kind)
                ]
                for kind in KINDS
            }
            added = [after - before for before, after in zip(*pairs.values(), strict=True)]
            line[f"{end}_clear_us"] = statistics.median(pairs["clear"])
            line[f"{end}_tls_us"] = statistics.median(pairs["TLS"])
            line[f"{end}_added_us"] = statistics.median(added)
            line[f"{end}_added_range_us"] = [min(added), max(added)]
        found.append(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256], help="of a step")
    parser.add_argument("--steps", type=int, default=1000, help="of each round, size and kind")
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up")
    parser.add_argument("--pause-us", type=float, default=500.0, help="between two steps")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_all(Path(folder), "bench", days=20)
        worker = Worker(folder)
        context = multiprocessing.get_context("spawn")
        pipe, ingress_end = context.Pipe()
        ingress = context.Process(
            target=run_ingress, args=(ingress_end, worker.address, folder), daemon=True
        )
        ingress.start()
        worker.start()
        rows = measure(args, worker, pipe)
        pipe.send(False)
        ingress.join(10)
    lines = summary(rows, args.tokens)
    print("| tokens a step | engine's thread | under TLS | added | ingress | under TLS | added |")
    print("|" + " --- |" * 7)
    for line in lines:
        cells = [
            f"{line[f'{end}_{kind}_us']:.1f} us"
            for end in ("engine", "ingress")
            for kind in ("clear", "tls", "added")
        ]
        print(f"| {line['tokens']} | {' | '.join(cells)} |")
    if args.json:
        record.write(args.json, __file__, {"rows": lines, "rounds": rows})


if __name__ == "__main__":
    main()
