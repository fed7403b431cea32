"""Memory pressure: preemption, deferred commit and host memory with a KV pool that is too small.

In-process engines on the built-in model, one thread. First the same seeded requests, all at once,
in a pool that cannot hold them (several LOADS): eager, eager with deferral's scratch memory as
blocks, deferred by the measured ridge, deferred with a large configured ridge, and eager with host
memory. Rounds are interleaved, each with new requests, and speed is the ratio to eager within a
round. Then long prompts that return after their blocks were moved to host memory, over links of
several speeds and with every kv_restore: tokens loaded, tokens recomputed, and the time to the
first token. All variants must give the same ids, or the benchmark fails.

    python -m benchmarks.memory.pressure --out OUT
    python -m benchmarks.memory.pressure --rounds 1 --turns 1 --link-mb-per-s 1000 20 2

Without --link-mb-per-s, the links are ten times, once and a fifth of the measured break-even.
Writes OUT.json and OUT.txt (what is printed).
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

from benchmarks.common import record
from benchmarks.memory.pressure_report import report, summary
from penstock.workers.config import EngineConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.memory.copier import CopyThread
from penstock.workers.memory.restore import MODES
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.loader import load_model
from penstock.workers.request import Delta, Request, SamplingParams
from penstock.workers.scheduling import swap
from penstock.workers.scheduling.deferral import num_scratch_blocks

# Activations lie apart, so that a step is never cut short: only the commit of KV differs.
COMMON: dict[str, Any] = {
    "activation_memory": "separate",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "kv_commit": "eager",
}
DEFERRED: dict[str, Any] = {"kv_commit": "deferred"}
LARGE_RIDGE = 256
HOST_GB = 0.125
COUNTERS = (
    *("num_steps", "num_prompt_tokens", "num_generated_tokens", "num_preemptions"),
    *("num_preemptions_avoided", "num_deferred_tokens", "num_recomputed_tokens"),
)
PROMPT_LEN = 1024  # of those that come back
NUM_PROMPTS = 3
# times the link that is as fast as computing
LINKS = {"fast": 10.0, "break-even": 1.0, "slow": 0.2}


@dataclass(frozen=True, slots=True)
class PressureLoad:
    """The lengths of requests, in tokens, and the pool's size."""

    prompt: tuple[int, int]
    answer: tuple[int, int]
    num_blocks: int
    prefix_cache: bool


LOADS = {
    "short prompts, a small pool": PressureLoad((24, 200), (24, 160), 96, True),
    "short prompts, a tiny pool": PressureLoad((24, 200), (24, 160), 48, True),
    "long prompts, no prefix cache": PressureLoad((300, 700), (24, 100), 192, False),
}


def variants(load: PressureLoad, num_extra: int) -> dict[str, dict[str, Any]]:
    """Settings by name; the first one is what the others are compared with."""
    num_blocks = load.num_blocks
    pool = {**COMMON, "num_blocks": num_blocks, "prefix_cache": load.prefix_cache}
    return {
        "eager": pool,
        f"eager, {num_extra} more blocks": {**pool, "num_blocks": num_blocks + num_extra},
        "deferred, measured ridge": {**pool, **DEFERRED},
        f"deferred, ridge {LARGE_RIDGE}": {**pool, **DEFERRED, "ridge_tokens": LARGE_RIDGE},
        "eager, host memory": {**pool, "host_kv_gb": HOST_GB},
    }


def scratch_in_blocks(model: Decoder) -> int:
    """KV blocks that would fit into the memory of deferral's scratch blocks, rounded up."""
    scratch = num_scratch_blocks(EngineConfig(**COMMON, **DEFERRED))
    return -(-scratch // model.config.num_layers)  # a scratch block has one layer


def requests_of(load: PressureLoad, args: argparse.Namespace, number: int) -> list[Request]:
    """The requests of one round; no two prompts begin alike."""
    rng = random.Random(number)
    found = []
    for i in range(args.requests):
        prompt = tuple(rng.randrange(3, 8000) for _ in range(rng.randint(*load.prompt)))
        num_new = rng.randint(*load.answer)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_new)
        found.append(Request(f"{number}-{i}", prompt, params))
    return found


def run(
    engine: Engine,
    requests: Sequence[Request],
    on_delta: Callable[[Delta], object] = lambda _: None,
) -> dict[str, list[int]]:
    """Serve `requests`, all at once; their ids."""
    ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None, delta
            ids[delta.request_id] += delta.token_ids
            on_delta(delta)
    engine.check()
    return ids


def counts_of(engine: Engine) -> dict[str, int]:
    stats = engine.stats()
    counts = {name: getattr(stats, name) for name in COUNTERS}
    host = engine.cache.swap
    counts["num_loaded_tokens"] = 0 if host is None else host.num_loaded_tokens
    return counts


def same(ids: Any, expected: Any, what: str) -> None:
    if ids != expected:
        raise SystemExit(f"pressure: {what} gives other ids")


def measure_pool(
    model: Decoder, load: PressureLoad, args: argparse.Namespace, bar: Any
) -> dict[str, Any]:
    """Every variant under one load, round after round."""
    settings = variants(load, scratch_in_blocks(model))
    engines = {name: Engine(EngineConfig(**each), model) for name, each in settings.items()}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for number in range(args.rounds + 1):  # the first one warms up
        requests = requests_of(load, args, number)
        # A prompt's last token is not counted as a prompt token.
        least = sum(len(request.prompt_ids) - 1 for request in requests)
        expected = None
        for name, engine in engines.items():
            before = counts_of(engine)
            began_s, cpu_began_s = time.perf_counter(), time.process_time()
            ids = run(engine, requests)
            seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_began_s
            expected = expected or ids
            same(ids, expected, f"{name}, {load}")
            counts = {key: value - before[key] for key, value in counts_of(engine).items()}
            computed_again = counts["num_prompt_tokens"] - least
            row = {"seconds": seconds, "cpu_s": cpu_s, **counts, "computed_again": computed_again}
            if number:
                rows[name].append(row)
            bar.update()
    ridges = {
        name: engine.scheduler.deferral.rule.ridge_tokens
        for name, engine in engines.items()
        if engine.scheduler.deferral is not None
    }
    for engine in engines.values():
        engine.close()
    return {"load": asdict(load), "ridges": ridges, "rows": rows}


