"""Memory of the ingress's gRPC server under calls that are reset before their message.

    python -m benchmarks.faults.resets [--calls 200000] [--json PATH]

A raw HTTP/2 client opens calls and resets them, fifty at a time. The server is gRPC's with the
ingress's interceptor, over a method that never answers, in a process of its own with one heap, as
an ingress has. Two servers: one whose read of the message ends with the call, as gRPC itself does
it, which leaks (https://github.com/grpc/grpc/issues/43360); and the ingress's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from benchmarks.common import record
from penstock.deployments.ingress.core.bounds.limits import OpenCalls, Turns
from penstock.deployments.ingress.grpc import interceptor
from penstock.deployments.security.api_keys import ApiKeys
from penstock.protos.penstock.v1 import inference_pb2_grpc

KINDS = ("the read is cancelled with the call", "the read ends by itself")
ROUNDS, AT_ONCE = 5, 50
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RESET, SETTINGS = 1, 3, 4  # types of frames
END_HEADERS, ACK, CANCEL = 4, 1, 8
PATH = "/penstock.v1.InferenceService/Generate"


class Silent(inference_pb2_grpc.InferenceServiceServicer):
    async def Generate(self, request: Any, context: Any) -> None:
        await asyncio.sleep(3600)


async def serve(kind: str) -> None:
    if kind == KINDS[0]:

        async def message_of(context: Any) -> Any:
            return await context.read()

        interceptor._message_of = message_of
    guard = interceptor.Guard(ApiKeys(), Counter(), OpenCalls(), Turns())
    server = grpc.aio.server(interceptors=[guard], options=[("grpc.max_concurrent_streams", 1024)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Silent(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers() -> bytes:
    """Of a call, as literals that no table keeps (RFC 7541, 6.2.2)."""
    fields = {
        ":method": "POST", ":scheme": "http", ":path": PATH, ":authority": "localhost",
        "te": "trailers", "content-type": "application/grpc",
    }  # fmt: skip
    return b"".join(
        b"\0" + b"".join(bytes([len(part)]) + part.encode() for part in field)
        for field in fields.items()
    )


def reset(port: int, num_calls: int) -> None:
    """Open `num_calls` calls on one connection, and reset each before its message."""
    block, cancel = headers(), struct.pack(">I", CANCEL)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(SETTINGS, ACK, 0, b""))
        for first in range(0, num_calls, AT_ONCE):
            streams = [2 * number + 1 for number in range(first, first + AT_ONCE)]
            connection.sendall(b"".join(frame(HEADERS, END_HEADERS, s, block) for s in streams))
            time.sleep(0.004)  # the calls begin, and wait for their message
            connection.sendall(b"".join(frame(RESET, 0, s, cancel) for s in streams))
            time.sleep(0.002)
            connection.setblocking(False)
            try:
                connection.recv(1 << 16)
            except BlockingIOError:
                pass
            finally:
                connection.setblocking(True)


def measure(kind: str, num_calls: int) -> dict[str, Any]:
    """MiB of the server when it is ready, and after each of the rounds."""
    command = [sys.executable, "-m", "benchmarks.faults.resets", "--serve", kind]
    heap = os.environ | {"MALLOC_ARENA_MAX": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=heap) as server:
        try:
            assert server.stdout is not None
            port, process = int(server.stdout.readline()), psutil.Process(server.pid)
            rss_mib = [process.memory_info().rss / 2**20]
            for _ in range(ROUNDS):
                reset(port, num_calls // ROUNDS)
                time.sleep(1.0)
                rss_mib.append(process.memory_info().rss / 2**20)
        finally:
            server.kill()
    print(f"{kind}: {', '.join(f'{each:.1f}' for each in rss_mib)} MiB", flush=True)
    return {"kind": kind, "calls": num_calls, "rss_mib": [round(each, 1) for each in rss_mib]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200_000, help="of each server")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(given.serve))
        return
    rows = [measure(kind, given.calls) for kind in KINDS]
    if given.json:
        record.write(given.json, __file__, {"servers": rows})


if __name__ == "__main__":
    main()
