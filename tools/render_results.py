"""Render the tables of `docs/benchmarks/results.md` from `benchmarks/results/**/*.json`.

    python -m tools.render_results           write the page
    python -m tools.render_results --check   exit 1, with a diff, where the page differs

The page's text is written by hand. Each table stands between `<!-- begin NAME -->` and
`<!-- end NAME -->`, where NAME is a key of `TABLES`; only what is between them is replaced.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.result_files import ROOT, Result, ResultError, load_all
from tools.result_tables import (
    commits,
    faults,
    gate,
    gguf,
    gpu,
    groups,
    hybrid,
    installation,
    loading,
    long_prompts,
    memory,
    security,
    serving,
    speculation,
    where,
)

PAGE = ROOT / "docs" / "benchmarks" / "results.md"
SPECULATION_RUNS = (
    "int8-1",
    "bf16-1",
    "int8-4",
    "int8-16",
    "int4",
    "fp32-draft",
    "prose-int8",
    "prose-int4",
    "prose-bf16-16",
)
BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end \2 -->)", re.S)
MARKER = re.compile(r"<!-- (?:begin|end) (\S+) -->")


@dataclass(frozen=True)
class Table:
    """One table of the page: the files that it is made of, and the function that makes it."""

    sources: Sequence[str]
    render: Callable[..., str]
    takes_all: bool = False  # `render` takes the list of results, not one argument for each

    def text(self, results: Mapping[str, Result]) -> str:
        """Where the figures are from, and the table. Raises ResultError for a missing file."""
        missing = [name for name in self.sources if name not in results]
        if missing:
            raise ResultError(f"benchmarks/results/{missing[0]}.json does not exist")
        found = [results[name] for name in self.sources]
        lines = "\n".join(f"- {result.provenance()}" for result in found)
        table = self.render(found) if self.takes_all else self.render(*found)
        return f"{lines}\n\n{table}\n"


def _simulated(load: str, source: str, *, fairness: bool = False, prefixes: bool = False) -> Table:
    render = partial(gate.simulate, load=load, fairness=fairness, prefixes=prefixes)
    return Table([f"simulate/{source}"], render)


def _offline(name: str) -> Table:
    return Table([f"offline/{name}"], serving.offline)


TABLES: dict[str, Table] = {
    "w1": _offline("epyc-zen5-w1"),
    "w2": _offline("epyc-zen5-w2"),
    "w1-xeon-amx": _offline("xeon-amx-w1"),
    "w2-xeon-amx": _offline("xeon-amx-w2"),
    "w1-xeon-avx512": _offline("xeon-avx512-w1"),
    "w2-xeon-avx512": _offline("xeon-avx512-w2"),
    "w1-xeon-vnni": _offline("xeon-vnni-w1"),
    "w2-xeon-vnni": _offline("xeon-vnni-w2"),
    "hybrid": Table(["hybrid/epyc-zen4-1-thread"], hybrid.hybrid),
    "groups": Table(["group/epyc-zen4-smollm2"], groups.times),
    "groups-avx2": Table(["group/epyc-avx2-smollm2"], groups.times),
    "groups-exchanged": Table(["group/epyc-avx2-smollm2"], groups.exchanged),
    "groups-experts": Table(["group/epyc-zen4-experts"], groups.times),
    "groups-experts-exchanged": Table(["group/epyc-zen4-experts"], groups.exchanged),
    "speculation-beside": Table(["speculation/epyc-zen4-int8-1-llama-cpp"], speculation.beside),
    "speculation-beside-bf16": Table(["speculation/epyc-zen4-bf16-beside"], speculation.beside),
    "long-prompts": Table(["long-prompts/epyc-zen4"], long_prompts.long_prompts),
    "long-prompts-whole": Table(["long-prompts/epyc-zen4-whole"], long_prompts.long_prompts),
    "gpu-checks": Table(["gpu/h200-checks"], gpu.checks),
    "gpu-decode": Table(["gpu/h200-decode"], gpu.decode),
    "gpu-tiles": Table(["gpu/h200-tiles"], gpu.tiles),
    "gpu-times": Table(["gpu/h200-times"], gpu.times),
    "gpu-experts": Table(["gpu/h200-times"], gpu.experts),
    "peers": Table(["peers/xeon-amx-smollm2"], serving.peers),
    "peers-epyc": Table(["peers/epyc-zen4-smollm2"], serving.peers),
    "peers-avx2": Table(["peers/epyc-avx2-smollm2"], serving.peers),
    "peers-zen5": Table(["peers/epyc-zen5-smollm2"], serving.peers),
    "peers-speed": Table(["peers/xeon-vnni-speed"], serving.peers_speed),
    "overhead-own-core": Table(["overhead/epyc-zen5-own-core"], serving.overhead),
    "overhead-any-core": Table(["overhead/epyc-zen5-any-core"], serving.overhead),
    "overhead-xeon": Table(["overhead/xeon-vnni"], serving.overhead),
    "overhead-model-b": Table(["overhead/epyc-zen5-model-b"], serving.overhead),
    "overhead-w3": Table(["overhead/epyc-avx2-w3"], serving.overhead),
    "overhead-w3-int4": Table(["overhead/epyc-avx2-w3-int4"], serving.overhead),
    "overhead-w3-zen5": Table(["overhead/epyc-zen5-w3-int4"], serving.overhead),
    "overhead-w3-zen5-own-core": Table(["overhead/epyc-zen5-w3-int4-own-core"], serving.overhead),
    "overhead-w3-xeon": Table(["overhead/xeon-amx-w3"], serving.overhead),
    "overhead-w3-own-core": Table(["overhead/xeon-amx-w3-own-core"], serving.overhead),
    "packed-weights": Table(["packed-weights/epyc-avx2-llama"], loading.packed_weights),
    "packed-weights-smollm2": Table(["packed-weights/epyc-avx2-smollm2"], loading.packed_weights),
    "startup-packed": Table(["startup/epyc-avx2-packed-smollm2"], commits.startup),
    "startup-zen5": Table(["startup/epyc-zen5"], commits.startup),
    "startup-zen5-smollm2": Table(["startup/epyc-zen5-smollm2"], commits.startup),
    "startup-path": Table(["startup/epyc-avx2-path"], commits.startup),
    "startup-path-smollm2": Table(["startup/epyc-avx2-path-smollm2"], commits.startup),
    "startup-torch": Table(["startup/epyc-avx2-torch"], commits.startup),
    "startup-torch-three": Table(["startup/epyc-avx2-torch-three"], commits.startup),
    "startup-forked": Table(["startup/epyc-avx2-forked"], commits.startup),
    "startup": Table(["startup/epyc"], commits.startup),
    "startup-xeon": Table(["startup/xeon-amx"], commits.startup),
    "cluster-setup": Table(["cluster-setup/x86-64"], installation.cluster_setup),
    "clean-root": Table(["clean-root/x86-64"], installation.clean_root),
    "ingress-cpu": Table(["ingress-cpu/xeon-avx512"], serving.ingress_cpu),
    "channel-cpu": Table(["channel-cpu/x86-64"], serving.channel_cpu),
    "journal-cost": Table(["journal-cost/epyc"], faults.journal_cost),
    "tls-cost": Table(["tls-cost/epyc"], faults.tls_cost),
    "trace-cost": Table(["trace-cost/epyc"], faults.trace_cost),
    "fault-table": Table(["faults/epyc-table"], faults.fault_table),
    "random-kills": Table(["faults/random-kills"], faults.kills),
    "cluster-kills": Table(["faults/cluster-kills"], faults.kills),
    "cluster-kills-quiet": Table(["faults/cluster-kills-quiet"], faults.kills),
    "soak": Table(["faults/soak"], faults.soak),
    "siege": Table(["faults/siege"], security.siege),
    "grpc-resets": Table(["faults/grpc-resets"], security.grpc_resets),
    "findings": Table(["faults/findings"], security.findings),
    "tenant-timing": Table(["tenant-timing/epyc"], security.tenant_timing),
    "overload": Table(["faults/overload"], faults.overload),
    "two-commits-engine": Table(
        ["two-commits/epyc-w1", "two-commits/epyc-w2"], commits.engines, takes_all=True
    ),
    "two-commits-path": Table(["two-commits/epyc-path"], commits.path),
    "slow-readers": Table(["slow-readers/epyc-zen5"], serving.slow_readers),
    "ablation": Table(["ablation/epyc-zen5"], serving.ablation),
    "ablation-served": Table(["ablation/epyc-zen5-served"], serving.served_ablation),
    "planner": Table(["planner/epyc-zen5"], serving.planner),
    "simulate-reasoning": _simulated("reasoning", "x86-64-saturation"),
    "simulate-overload": _simulated("overload", "x86-64-saturation"),
    "simulate-generous": _simulated("generous", "x86-64-generous"),
    "simulate-chat": _simulated("chat", "x86-64-loads"),
    "simulate-bursts": _simulated("bursts", "x86-64-loads"),
    "simulate-mixed": _simulated("mixed", "x86-64-loads"),
    "simulate-noisy": _simulated("noisy", "x86-64-noisy", fairness=True),
    "simulate-overload-4": _simulated("overload", "x86-64-overload-4-workers"),
    "simulate-mixed-4": _simulated("mixed", "x86-64-mixed-4-workers"),
    "simulate-mixed-16": _simulated("mixed", "x86-64-mixed-16-workers"),
    "simulate-overload-16": _simulated("overload", "x86-64-overload-16-workers"),
    "simulate-prefixes": _simulated("prefixes", "x86-64-prefixes-4-workers", prefixes=True),
    "real-engine": Table(["real-engine/x86-64"], gate.real_engine),
    "gate-latency": Table(["gate-latency/xeon-avx512"], gate.gate_latency),
    "gate-scale": Table(["gate-scale/x86-64"], gate.gate_scale),
    "gate-request": Table(["gate-request/epyc-zen4"], gate.gate_request),
    "gate-request-zen5": Table(["gate-request/epyc-zen5"], gate.gate_request),
    "state-stores": Table(["state-stores/epyc"], serving.state_stores),
    "retry-after": Table(["retry-after/x86-64"], gate.retry_after),
    "autoscale": Table(["autoscale/x86-64"], gate.autoscale),
    "autoscale-frontier": Table(["autoscale/x86-64-frontier"], gate.autoscale),
    "predictor": Table(["predictor/x86-64"], gate.predictor),
    "matmul": Table(
        ["matmul/epyc-zen5", "matmul/xeon-amx", "matmul/xeon-avx512"],
        memory.matmul,
        takes_all=True,
    ),
    "speculation": Table(
        [f"speculation/epyc-zen4-{run}" for run in SPECULATION_RUNS],
        speculation.speculation,
        takes_all=True,
    ),
    "speculation-proposer": Table(["speculation/epyc-zen4-proposer"], speculation.proposer),
    "int4-by-rows": Table(["int4-by-rows/epyc-zen5"], memory.int4_by_rows),
    "int4-unprepared": Table(["format-quality/epyc-unprepared"], memory.int4_quality),
    "int4-off-grid": Table(["format-quality/epyc-smollm2-off-grid"], memory.int4_quality),
    "wide-layers": Table(["format-quality/epyc-wide-layers"], memory.wide_layers),
    "format-quality-dense": Table(["format-quality/xeon-amx-dense"], memory.format_quality),
    "format-quality-smollm2": Table(["format-quality/xeon-amx-smollm2"], memory.format_quality),
    "calibrated-builtin": Table(["calibrated/builtin-unprepared"], gguf.calibrated_quality),
    "format-quality-moe": Table(["format-quality/xeon-avx512-moe"], memory.format_quality),
    "gguf-quality": Table(["gguf-quality/epyc-smollm2"], gguf.quality),
    "gguf-tokenizer": Table(["gguf-quality/epyc-smollm2"], gguf.tokenizer),
    "gguf-types": Table(["gguf-quality/epyc-smollm2-types"], gguf.types),
    "gguf-speed": Table(["gguf-speed/epyc-smollm2"], gguf.speed),
    "kv-formats": Table(["kv-formats/xeon-avx512"], memory.kv_formats),
    "kv-attention-64": Table(
        ["kv-attention/epyc-zen5-64", "kv-attention/epyc-zen5-64-before"],
        memory.kv_attention_change,
    ),
    "kv-attention-128": Table(
        ["kv-attention/epyc-zen5-128", "kv-attention/epyc-zen5-128-before"],
        memory.kv_attention_change,
    ),
    "kv-attention": Table(["kv-attention/xeon-avx512"], memory.kv_attention),
    "pressure": Table(["pressure/x86-64"], memory.pressure),
    "memory-where": Table(["memory-where/epyc-zen5"], where.memory_where),
    "deferral-map": Table(["deferral-map/roofline"], memory.deferral_map),
    "streaming-quality": Table(["streaming-quality/xeon"], memory.streaming_quality),
    "streaming-quality-smollm2": Table(
        ["streaming-quality/xeon-avx512-smollm2"], memory.streaming_quality
    ),
    "long-quality": Table(
        ["streaming-quality/epyc-smollm2-engine", "streaming-quality/epyc-smollm2-full"],
        memory.long_quality,
    ),
    "endless": Table(["endless/xeon-amx"], memory.endless),
    "second-turn": Table(["second-turn/epyc-zen5-smollm2"], memory.second_turn),
    "expert-quality": Table(
        ["expert-quality/xeon-avx512", "expert-quality/xeon-avx512-int4"], memory.expert_quality
    ),
    "expert-accuracy": Table(["expert-accuracy/xeon-avx512"], memory.expert_accuracy),
    "expert-memory": Table(["expert-memory/xeon-avx512"], memory.expert_memory),
    "expert-speed": Table(["expert-speed/xeon-avx512"], memory.expert_speed),
    "expert-auto": Table(["expert-speed/epyc-zen5-auto"], memory.expert_speed),
    "expert-neurons": Table(["expert-speed/epyc-neurons"], memory.expert_speed),
    "expert-many": Table(["expert-speed/epyc-64", "expert-speed/epyc-128"], memory.expert_speed),
    "expert-many-late": Table(["expert-speed/epyc-128-late"], memory.expert_speed),
    "expert-formats": Table(["expert-speed/epyc-formats"], memory.expert_formats),
    "expert-compact": Table(["expert-compact/epyc-zen4"], memory.expert_compact),
}


def render(page: str, results: Mapping[str, Result], tables: Mapping[str, Table]) -> str:
    """The page with each table made anew.

    Raises ResultError where a marker has no partner or no table, or a table no marker.
    """
    replaced = [match[2] for match in BLOCK.finditer(page)]
    marked = MARKER.findall(page)
    if sorted(marked) != sorted(2 * replaced):
        raise ResultError("a `begin` marker has no `end`, or they are nested")
    if unknown := sorted(set(replaced) ^ set(tables)):
        raise ResultError(f"markers and tables differ: {', '.join(unknown)}")
    if len(replaced) != len(set(replaced)):
        raise ResultError("a table stands twice on the page")
    return BLOCK.sub(lambda match: match[1] + tables[match[2]].text(results) + match[3], page)


def main(arguments: Sequence[str] | None = None, page: Path = PAGE) -> int:
    """Returns the exit status: 1 where `--check` finds a difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail with a diff")
    args = parser.parse_args(arguments)
    old = page.read_text()
    new = render(old, load_all(), TABLES)
    if not args.check:
        page.write_text(new)
        return 0
    names = (page.name, "rendered")
    sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), *names))
    return int(old != new)


if __name__ == "__main__":
    sys.exit(main())
