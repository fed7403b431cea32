"""The flags of `penstock bench`; bench.py and ablate.py act on them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from penstock.workers.config import WEIGHTS

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

What ends an answer: by default the client closes the stream at the wanted length; all requests send
the same max_tokens, so the server cannot know the true length in advance. With
--max-tokens-from-trace requests send their true length; with --until-eos the model ends answers.
"""
OFFLINE_EXAMPLES = """\
examples:
  penstock bench offline                                     32 requests on the built-in model
  penstock bench offline ./my-checkpoint --weights bf16 --input-len 16:512 --output-len 16:256
  penstock bench offline --trace lengths.json --num-requests 200 --json out.json
"""
ABLATE_EXAMPLES = """\
examples:
  penstock bench ablate                                      on the built-in model
  penstock bench ablate ./my-checkpoint --num-requests 48 --output-len 32:256 --rounds 5
  penstock bench ablate --trace lengths.json --pool-share 0.25 --json out.json

All requests are submitted at the start. The KV pool holds --pool-share of their tokens in the
model's own KV format, so that memory is scarce. Every request has the limit --max-tokens; the
engine never knows the true length. Compare within a run: every round serves the load with all parts
and without each of them, and the table has the medians.
"""
LEAST_VOCABULARY = 1000  # ids below it exist in every published vocabulary


