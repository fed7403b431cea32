"""What `penstock eval` does with its flags: texts, combinations, progress, results.

workers/evaluation measures; eval_report.py and eval_plot.py show.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from penstock.deployments.bench.report import check_plot, write_json
from penstock.deployments.cli.evaluation.eval_plot import check_suffix, plot
from penstock.deployments.cli.evaluation.eval_report import envelope, row_of, table
from penstock.workers.config import EngineConfig
from penstock.workers.engine.load import device_of
from penstock.workers.errors import ConfigError
from penstock.workers.evaluation.combination import Combination, ContextChoice
from penstock.workers.evaluation.eval_set import EvalSet, cut_windows
from penstock.workers.evaluation.judge import Judged, check_all, judge
from penstock.workers.evaluation.machine import machine_facts
from penstock.workers.text.tokenizer import Tokenizer
from penstock.workers.weights.hub import resolve_model
from penstock.workers.weights.model_digest import model_digest

PROMPT_TOKENS = 64  # of a greedy prompt, the beginning of a window; half of a shorter window


def run_eval(args: argparse.Namespace) -> int:
    """`penstock eval`; the exit status. Raises ConfigError and LoadError."""
    check_plot(args.plot)
    check_suffix(args.plot)
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        _check_folder(flag, path)
    texts = read_texts(args.text)
    baseline, others = combinations_of(args)
    config = config_of(args)
    folder = resolve_model(args.model, args.revision, args.download_dir)
    tokenizer = Tokenizer.load(folder)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts.values()]
    prefix = tokenizer.prefix_ids
    eval_set = eval_set_of(args, ids, prefix)
    check_all(config, folder, [baseline, *others], eval_set.window_tokens)
    files = [
        {"file": name, "sha256": hashlib.sha256(text.encode()).hexdigest(), "tokens": len(each)}
        for (name, text), each in zip(texts.items(), ids, strict=True)
    ]
    content = {
        **envelope(),
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": {"name": args.model, "digest": model_digest(folder)},
        "machine": machine_facts(config.device) | {"threads": torch.get_num_threads()},
        "settings": {name: value for name, value in vars(args).items() if name != "run"},
        "texts": files,
        "prefix_ids": prefix,
        "scored_tokens": eval_set.num_scored,
        "greedy_prompts": len(eval_set.prompts),
        "baseline": str(baseline),
    }
    judged: list[Judged] = []
    for each in _shown(args, config, folder, baseline, others, eval_set):
        judged.append(each)
        if args.json is not None:
            write_json(args.json, {**content, "rows": [row_of(done) for done in judged]})
    print(table(judged, eval_set))
    if args.plot is not None:
        plot(args.plot, judged, f"{args.model}, {', '.join(Path(name).name for name in texts)}")
    return 0


def _shown(
    args: argparse.Namespace,
    config: EngineConfig,
    folder: Path,
    baseline: Combination,
    others: Sequence[Combination],
    eval_set: EvalSet,
) -> Any:
    """`judge`, with a bar of the tokens to come."""
    num = len({baseline, *others})
    num_tokens = eval_set.num_scored + len(eval_set.prompts) * eval_set.num_new
    with tqdm(
        total=num * num_tokens, unit="token", file=sys.stderr, disable=args.no_progress
    ) as bar:
        bar.set_description("loading the baseline")

        def progress(combination: Combination, tokens: int) -> None:
            bar.set_description(f"{combination}", refresh=False)
            bar.update(tokens)

        yield from judge(config, folder, baseline, others, eval_set, progress)


def combinations_of(args: argparse.Namespace) -> tuple[Combination, list[Combination]]:
    """The baseline, and all combinations of the lists; those that differ in nothing once."""
    plain = Combination()
    contexts = [ContextChoice.parse(each) for each in args.context_policy]
    caches = [
        (kv, group)
        for kv in args.kv
        for group in (args.kv_group if kv != "auto" else (plain.kv_group,))
    ]
    found = dict.fromkeys(
        replace(
            weights,
            quantize_o=args.quantize_o,
            quantize_lm_head=args.quantize_lm_head,
            activations=args.activations,
            kv=kv,
            kv_group=kv_group,
            context=context,
        )
        for weights in _weights_of(args)
        for kv, kv_group in caches
        for context in contexts
    )
    return Combination(weights=args.baseline), list(found)


def _weights_of(args: argparse.Namespace) -> Iterator[Combination]:
    """Each format of weights with each of the choices that it has."""
    plain = Combination()
    for weights in args.weights:
        is_int4, is_int8 = weights in ("int4", "auto"), weights == "int8"
        yield from (
            replace(
                plain,
                weights=weights,
                int8_group=int8,
                int4_group=int4,
                int4_wide_layers=wide == "on",
                int4_activations=rows,
            )
            for int8 in (args.int8_group if is_int8 else (plain.int8_group,))
            for int4 in (args.int4_group if weights == "int4" else (plain.int4_group,))
            for wide in (args.int4_wide_layers if weights == "int4" else ("on",))
            for rows in (args.int4_activations if is_int4 else (plain.int4_activations,))
        )


def config_of(args: argparse.Namespace) -> EngineConfig:
    """The engine, without what combinations set; sets torch's threads."""
    threads = args.threads
    if threads is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        threads = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    return EngineConfig(
        model=args.model,
        revision=args.revision,
        download_dir=args.download_dir,
        device=device_of(args.device),
        threads=threads,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_gb=args.kv_cache_gb,
    )


def eval_set_of(
    args: argparse.Namespace, ids: Sequence[Sequence[int]], prefix: list[int]
) -> EvalSet:
    """What all combinations see of the texts `ids`. Raises ConfigError where they are too short."""
    windows = cut_windows(ids, args.windows, args.window_tokens, prefix)
    if not args.greedy_tokens:
        return EvalSet(windows)
    size = min(PROMPT_TOKENS, args.window_tokens // 2)
    return EvalSet(windows, tuple(each[:size] for each in windows), args.greedy_tokens)


def read_texts(paths: Sequence[str] | None) -> dict[str, str]:
    """The texts by the names of their files. Raises ConfigError for what cannot be read."""
    if not paths:
        raise ConfigError(
            "--text is missing: name one or more files of plain text that this model was not "
            "trained on, such as it will meet; Penstock ships no text of its own"
        )
    found = {}
    for name in paths:
        try:
            found[name] = Path(name).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {name} cannot be read: {error}") from error
    return found


def _check_folder(flag: str, path: str | None) -> None:
    if path is not None and not Path(path).expanduser().absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: the folder does not exist; make it, or name another")
