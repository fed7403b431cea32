"""Every block type of GGUF, decoded to the same bits as by the `gguf` package."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.kernels.quant import dequantize_weight
from penstock.workers.gguf.header import BLOCK_TYPES, BlockType
from penstock.workers.quantization import StoredScheme
from penstock.workers.weights import gguf_blocks
from penstock.workers.weights.gguf_blocks import decode
from penstock.workers.weights.stored import Q4_0_MARK, read_weight

gguf = pytest.importorskip("gguf", reason="the package gguf, the oracle, is not installed")

# Where a block has numbers in fp16.
HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def rows_of(type: BlockType, num_rows: int, num_blocks: int, seed: int) -> np.ndarray:
    """Random blocks: any bytes, except that numbers in fp16 are finite."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (num_rows, num_blocks, type.num_bytes), dtype=np.uint8)
    for at in HALVES[type.name]:
        halves = generator.normal(0, 2, (num_rows, num_blocks, 1)).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (64, 5)])
@pytest.mark.parametrize("name", HALVES)
def test_any_blocks(monkeypatch, name, shape):
    type = next(each for each in BLOCK_TYPES.values() if each.name == name)
    raw = rows_of(type, shape[0], shape[1], seed=shape[0])
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    for chunk in (gguf_blocks.CHUNK_ELEMENTS, 1000):
        monkeypatch.setattr(gguf_blocks, "CHUNK_ELEMENTS", chunk)
        found = decode(torch.from_numpy(raw), type)
        assert found.shape == expected.shape == (shape[0], shape[1] * type.elements)
        assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)],
)
def test_floats_keep_their_bits(name, dtype):
    type = next(each for each in BLOCK_TYPES.values() if each.name == name)
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = decode(values.view(torch.uint8), type)
    assert found.dtype == dtype and torch.equal(found, values)


def test_the_sizes_are_those_of_the_format():
    for number, type in BLOCK_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == type.name
        assert gguf.GGML_QUANT_SIZES[kind] == (type.elements, type.num_bytes)


def test_q4_0_is_int4_with_the_same_codes_and_scales():
    type = BLOCK_TYPES[2]
    raw = torch.from_numpy(rows_of(type, 9, 3, seed=5))
    scheme = StoredScheme("gguf", ("int4",), (32,))
    weight = read_weight(lambda name: name == Q4_0_MARK, lambda name: raw, scheme, (9, 96))
    assert (weight.format, weight.group, weight.zeros) == ("int4", 32, None)
    assert torch.equal(dequantize_weight(weight), decode(raw, type))
