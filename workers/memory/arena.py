"""The arena: one allocation that holds every KV block of a worker, block-major, and a reserve.

A block holds K and V of all layers for `block_size` tokens, and their scales where they are
quantised, so that it is swapped and lent as one contiguous range. The reserve follows the last
block, so that the last blocks and the reserve form one range, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.kernels.cpu import huge_pages
from penstock.kernels.types import KvScales, PagedKv

BLOCK_ALIGN_BYTES = 512
SCALE = torch.float16


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where each layer's K and V lie inside a block.

    Per layer: K [num_kv_heads, block_size, head_dim], then V of the same shape, in `dtype`. If
    `group` dimensions share a scale, the scales follow K and V of all layers: per layer the fp16
    scales of K [num_kv_heads, block_size, head_dim / group], then those of V. So codes stay
    aligned whatever the size of the scales. The block's bytes are rounded up to 512.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    group: int | None = None

    @property
    def half_bytes(self) -> int:
        """Bytes of one layer's K (or V) in one block."""
        return self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def half_scale_bytes(self) -> int:
        """Bytes of the scales of one layer's K (or V) in one block."""
        return self.num_kv_heads * self.block_size * self._num_groups * SCALE.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's K, V and scales in one block."""
        return 2 * (self.half_bytes + self.half_scale_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, without the block's padding."""
        return self.num_layers * self.layer_bytes // self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes from one block to the next."""
        raw = self.num_layers * self.layer_bytes
        return -(-raw // BLOCK_ALIGN_BYTES) * BLOCK_ALIGN_BYTES

    @property
    def _num_groups(self) -> int:
        return 0 if self.group is None else self.head_dim // self.group

    def layer_views(self, memory: torch.Tensor, num_blocks: int) -> list[PagedKv]:
        """Each layer's K and V of `num_blocks` blocks from the start of `memory`, uint8."""
        half, scale_half = self.half_bytes, self.half_scale_bytes
        scales_from = 2 * half * self.num_layers
        layers = []
        for layer in range(self.num_layers):
            k, v = (
                self._view(memory, num_blocks, self.dtype, self.head_dim, (2 * layer + side) * half)
                for side in (0, 1)
            )
            if self.group is None:
                layers.append(PagedKv(k, v))
                continue
            offsets = [scales_from + (2 * layer + side) * scale_half for side in (0, 1)]
            of_k, of_v = (
                self._view(memory, num_blocks, SCALE, self._num_groups, offset)
                for offset in offsets
            )
            layers.append(PagedKv(k, v, KvScales(of_k, of_v)))
        return layers

    def _view(
        self, memory: torch.Tensor, num_blocks: int, dtype: torch.dtype, width: int, offset: int
    ) -> torch.Tensor:
        """[num_blocks, num_kv_heads, block_size, width], `offset` bytes into each block."""
        shape = (num_blocks, self.num_kv_heads, self.block_size, width)
        strides = (self.block_bytes // dtype.itemsize, self.block_size * width, width, 1)
        flat = memory.view(dtype)
        return flat.as_strided(shape, strides, flat.storage_offset() + offset // dtype.itemsize)


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
        num_bytes = num_blocks * layout.block_bytes + self.reserve_bytes
        # A decode step on a CPU reads a few KiB of each of many blocks: huge pages help it much.
        self.storage = (
            huge_pages.empty((num_bytes,), torch.uint8, alone=True)
            if device.type == "cpu"
            else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        )

    @property
    def num_bytes(self) -> int:
        return self.storage.numel()

    def kv_layers(self) -> list[PagedKv]:
        """K and V of each layer in all blocks: strided views."""
        return self.layout.layer_views(self.storage, self.num_blocks)

    def block(self, block_id: int) -> torch.Tensor:
        """The bytes of one block, uint8 [block_bytes]."""
        size = self.layout.block_bytes
        return self.storage[block_id * size : (block_id + 1) * size]

    def tail(self, num_blocks: int) -> torch.Tensor:
        """The bytes of the last `num_blocks` blocks and of the reserve after them, uint8."""
        return self.storage[(self.num_blocks - num_blocks) * self.layout.block_bytes :]
