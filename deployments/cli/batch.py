"""`penstock batch INPUT OUTPUT`: chooses the server or the model, and reports the result.

The flags are in flags/batch.py; deployments/batch/ runs the batch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.deployments.batch import results
from penstock.deployments.batch.job_reports import reported
from penstock.deployments.batch.lease import POLL_S, STALE_POLLS, Lease, Owner, hold
from penstock.deployments.batch.lines import InputError, check_input
from penstock.deployments.batch.run import BatchFiles, BatchRun
from penstock.deployments.batch.runner import LOWEST_PRIORITY, Progress, RunSettings
from penstock.deployments.batch.server_target import ServerTarget
from penstock.deployments.batch.target import Target
from penstock.deployments.cli.batch_progress import shown
from penstock.deployments.client.tls import ClientTls
from penstock.deployments.config import ServeConfig, config_from
from penstock.deployments.config_file import read_config
from penstock.deployments.model_entries import MODELS
from penstock.workers.errors import ConfigError

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class _Where:
    """The server, if --model is not given, and how to reach it."""

    url: str
    api_key: str | None
    tls: ClientTls | None


@dataclass(frozen=True, slots=True)
class _RunTarget:
    """The target of a run: a server, or an engine in this process.

    `identity`: part of the run's identity. `models`: the names that lines may use.
    """

    target: Target
    name: str  # for people
    identity: str
    models: list[str]
    max_in_flight: int
    server: ServerTarget | None = None  # gets reports of the progress


def run_batch(
    args: argparse.Namespace, url: str, api_key: str | None, tls: ClientTls | None = None
) -> int:
    """`penstock batch`; the exit status. `url`: of the server, if --model is not given.

    Raises ConfigError, or RuntimeError.
    """
    try:
        return _run(args, _Where(url, api_key, tls))
    except InputError as error:
        more = error.num_problems - len(error.problems)
        shown = "".join(f"\n  {each}" for each in error.problems)
        rest = f"\n  and {more} more" if more else ""
        raise ConfigError(f"{args.input} cannot be run:{shown}{rest}") from None


def _run(args: argparse.Namespace, where: _Where) -> int:
    if not Path(args.input).is_file():
        raise ConfigError(f"there is no file {args.input}")
    if args.check:
        with open(args.input, "rb") as file:
            num_lines = check_input(file).num_lines
        noun = "request" if num_lines == 1 else "requests"
        print(f"{args.input}: {num_lines} {noun}, well-formed")
        return 0
    if args.max_in_flight < 1:
        raise ConfigError(f"--max-in-flight must be at least 1; got {args.max_in_flight}")
    _priority(args)  # checked here, too: before a model is loaded
    _seconds(args.within)
    if args.config is not None and args.model is None:
        raise ConfigError("--config has settings of an engine in this process; it needs --model")
    try:
        return asyncio.run(_run_until_signal(args, where))
    except asyncio.CancelledError:
        return 130


async def _run_until_signal(args: argparse.Namespace, where: _Where) -> int:
    """SIGINT and SIGTERM end the run, which stays resumable."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    return await _run_on_loop(args, where)


async def _run_on_loop(args: argparse.Namespace, where: _Where) -> int:
    files = _files(args)
    with open(files.input, "rb") as file:
        check_input(file)  # before a model is loaded
    async with _run_target(args, where) as chosen:
        with BatchRun(files, model=chosen.identity, models=chosen.models) as run:
            async with hold(files.lease, files.state, on_wait=_print_wait) as lease:
                await asyncio.to_thread(run.begin, lease, run_seed=args.seed, restart=args.restart)
                if run.finished is not None:
                    print(f"{files.output} is complete already; --restart runs the batch again")
                    status = 0
                else:
                    status = await _run_begun(args, run, chosen, lease)
                lease.is_done = True
                return status


async def _run_begun(
    args: argparse.Namespace, run: BatchRun, chosen: _RunTarget, lease: Lease
) -> int:
    """Run the unfinished lines, with a progress bar; the exit status."""
    within_s = _seconds(args.within)
    settings = RunSettings(
        run_seed=run.run_seed,
        max_in_flight=min(args.max_in_flight, chosen.max_in_flight),
        priority=_priority(args),
        deadline_s=None if within_s is None else time.monotonic() + within_s,
    )
    progress = run.progress()
    if not args.no_progress:
        before = f", {run.num_done} of them done before" if run.num_done else ""
        words = f"{progress.num_lines} requests to {chosen.name}{before}"
        print(f"{args.input}: {words}", file=sys.stderr)
    try:
        async with contextlib.AsyncExitStack() as around:
            if chosen.server is not None:
                name = Path(args.input).name
                await around.enter_async_context(
                    reported(chosen.server, lease.owner, name, progress)
                )
            if not args.no_progress:
                await around.enter_async_context(shown(progress))
            await run.run(chosen.target, settings, progress)
    except asyncio.CancelledError:
        if not lease.is_lost:
            print(
                f"interrupted: {run.num_done} of {progress.num_lines} requests are done; the same "
                "command resumes the run",
                file=sys.stderr,
            )
        raise
    return _report(run, progress)