def break_even_bytes_per_s(model: Decoder, num_blocks: int) -> float:
    """A link that brings tokens just as fast as they are computed, as the engine measures it."""
    engine = Engine(EngineConfig(**COMMON, num_blocks=num_blocks, host_kv_gb=HOST_GB), model)
    assert engine.totals.rates is not None
    per_token = engine.arena.layout.block_bytes / engine.config.block_size
    rate = engine.totals.rates.compute_tokens_per_s * per_token
    engine.close()
    return rate


def returning_engine(model: Decoder, bytes_per_s: float, mode: str) -> Engine:
    """A pool that holds one prompt's blocks and so none of the one before; a throttled link."""
    settings = {
        **COMMON, "num_blocks": PROMPT_LEN // 16 + 8, "host_kv_gb": HOST_GB, "kv_restore": mode
    }  # fmt: skip
    throttled = functools.partial(CopyThread, bytes_per_s=bytes_per_s)
    with mock.patch.object(swap, "CopyThread", throttled):
        return Engine(EngineConfig(**settings), model)


def visit(engine: Engine, request: Request) -> dict[str, Any]:
    """One prompt comes back; how long until its first token, and what that took."""
    host = engine.cache.swap
    assert host is not None
    before, choices = counts_of(engine), dict(host.num_restores)
    began_s = time.perf_counter()
    ids = run(engine, [request])
    seconds = time.perf_counter() - began_s
    counts = {key: value - before[key] for key, value in counts_of(engine).items()}
    return {
        "ids": ids,
        "seconds": seconds,
        "loaded": counts["num_loaded_tokens"],
        "computed": counts["num_prompt_tokens"],
        "chosen": [name for name, num in host.num_restores.items() if num > choices[name]],
    }


def measure_link(
    model: Decoder, bytes_per_s: float, args: argparse.Namespace, bar: Any
) -> list[dict[str, Any]]:
    """Prompts that come back one at a time; every kv_restore in turn."""
    engines = {mode: returning_engine(model, bytes_per_s, mode) for mode in MODES}
    rng = random.Random(7)
    prompts = [
        tuple(rng.randrange(3, 8000) for _ in range(PROMPT_LEN + 1)) for _ in range(NUM_PROMPTS)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    visits: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    # One turn to compute them, one in which each engine comes to know its link, then what counts.
    for turn in range(2 + args.turns):
        for i, prompt in enumerate(prompts):
            for mode, engine in engines.items():
                visits[mode].append(visit(engine, Request(f"{turn}-{i}", prompt, params)))
                ids, expected = (visits[each][-1]["ids"] for each in (mode, MODES[0]))
                same(ids, expected, f"kv_restore {mode} over {bytes_per_s / 1e6:.1f} MB/s")
            bar.update()
    found = []
    for mode, engine in engines.items():
        engine.close()
        counted = visits[mode][2 * NUM_PROMPTS :]
        keys = ("seconds", "loaded", "computed")
        found.append(
            {"mode": mode, "bytes_per_s": bytes_per_s}
            | {key: statistics.median(each[key] for each in counted) for key in keys}
            | {
                "least_seconds": min(each["seconds"] for each in counted),
                "chosen": sorted({name for each in counted for name in each["chosen"]}),
                "visits": [{key: each[key] for key in (*keys, "chosen")} for each in counted],
            }
        )
    return found


def measure_links(model: Decoder, args: argparse.Namespace) -> list[dict[str, Any]]:
    even = break_even_bytes_per_s(model, PROMPT_LEN // 16 + 8)
    if args.link_mb_per_s:
        links = {f"{rate:g} MB/s": 1e6 * rate for rate in args.link_mb_per_s}
    else:
        links = {name: even * times for name, times in LINKS.items()}
    found = []
    with tqdm(total=len(links) * NUM_PROMPTS * (2 + args.turns), unit="prompt") as bar:
        for name, rate in links.items():
            rows = measure_link(model, rate, args, bar)
            found += [{"link": name, "break_even_bytes_per_s": even, **row} for row in rows]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument("--requests", type=int, default=20, help="of one round, all at once")
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--turns", type=int, default=3, help="times that each prompt comes back")
    parser.add_argument("--link-mb-per-s", type=float, nargs="+", metavar="X",
                        help="speeds of the link to host memory")  # fmt: skip
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.txt")
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    model = load_model("builtin", weights=args.weights, progress=False)
    pools = []
    num_runs = sum(len(variants(each, 0)) for each in LOADS.values()) * (args.rounds + 1)
    with tqdm(total=num_runs, unit="run") as bar:
        for name, each in LOADS.items():
            pool = measure_pool(model, each, args, bar)
            pools.append({"name": name, **pool, "summary": summary(pool)})
    links = measure_links(model, args)
    found = {
        "about": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "load_averages": [load, os.getloadavg()[0]],
            "args": {name: str(value) for name, value in vars(args).items()},
        },
        "pools": pools,
        "links": links,
    }
    text = report(found)
    print("\n" + text)
    if args.out:
        args.out.with_suffix(".txt").write_text(text)
        record.write(args.out.with_suffix(".json"), __file__, found, threads=1)


if __name__ == "__main__":
    main()
