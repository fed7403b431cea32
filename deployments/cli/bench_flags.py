"""The flags of `penstock bench`. Knows nothing of what is done with them."""

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
      one hundred requests to the server on this machine, arriving as people do (Poisson)
  penstock bench serve --arrivals at-once --max-concurrency 32 --num-requests 256
      a closed loop: 32 under way at all times; for throughput
  penstock bench serve --trace azure.csv --arrivals trace --speed 0.5 --num-requests 500
      a recorded service at half its speed, with its own arrivals and lengths
  penstock bench serve --trace lengths.json --rate 2 --duration 120
      the lengths of a trace, with arrivals of our own
  penstock bench serve --url grpc://127.0.0.1:8001 --arrivals bursty --cv 3 --rate 4
  penstock bench serve --url http://other:8000 --chat --model org/name --no-ignore-eos
      any server with OpenAI's API is measured by this same client
  penstock bench serve --rate 4 --slo-ttft-ms 500 --slo-tpot-ms 50 --json out.json --plot out.png

Who ends an answer: by default the client, which closes the stream once the wanted number of tokens
is there; the server is told one limit for all requests and cannot know the true length in advance.
--max-tokens-from-trace tells it, --until-eos leaves the end to the model.
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

All requests are there at the start, and the pool holds --pool-share of their tokens in the model's
own KV format, so that memory is what is short. The engine is told --max-tokens for every request
and never the true length. Compare within a run: every round serves the load with all parts and
without each of them, and the table has the medians.
"""
LEAST_VOCABULARY = 1000  # ids below it exist in every vocabulary that is in use


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
        description="Send a load to a running server, at times of its own, and measure the answers:"
        " TTFT, TPOT, ITL, throughput, goodput.",
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
        description="Serve requests that are all there at the start, with the engine alone.",
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
        help="what each part of the server recipe brings",
        description="Serve one load with the whole recipe (merged steps, quantised weights and KV, "
        "text beside the steps, predicted admission) and without each of its parts.",
        epilog=ABLATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_ablate_flags(ablate)
    _add_length_flags(ablate, num_requests=32)
    _add_output_flags(ablate, plot=False)
    ablate.set_defaults(run=run_ablate)


def _add_request_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what a request is")
    group.add_argument("--chat", action="store_true", help="chat completions, not completions")
    group.add_argument(
        "--prompts",
        choices=("words", "ids"),
        default="words",
        help="words: English ones, so many that the length is about right, by two requests that"
        " are sent first; ids: random token ids, exactly as many (default: words)",
    )
    group.add_argument(
        "--vocab-size",
        type=_positive_int,
        metavar="N",
        help=f"for --prompts ids: ids are below it (default: the server's over gRPC, which tells"
        f" it; else {LEAST_VOCABULARY})",
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask the server to go on past the end of sequence; not all servers know how"
        " (default: yes, but not with --until-eos)",
    )
    group.add_argument(
        "--extra-body",
        metavar="JSON",
        help="more fields of the HTTP body, e.g. '{\"return_token_ids\": true}', which makes the"
        " counts of tokens exact where the server knows it",
    )
    ending = group.add_mutually_exclusive_group()
    ending.add_argument(
        "--max-tokens-from-trace",
        action="store_true",
        help="tell the server how long each answer will be, which no real client can",
    )
    ending.add_argument("--until-eos", action="store_true", help="the model ends its answers")
    group.add_argument(
        "--max-tokens",
        type=_positive_int,
        metavar="N",
        help="longest answer, as all requests tell the server (default: the longest one wanted)",
    )
    group.add_argument(
        "--timeout-s", type=_positive, metavar="X", help="give a request up after it"
    )


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("when requests are sent")
    group.add_argument(
        "--arrivals",
        choices=ARRIVALS,
        default="poisson",
        help="poisson; bursty: gamma gaps with --cv; constant; trace: as recorded; at-once"
        " (default: poisson)",
    )
    group.add_argument(
        "--rate", type=_positive, default=1.0, metavar="X", help="requests/s (default: 1)"
    )
    group.add_argument(
        "--cv",
        type=_positive,
        default=2.0,
        metavar="X",
        help="of bursty gaps: their deviation over their mean; 1 is Poisson (default: 2)",
    )
    group.add_argument(
        "--speed", type=_positive, default=1.0, metavar="X", help="of --arrivals trace (default: 1)"
    )
    group.add_argument("--duration", type=_positive, metavar="S", help="send for so many seconds")
    group.add_argument(
        "--max-concurrency",
        type=_positive_int,
        metavar="N",
        help="most requests under way; the rest waits in the client, and is reported",
    )
    group.add_argument("--slo-ttft-ms", type=_positive, metavar="MS", help="for goodput")
    group.add_argument("--slo-tpot-ms", type=_positive, metavar="MS", help="for goodput")


def _add_length_flags(parser: argparse.ArgumentParser, num_requests: int | None) -> None:
    group = parser.add_argument_group("how many, and how long")
    default = "100, or as --duration has it" if num_requests is None else str(num_requests)
    group.add_argument(
        "--num-requests",
        type=_positive_int,
        default=num_requests,
        metavar="N",
        help=f"(default: {default})",
    )
    group.add_argument(
        "--input-len", default="128", metavar="N", help="tokens, or LOW:HIGH (default: 128)"
    )
    group.add_argument(
        "--output-len", default="64", metavar="N", help="tokens, or LOW:HIGH (default: 64)"
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="take lengths from it: CSV with TIMESTAMP, ContextTokens, GeneratedTokens; or a JSON"
        " list of {prompt_tokens, gen_tokens}",
    )
    group.add_argument("--max-prompt-tokens", type=_positive_int, metavar="N", help="clip to it")
    group.add_argument("--max-output-tokens", type=_positive_int, metavar="N", help="clip to it")
    group.add_argument(
        "--skip-too-long", action="store_true", help="leave out what does not fit the model"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed, the same load (default: 0)"
    )


def _add_output_flags(parser: argparse.ArgumentParser, *, plot: bool) -> None:
    group = parser.add_argument_group("what comes out, beside the table")
    group.add_argument("--json", metavar="FILE", help="all figures and all requests")
    if plot:
        group.add_argument("--plot", metavar="FILE.png", help="a picture; needs matplotlib")
    group.add_argument("--no-progress", action="store_true", help="no progress bar")


def _add_ablate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_path", nargs="?", default="builtin", metavar="MODEL", help="(default: builtin)"
    )
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--weights",
        choices=("int8", "int4", "nf4", "fp8"),
        default="int8",
        help="the recipe's; without it: the checkpoint's own (default: int8)",
    )
    group.add_argument("--kv", choices=("int8", "fp8"), default="int8", help="(default: int8)")
    group.add_argument(
        "--pool-share",
        type=_positive,
        default=0.25,
        metavar="X",
        help="of all tokens of the load, that the KV pool holds unquantised (default: 0.25)",
    )
    group.add_argument(
        "--max-tokens",
        type=_positive_int,
        metavar="N",
        help="what the engine is told of each answer (default: four times the longest)",
    )
    group.add_argument("--rounds", type=_positive_int, default=3, metavar="N", help="(default: 3)")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument("--threads", type=_positive_int, metavar="N", help="(default: all cores)")
    group.add_argument("--max-num-seqs", type=_positive_int, default=64, metavar="N")
    group.add_argument("--max-num-batched-tokens", type=_positive_int, default=2048, metavar="N")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_path", nargs="?", default="builtin", metavar="MODEL", help="(default: builtin)"
    )
    group = parser.add_argument_group("engine")
    group.add_argument("--weights", choices=WEIGHTS, default="auto")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument("--threads", type=_positive_int, metavar="N", help="(default: all cores)")
    group.add_argument("--max-num-seqs", type=_positive_int, default=64, metavar="N")
    group.add_argument("--max-num-batched-tokens", type=_positive_int, default=2048, metavar="N")
    group.add_argument("--kv-cache-gb", type=_positive, metavar="X")


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
