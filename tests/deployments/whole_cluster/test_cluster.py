"""A real Ray cluster on this machine: sharing, killing, healing, and a clean end.

Each oracle is the same request run alone on the same cluster, before anything was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import struct
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import psutil

from benchmarks.cluster.startup import role_of
from penstock.deployments.client import AsyncClient
from penstock.deployments.supervision.processes import descendants
from penstock.deployments.supervision.view import ClusterView
from penstock.workers.engine.engine import Engine
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
from penstock.workers.weights.hub import resolve_model
from tests.deployments.clusters import ENGINE, await_view, generate, pids_of, prompt
from tests.deployments.ingress.bad_input.hostile import CASES, Fronts, GoodTraffic, run_all
from tests.deployments.waiting import eventually

HEAP_BYTES = 64 << 20  # HEAP_MAX_SIZE of glibc


def is_whole(view: ClusterView) -> bool:
    """Whether all workers are there, and every ingress is connected with all of them."""
    reach = [ingress.num_workers for ingress in view.ingresses]
    return len(view.workers) == 2 and reach == [2]


def is_idle(view: ClusterView) -> bool:
    return is_whole(view) and all(
        stats.num_running == stats.num_waiting == stats.num_live_blocks == 0
        for _, stats in view.workers
    )


def finished(view: ClusterView) -> dict[int, int]:
    """Requests that each worker ended, by pid."""
    return {info.pid: sum(stats.num_finished.values()) for info, stats in view.workers}


def roles() -> Counter[str]:
    """How many processes of each role the cluster has. Other tests may have left some of their own
    to this process: older ones than the cluster's first, and Python's for multiprocessing."""
    found: list[tuple[float, str]] = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found.append((process.create_time(), " ".join(process.cmdline())))
    first_s = max(since_s for since_s, command in found if role_of(command) == "Ray: GCS")
    return Counter(
        role_of(command)
        for since_s, command in found
        if since_s >= first_s and "multiprocessing" not in command
    )


def test_rays_own_processes_are_those_that_it_uses(cluster):
    await_view(cluster, is_whole, 120)
    found = roles()
    ours = {"worker", "ingress", "registry", "Serve's controller"}
    rays = {role for role in found if role.startswith("Ray: ")} - {"Ray: idle worker"}
    assert ours <= set(found), found
    assert rays == {"Ray: GCS", "Ray: raylet", "Ray: placeholder of an agent"}, found
    assert (found["worker"], found["ingress"]) == (2, 1)


def test_ray_starts_no_program_for_an_actor(cluster):
    """All are forks of one process: a program of its own takes a second of CPU time for imports."""
    view = await_view(cluster, is_whole, 120)
    parents = {" ".join(psutil.Process(pid).parent().cmdline()) for pid in pids_of(view)}
    assert [role_of(each) for each in parents] == ["fork server"], parents


def test_workers_are_forks_of_a_process_that_has_imported_torch(cluster):
    view = await_view(cluster, is_whole, 120)
    (of_workers,) = {psutil.Process(info.pid).ppid() for info, _ in view.workers}
    (of_all,) = {psutil.Process(info.pid).ppid() for info in view.ingresses}
    assert psutil.Process(of_workers).ppid() == of_all


def test_two_workers_share_the_load(cluster, config, run):
    def least() -> int:
        """Of 16 requests, those of the worker that had fewer. No request may fail."""
        await_view(cluster, is_idle, 120)
        before = finished(cluster.view())

        async def scenario():
            async with AsyncClient(f"127.0.0.1:{config.grpc_port}") as client:
                return await asyncio.gather(*(generate(client, n, 24) for n in range(16)))

        for ids, error in run(scenario()):
            assert error is None
            assert len(ids) == 24
        num_before = sum(before.values())
        await_view(cluster, lambda view: sum(finished(view).values()) - num_before == 16, 120)
        return min(count - before[pid] for pid, count in finished(cluster.view()).items())

    # A worker that is listed may still be new to the gate, which then sends it nothing.
    eventually(lambda: least() >= 4, 60, "both workers to serve")


def test_embeddings_come_from_both_workers(cluster, config, run):
    """Over the gate and the channel, beside answers, they are what an engine gives by itself."""
    await_view(cluster, is_idle, 120)
    before = finished(cluster.view())
    texts = [prompt(n) for n in range(40)]

    async def scenario():
        async with AsyncClient(f"127.0.0.1:{config.grpc_port}") as client:
            return await asyncio.gather(
                client.embed(texts, normalize=False),
                *(generate(client, n, 24) for n in range(4)),
            )

    vectors, *answers = run(scenario())
    assert [(len(ids), error) for ids, error in answers] == [(24, None)] * 4
    engine = Engine(ENGINE, load_model(resolve_model("builtin"), weights="fp32", progress=False))
    for n, ids in enumerate(texts):
        engine.add(Request(str(n), tuple(ids), SamplingParams(max_tokens=1), embeds=True))
    while engine.has_work():
        for delta in engine.step():
            want = np.frombuffer(delta.embedding, dtype="<f4")
            np.testing.assert_allclose(vectors[int(delta.request_id)], want, rtol=1e-3, atol=1e-3)
    await_view(cluster, lambda view: sum(finished(view).values()) - sum(before.values()) == 44, 120)
    assert min(count - before[pid] for pid, count in finished(cluster.view()).items()) >= 4
    await_view(cluster, is_idle, 120)


def test_replicas_open_no_port_to_the_network_but_rays_own(cluster):
    """Ray's own asks for the cluster's token; Serve's would unpickle whatever comes."""
    view = cluster.view()
    for pid in (*finished(view), *(ingress.pid for ingress in view.ingresses)):
        assert len(open_ports(pid)) <= 1