def add_bench(
    commands: Any,
    add_server_flags: Callable[[argparse.ArgumentParser], None],
    *,
    run_serve: Callable[[argparse.Namespace], int],
    run_offline: Callable[[argparse.Namespace], int],
    run_ablate: Callable[[argparse.Namespace], int],
) -> None:
    """Add `bench serve`, `offline` and `ablate` to the commands of the command line."""
    bench = commands.add_parser("bench", help="measure a server, or the engine alone")
    forms = bench.add_subparsers(title="what to measure", required=True, metavar="WHAT")
    serve = forms.add_parser(
        "serve",
        help="a running server, over HTTP or gRPC",
        description="Send a load to a running server, open-loop or closed-loop, and measure the "
        "answers: TTFT, TPOT, ITL, throughput, goodput.",
        epilog=SERVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_server_flags(serve)
    _add_request_flags(serve)
    _add_load_flags(serve)
    _add_length_flags(serve, num_requests=None)
    _add_output_flags(serve, plot=True)
    serve.set_defaults(run=run_serve)
    offline = forms.add_parser(
        "offline",
        help="the engine in this process: no Ray, no network",
        description="Run requests that are all submitted at the start on the engine alone.",
        epilog=OFFLINE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_engine_flags(offline)
    _add_length_flags(offline, num_requests=32)
    _add_output_flags(offline, plot=False)
    offline.set_defaults(run=run_offline)
    ablate = forms.add_parser(
        "ablate",
        help="what each part of the engine contributes to throughput",
        description="Serve one load with all parts (mixed batches, quantised weights and KV, text "
        "in parallel with the steps, predicted admission) and without each of them.",
        epilog=ABLATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_ablate_flags(ablate)
    _add_length_flags(ablate, num_requests=32)
    _add_output_flags(ablate, plot=False)
    ablate.set_defaults(run=run_ablate)


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
        type=_positive_int,
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
        type=_positive_int,
        metavar="N",
        help="max_tokens that all requests send (default: the longest wanted answer)",
    )
    group.add_argument(
        "--timeout-s", type=_positive, metavar="X", help="cancel a request after this time"
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
        "--rate", type=_positive, default=1.0, metavar="X", help="requests per second (default: 1)"
    )
    group.add_argument(
        "--cv",
        type=_positive,
        default=2.0,
        metavar="X",
        help="with bursty, coefficient of variation of the gaps; 1 is Poisson (default: 2)",
    )
    group.add_argument(
        "--speed",
        type=_positive,
        default=1.0,
        metavar="X",
        help="speed-up of --arrivals trace (default: 1)",
    )
    group.add_argument(
        "--duration", type=_positive, metavar="S", help="send requests for S seconds"
    )
    group.add_argument(
        "--max-concurrency",
        type=_positive_int,
        metavar="N",
        help="maximum concurrent requests; further ones wait in the client, which is reported",
    )
    group.add_argument("--slo-ttft-ms", type=_positive, metavar="MS", help="TTFT limit for goodput")
    group.add_argument("--slo-tpot-ms", type=_positive, metavar="MS", help="TPOT limit for goodput")


def _add_length_flags(parser: argparse.ArgumentParser, num_requests: int | None) -> None:
    group = parser.add_argument_group("number and lengths")
    default = "100, or as many as fit in --duration" if num_requests is None else str(num_requests)
    group.add_argument(
        "--num-requests",
        type=_positive_int,
        default=num_requests,
        metavar="N",
        help=f"number of requests (default: {default})",
    )
    group.add_argument(
        "--input-len", default="128", metavar="N", help="prompt tokens, or LOW:HIGH (default: 128)"
    )
    group.add_argument(
        "--output-len", default="64", metavar="N", help="answer tokens, or LOW:HIGH (default: 64)"
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="file with lengths: CSV with TIMESTAMP, ContextTokens, GeneratedTokens; or a JSON"
        " list of {prompt_tokens, gen_tokens}",
    )
    group.add_argument(
        "--max-prompt-tokens", type=_positive_int, metavar="N", help="clip prompts to N tokens"
    )
    group.add_argument(
        "--max-output-tokens", type=_positive_int, metavar="N", help="clip answers to N tokens"
    )
    group.add_argument(
        "--skip-too-long",
        action="store_true",
        help="drop requests that do not fit the model's context",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed; the same seed gives the same load (default: 0)",
    )


def _add_output_flags(parser: argparse.ArgumentParser, *, plot: bool) -> None:
    group = parser.add_argument_group("output in addition to the table")
    group.add_argument("--json", metavar="FILE", help="write all figures and all requests")
    if plot:
        group.add_argument("--plot", metavar="FILE.png", help="write a picture; needs matplotlib")
    group.add_argument("--no-progress", action="store_true", help="no progress bar")


def _add_ablate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_path",
        nargs="?",
        default="builtin",
        metavar="MODEL",
        help="model folder, hub id or built-in (default: builtin)",
    )
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--weights",
        choices=("int8", "int4", "nf4", "fp8"),
        default="int8",
        help="weight format; compared with the checkpoint's own (default: int8)",
    )
    group.add_argument(
        "--kv", choices=("int8", "fp8"), default="int8", help="KV format (default: int8)"
    )
    group.add_argument(
        "--pool-share",
        type=_positive,
        default=0.25,
        metavar="X",
        help="share of the load's tokens that the KV pool holds unquantised (default: 0.25)",
    )
    group.add_argument(
        "--max-tokens",
        type=_positive_int,
        metavar="N",
        help="limit that each request sends (default: four times the longest wanted answer)",
    )
    group.add_argument(
        "--rounds",
        type=_positive_int,
        default=3,
        metavar="N",
        help="rounds; the table has medians (default: 3)",
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)"
    )
    group.add_argument(
        "--threads", type=_positive_int, metavar="N", help="CPU threads (default: all cores)"
    )
    _add_batch_flags(group)


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_path",
        nargs="?",
        default="builtin",
        metavar="MODEL",
        help="model folder, hub id or built-in (default: builtin)",
    )
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--weights", choices=WEIGHTS, default="auto", help="weight format (default: auto)"
    )
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)"
    )
    group.add_argument(
        "--threads", type=_positive_int, metavar="N", help="CPU threads (default: all cores)"
    )
    _add_batch_flags(group)
    group.add_argument(
        "--kv-cache-gb", type=_positive, metavar="X", help="GiB for the KV cache and activations"
    )


def _add_batch_flags(group: Any) -> None:
    group.add_argument(
        "--max-num-seqs",
        type=_positive_int,
        default=64,
        metavar="N",
        help="maximum sequences in one step (default: 64)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=_positive_int,
        default=2048,
        metavar="N",
        help="maximum tokens of one step (default: 2048)",
    )


def _positive(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number
