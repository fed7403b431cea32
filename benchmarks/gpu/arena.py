"""Checks for check.py of the arena on two streams: blocks come back from host memory during steps
that lend blocks to activations (test 8 of the arena).

A loan ends when the kernels of its step are enqueued, not when they have run; the copier has a
stream of its own, which must wait for them. On a CPU there is one order of things, and the same
checks go through the copier's thread.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import transformers
from torch import Tensor

from benchmarks.gpu.cases import CUDA, DEVICE, Checks, Triples, Work
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.memory.copier import CopyThread
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams

NUM_BLOCKS, BLOCK_BYTES = 64, 1 << 18
SLEEP_CYCLES = 200_000_000  # about 0.1 s: the activations are written late
BLOCK_SIZE, NUM_NEW = 8, 24
PROMPTS = [tuple(range(3 + i, 23 + 10 * i)) for i in range(8)]  # of 20 to 83 tokens
# What came once comes back from host memory while others are computed.
ROUNDS = [PROMPTS] + [
    [p for i, old in enumerate(PROMPTS) for p in (old, (150 + 9 * n + i, *old))] for n in range(3)
]


def check_copier(dtype: torch.dtype) -> Triples:
    """One block after another is lent, written to late, given back, and loaded into."""
    if dtype != torch.float32:
        return
    device = torch.device(DEVICE)
    blocks = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8, device=device)
    kept = torch.randint(1, 200, blocks.shape, dtype=torch.uint8, pin_memory=CUDA)
    pairs = list(zip(kept, blocks, strict=True))
    with CopyThread(device=device) as link:
        _lend(blocks)
        transfer = link.submit(pairs)
        transfer.wait()
        _wait()
        yield "a load after a loan", blocks.float(), kept.to(device).float()
    with CopyThread(device=device, bytes_per_s=20 * BLOCK_BYTES) as link:
        transfer = link.submit(pairs)
        transfer.cancel()
        transfer.wait()
        _lend(blocks)
        _wait()
        yield "a loan after a load that was cancelled", blocks.float(), _written(blocks)
    if CUDA:  # else the first check would show nothing
        _lend(blocks)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            blocks.copy_(kept, non_blocking=True)
        _wait()
        yield "a copy that waits for nothing is too early", blocks.float(), _written(blocks)


def _lend(blocks: Tensor) -> None:
    """The last kernel of a step, after others that take long."""
    if CUDA:
        torch.cuda._sleep(SLEEP_CYCLES)
    blocks.fill_(0xFF)


def _written(blocks: Tensor) -> Tensor:
    return torch.full_like(blocks, 0xFF).float()


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def check_engine(dtype: torch.dtype) -> Triples:
    """A starved engine with host memory across a slow link, every loan NaN as it is given back,
    against one with room for all: the same token ids."""
    if dtype != torch.float32:
        return
    model = _model()
    config = EngineConfig(
        block_size=BLOCK_SIZE, num_blocks=300, max_num_seqs=6, max_num_batched_tokens=48
    )
    roomy = Engine(config, model)
    expected = torch.cat([_run(roomy, prompts) for prompts in ROUNDS])
    roomy.close()
    starved = replace(config, num_blocks=36, host_kv_gb=0.01, kv_restore="load")
    engine = Engine(starved, model)
    swap = engine.cache.swap
    assert swap is not None
    swap.link.close()
    swap.link = CopyThread(device=model.device, bytes_per_s=100 * engine.arena.layout.block_bytes)
    engine.arena.storage.fill_(0xFF)
    pool, give_back, num_raced = engine.pool, engine.pool.give_back, 0

    def poison() -> None:
        nonlocal num_raced
        num_raced += bool(pool.num_lent and swap._restores)
        engine.arena.tail(pool.num_lent).fill_(0xFF)
        give_back()

    pool.give_back = poison  # type: ignore[method-assign]
    got = torch.cat([_run(engine, prompts) for prompts in ROUNDS])
    engine.close()
    yield "ids with a slow link", got, expected
    happened = torch.tensor([num_raced, swap.num_loaded_tokens], dtype=torch.float32)
    yield f"{num_raced} loans during loads", happened.clamp(max=1), torch.ones(2)


def _model() -> Decoder:
    """Weights far larger than a real initialisation, so that greedy ids vary."""
    shape = transformers.LlamaConfig(
        vocab_size=199, hidden_size=64, intermediate_size=112, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.3, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
        return load_model(folder, weights="fp32", device=DEVICE, progress=False)


def _run(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> Tensor:
    """Token ids [requests, NUM_NEW]."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    ids: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for name, prompt in zip(ids, prompts, strict=True):
        engine.add(Request(name, prompt, params))
    while engine.has_work():
        for delta in engine.step():
            ids[delta.request_id] += delta.token_ids
        engine.check()
    return torch.tensor(list(ids.values()), dtype=torch.float32)


CHECKS: Checks = {"arena, copier": check_copier, "arena, engine": check_engine}


def works(tiny: bool) -> Iterator[Work]:
    """Nothing here is timed."""
    return iter(())
