"""A Redis that is killed, hangs, is full, is another one, or wants another password."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import time
from functools import partial

import pytest

from penstock.deployments.state.redis.survey import FUNCTIONS
from penstock.deployments.state.store import ABSENT, Bucket, StateDown, StateFull
from tests.deployments.state.servers import (
    BUDGET,
    RedisServer,
    append_until,
    as_user,
    redis_backend,
    until,
)
from tests.deployments.waiting import until as eventually

RECOVERY_S = 2.0
SLACK_S = 1.5  # of this test's machine, with others on it


@pytest.fixture
def server(tmp_path):
    running = RedisServer(
        tmp_path / "redis", "--appendonly", "yes", "--appendfsync", "always"
    ).start()
    yield running
    running.signal(signal.SIGCONT)
    running.kill()


async def timed(call):
    began = time.monotonic()
    with pytest.raises(StateDown) as raised:
        await call
    return time.monotonic() - began, str(raised.value)


def test_a_killed_server_is_noticed_at_once_and_found_again(server):
    async def scenario(store):
        version = await store.put("a", b"1", **BUDGET)
        server.kill()
        await asyncio.sleep(0.1)
        took_s, _ = await timed(store.get("a", budget_s=0.25))
        assert took_s < 0.25 + SLACK_S
        await asyncio.sleep(1.0)
        took_s, text = await timed(store.put("a", b"2", budget_s=5))
        assert took_s < SLACK_S, "the breaker is not open"
        assert "cannot be reached" in text
        assert not store.status().is_up
        assert "cannot be reached" in (store.status().fault or "")
        server.start()
        found, after_s = await until(lambda: store.get("a", budget_s=0.25), within_s=10)
        assert (found.value, found.version) == (b"1", version)
        assert after_s < RECOVERY_S + SLACK_S
        assert store.status().is_up

    redis_backend(server).run(scenario)


def test_no_record_is_lost_or_doubled_over_kills_and_stops(server):
    records: list[bytes] = []

    async def written(num):
        await eventually(lambda: len(records) >= num)

    async def trouble():
        for num in (11, 22):
            await asyncio.sleep(0.3)
            await written(num)  # however slowly they are
            server.signal(signal.SIGSTOP)
            await asyncio.sleep(1.5)
            server.signal(signal.SIGCONT)
            await asyncio.sleep(0.3)
            server.kill()
            await asyncio.to_thread(server.start)

    async def scenario(store):
        troubled = asyncio.create_task(trouble())
        await append_until(store, "s", troubled.done, records)
        await troubled
        assert len(records) > 20
        found: list[bytes] = []
        while len(found) < len(records) + 1:
            read = partial(store.read, "s", len(found), limit=1000, **BUDGET)
            part, _ = await until(read, within_s=10)
            if not part.records:
                break
            found += part.records
        assert found == records

    redis_backend(server).run(scenario)


def test_an_append_that_was_done_unseen_is_not_done_twice(server):
    async def scenario(store):
        await store.append("s", 0, [b"a"], **BUDGET)
        server.signal(signal.SIGSTOP)
        took_s, text = await timed(store.append("s", 1, [b"b"], budget_s=0.25))
        assert took_s < 0.25 + SLACK_S
        assert "within 0.25 s" in text
        server.signal(signal.SIGCONT)
        await asyncio.sleep(0.3)
        assert (await store.read("s", **BUDGET)).records == (b"a", b"b")  # it was done all the same
        assert await store.append("s", 1, [b"b"], **BUDGET) == 2
        assert (await store.read("s", **BUDGET)).records == (b"a", b"b")

    redis_backend(server).run(scenario)


def test_a_server_that_hangs_holds_nobody_beyond_a_budget(server):
    async def scenario(store):
        await store.put("a", b"1", **BUDGET)
        server.signal(signal.SIGSTOP)
        took_s = []
        ends = time.monotonic() + 4
        while time.monotonic() < ends:
            took_s += [(await timed(store.get("a", budget_s=0.25)))[0]]
            await asyncio.sleep(0.02)
        assert max(took_s) < 0.25 + SLACK_S
        assert sum(each < 0.02 for each in took_s) > len(took_s) / 2, "the breaker is not open"
        server.signal(signal.SIGCONT)
        _, after_s = await until(lambda: store.get("a", budget_s=0.25), within_s=10)
        assert after_s < RECOVERY_S + SLACK_S

    redis_backend(server).run(scenario)


def test_a_patient_caller_outlasts_a_server_that_waits_for_its_disk(server):
    async def scenario(store):
        await store.append("s", 0, [b"a"], **BUDGET)
        server.signal(signal.SIGSTOP)
        append = asyncio.create_task(store.append("s", 1, [b"b"], budget_s=5))
        await asyncio.sleep(1.8)
        server.signal(signal.SIGCONT)
        assert await append == 2

    redis_backend(server).run(scenario)


def test_a_read_that_waits_ends_in_time_on_a_server_that_hangs(server):
    async def scenario(store):
        waiting = asyncio.create_task(store.read("s", wait_s=0.7, budget_s=0.3))
        await asyncio.sleep(0.2)
        server.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(StateDown):
            await waiting
        assert time.monotonic() - began < 1.0 + SLACK_S
        server.signal(signal.SIGCONT)

    redis_backend(server).run(scenario)


def test_a_full_server_refuses_writes_and_serves_reads_and_deletes(server):
    async def scenario(store):
        await store.put("a", b"kept", **BUDGET)
        await store.append("s", 0, [b"r"], **BUDGET)
        used = server.ask("INFO", "memory")["used_memory"]
        large = await store.put("large", bytes(4 << 20), **BUDGET)
        # Not by what is used now: the buffer in which the value came goes by itself, some time.
        server.ask("CONFIG", "SET", "maxmemory", used + (2 << 20))
        for call in (
            store.put("b", b"x", **BUDGET),
            store.append("s", 1, [b"x"], **BUDGET),
            store.take([Bucket("q", 1, 1)], **BUDGET),
        ):
            with pytest.raises(StateFull):
                await call
        assert "no memory left" in (store.status().fault or "")
        assert store.status().is_up
        assert (await store.get("a", **BUDGET)).value == b"kept"
        assert (await store.read("s", **BUDGET)).records == (b"r",)
        await store.delete("large", expect=large, **BUDGET)
        assert store.status().fault is not None, "nothing was written since"
        await until(lambda: store.put("b", b"x", **BUDGET), within_s=10)
        assert store.status().fault is None
        assert await store.append("s", 1, [b"x"], **BUDGET) == 2

    redis_backend(server).run(scenario)


def test_a_server_that_cannot_write_its_own_files_is_full(tmp_path):
    server = RedisServer(tmp_path / "gone").start()

    async def scenario(store):
        shutil.rmtree(server.folder)
        server.ask("CONFIG", "SET", "save", "3600 1")
        await store.put("a", b"1", **BUDGET)
        server.ask("BGSAVE")

        async def is_refused():
            try:
                await store.put("a", b"2", **BUDGET)
            except StateFull as error:
                return str(error)
            raise StateDown("not yet")

        text, _ = await until(is_refused, within_s=10)
        assert "MISCONF" in text
        assert await store.get("a", **BUDGET) is not None

    try:
        redis_backend(server).run(scenario)
    finally:
        server.kill()


def test_a_wrong_password_is_said_and_a_right_one_is_read_without_a_restart(server, tmp_path):
    server.ask("CONFIG", "SET", "requirepass", "right")
    file = tmp_path / "password"
    file.write_text("wrong\n")
    backend = redis_backend(server, state_password_file=str(file))

    async def scenario(store):
        took_s, text = await timed(store.get("a", budget_s=0.25))
        assert took_s < SLACK_S
        assert "state_password_file" in text
        assert "wrong" not in text
        file.write_text("right\n")
        _, after_s = await until(lambda: store.put("a", b"1", budget_s=0.25), within_s=10)
        assert after_s < RECOVERY_S + SLACK_S
        file.unlink()
        server.ask("CLIENT", "KILL", "TYPE", "normal", password="right")
        await asyncio.sleep(1.5)
        assert "cannot be read" in (await timed(store.get("a", budget_s=0.25)))[1]
        file.write_text("right\n")
        await until(lambda: store.get("a", budget_s=0.25), within_s=10)

    began = time.monotonic()
    backend.run(scenario)
    assert time.monotonic() - began < 15


def test_a_server_that_wants_a_password_says_which_setting(server):
    server.ask("CONFIG", "SET", "requirepass", "right")

    async def scenario(store):
        assert "state_password_file" in (await timed(store.get("a", budget_s=0.25)))[1]

    redis_backend(server).run(scenario)


def test_a_read_only_replica_takes_no_writes_until_it_is_promoted(server, tmp_path):
    primary = RedisServer(tmp_path / "primary").start()
    try:
        primary.ask("FUNCTION", "LOAD", FUNCTIONS.read_bytes())
        server.ask("CONFIG", "SET", "repl-diskless-sync-delay", 0)
        primary.ask("CONFIG", "SET", "repl-diskless-sync-delay", 0)
        server.ask("REPLICAOF", "127.0.0.1", primary.port)
        deadline = time.monotonic() + 20
        while server.ask("INFO", "replication")["master_link_status"] != "up":
            assert time.monotonic() < deadline
            time.sleep(0.05)

        async def scenario(store):
            assert any("replica" in note for note in store.status().notes)
            assert "replica" in (await timed(store.put("a", b"1", **BUDGET)))[1]
            await until(lambda: store.get("a", **BUDGET), within_s=5)
            server.ask("REPLICAOF", "NO", "ONE")
            _, after_s = await until(lambda: store.put("a", b"1", **BUDGET), within_s=10)
            assert after_s < RECOVERY_S + SLACK_S

        redis_backend(server).run(scenario)
    finally:
        primary.kill()


def test_a_server_that_is_not_there_at_the_start_is_found_later(server):
    server.kill()

    async def scenario(store):
        assert "cannot be reached" in (await timed(store.put("a", b"1", budget_s=0.25)))[1]
        server.start()
        await until(lambda: store.put("a", b"1", expect=ABSENT, budget_s=0.25), within_s=10)

    redis_backend(server).run(scenario)


def test_functions_that_vanish_are_loaded_again(server):
    async def scenario(store):
        await store.put("a", b"1", **BUDGET)
        server.ask("FUNCTION", "FLUSH")
        await timed(store.put("a", b"2", **BUDGET))
        _, after_s = await until(lambda: store.put("a", b"2", budget_s=0.5), within_s=10)
        assert after_s < RECOVERY_S + SLACK_S
        assert server.ask("FUNCTION", "LIST")[0][b"library_name"] == b"penstock_state_1"

    redis_backend(server).run(scenario)


def test_a_key_of_others_is_out_of_reach(server, tmp_path):
    server.ask("ACL", "SETUSER", "other", "on", ">x", "~other:*", "+@all")
    (tmp_path / "password").write_text("x")
    backend = redis_backend(
        server,
        state_url=server.url.replace("redis://", "redis://other@"),
        state_password_file=str(tmp_path / "password"),
    )

    async def scenario(store):
        for call in (store.get("a", **BUDGET), store.put("a", b"", **BUDGET)):
            assert "permissions" in (await timed(call))[1]
        assert store.status().is_up
        assert "permissions" in (store.status().fault or "")

    backend.run(scenario)


def test_a_verb_that_is_forbidden_is_a_fault_until_it_succeeds(tmp_path, server, caplog):
    backend = as_user(server, "penstock-plain", tmp_path)

    async def scenario(store):
        await store.append("s", 0, [b"r"], **BUDGET)
        server.ask("ACL", "SETUSER", "penstock-plain", "-xrange")
        for _ in range(2):
            assert "xrange" in (await timed(store.read("s", **BUDGET)))[1]
        await store.put("a", b"x", **BUDGET)
        assert "xrange" in (store.status().fault or ""), "another verb's success says nothing"
        server.ask("ACL", "SETUSER", "penstock-plain", "+xrange")
        assert (await store.read("s", **BUDGET)).records == (b"r",)
        assert store.status().fault is None

    with caplog.at_level(logging.INFO, "penstock.state"):
        backend.run(scenario)
    told = [each.message for each in caplog.records]
    assert sum("xrange" in each for each in told) == 1
    assert told[-1] == "Redis takes all calls again"


@pytest.mark.parametrize(
    ("setting", "value", "word"),
    [("maxmemory-policy", "allkeys-lru", "noeviction"), ("appendonly", "no", "append-only")],
)
def test_what_weakens_the_promise_is_reported(server, caplog, setting, value, word):
    server.ask("CONFIG", "SET", setting, value)

    async def scenario(store):
        return store.status().notes

    with caplog.at_level(logging.WARNING, "penstock.state"):
        notes = redis_backend(server).run(scenario)
    assert any(word in note for note in notes)
    assert any(word in record.message for record in caplog.records)
    server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    server.ask("CONFIG", "SET", "appendonly", "yes")
    assert redis_backend(server).run(scenario) == ()


def test_a_cluster_is_refused_by_name(tmp_path):
    server = RedisServer(tmp_path / "cluster", "--cluster-enabled", "yes").start()

    async def scenario(store):
        assert "Cluster" in (await timed(store.get("a", budget_s=0.25)))[1]

    try:
        redis_backend(server).run(scenario)
    finally:
        server.kill()


def test_what_waits_for_a_server_is_bounded(server):
    async def scenario(store):
        server.signal(signal.SIGSTOP)
        puts = [
            asyncio.create_task(store.put(f"n{n}", bytes(8 << 20), budget_s=0.5)) for n in range(8)
        ]
        done, _ = await asyncio.wait(puts, timeout=5)
        texts = [str(task.exception()) for task in done]
        assert len(texts) == 8
        assert any("wait for Redis already" in text for text in texts)
        server.signal(signal.SIGCONT)
        await until(lambda: store.get("a", budget_s=0.5), within_s=10)

    redis_backend(server).run(scenario)
