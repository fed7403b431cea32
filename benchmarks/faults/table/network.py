"""Rows about the network between ingress and workers: partitions, cuts, repeated messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.faults.proxy import HEADER, Programme, Proxy
from benchmarks.faults.table.desk import Desk, Hand, desk
from benchmarks.faults.table.rows import Scale, Seen, row
from benchmarks.faults.table.workers import HANG_S, compare, plain
from penstock.deployments.ingress.core.errors import ServiceError
from penstock.protos.penstock.internal.v1 import channel_pb2 as pb
from penstock.workers.request import RequestError

HALF_OPEN_S = 11.0  # TCP_USER_TIMEOUT, and the computation
QUICK_PARTITIONS = ("both ways", "from the worker")


@dataclass(frozen=True)
class Partition:
    """One way to lose a node."""

    act: Callable[[Proxy], None]
    pause_s: float


def _verb(direction: str, verb: str) -> Callable[[Proxy], None]:
    return lambda relay: relay.set(direction, Programme(verb))  # type: ignore[arg-type]


def _gone(relay: Proxy) -> None:
    relay.refuse()
    relay.cut()


PARTITIONS = {
    "both ways": Partition(_verb("both", "swallow"), HANG_S),
    "to the worker": Partition(_verb("up", "swallow"), HANG_S),
    "from the worker": Partition(_verb("down", "swallow"), HANG_S),
    "half-open": Partition(_verb("both", "stall"), HALF_OPEN_S),
    "reset, port closed": Partition(_gone, 2.0),
}


@row(
    4,
    "Node lost",
    injected="between ingress and a worker: both ways dropped, either way alone, both ways "
    "stalled, "
    "reset and port closed; healed after 12 s",
    promised="as row 1; noticed within 5 s (half-open: 10 s), requests sent into the void as well; "
    "no token comes twice after the healing",
)
async def node_lost(scale: Scale, seen: Seen) -> None:
    names = QUICK_PARTITIONS if scale.is_quick else tuple(PARTITIONS)
    async with desk(2) as made:
        calls = [plain("The road was", seed=n, max_tokens=500) for n in range(3)]
        late = [plain("The garden was", seed=n, max_tokens=60) for n in range(3)]
        expected = [await made.alone(n, each) for n, each in enumerate(calls + late)]
        for name in names:
            partition, hand = PARTITIONS[name], made.hands[0]
            is_cut = asyncio.Event()

            async def told(num: int, act: object = None, is_cut: asyncio.Event = is_cut) -> None:
                if num > 20:
                    is_cut.set()

            running = [asyncio.ensure_future(made.run(call, 1, told)) for call in calls]
            await is_cut.wait()
            partition.act(hand.relay)
            began_s = time.monotonic()
            running += [asyncio.ensure_future(made.run(call)) for call in late]
            for n, (got, watched) in enumerate(await asyncio.gather(*running)):
                compare(seen, f"{name}: request {n}", got, expected[n])
                waits = [watched.longest_gap_s, watched.arrivals[1] - watched.arrivals[0]]
                seen.most(f"longest wait s, {name}", max(waits))
            wait_s = seen.facts[f"longest wait s, {name}"]
            seen.check(wait_s <= partition.pause_s, f"{name}: a request waited {wait_s} s")
            await asyncio.sleep(max(0.0, 12.0 - (time.monotonic() - began_s)))
            hand.relay.heal()
            await hand.relay.listen()
            await made.connected(2)
        await made.check_free(seen)


class _Steps:
    """What to send instead of the tenth message with tokens, once."""

    def __init__(self, instead: Callable[[bytes, bytes], list[bytes]], tenth: int = 10):
        self._instead, self._tenth = instead, tenth
        self._num, self._before = 0, b""
        self.is_done = False

    def __call__(self, data: bytes) -> list[bytes]:
        message = pb.DownMessage.FromString(data[HEADER.size :])
        if not message.HasField("step") or not message.step.token_ids or self.is_done:
            return [data]
        self._num += 1
        before, self._before = self._before, data
        if self._num < self._tenth:
            return [data]
        self.is_done = True
        return self._instead(before, data)


class _Submits:
    """The first Submit is sent twice."""

    def __init__(self) -> None:
        self.is_done = False

    def __call__(self, data: bytes) -> list[bytes]:
        if self.is_done or not pb.UpMessage.FromString(data[HEADER.size :]).HasField("submit"):
            return [data]
        self.is_done = True
        return [data, data]


FRAMES: dict[str, Callable[[], tuple[str, _Steps | _Submits]]] = {
    "a step repeated": lambda: ("down", _Steps(lambda _, now: [now, now])),
    "a step withheld": lambda: ("down", _Steps(lambda _, now: [])),
    "an old step again": lambda: ("down", _Steps(lambda before, now: [now, before])),
    "a Submit repeated": lambda: ("up", _Submits()),
}


@row(
    22,
    "Repeated, late and truncated messages",
    injected="a cut after each number of bytes within a message; a step repeated, withheld, and an "
    "older one again; a Submit repeated; bytes of an old connection after the new one's Hello; "
    "delays that vary",
    promised="idempotent by request, attempt and position: equal ids, or an error and never "
    "another "
    "text; truncated: continued",
)
async def messages(scale: Scale, seen: Seen) -> None:
    call = plain("The friend was", seed=11, max_tokens=150)
    async with desk(2) as made:
        expected = await made.alone("friend", call)
        for num_bytes in range(1, scale.of(4, 40)):
            await _disturbed(made, seen, f"cut after {num_bytes} bytes", _cut_after(num_bytes))
        for name, make in FRAMES.items():
            direction, frames = make()

            def act(hand: Hand, direction: str = direction, frames: object = frames) -> None:
                hand.relay.set(direction, Programme(frames=frames))  # type: ignore[arg-type]

            if direction == "up":
                for hand in made.hands:
                    act(hand)
                await _compared(made, seen, name, None, expected)
            else:
                await _disturbed(made, seen, name, act)
            seen.check(frames.is_done, f"{name}: it was not made")
            for hand in made.hands:
                hand.relay.heal()
            await made.connected(2)
        await _disturbed(made, seen, "late bytes of an old connection", _detach)
        await asyncio.sleep(1.0)
        for hand in made.hands:
            hand.relay.heal()
        await made.connected(2)
        for hand in made.hands:
            hand.relay.set("both", Programme(delay_s=0.01, jitter_s=0.05))
        await _compared(made, seen, "delays that vary", None, expected)
        for hand in made.hands:
            hand.relay.heal()
        await made.check_free(seen)


def _cut_after(num_bytes: int) -> Callable[[Hand], None]:
    return lambda hand: hand.relay.set("down", Programme(cut_at=num_bytes))


def _detach(hand: Hand) -> None:
    hand.relay.set("up", Programme(delay_s=0.5))
    asyncio.get_running_loop().call_later(0.05, hand.relay.detach)


async def _disturbed(made: Desk, seen: Seen, name: str, act: Callable[[Hand], None]) -> None:
    """The call, and `act` on its worker once it has some tokens."""
    done: list[Hand] = []

    async def told(num_tokens: int) -> None:
        if num_tokens > 10 and not done:
            done.append(await made.busy())
            act(done[0])

    await _compared(made, seen, name, told, await made.alone("friend", plain("")))
    await made.connected(2)


async def _compared(made: Desk, seen: Seen, name: str, told: object, expected: object) -> None:
    """Run the call; an error is allowed in place of the text, another text never."""
    call = plain("The friend was", seed=11, max_tokens=150)
    try:
        async with asyncio.timeout(60):
            got, watched = await made.run(call, 1, told)  # type: ignore[arg-type]
    except (ServiceError, RequestError) as error:
        seen.count("ended with an error")
        seen.note(f"error, {name}", error.code)
        seen.check(True, "")
        return
    seen.most("longest pause s", watched.longest_gap_s)
    compare(seen, name, got, expected)  # type: ignore[arg-type]