def _print_wait(owner: Owner) -> None:
    print(
        f"{owner} runs this batch; if it does not renew its lease within "
        f"{POLL_S * STALE_POLLS:.0f} s, this process takes the batch over",
        file=sys.stderr,
    )


def _report(run: BatchRun, progress: Progress) -> int:
    files = run.files
    print(f"{files.output}: {progress.num_completed} of {progress.num_lines} requests answered")
    if progress.num_failed:
        with open(files.errors, "rb") as file:
            codes = Counter(results.code_of(line) for line in file)
        words = ", ".join(f"{code} ({num})" for code, num in codes.most_common())
        print(f"{files.errors}: {progress.num_failed} requests failed: {words}")
    return 0 if progress.num_completed else 1


def _files(args: argparse.Namespace) -> BatchFiles:
    """The files of the batch. Raises ConfigError."""
    given, output = Path(args.input), Path(args.output)
    errors = (
        output.with_name(f"{output.stem}.errors{output.suffix}")
        if args.errors is None
        else Path(args.errors)
    )
    for folder in {output.parent, errors.parent}:
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}; make it first")
    if len({path.resolve() for path in (given, output, errors)}) < 3:
        raise ConfigError("INPUT, OUTPUT and --errors must be three different files")
    return BatchFiles(given, output, errors)


@asynccontextmanager
async def _run_target(args: argparse.Namespace, where: _Where) -> AsyncIterator[_RunTarget]:
    """The server, or the model, loaded. Raises TargetError, LoadError or ConfigError."""
    if args.model is not None:
        from penstock.deployments.ingress.http.in_process import InProcessTarget
        from penstock.deployments.local_engine import load_core

        config = _engine_config(args)
        core, engine = load_core(config)
        try:
            target = InProcessTarget(core, is_local=True)
            num_slots = 4 * config.engine.max_num_seqs
            name = f"{config.model_name} in this process"
            yield _RunTarget(target, name, _model_identity(config), [config.model_name], num_slots)
        finally:
            engine.stop()
        return
    if not re.match(r"https?://[^/]", where.url):
        raise ConfigError(
            f"cannot read --url {where.url!r}: write http://host:port or https://host:port"
        )
    async with ServerTarget(
        where.url,
        api_key=where.api_key,
        max_connections=args.max_in_flight,
        verify=True if where.tls is None else where.tls.context(),
    ) as server:
        models = await server.models()
        names = sorted(each["id"] for each in models)
        lengths = [f"{each['id']} ({each.get('max_model_len', '?')} tokens)" for each in models]
        name = f"{server.url} ({', '.join(names)})"
        identity = ", ".join(sorted(lengths))
        yield _RunTarget(server, name, identity, names, args.max_in_flight, server)


def _engine_config(args: argparse.Namespace) -> ServeConfig:
    values = read_config(args.config) if args.config is not None else {}
    if MODELS in values:
        raise ConfigError(
            f"{args.config} lists several models, and one is loaded here: pass a file without the "
            "list, or a server's --url"
        )
    return config_from({**values, "model": args.model})


def _model_identity(config: ServeConfig) -> str:
    """A digest of the model's files and the engine's settings, which determine the answers."""
    from penstock.workers.weights.model_digest import verified_folder

    digest = hashlib.sha256()
    model = verified_folder(config.engine)
    for path in sorted(model.iterdir()) if model.is_dir() else [model]:
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            if path.suffix == ".json":
                digest.update(path.read_bytes())
    same = {"model", "revision", "model_digest", "threads"}  # or told by the files
    same |= {"download_dir", "packed_cache_dir", "packed_cache_gb"}
    settings = {k: v for k, v in asdict(config.engine).items() if k not in same}
    digest.update(repr(sorted(settings.items(), key=str)).encode())
    return f"{config.model_name} here, {digest.hexdigest()[:16]}"


def _priority(args: argparse.Namespace) -> int | None:
    """The value of --priority. Raises ConfigError."""
    text = args.priority
    if text.lower() == "none":
        return None
    if not (text.isdecimal() and int(text) <= LOWEST_PRIORITY):
        raise ConfigError(f"--priority must be 0 to {LOWEST_PRIORITY}, or none; got {text!r}")
    return int(text)


def _seconds(text: str | None) -> float | None:
    """A duration in seconds. Raises ConfigError."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"--within must be a time as 90s, 30m, 2h or 1d; got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]
