"""The arena: one allocation that holds every KV block of a worker, block-major, and a reserve.

A block holds K and V of all layers for `block_size` tokens, so that it moves, swaps and is lent as
one contiguous range. The reserve lies right behind the last block, so that the last blocks and the
reserve are one range, too. Knows nothing of sequences, reference counts or who uses which block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_ALIGN_BYTES = 512


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where each layer's K and V lie inside a block.

    Per layer: K [num_kv_heads, block_size, head_dim], then V of the same shape. The block's bytes
    are rounded up to 512.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def half_bytes(self) -> int:
        """Bytes of one layer's K (or V) in one block."""
        return self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes from one block to the next."""
        raw = 2 * self.half_bytes * self.num_layers
        return -(-raw // BLOCK_ALIGN_BYTES) * BLOCK_ALIGN_BYTES


class Arena:
    """`num_blocks` blocks and then `reserve_bytes`, rounded up to 512, in one uint8 tensor.

    Fresh and returned blocks hold garbage.
    """

    def __init__(
        self, layout: BlockLayout, num_blocks: int, device: torch.device, reserve_bytes: int = 0
    ):
        assert num_blocks > 0
        self.layout = layout
        self.num_blocks = num_blocks
        self.reserve_bytes = -(-reserve_bytes // BLOCK_ALIGN_BYTES) * BLOCK_ALIGN_BYTES
        self.storage = torch.empty(
            num_blocks * layout.block_bytes + self.reserve_bytes, dtype=torch.uint8, device=device
        )

    @property
    def num_bytes(self) -> int:
        return self.storage.numel()

    def kv_layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(K, V) of each layer: strided views [num_blocks, num_kv_heads, block_size, head_dim]."""
        half = self.layout.half_bytes
        return [
            (self._view(2 * half * layer), self._view(2 * half * layer + half))
            for layer in range(self.layout.num_layers)
        ]

    def block(self, block_id: int) -> torch.Tensor:
        """The bytes of one block, uint8 [block_bytes]."""
        size = self.layout.block_bytes
        return self.storage[block_id * size : (block_id + 1) * size]

    def tail(self, num_blocks: int) -> torch.Tensor:
        """The bytes of the last `num_blocks` blocks and of the reserve behind them, uint8."""
        return self.storage[(self.num_blocks - num_blocks) * self.layout.block_bytes :]

    def _view(self, offset_bytes: int) -> torch.Tensor:
        lay, size = self.layout, self.layout.dtype.itemsize
        shape = (self.num_blocks, lay.num_kv_heads, lay.block_size, lay.head_dim)
        strides = (lay.block_bytes // size, lay.block_size * lay.head_dim, lay.head_dim, 1)
        return self.storage.view(lay.dtype).as_strided(shape, strides, offset_bytes // size)
