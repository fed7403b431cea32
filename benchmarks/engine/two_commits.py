"""The engine of two commits in turn: are its token ids the same, and its speed within 3 %?

Each commit's engine lives in a process of its own, with the same random weights (the shape of
Qwen2.5-0.5B, see offline.py), and runs a workload on request, so that at any time one of
them computes. The order changes from round to round; what is compared is the median of the rounds'
ratios, since the speed of a shared machine drifts more than the commits differ.

    git worktree add --detach ../old COMMIT
    python -m benchmarks.engine.two_commits ../old/src src --workload W1 --rounds 12

A commit from before `src/penstock/` needs a folder with a folder `penstock` of links in its place.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import record
from benchmarks.engine.offline import make_workload, model_b_config, save_random_checkpoint

# Runs under the packages of either commit: only what both have.
WORKER = """
import sys, json, time, hashlib
import torch
folder, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(threads)
try:
    from penstock.workers.engine.engine import Engine
except ImportError:
    from penstock.workers.engine import Engine
from penstock.workers.config import EngineConfig
from penstock.workers.models.loader import load_model
from penstock.workers.request import Request, SamplingParams
out = sys.stdout
sys.stdout = sys.stderr
config = EngineConfig(model=folder, threads=threads, prefix_cache=False)
model = load_model(folder, weights=config.weights, device="cpu", progress=False)
engine = Engine(config, model)

def drain(jobs):
    ids, began, first_s = {}, time.perf_counter(), 0.0
    cpu = time.process_time()
    for i, (prompt, num) in enumerate(jobs):
        params = SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True)
        engine.add(Request(f"r{i}", tuple(prompt), params))
    while engine.has_work():
        for delta in engine.step():
            ids.setdefault(delta.request_id, []).extend(delta.token_ids)
        first_s = first_s or time.perf_counter() - began
    total = time.perf_counter() - began
    text = json.dumps(sorted(ids.items())).encode()
    num = sum(map(len, ids.values()))
    return {"total_s": total, "first_s": first_s, "cpu_s": time.process_time() - cpu,
            "num": num, "digest": hashlib.sha256(text).hexdigest()}

drain([([1] * 40, 4)] * 2)
print("ready", file=out, flush=True)
for line in sys.stdin:
    print(json.dumps(drain(json.loads(line))), file=out, flush=True)
"""


class Tree:
    """The engine of one commit, in a process of its own."""

    def __init__(self, source: Path, folder: Path, threads: int):
        env = os.environ | {"PYTHONPATH": str(source.absolute()), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, "-c", WORKER, str(folder), "bf16", str(threads)]
        self._process = subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def run(self, jobs: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(jobs + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._read())
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the engine's process ended; see its output above")
        return line


def compare(trees: dict[str, Tree], jobs: str, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Both trees in each round, the first one in turn."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for number in range(rounds):
        names = list(trees) if number % 2 == 0 else list(reversed(trees))
        for name in names:
            runs[name].append(trees[name].run(jobs))
        new, old = runs["new"][-1], runs["old"][-1]
        print(
            f"round {number}: old {old['total_s']:.3f} s, new {new['total_s']:.3f} s, "
            f"ratio {new['total_s'] / old['total_s']:.4f}, ids {_same(runs)}",
            flush=True,
        )
    return runs


def _same(runs: dict[str, list[dict[str, Any]]]) -> str:
    digests = {each["digest"] for rounds in runs.values() for each in rounds}
    return "equal" if len(digests) == 1 else "DIFFER"


def ratios(runs: dict[str, list[dict[str, Any]]], figure: str) -> list[float]:
    """new / old of each round."""
    pairs = zip(runs["new"], runs["old"], strict=True)
    return [new[figure] / old[figure] for new, old in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="folder with the package penstock of the old commit")
    parser.add_argument("new", type=Path, help="folder with the package penstock of the new commit")
    parser.add_argument("--workload", choices=["W1", "W2"], default="W1")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    workload = make_workload(args.workload, model_b_config().vocab_size)
    jobs = json.dumps([(job.prompt_ids, job.num_new) for job in workload])
    with tempfile.TemporaryDirectory() as temporary:
        save_random_checkpoint(Path(temporary), torch.bfloat16)
        sources = {"old": args.old, "new": args.new}
        trees = {n: Tree(each, Path(temporary), args.threads) for n, each in sources.items()}
        runs = compare(trees, jobs, args.rounds)
        for tree in trees.values():
            tree.close()
    print(f"\n{args.workload}, bf16, {args.threads} threads, {args.rounds} rounds; new / old:")
    for figure in ("total_s", "first_s", "cpu_s"):
        found = sorted(ratios(runs, figure))
        print(f"  {figure}: median {statistics.median(found):.4f} ({found[0]:.4f}-{found[-1]:.4f})")
    print(f"  token ids: {_same(runs)}")
    if args.json:
        content = {"workload": args.workload, "runs": runs}
        record.write(args.json, __file__, content, threads=args.threads)


if __name__ == "__main__":
    main()
