"""The `penstock` command: its subcommands and their flags.

The flags of `serve` are the settings of the configuration. Each command imports what it needs when
it runs, so that `--help` is immediate.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from penstock.deployments.cli.calibrate import add_calibrate, run_calibrate
from penstock.deployments.cli.flags.batch import add_batch
from penstock.deployments.cli.flags.bench import add_bench
from penstock.deployments.cli.flags.certs import add_certs
from penstock.deployments.cli.flags.commands import add_command
from penstock.deployments.cli.flags.keys import add_keys
from penstock.deployments.cli.flags.plan import add_plan
from penstock.deployments.cli.flags.server import (
    DEFAULT_URL,
    KEY_VARIABLE,
    add_sampling_flags,
    add_server_flags,
    tls_of,
)
from penstock.deployments.cli.plan import run_plan
from penstock.deployments.cli.quantize import add_quantize, run_quantize
from penstock.deployments.config import config_from, settings, settings_by_group
from penstock.deployments.config_file import read_config
from penstock.deployments.security.key_file import read_client_key
from penstock.workers.errors import ConfigError
from penstock.workers.settings import Setting

SERVE_EXAMPLES = """\
examples:
  penstock serve                                  the built-in model, on this machine only
  penstock serve ./my-checkpoint --num-workers 2  a folder with config.json and safetensors
  penstock serve ./model.Q4_K_M.gguf              a GGUF file
  penstock serve org/name --host 0.0.0.0 --api-keys-file keys.txt
  penstock serve --config penstock.yaml --http-port 9000

A file for --config holds the same settings, one a line (num_workers: 2); flags override it.
Numbers may end in k, M or G (x1000), or Ki, Mi or Gi (x1024).
"""
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0 done, 1 failed, 2 misused, 130 interrupted."""
    args, rest = build_parser().parse_known_args(arguments)
    try:
        if rest:
            raise _not_understood(rest[0])
        status: int = args.run(args)
        return status
    except ConfigError as error:
        return _fail(error, 2)
    except (RuntimeError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Serve large language models on a Ray cluster, and talk to them.",
        epilog="A first tour: `penstock serve` in one terminal, `penstock chat` in another.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {version('penstock')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serve(commands)
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
    add_plan(commands, run_plan)
    add_certs(commands, _certs)
    experts = commands.add_parser(
        "experts", help="show hit rates and transfers of a server's expert caches"
    )
    add_server_flags(experts)
    experts.set_defaults(run=_experts)
    add_quantize(commands, run_quantize)
    add_calibrate(commands, run_calibrate)
    models = commands.add_parser("models", help="list the models of a server")
    add_server_flags(models)
    models.set_defaults(run=_models)
    status = commands.add_parser(
        "status", help="show a server's nodes, workers, scaling decisions and batches"
    )
    add_server_flags(status)
    status.set_defaults(run=_status)
    queue = commands.add_parser(
        "queue", help="show the requests that wait at a server's gate, and why"
    )
    add_server_flags(queue)
    queue.add_argument(
        "--limit", type=int, default=50, metavar="N", help="maximum rows (default: 50)"
    )
    queue.set_defaults(run=_queue)
    commands.add_parser("version", help="print the version").set_defaults(run=_version)
    return parser


def _add_serve(commands: Any) -> None:
    serve = add_command(
        commands,
        "serve",
        help="serve a model over HTTP and gRPC",
        usage="penstock serve [MODEL] [--config FILE] [--SETTING VALUE ...]",
        description="Serve a model over HTTP (OpenAI-compatible) and gRPC, until Ctrl-C.",
        epilog=SERVE_EXAMPLES,
    )
    groups = settings_by_group()
    (model,) = (setting for setting in groups["model"] if setting.name == "model")
    # Flags that are not given have no default here, so that the file's settings show through.
    serve.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help=f"{model.help} (default: {model.default})",
    )
    serve.add_argument("--config", metavar="FILE", help="YAML file with any of these settings")
    for title, settings_of_group in groups.items():
        group = serve.add_argument_group(title)
        for setting in settings_of_group:
            if setting is not model:
                _add_setting(group, setting)
    serve.set_defaults(run=_serve)


def _add_setting(group: Any, setting: Setting) -> None:
    flag = _flag(setting.name)
    text = setting.help  # it says what no value means
    if setting.default is not None:
        text += f" (default: {setting.default})"
    text = text.replace("%", "%%")
    common = {"dest": setting.name, "default": argparse.SUPPRESS, "help": text}
    if setting.kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif setting.choices:
        group.add_argument(flag, choices=setting.choices, **common)
    else:
        metavar = "N|MIN:MAX" if setting.is_range else _METAVARS[setting.kind]
        group.add_argument(flag, metavar=metavar, **common)


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser("chat", help="chat with a model in the terminal")
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
    from penstock.deployments.cli.serve import run_serve

    given = {name: value for name, value in vars(args).items() if name not in ("run", "config")}
    file = read_config(args.config) if args.config else {}
    return run_serve(config_from({**file, **given}))


def _chat(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.chat import ChatRepl

    with _server(args) as server:
        return ChatRepl(server, _sampling(args), system=args.system).run()


def _complete(args: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    with _server(args) as server:
        for text in server.complete(prompt, _sampling(args)):
            print(text, end="", flush=True)
    print()
    return 0


def _models(args: argparse.Namespace) -> int:
    with _server(args) as server:
        print("\n".join(server.models()))
    return 0


def _experts(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.experts import run_experts

    return run_experts(args.url, _api_key(args), tls_of(args, args.url))


def _status(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.status import run_status

    return run_status(args.url, _api_key(args), tls_of(args, args.url))


def _queue(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.status import run_queue

    return run_queue(args.url, _api_key(args), tls_of(args, args.url), args.limit)


def _version(_: argparse.Namespace) -> int:
    print(f"penstock {version('penstock')}")
    return 0


def _batch(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.batch import run_batch

    url = args.url or DEFAULT_URL
    return run_batch(args, url, _api_key(args), tls_of(args, url))


def _keys(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.keys import run_keys

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


def _certs(args: argparse.Namespace) -> int:
    from penstock.deployments.cli.certs import run_certs

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


def _not_understood(argument: str) -> ConfigError:
    """The error for an unknown flag or argument; it names the nearest flag."""
    if not argument.startswith("-"):
        return ConfigError(f"unexpected argument {argument!r}; see `penstock --help`")
    if argument.partition("=")[0] == "--model":
        return ConfigError("the model is given without a flag: `penstock serve MODEL`")
    flags = [_flag(setting.name) for setting in settings()]
    near = difflib.get_close_matches(argument.partition("=")[0], flags, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "see --help"
    return ConfigError(f"unknown flag {argument}; {hint}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _fail(error: Exception, status: int) -> int:
    print(f"penstock: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