def test_an_ingress_has_one_heap_and_a_worker_one_for_each_thread(cluster):
    view = await_view(cluster, is_whole, 120)
    (ingress,) = view.ingresses
    assert num_heaps(ingress.pid) == 0  # beside that of the program
    assert all(num_heaps(info.pid) > 0 for info, _ in view.workers)


def num_heaps(pid: int) -> int:
    """Memory that glibc has reserved for the heaps of threads: 64 MB each, at multiples of it."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        bounds, rights, *file = line.split()
        first, end = (int(each, 16) for each in bounds.split("-"))
        found.append((first, end, rights, len(file)))
    reserved = {(first, end) for first, end, rights, _ in found if rights == "---p"}
    return sum(
        rights == "rw-p"
        and num_fields == 3  # no name: of no file
        and first % HEAP_BYTES == 0
        and (end, first + HEAP_BYTES) in reserved
        for first, end, rights, num_fields in found
    )


def open_ports(pid: int) -> list[str]:
    """Where a process listens for others than this machine, as /proc/net/tcp spells it."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            is_loopback = address.startswith(("0100007F:", "0000000000000000FFFF00000100007F:"))
            if state == "0A" and inode in inodes and not is_loopback:
                found.append(address)
    return found


def test_the_hostile_corpus_restarts_no_process(cluster, config):
    """By every front end, while concurrent good requests are answered as they are alone."""
    await_view(cluster, is_idle, 120)
    before = pids_of(cluster.view())
    addresses = f"http://127.0.0.1:{config.http_port}", f"127.0.0.1:{config.grpc_port}"
    with GoodTraffic(*addresses), Fronts(*addresses) as fronts:
        assert len(list(run_all(fronts))) == len(CASES)
    await_view(cluster, is_idle, 120)
    time.sleep(2.5)  # idle engines check their ledgers, and one that is wrong ends its worker
    await_view(cluster, is_idle, 120)
    assert pids_of(cluster.view()) == before


def test_a_killed_worker_costs_no_request_and_is_replaced(cluster, config, run):
    await_view(cluster, is_idle, 120)
    num_requests, max_tokens = 8, 250

    def num_continued() -> int:
        text = httpx.get(f"http://127.0.0.1:{config.metrics_port}/metrics").text
        (line,) = re.findall(r"^penstock_requests_continued_total (\S+)$", text, re.M)
        return int(float(line))

    victim = cluster.view().workers[0][0].pid

    async def scenario():
        async with AsyncClient(f"127.0.0.1:{config.grpc_port}") as client:
            alone = [(await generate(client, n, max_tokens))[0] for n in range(num_requests)]
            started = [asyncio.Event() for _ in range(num_requests)]
            running = [
                asyncio.ensure_future(generate(client, n, max_tokens, started[n]))
                for n in range(num_requests)
            ]
            for event in started:
                await event.wait()
            os.kill(victim, signal.SIGKILL)
            # Nothing of these is emitted yet, so no client may notice.
            late = [asyncio.ensure_future(generate(client, 50 + n, 8)) for n in range(4)]
            async with asyncio.timeout(60):
                answers = await asyncio.gather(*running)
                late_answers = await asyncio.gather(*late)
            return alone, answers, late_answers

    num_before = num_continued()
    alone, answers, late_answers = run(scenario())
    assert answers == [(ids, None) for ids in alone]
    assert all(len(ids) == max_tokens for ids in alone)
    # Least outstanding work puts about half on either worker.
    assert 2 <= num_continued() - num_before <= num_requests + 4
    for ids, error in late_answers:
        assert error is None
        assert len(ids) == 8

    await_view(cluster, lambda view: is_whole(view) and victim not in finished(view), 120)
    test_two_workers_share_the_load(cluster, config, run)


