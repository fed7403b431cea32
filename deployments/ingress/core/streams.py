"""The answers of a call as one stream, and long work on text off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from penstock.deployments.ingress.core.call import TextDelta

MAX_WAITING = 256  # pieces that the client has not taken yet
MAX_INLINE_SIZE = 4096  # characters or tokens; longer work runs on another thread

T = TypeVar("T")
Pieces = AsyncGenerator[tuple[int, TextDelta], None]


async def merged(streams: Sequence[Pieces]) -> Pieces:
    """All pieces of `streams` as they come; each stream has one last piece.

    The first failure ends all streams; so does closing this generator.
    """
    ready: asyncio.Queue[tuple[int, TextDelta] | Exception] = asyncio.Queue(maxsize=MAX_WAITING)

    async def pump(stream: Pieces) -> None:
        try:
            async with aclosing(stream) as pieces:
                async for item in pieces:
                    await ready.put(item)
        except Exception as error:
            await ready.put(error)

    pumps = [asyncio.create_task(pump(each)) for each in streams]
    try:
        num_unfinished = len(streams)
        while num_unfinished:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            num_unfinished -= item[1].finish_reason is not None
            yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def run_off_loop_if_large(
    size: int, convert: Callable[..., T], /, *args: Any, **options: Any
) -> T:
    """`convert(…)`; on another thread if `size` is so large that other requests would wait."""
    if size <= MAX_INLINE_SIZE:
        return convert(*args, **options)
    return await asyncio.to_thread(convert, *args, **options)
