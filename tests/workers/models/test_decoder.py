"""The decoder against transformers' own models in fp32: every family, every way to cut a batch."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from penstock.kernels.delta_types import StateRows
from penstock.kernels.types import DecodeBatch, PrefillBatch
from penstock.workers.memory.arena import Arena, BlockLayout
from penstock.workers.memory.state_slots import StateLayout
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.layers import AttentionInputs, LayerCache
from penstock.workers.models.loader import build_random, load_model
from penstock.workers.models.rope import Rope, inverse_frequencies
from penstock.workers.rope_config import RopeConfig
from penstock.workers.weights.hub import resolve_model
from tests.workers.checkpoints import (
    ALL,
    FAMILIES,
    make_checkpoint,
    random_model,
    random_prompt,
    reference_greedy,
    reference_logits,
    reference_model,
)

BLOCK_SIZE = 4
NUM_BLOCKS = 64
NUM_SLOTS = 40
NUM_NEW = 40
TOLERANCE: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-4}
# Of states over the whole context: transformers' fp32 is as far from its own fp64.
OF_STATES: dict[str, Any] = {"atol": 1e-3, "rtol": 1e-3}


BUILTIN = ("builtin", "builtin-moe")
BF16 = ("llama-bias", "qwen3", "mistral-window", "qwen2_moe", "granite", "smollm3", "ministral3",
        "phi3-longrope", "olmo2", "glm4", "gemma2", "gemma3_text",
        "glm4_moe", "granitemoe", "gpt_oss-window", "qwen3_next", "qwen3_5_text")  # fmt: skip


def tolerance_of(name: str) -> dict[str, Any]:
    return OF_STATES if "qwen3_next" in name or "qwen3_5" in name else TOLERANCE


def folder_of(name: str) -> Path:
    return resolve_model(name) if name in BUILTIN else make_checkpoint(name)


@functools.cache
def decoder_of(name: str, weights: str = "fp32") -> Decoder:
    return load_model(folder_of(name), weights=weights, progress=False)


@dataclass
class Tokens:
    """One sequence: its ids so far, how many of them are computed, its blocks, and the slot of its
    recurrent state."""

    ids: list[int]
    num_computed: int = 0
    table: list[int] = field(default_factory=list)
    slot: int = -1


class PagedDecoder:
    """Runs a decoder over blocks that hold NaN until they are written."""

    def __init__(self, decoder: Decoder, *, shuffled: bool = False, seed: int = 0):
        config = decoder.config
        layout = BlockLayout(
            config.num_kv_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim, decoder.dtype
        )
        arena = Arena(layout, NUM_BLOCKS, decoder.device)
        arena.storage.view(decoder.dtype).fill_(float("nan"))
        self.kv_layers: list[LayerCache] = list(arena.kv_layers())
        self.free_slots = list(range(NUM_SLOTS))
        if config.linear_attention is not None:
            states = StateLayout(sum(config.linear_layers), config.linear_attention, decoder.dtype)
            memory = torch.full(
                (NUM_SLOTS, states.slot_bytes), 0xFF, dtype=torch.uint8, device=decoder.device
            )
            of_kv, of_states = iter(self.kv_layers), iter(states.views(memory))
            self.kv_layers = [
                next(of_states) if is_linear else next(of_kv) for is_linear in config.linear_layers
            ]
        self.decoder = decoder
        self.free = list(range(NUM_BLOCKS))
        if shuffled:
            random.Random(seed).shuffle(self.free)
            random.Random(seed).shuffle(self.free_slots)

    @torch.inference_mode()
    def step(self, *chunks: tuple[Tokens, int], num_decode: int = 0) -> list[Tensor]:
        """Compute the next n tokens of each sequence -> logits [n, vocab] of each, on the host.

        The first `num_decode` of the chunks, of one token each, run as decode rows.
        """
        rows = []
        for seq, length in chunks:
            span = range(seq.num_computed, seq.num_computed + length)
            while len(seq.table) * BLOCK_SIZE < span.stop:
                seq.table.append(self.free.pop(0))
            rows += [(seq, position) for position in span]
            seq.num_computed += length
        lengths = [length for _, length in chunks]
        with torch.device(self.decoder.device):
            token_ids = torch.tensor([seq.ids[position] for seq, position in rows])
            positions = torch.tensor([position for _, position in rows])
            inputs = self._inputs(chunks, rows, num_decode)
        hidden = self.decoder.forward(token_ids, positions, inputs, self.kv_layers)
        return list(self.decoder.logits(hidden).cpu().split(lengths))

    def _inputs(
        self, chunks: tuple[tuple[Tokens, int], ...], rows: list, num_decode: int
    ) -> AttentionInputs:
        decode, prefill = chunks[:num_decode], chunks[num_decode:]
        assert all(length == 1 for _, length in decode)
        starts = [0]
        for _, length in prefill:
            starts.append(starts[-1] + length)
        return AttentionInputs(
            slots=torch.tensor(
                [seq.table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for seq, p in rows]
            ),
            num_decode=num_decode,
            decode=DecodeBatch(
                _tables([seq for seq, _ in decode]),
                _int32([seq.num_computed for seq, _ in decode]),
                max((seq.num_computed for seq, _ in decode), default=0),
            ),
            prefill=PrefillBatch(
                _tables([seq for seq, _ in prefill]),
                _int32(starts),
                _int32([seq.num_computed for seq, _ in prefill]),
                max((length for _, length in prefill), default=0),
            ),
            states=self._states(chunks) if self.decoder.config.has_states else None,
        )

    def _states(self, chunks: tuple[tuple[Tokens, int], ...]) -> StateRows:
        """Each sequence gets another slot."""
        sources = [seq.slot for seq, _ in chunks]
        for seq, _ in chunks:
            seq.slot = self.free_slots.pop(0)
        self.free_slots += [slot for slot in sources if slot >= 0]
        lengths = [length for _, length in chunks]
        return StateRows(
            _int32([0, *accumulate(lengths)]),
            _int32(sources),
            _int32(range(len(chunks) + 1)),
            _int32(lengths),
            _int32([seq.slot for seq, _ in chunks]),
        )

    def greedy(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """The naive loop: the prompt in one chunk, then one decode row a step."""
        seq = Tokens(list(prompt_ids))
        (logits,) = self.step((seq, len(prompt_ids)))
        for _ in range(num_tokens - 1):
            seq.ids.append(int(logits[-1].argmax()))
            (logits,) = self.step((seq, 1), num_decode=1)
        return [*seq.ids[len(prompt_ids) :], int(logits[-1].argmax())]


def _int32(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def _tables(sequences: list[Tokens]) -> Tensor:
    """Rows padded with an id that no arena has: reading it would fail or crash."""
    longest = max((len(seq.table) for seq in sequences), default=0)
    table = torch.full((len(sequences), longest), 2**30, dtype=torch.int32)
    for row, seq in zip(table, sequences):
        row[: len(seq.table)] = _int32(seq.table)
    return table


@pytest.mark.parametrize("name", [*ALL, *BUILTIN])
def test_naive_run_gives_the_logits_and_greedy_ids_of_transformers(name: str):
    decoder, folder = decoder_of(name), folder_of(name)
    for length in (1, 7, 37):
        prompt = random_prompt(length)
        seq = Tokens(prompt)
        (logits,) = PagedDecoder(decoder).step((seq, length))
        torch.testing.assert_close(logits, reference_logits(folder, prompt), **tolerance_of(name))
        expected = reference_greedy(folder, prompt, NUM_NEW)
        assert PagedDecoder(decoder).greedy(prompt, NUM_NEW) == expected
        if name in ALL:
            assert len(set(expected)) > 5, "a test on constant ids would show little"


@pytest.mark.parametrize("name", [*ALL, *BUILTIN])
def test_any_chunking_over_shuffled_blocks_gives_the_same_logits(name: str):
    decoder, folder = decoder_of(name), folder_of(name)
    ids = random_prompt(37) + reference_greedy(folder, random_prompt(37), NUM_NEW)
    expected = reference_logits(folder, ids)
    for chunk in (1, 7, 64):
        paged, seq, found = PagedDecoder(decoder, shuffled=True, seed=chunk), Tokens(ids), []
        while seq.num_computed < len(ids):
            found += paged.step((seq, min(chunk, len(ids) - seq.num_computed)))
        torch.testing.assert_close(torch.cat(found), expected, **tolerance_of(name))
        assert torch.equal(torch.cat(found).argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", [*ALL, *BUILTIN])
def test_a_merged_batch_of_decode_and_prefill_rows_gives_each_its_own_ids(name: str):
    """One sequence decodes while two others are prefilled in chunks; then all decode."""
    decoder, folder = decoder_of(name), folder_of(name)
    paged = PagedDecoder(decoder, shuffled=True, seed=5)
    prompts = [random_prompt(length) for length in (7, 37, 21)]  # two of the naive run's
    sequences = [Tokens(list(prompt)) for prompt in prompts]
    paged.step((sequences[0], len(prompts[0]) - 1))
    for _ in range(80):
        chunks = []
        for seq in sequences:
            left = len(seq.ids) - seq.num_computed
            if left:
                chunks.append((seq, min(left, 5)))
        decode = [chunk for chunk in chunks if chunk[0].num_computed + 1 == len(chunk[0].ids)]
        prefill = [chunk for chunk in chunks if chunk not in decode]
        # Decode rows come first; a prompt's last lone token may as well be one of them.
        for (seq, _), logits in zip(
            decode + prefill, paged.step(*decode, *prefill, num_decode=len(decode))
        ):
            if seq.num_computed == len(seq.ids):
                seq.ids.append(int(logits[-1].argmax()))
        if all(len(seq.ids) >= len(p) + NUM_NEW for seq, p in zip(sequences, prompts)):
            break
    for seq, prompt in zip(sequences, prompts):
        expected = reference_greedy(folder, prompt, NUM_NEW)
        assert seq.ids[len(prompt) : len(prompt) + NUM_NEW] == expected


@pytest.mark.parametrize("name", BF16)
def test_bf16_is_as_close_to_fp32_as_transformers_in_bf16(name: str):
    folder, ids = make_checkpoint(name), random_prompt(50)
    truth = reference_logits(folder, ids)
    theirs = (reference_logits(folder, ids, torch.bfloat16) - truth).square().mean().sqrt()
    decoder = decoder_of(name, "bf16")
    assert decoder.dtype == torch.bfloat16
    (logits,) = PagedDecoder(decoder).step((Tokens(ids), len(ids)))
    assert logits.dtype == torch.float32
    ours = (logits - truth).square().mean().sqrt()
    assert ours < 1.3 * theirs + 1e-3, (ours, theirs)
    assert ours < 0.25 * truth.std()


def test_the_variants_are_not_the_plain_model():
    """Each switch of a variant changes the logits, or the tests above would prove nothing of it."""
    without: dict[str, dict[str, Any]] = {
        "mistral-window": {"sliding_window": None},
        "mixtral-window": {"sliding_window": None},
        "qwen2-window": {"use_sliding_window": False},
        "qwen2_moe-window": {"use_sliding_window": False},
        "qwen2_moe-normed": {"norm_topk_prob": False},
        "qwen3_moe": {"norm_topk_prob": False},
        "olmoe-clip": {"clip_qkv": None},
        "glm4_moe": {"routed_scaling_factor": 1.0},
        "gpt_oss": {"swiglu_limit": 7.0},
        "gpt_oss-window": {"sliding_window": 40},
        "glm4_moe-groups": {"n_group": 1, "topk_group": 1},
        "minimax_m2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "llama-llama3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "llama-yarn": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "ministral3": {"rope_parameters": {**ALL["llama-yarn"][1]["rope_parameters"],
                                           "original_max_position_embeddings": 16,
                                           "llama_4_scaling_beta": 0.0}},
        "smollm3": {"no_rope_layers": [1, 1, 1]},
        "smollm3-window-bias": {"use_sliding_window": False},
        "seed_oss": {"attention_bias": False},
        "phi3-longrope": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                              "partial_rotary_factor": 0.5}},
        "olmo3": {"rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 7000.0}
            for kind in ("full_attention", "sliding_attention")
        }},
        "gemma3_text": {"sliding_window": 512},
        "gemma3_text-capped": {"final_logit_softcapping": None},
    }  # fmt: skip
    cases = [*without.items()]
    cases += [("granite", {key: 1.0}) for key in ALL["granite"][1] if "multiplier" in key]
    cases += [("granite", {"logits_scaling": 1.0})]
    cases += [("gemma2", {key: None}) for key in ALL["gemma2"][1] if "softcapping" in key]
    cases += [("gemma2", {"query_pre_attn_scalar": 24}), ("gemma2", {"hidden_activation": "silu"})]
    for name, plain in cases:
        model_type, settings = ALL[name]
        ids = random_prompt(50)
        with torch.inference_mode():
            logits = random_model(model_type, {**settings, **plain})(torch.tensor([ids])).logits[0]
        assert (logits - reference_logits(make_checkpoint(name), ids)).abs().max() > 0.05, name


def test_partial_rotary_turns_the_first_dimensions_only(tmp_path):
    """transformers' Llama has no partial rotary; with zero frequencies and moved rows it has.

    The pairs (i, i + rot/2) of each head are moved to where full rotation pairs them, and the
    dimensions that do not turn to pairs whose frequency is zero.
    """
    source = make_checkpoint("llama")
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"]["partial_rotary_factor"] = 0.5
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    decoder = load_model(tmp_path, weights="fp32", progress=False)
    dim, rotary = decoder.config.head_dim, decoder.config.ropes[0].rotary_dim
    assert rotary == dim // 2

    half = rotary // 2
    still = list(range(rotary, dim))
    order = [
        *range(half),
        *still[: len(still) // 2],
        *range(half, rotary),
        *still[len(still) // 2 :],
    ]
    model = random_model(*FAMILIES["llama"])
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                heads = projection.weight.view(-1, dim, projection.weight.shape[1])
                heads.copy_(heads[:, order].clone())
        frequencies = inverse_frequencies(RopeConfig(theta=1e4, rotary_dim=rotary))
        model.model.rotary_emb.inv_freq = torch.cat([frequencies, torch.zeros(dim // 2 - half)])
        ids = random_prompt(37)
        expected = model(torch.tensor([ids])).logits[0]
    (logits,) = PagedDecoder(decoder).step((Tokens(ids), len(ids)))
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert not torch.allclose(logits, reference_logits(source, ids), atol=0.05)


@pytest.mark.parametrize("name", [n for n in ALL if n.startswith(("llama", "qwen2-yarn"))])
def test_rope_frequencies_are_those_of_transformers_bit_for_bit(name: str):
    config = ModelConfig.from_pretrained(make_checkpoint(name))
    theirs = LlamaRotaryEmbedding(reference_model(make_checkpoint(name)).config)
    assert torch.equal(inverse_frequencies(config.ropes[0]), theirs.inv_freq)
    assert config.ropes[0].attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)

    positions = torch.arange(config.max_position_embeddings)
    cos, sin = Rope(config.ropes[0], len(positions), torch.device("cpu")).tables(positions)
    their_cos, their_sin = theirs(torch.zeros(1), positions[None])
    half = cos.shape[1]
    for ours, expected in ((cos, their_cos), (sin, their_sin)):
        torch.testing.assert_close(ours, expected[0, :, :half], atol=2e-7, rtol=0)


def test_rope_angles_stay_exact_far_beyond_the_trained_context():
    rope = Rope(RopeConfig(theta=1e4, rotary_dim=64), 4096, torch.device("cpu"))
    positions = torch.tensor([4095, 4096, 1_000_003, 2**31 + 5])
    cos, sin = rope.tables(positions)
    frequencies = inverse_frequencies(RopeConfig(theta=1e4, rotary_dim=64)).double()
    angles = positions[:, None].double() * frequencies
    torch.testing.assert_close(cos[1:], angles[1:].cos().float(), atol=1e-7, rtol=0)
    torch.testing.assert_close(sin[1:], angles[1:].sin().float(), atol=1e-7, rtol=0)
    rounded = angles[0].float().cos()  # within it: the angle that the model was trained with
    torch.testing.assert_close(cos[0], rounded, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", ["llama-tied", "qwen2_moe-normed", "mixtral"])
def test_random_weights_run_and_depend_on_the_seed_alone(name: str):
    config = ModelConfig.from_pretrained(make_checkpoint(name))
    ids = random_prompt(9)
    runs = []
    for seed in (3, 3, 4):
        decoder = build_random(config, weights="bf16", seed=seed)
        (logits,) = PagedDecoder(decoder).step((Tokens(ids), len(ids)))
        runs.append(logits)
    assert runs[0].isfinite().all()
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
