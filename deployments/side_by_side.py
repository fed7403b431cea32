"""Several answers on their way at once, read as one stream of pieces. Knows nothing of cores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from penstock.deployments.calls import TextDelta

MAX_WAITING = 256  # pieces that nobody has read so far


async def side_by_side(
    streams: Sequence[AsyncGenerator[TextDelta, None]],
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """All pieces as they come, each with the index of its stream; a stream has one last piece.

    The first failure ends them all; so does closing this generator.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    ready: asyncio.Queue[tuple[int, TextDelta | Exception]] = asyncio.Queue(maxsize=MAX_WAITING)

    async def pump(index: int, stream: AsyncGenerator[TextDelta, None]) -> None:
        try:
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    await ready.put((index, piece))
        except Exception as error:
            await ready.put((index, error))

    pumps = [asyncio.create_task(pump(i, each)) for i, each in enumerate(streams)]
    try:
        num_unfinished = len(streams)
        while num_unfinished:
            index, item = await ready.get()
            if isinstance(item, Exception):
                raise item
            num_unfinished -= item.finish_reason is not None
            yield index, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