def test_a_killed_ingress_is_replaced_and_streams_continue_on_the_new_one(cluster, config, run):
    """Those of clients that want it; the requests of the others are dropped."""
    await_view(cluster, is_idle, 120)
    victim = cluster.view().ingresses[0].pid
    target = f"127.0.0.1:{config.grpc_port}"

    async def scenario():
        async with AsyncClient(target) as patient, AsyncClient(target, resume_s=0) as other:
            alone = [await generate(patient, n, 600) for n in range(2)]
            started = [asyncio.Event() for _ in range(4)]
            running = [
                asyncio.ensure_future(
                    generate(patient, n, 600, event) if n < 2 else generate(other, n, 1900, event)
                )
                for n, event in enumerate(started)
            ]
            for event in started:
                await event.wait()
            os.kill(victim, signal.SIGKILL)
            async with asyncio.timeout(60):
                dropped = await asyncio.gather(*running[2:])
            async with asyncio.timeout(180):
                return alone, await asyncio.gather(*running[:2]), dropped

    alone, continued, dropped = run(scenario())
    assert continued == alone
    assert all(error is not None for _, error in dropped)
    await_view(cluster, lambda view: is_idle(view) and view.ingresses[0].pid != victim, 120)
    test_two_workers_share_the_load(cluster, config, run)


def test_a_killed_registry_comes_back_and_requests_go_on_meanwhile(cluster, config, run):
    await_view(cluster, is_idle, 120)
    registry, workers = cluster.view().pid, sorted(finished(cluster.view()))

    async def scenario():
        async with AsyncClient(f"127.0.0.1:{config.grpc_port}") as client:
            alone, _ = await generate(client, 1, 100)
            os.kill(registry, signal.SIGKILL)
            until_s = time.monotonic() + 4.0
            answers = []
            while time.monotonic() < until_s:
                answers.append(await generate(client, 1, 100))
            return alone, answers

    alone, answers = run(scenario())
    assert answers
    assert all(answer == (alone, None) for answer in answers)
    await_view(cluster, lambda view: is_whole(view) and view.pid != registry, 120)
    assert sorted(finished(cluster.view())) == workers  # no worker was restarted for it


def test_a_thousand_requests_with_cancels_and_disconnects_leave_no_block_behind(
    cluster, config, run
):
    await_view(cluster, is_idle, 120)
    workers = sorted(finished(cluster.view()))
    chance = random.Random(7)
    ways = ("whole", "unary", "leave", "cancel", "reset")
    plans = [(n, chance.choice(ways)) for n in range(1000)]
    url = f"http://127.0.0.1:{config.http_port}"

    async def one(http: httpx.AsyncClient, number: int, plan: str) -> bool:
        """Run one request as planned; whether it came to its end."""
        max_tokens = 40 if plan in ("leave", "cancel", "reset") else 1 + number % 6
        body = {
            "model": "builtin",
            "prompt": prompt(number % 50),
            "max_tokens": max_tokens,
            "stream": plan != "unary",
        }
        if plan == "reset":
            await _reset(config.http_port, number)
            return False
        if plan == "unary":
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            return True
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            num_events = 0
            async for line in response.aiter_lines():
                num_events += line.startswith("data: ")
                if plan == "leave" and num_events > number % 4:
                    return False
        return True

    async def scenario():
        limits = httpx.Limits(max_connections=None)
        gate = asyncio.Semaphore(48)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as http:

            async def planned(number, plan):
                async with gate:
                    task = asyncio.ensure_future(one(http, number, plan))
                    if plan == "cancel":
                        await asyncio.sleep(number % 10 * 0.01)
                        task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        return await task
                    return False

            return await asyncio.gather(*(planned(*plan) for plan in plans))

    ended = run(scenario())
    assert sum(ended) >= sum(plan in ("whole", "unary") for _, plan in plans)
    await_view(cluster, is_idle, 120)
    time.sleep(2.5)  # idle engines check their ledgers, and one that is wrong ends its worker
    await_view(cluster, is_idle, 120)
    assert sorted(finished(cluster.view())) == workers
    aborted = sum(stats.num_finished["abort"] for _, stats in cluster.view().workers)
    assert aborted > 100


async def _reset(port: int, number: int) -> None:
    """Ask over a plain socket, and break the connection without a goodbye."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"model":"builtin","prompt":"It was","max_tokens":40,"stream":true}'
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    if number % 2:
        await reader.read(1)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
