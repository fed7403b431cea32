"""The flags of `penstock batch`, and its help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from penstock.deployments.cli.flags.commands import add_command
from penstock.deployments.cli.flags.server import DEFAULT_URL, KEY_VARIABLE, add_tls_flags
from penstock.deployments.cli.flags.types import url

EXAMPLES = """\
Each line of INPUT is one request, in the format of OpenAI's batch files:

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}}

(in the file on one line; url: /v1/chat/completions, /v1/completions, /v1/responses or
/v1/embeddings; body: of a
call to that endpoint)
OUTPUT gets one line for each answered request, with its custom_id, in the order of INPUT; failed
requests go to the error file. INPUT is checked first: if a line is not a valid request, nothing
runs, and the error names the line and its field.

The command may be interrupted or killed at any point: the same command resumes the run. A request
without a seed gets one that is derived from --seed and the number of its line, so a run that was
interrupted gives the same tokens as one that was not. Results so far are in OUTPUT.part;
OUTPUT.state holds the identity of the run, and OUTPUT.lease names the process that runs it. A
second process is refused, unless the first one has ended or has not renewed the lease for 20 s:
then it takes the run over.

examples:
  penstock batch in.jsonl out.jsonl                               against a server on this machine
  penstock batch in.jsonl out.jsonl --url http://10.0.0.7:8000    against another one
  penstock batch in.jsonl out.jsonl --model ./my-checkpoint       without a server
  penstock batch in.jsonl out.jsonl --check                       only check the input
  ray job submit -- penstock batch /shared/in.jsonl /shared/out.jsonl --url http://10.0.0.7:8000

Exit status: 0 every line has its result, 1 the run stopped before that or no request succeeded,
2 the input or a flag is wrong, 130 interrupted.
"""
MAX_IN_FLIGHT = 64


def add_batch(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `batch` to the commands of the command line."""
    batch = add_command(
        commands,
        "batch",
        help="run a file of requests, resumable, to one result for each line",
        description="Run a file of requests in OpenAI's batch format, against a server or with an "
        "engine in this process.",
        epilog=EXAMPLES,
    )
    batch.add_argument("input", metavar="INPUT", help="file of requests, one JSON object a line")
    batch.add_argument("output", metavar="OUTPUT", help="file for the results")
    batch.add_argument(
        "--errors",
        metavar="FILE",
        help="file for requests that failed; none: OUTPUT with .errors before its suffix",
    )
    _add_target_flags(batch)
    _add_run_flags(batch)
    batch.set_defaults(run=run)


def _add_target_flags(batch: argparse.ArgumentParser) -> None:
    where = batch.add_argument_group("server or model")
    either = where.add_mutually_exclusive_group()
    either.add_argument(
        "--url",
        type=url,
        metavar="URL",
        help=f"an OpenAI-compatible server (default: {DEFAULT_URL})",
    )
    either.add_argument(
        "--model",
        metavar="MODEL",
        help="folder, hub id or built-in model to load in this process, without a server",
    )
    where.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"file with the server's API key; none: the environment variable {KEY_VARIABLE}",
    )
    add_tls_flags(where)
    where.add_argument(
        "--config",
        metavar="FILE",
        help="with --model: YAML file with settings of the engine, as for `penstock serve`",
    )


def _add_run_flags(batch: argparse.ArgumentParser) -> None:
    how = batch.add_argument_group("the run")
    how.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of the run, for requests without one; none: random, stored in OUTPUT.state",
    )
    how.add_argument(
        "--max-in-flight",
        type=int,
        metavar="N",
        default=MAX_IN_FLIGHT,
        help="maximum requests in flight; fewer while the server refuses some "
        f"(default: {MAX_IN_FLIGHT})",
    )
    how.add_argument(
        "--priority",
        metavar="N",
        default="100",
        help="priority of all requests, 0 to 100: waiting requests with a lower number go first; "
        "none: that of each line, for servers that do not know priorities (default: 100)",
    )
    how.add_argument(
        "--within",
        metavar="TIME",
        help="time limit of the batch, as 90s, 30m, 2h or 1d; requests that are unfinished then "
        "become errors with the code batch_expired; none: no limit",
    )
    how.add_argument(
        "--restart", action="store_true", help="discard an earlier run, and begin anew"
    )
    how.add_argument("--check", action="store_true", help="only check INPUT")
    how.add_argument("--no-progress", action="store_true", help="no progress on standard error")
