"""Every block type of GGUF, decoded to the same bits as by the `gguf` package."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.kernels.quant import QuantizedWeight, dequantize_weight
from penstock.workers.gguf.config import KEPT_FORMATS
from penstock.workers.gguf.header import BLOCK_TYPES, BlockType
from penstock.workers.quantization import StoredScheme
from penstock.workers.weights import gguf_blocks
from penstock.workers.weights.gguf_blocks import decode
from penstock.workers.weights.joined import joined
from penstock.workers.weights.stored import read_weight

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


@pytest.mark.parametrize("name", HALVES)
def test_kept_codes_stand_for_the_decoded_values(name):
    """The same bits without minimums; with them, a zero point that is rounded once. One group has
    the scale 0."""
    type = next(each for each in BLOCK_TYPES.values() if each.name == name)
    raw = torch.from_numpy(rows_of(type, 9, 3, seed=5))
    raw[4, :2] = 0
    weight = kept(type, raw)
    assert (weight.format, weight.group) == KEPT_FORMATS[name] and weight.group is not None
    expected, found = decode(raw, type), dequantize_weight(weight)
    assert (weight.zeros is None) == (name in ("Q4_0", "Q5_0", "Q8_0", "Q6_K"))
    if weight.zeros is None:
        assert torch.equal(found, expected)
    else:
        size = (weight.scales * (weight.zeros.abs() + 31)).repeat_interleave(weight.group, 1).abs()
        assert ((found - expected).abs() <= 2.0**-22 * size).all()
        assert len(expected[4, : weight.group].unique()) == 1


def kept(type: BlockType, raw: torch.Tensor) -> QuantizedWeight:
    scheme = StoredScheme("gguf", ("int4",), (32,))
    mark = f"weight_{type.name.lower()}"
    shape = (len(raw), raw.shape[1] // type.num_bytes * type.elements)
    return read_weight(lambda name: name == mark, lambda name: raw, scheme, shape)


@pytest.mark.parametrize(
    "others", [("Q4_K",), ("Q4_K", "Q6_K"), ("Q5_K", "Q6_K"), ("Q4_0", "Q8_0")]
)
def test_joined_blocks_keep_every_value(others):
    """A file has v in more bits than q and k."""
    weights = []
    for index, name in enumerate(("Q4_K", *others)):
        type = next(each for each in BLOCK_TYPES.values() if each.name == name)
        blocks = 512 // type.elements
        weights.append(kept(type, torch.from_numpy(rows_of(type, 4 + index, blocks, seed=index))))
    found = joined(weights)
    assert isinstance(found, QuantizedWeight)
    only_q4 = others == ("Q4_K",)
    assert (found.format, found.group) == (
        "int4" if only_q4 else "int8g",
        16 if "Q6_K" in others else 32,
    )
    expected = torch.cat([dequantize_weight(weight) for weight in weights])
    torch.testing.assert_close(dequantize_weight(found), expected, rtol=1e-6, atol=1e-4)


def test_joined_with_a_plain_weight_is_plain():
    type = BLOCK_TYPES[8]
    weight = kept(type, torch.from_numpy(rows_of(type, 3, 2, seed=1)))
    found = joined([weight, torch.ones(2, 64)])
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, torch.cat((dequantize_weight(weight), torch.ones(2, 64))))
