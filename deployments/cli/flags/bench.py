"""The flags of `penstock bench serve`, and the parser of all that `bench` measures.

bench.py acts on the flags; those of the engine alone are in flags/bench_engine.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from penstock.deployments.cli.flags.bench_engine import (
    add_ablate,
    add_length_flags,
    add_offline,
    add_output_flags,
)
from penstock.deployments.cli.flags.commands import add_command
from penstock.deployments.cli.flags.server import add_server_flags
from penstock.deployments.cli.flags.types import positive, positive_int

ARRIVALS = ("poisson", "bursty", "constant", "trace", "at-once")
SERVE_EXAMPLES = """\
examples:
  penstock bench serve --num-requests 100 --rate 4
      one hundred requests to the server on this machine, with Poisson arrivals
  penstock bench serve --arrivals at-once --max-concurrency 32 --num-requests 256
      a closed loop: 32 concurrent requests at all times; for throughput
  penstock bench serve --trace azure.csv --arrivals trace --speed 0.5 --num-requests 500
      a recorded trace at half its speed, with its own arrivals and lengths
  penstock bench serve --trace lengths.json --rate 2 --duration 120
      the lengths of a trace, with Poisson arrivals
  penstock bench serve --url grpc://127.0.0.1:8001 --arrivals bursty --cv 3 --rate 4
  penstock bench serve --url http://other:8000 --chat --model org/name --no-ignore-eos
      any other server with OpenAI's API
  penstock bench serve --rate 4 --slo-ttft-ms 500 --slo-tpot-ms 50 --json out.json --plot out.png

What ends an answer: by default the client closes the stream at the drawn length; all requests send
the same max_tokens, so the server cannot know the true length in advance. With
--max-tokens-from-trace requests send their true length; with --until-eos the model ends answers.
"""
LEAST_VOCABULARY = 1000  # ids below it exist in every published vocabulary


def add_bench(
    commands: Any,
    *,
    run_serve: Callable[[argparse.Namespace], int],
    run_offline: Callable[[argparse.Namespace], int],
    run_ablate: Callable[[argparse.Namespace], int],
) -> None:
    """Add `bench serve`, `offline` and `ablate` to the commands of the command line."""
    bench = commands.add_parser("bench", help="measure a server, or the engine alone")
    forms = bench.add_subparsers(title="what to measure", required=True, metavar="WHAT")
    serve = add_command(
        forms,
        "serve",
        help="a running server, over HTTP or gRPC",
        description="Send a load to a running server, open-loop or closed-loop, and measure the "
        "answers: TTFT, TPOT, ITL, throughput, goodput.",
        epilog=SERVE_EXAMPLES,
    )
    add_server_flags(serve)
    _add_request_flags(serve)
    _add_load_flags(serve)
    add_length_flags(serve, num_requests=None)
    add_output_flags(serve, plot=True)
    serve.set_defaults(run=run_serve)
    add_offline(forms, run_offline)
    add_ablate(forms, run_ablate)


def _add_request_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--chat", action="store_true", help="send chat completions instead of completions"
    )
    group.add_argument(
        "--prompts",
        choices=("words", "ids"),
        default="words",
        help="words: random English words; two requests sent first measure the tokens per word, so "
        "lengths are approximate; ids: random token ids, exact lengths (default: words)",
    )
    group.add_argument(
        "--vocab-size",
        type=positive_int,
        metavar="N",
        help="with --prompts ids, token ids are below N (default: the vocabulary size that the "
        f"server reports over gRPC; else {LEAST_VOCABULARY})",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="sampling temperature; 0 is greedy (default: 0)",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask the server to continue after the end-of-sequence token, which not every server "
        "supports (default: yes, but not with --until-eos)",
    )
    group.add_argument(
        "--extra-body",
        metavar="JSON",
        help="additional fields of the HTTP body, e.g. '{\"return_token_ids\": true}', which makes "
        "the token counts exact on servers that support it",
    )
    ending = group.add_mutually_exclusive_group()
    ending.add_argument(
        "--max-tokens-from-trace",
        action="store_true",
        help="send the true length of each answer as max_tokens, which no real client knows",
    )
    ending.add_argument("--until-eos", action="store_true", help="let the model end its answers")
    group.add_argument(
        "--max-tokens",
        type=positive_int,
        metavar="N",
        help="max_tokens that all requests send (default: the longest drawn answer)",
    )
    group.add_argument(
        "--timeout-s", type=positive, metavar="X", help="cancel a request after this time"
    )


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("arrivals and limits")
    group.add_argument(
        "--arrivals",
        choices=ARRIVALS,
        default="poisson",
        help="poisson; bursty: gamma gaps with --cv; constant; trace: as recorded; at-once"
        " (default: poisson)",
    )
    group.add_argument(
        *("--rate", "--request-rate"),
        type=positive,
        default=1.0,
        metavar="X",
        help="requests per second (default: 1)",
    )
    group.add_argument(
        "--cv",
        type=positive,
        default=2.0,
        metavar="X",
        help="with bursty, coefficient of variation of the gaps; 1 is Poisson (default: 2)",
    )
    group.add_argument(
        "--speed",
        type=positive,
        default=1.0,
        metavar="X",
        help="speed-up of --arrivals trace (default: 1)",
    )
    group.add_argument("--duration", type=positive, metavar="S", help="send requests for S seconds")
    group.add_argument(
        "--max-concurrency",
        type=positive_int,
        metavar="N",
        help="maximum concurrent requests; further ones wait in the client, which is reported",
    )
    group.add_argument("--slo-ttft-ms", type=positive, metavar="MS", help="TTFT limit for goodput")
    group.add_argument("--slo-tpot-ms", type=positive, metavar="MS", help="TPOT limit for goodput")
