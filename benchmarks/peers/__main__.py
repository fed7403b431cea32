"""One model in several systems: perplexity of each format beside its speed, on one machine.

    python -m venv ov && ov/bin/pip install openvino openvino-genai 'optimum-intel>=2' nncf
    python -m venv lc && lc/bin/pip install llama-cpp-python      # compiles for ten minutes
    python -m benchmarks.peers --openvino ov/bin/python --llama-cpp lc/bin/python --json out.json

The model is SmolLM2-135M-Instruct, moved off the 4-bit grid of its published file
(benchmarks/common/off_grid.py). Each system gets the same weights, quantises them with its own
tools, and runs in a process of its own, with as many threads: what it costs, over the same windows
of two held-out novels, against its own unquantised run; W1, one request with 128 prompt and 128 new
tokens; and W2, 32 requests at once with prompts of 16 to 512 tokens and 16 to 256 new ones. The
systems take turns, round by round. --work keeps what was made, so that a run goes on where it was;
an interrupt after the first round of speeds ends it with the rounds that are complete.

Penstock's `calibrated` rows are made by `penstock quantize --to int4 --grid steps --hadamard`: on
what the model writes (self), and on books by other authors (text). Needs `pip install gguf`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common import record
from benchmarks.common.off_grid import write_off_grid
from benchmarks.engine.calibrated_quality import CORPUS, WINDOW, calibration_text
from benchmarks.engine.gguf_quality import books
from benchmarks.engine.offline import make_workload
from benchmarks.peers import convert
from benchmarks.peers.case import Case, version_of
from benchmarks.peers.figures import draw, rows_of
from benchmarks.peers.run_penstock import size_of
from penstock.deployments.cli.main import main as penstock
from penstock.workers.evaluation.eval_set import cut_windows
from penstock.workers.model_config import ModelConfig
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model

# Penstock's own rows: settings of run_penstock.load. The head in 8 bits, as the others have it.
HEAD = {"quantize_lm_head": True}
PENSTOCK: dict[str, dict[str, Any]] = {
    "fp32": {"weights": "fp32", "dtype": "fp32"},
    "bf16": {"weights": "bf16"},
    "int8": {"weights": "int8", **HEAD},
    "int8, one scale a token": {"weights": "int8", "int8_group": None, **HEAD},
    "int4": {"weights": "int4", **HEAD},
    "int4, groups of 32": {"weights": "int4", "int4_group": 32, **HEAD},
    "int8, KV in int8": {"weights": "int8", "kv": "int8", **HEAD},
    "int4, KV in int8": {"weights": "int4", "kv": "int8", **HEAD},
    "int4, no wide layers": {"weights": "int4", "int4_wide_layers": False, **HEAD},
}
CALIBRATED = {  # what they are calibrated on, and the size of groups
    "int4, calibrated on itself": ("self", "16"),
    "int4, calibrated on text": ("text", "16"),
    "int4, groups of 32, calibrated on text": ("text", "32"),
}
BASES = {"Penstock": "fp32", "OpenVINO": "fp32", "llama.cpp": "F16"}


def cases(args: argparse.Namespace, work: Path) -> list[Case]:
    """Everything that is compared; what is not there yet is made."""
    folder = work / "off-grid"
    if not folder.exists():
        write_off_grid(resolve_model("smollm2"), folder)
    return [
        *_penstock(args, folder, work),
        *(_openvino(args, folder, work) if args.openvino else ()),
        *(_llama_cpp(args, folder, work) if args.llama_cpp else ()),
    ]


def wants(args: argparse.Namespace, system: str, format: str) -> bool:
    """Whether this format is compared: what the others of its system are judged by always is."""
    return not args.formats or format in (BASES[system], *args.formats)


def _penstock(args: argparse.Namespace, folder: Path, work: Path) -> list[Case]:
    models = {
        name: (folder, settings)
        for name, settings in PENSTOCK.items()
        if wants(args, "Penstock", name)
    }
    text = work / "text.txt"
    text.write_text(calibration_text(CORPUS), encoding="utf-8")
    for name, (source, group) in CALIBRATED.items():
        if not wants(args, "Penstock", name):
            continue
        out = work / f"calibrated-{source}-{group}"
        given = str(text) if source == "text" else source
        options = ["--to", "int4", "--grid", "steps", "--group-size", group, "--hadamard"]
        options += ["--calibrate", given]
        if not out.exists() and penstock(["quantize", str(folder), str(out), *options]):
            raise SystemExit("penstock quantize failed")
        models[name] = out, HEAD
    return [
        Case("Penstock", name, sys.executable, "run_penstock", str(model),
             *size_of(str(model), settings), settings)
        for name, (model, settings) in models.items()
    ]  # fmt: skip


def _openvino(args: argparse.Namespace, folder: Path, work: Path) -> list[Case]:
    python, vocab, found = args.openvino, ModelConfig.from_pretrained(folder).vocab_size, []
    for kind in convert.OPENVINO:
        if not wants(args, "OpenVINO", kind):
            continue
        out = work / f"openvino-{kind.replace(', ', '-').replace(' ', '-')}"
        if not (out / "openvino_model.xml").exists():
            convert.export_openvino(python, folder, out, kind)
        bits, mib = convert.openvino_size(python, out, vocab)
        settings = {"precision": "f32"} if kind == BASES["OpenVINO"] else {}
        bits = 32.0 if kind == BASES["OpenVINO"] else bits
        found.append(Case("OpenVINO", kind, python, "run_openvino", str(out), bits, mib, settings))
    return found


def _llama_cpp(args: argparse.Namespace, folder: Path, work: Path) -> list[Case]:
    python, plain = args.llama_cpp, work / "F16.gguf"
    if not plain.exists():
        convert.write_gguf(resolve_model("smollm2"), folder, plain)
    found = []
    for kind in convert.LLAMA_CPP:
        if not wants(args, "llama.cpp", kind):
            continue
        file = work / f"{kind}.gguf"
        if not file.exists():
            convert.quantize_gguf(python, plain, file, kind, args.threads)
        size = convert.gguf_size(file)
        case = Case("llama.cpp", kind, python, "run_llama_cpp", str(file), *size)
        found.append(replace(case, preload=args.llama_cpp_preload))
    return found


def windows_of(folder: Path, num: int) -> list[list[int]]:
    tokenizer = Tokenizer.load(folder)
    ids = [tokenizer.encode(book, add_special_tokens=False) for book in books(CORPUS)]
    return [list(each) for each in cut_windows(ids, num, WINDOW + 1)]


def measure_quality(
    compared: Sequence[Case], work: Path, windows: Sequence[list[int]], threads: int
) -> dict[str, list[list[float]]]:
    """-log p of each token by case; kept in the folder `work`."""
    kept = work / "nll.json"
    found: dict[str, list[list[float]]] = json.loads(kept.read_text()) if kept.exists() else {}
    for case in compared:
        if len(found.get(case.name, ())) != len(windows):
            found[case.name] = case.run({"threads": threads, "windows": windows})["nll"]
            kept.write_text(json.dumps(found))
            print(case.name, f"{case.bits:.2f} bits", flush=True)
    return {case.name: found[case.name] for case in compared}


def measure_speed(
    compared: Sequence[Case], vocab: int, rounds: int, threads: int
) -> dict[str, list[dict[str, dict[str, float]]]]:
    """Of each round and case, what job.py answers; the order turns from round to round. Interrupted
    after the first round: those that are complete."""
    workloads = {name: [asdict(job) for job in make_workload(name, vocab)] for name in ("W1", "W2")}
    found: dict[str, list[Any]] = {case.name: [] for case in compared}
    for number in range(rounds):
        order = compared if number % 2 else compared[::-1]
        try:
            answers = [_timed(number, case, workloads, threads) for case in order]
        except KeyboardInterrupt:
            if number:
                break
            raise
        for case, answer in zip(order, answers, strict=True):
            found[case.name].append(answer)
    return found


def _timed(number: int, case: Case, workloads: dict[str, Any], threads: int) -> dict[str, Any]:
    answer = case.run({"threads": threads, "workloads": workloads})
    for name, jobs in workloads.items():
        total = sum(job["num_new"] for job in jobs)
        if answer[name]["num"] != total:
            raise RuntimeError(f"{case.name}: {answer[name]['num']} tokens, not {total}")
    rates = {n: round(answer[n]["num"] / answer[n]["total_s"], 1) for n in workloads}
    print(number, case.name, rates, flush=True)
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--openvino", metavar="PYTHON", help="of an environment that has it")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="the same of llama-cpp-python")
    parser.add_argument("--llama-cpp-preload", metavar="LIB", default="", help="see without_amx.c")
    parser.add_argument("--work", type=Path, default=Path("peers-work"), help="is kept")
    parser.add_argument("--windows", type=int, default=16, help=f"of {WINDOW} tokens (default: 16)")
    parser.add_argument("--rounds", type=int, default=3, help="of the speeds (default: 3)")
    parser.add_argument("--formats", nargs="+", metavar="NAME",
                        help="only these, as the table names them (default: all)")  # fmt: skip
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write the picture here")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    compared = cases(args, args.work)
    folder = args.work / "off-grid"
    nll = measure_quality(compared, args.work, windows_of(folder, args.windows), args.threads)
    timed = [case for case in compared if BASES[case.system] != case.format]
    vocab = ModelConfig.from_pretrained(folder).vocab_size
    speed = measure_speed(timed, vocab, args.rounds, args.threads)
    results: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct off its grid",
        "tokens": sum(len(each) for each in nll[compared[0].name]),
        "rounds": len(speed[timed[0].name]),
        "versions": _versions(args),
        "rows": rows_of(compared, nll, speed, BASES),
    }
    for row in results["rows"]:
        print(row)
    if args.json:
        record.write(args.json, __file__, results, threads=args.threads)
    if args.plot:
        draw(results["rows"], args.plot)
    return 0


def _versions(args: argparse.Namespace) -> dict[str, str]:
    packages = ((args.openvino, "openvino-genai"), (args.llama_cpp, "llama-cpp-python"))
    return {package: version_of(python, package) for python, package in packages if python}


if __name__ == "__main__":
    raise SystemExit(main())
