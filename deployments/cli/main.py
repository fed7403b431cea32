"""The `penstock` command: its subcommands and their flags.

The flags of `serve` are the settings of the configuration. Each command imports what it needs when
it runs, so that `--help` is immediate.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from penstock.deployments.cli.calibrate import add_calibrate, run_calibrate
from penstock.deployments.cli.completion import SHELLS, run_completion
from penstock.deployments.cli.flags.batch import add_batch
from penstock.deployments.cli.flags.bench import add_bench
from penstock.deployments.cli.flags.certs import add_certs
from penstock.deployments.cli.flags.evaluate import add_eval
from penstock.deployments.cli.flags.keys import add_keys
from penstock.deployments.cli.flags.parser import Parser
from penstock.deployments.cli.flags.plan import add_plan
from penstock.deployments.cli.flags.serve import add_serve, settings_given
from penstock.deployments.cli.flags.server import (
    DEFAULT_URL,
    KEY_VARIABLE,
    add_sampling_flags,
    add_server_flags,
    tls_of,
)
from penstock.deployments.cli.quantize import add_quantize, run_quantize
from penstock.deployments.config import config_from
from penstock.deployments.config_file import as_yaml
from penstock.deployments.config_values import values_by_group
from penstock.deployments.placement import SHORT_SPINS
from penstock.deployments.security.key_file import read_client_key
from penstock.workers.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0 done, 1 failed, 2 misused, 130 interrupted."""
    # For engines in this process. OpenMP reads it when PyTorch is loaded.
    for name, value in SHORT_SPINS.items():
        os.environ.setdefault(name, value)
    parser = build_parser()
    try:
        args = parser.parse_args(arguments)
        if "run" not in args:
            parser.print_help()
            return 0
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        return _fail(error, 2)
    except BrokenPipeError:  # the reader of the pipe has exited, as `head` does: no message
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1
    except (RuntimeError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="penstock",
        description="Serve large language models on a Ray cluster, and talk to them.",
        epilog="A first tour: `penstock serve` in one terminal, `penstock chat` in another.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {version('penstock')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_serve(commands, _serve)
    _add_chat(commands)
    _add_complete(commands)
    add_bench(
        commands,
        run_serve=_bench_serve,
        run_offline=_bench_offline,
        run_ablate=_bench_ablate,
    )
    add_batch(commands, _batch)
    add_keys(commands, _keys)
    add_plan(commands, _plan)
    add_certs(commands, _certs)
    experts = commands.add_parser(
        "experts", help="show hit rates and transfers of a server's expert caches"
    )
    add_server_flags(experts, model=None)
    experts.add_argument(
        "--reload",
        action="store_true",
        help="have the expert stores read the model's experts again, and wait until they have",
    )
    experts.set_defaults(run=_experts)
    add_quantize(commands, run_quantize)
    add_eval(commands, _eval)
    add_calibrate(commands, run_calibrate)
    models = commands.add_parser("models", help="list the models of a server")
    add_server_flags(models, model=None)
    models.set_defaults(run=_models)
    status = commands.add_parser(
        "status", help="show a server's nodes, workers, scaling decisions and batches"
    )
    add_server_flags(status, model=None)
    status.set_defaults(run=_status)
    queue = commands.add_parser(
        "queue", help="show the requests that wait at a server's gate, and why"
    )
    add_server_flags(queue, model="only the queue of this model; none: of all models")
    queue.add_argument(
        "--limit", type=int, default=50, metavar="N", help="maximum rows (default: 50)"
    )
    queue.set_defaults(run=_queue)
    explain = commands.add_parser(
        "explain", help="show where one request has been, and what was decided about its memory"
    )
    add_server_flags(explain, model=None)
    explain.add_argument(
        "request_id",
        metavar="REQUEST",
        help="id of the header x-request-id, or of the answer (chatcmpl-...)",
    )
    explain.set_defaults(run=_explain)
    completion = commands.add_parser(
        "completion", help="print a script that completes commands, flags and values in a shell"
    )
    completion.add_argument(
        "shell", choices=SHELLS, help="the shell; for bash: source <(penstock completion bash)"
    )
    completion.set_defaults(run=lambda args: run_completion(parser, args.shell))
    commands.add_parser("version", help="print the version").set_defaults(run=_version)
    return parser


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser("chat", help="chat with a model in the terminal")
    chat.add_argument(
        "message",
        metavar="MESSAGE",
        nargs="?",
        help="answer this one and end; none: a conversation, or a message for each line of stdin",
    )
    add_server_flags(chat)
    add_sampling_flags(chat)
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    chat.set_defaults(run=_chat)


def _add_complete(commands: Any) -> None:
    complete = commands.add_parser("complete", help="complete a text")
    complete.add_argument(
        "prompt", metavar="PROMPT", help="text to complete; '-' reads it from stdin"
    )
    add_server_flags(complete)
    add_sampling_flags(complete)
    complete.set_defaults(run=_complete)


def _serve(args: argparse.Namespace) -> int:
    config = config_from(settings_given(args))
    if args.dump_config:
        print(as_yaml(values_by_group(config)), end="")
        return 0
    from penstock.deployments.cli.starting.environment import prepare_environment
    from penstock.deployments.supervision.fork_server import ForkServer

    prepare_environment(config)
    with contextlib.ExitStack() as ended:
        forks: ForkServer | None = None
        if config.ray_address is None:
            forks = ForkServer()  # it imports Ray while this process imports the rest
            ended.callback(forks.close)
        from penstock.deployments.cli.serve import run_serve

        return run_serve(config, forks)


def _chat(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.chat import ChatRepl

    with _server(args) as server:
        chat = ChatRepl(server, _sampling(args), system=args.system)
        return chat.run() if args.message is None else chat.answer_one(args.message)


def _complete(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with _server(args) as server:
        for text in server.complete(prompt, _sampling(args)):
            print(text, end="", flush=True)
    print()
    return 0


def _models(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.server import connect

    with connect(args.url, api_key=_api_key(args), tls=tls_of(args, args.url)) as server:
        print("\n".join(server.models()))
    return 0


def _experts(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.experts import run_experts, run_reload

    run = run_reload if args.reload else run_experts
    return run(args.url, _api_key(args), tls_of(args, args.url))


def _status(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.status import run_status

    return run_status(args.url, _api_key(args), tls_of(args, args.url))


def _queue(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.status import run_queue

    return run_queue(args.url, _api_key(args), tls_of(args, args.url), args.limit, args.model)


def _explain(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.explain import run_explain

    return run_explain(args.url, _api_key(args), tls_of(args, args.url), args.request_id)


def _version(_: argparse.Namespace) -> int:
    print(f"penstock {version('penstock')}")
    return 0


def _batch(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.batch import run_batch

    url = args.url or DEFAULT_URL
    return run_batch(args, url, _api_key(args), tls_of(args, url))


def _keys(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.access.keys import run_keys

    return run_keys(args)


def _bench_serve(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.bench import run_serve

    return run_serve(args, _api_key(args), tls_of(args, args.url))


def _bench_offline(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.bench import run_offline

    return run_offline(args)


def _bench_ablate(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.ablate import run_ablate

    return run_ablate(args)


def _eval(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.evaluation.evaluate import run_eval

    return run_eval(args)


def _plan(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.planning.plan import run_plan

    return run_plan(args)


def _certs(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.access.certs import run_certs

    return run_certs(args)


def _server(args: argparse.Namespace) -> Any:
    from penstock.deployments.cli.server import connect

    tls = tls_of(args, args.url)
    return connect(args.url, model=args.model, api_key=_api_key(args), tls=tls)


def _api_key(args: argparse.Namespace) -> str | None:
    if args.api_key_file is not None:
        return read_client_key(args.api_key_file)
    return os.environ.get(KEY_VARIABLE)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _fail(error: Exception, status: int) -> int:
    print(f"penstock: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
