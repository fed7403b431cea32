"""The flags of `penstock serve`: every setting, vLLM's names for them, and help by group.

cli/serve.py acts on them, once `settings_given` has put file and flags together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from penstock.deployments.cli.flags.commands import add_command
from penstock.deployments.cli.flags.parser import Parser
from penstock.deployments.config import settings, settings_by_group
from penstock.deployments.config_file import read_config
from penstock.deployments.model_entries import MODELS, place, within
from penstock.deployments.vllm_names.flag import VllmFlag, add_given, translated
from penstock.deployments.vllm_names.table import BY_NAME, FLAGS
from penstock.workers.errors import ConfigError
from penstock.workers.settings import Setting

USAGE = "penstock serve [MODEL] [--config FILE] [--SETTING VALUE ...]"
DESCRIPTION = "Serve a model over HTTP (OpenAI-compatible) and gRPC, until Ctrl-C."
EXAMPLES = """\
examples:
  penstock serve                                  the built-in model, on this machine only
  penstock serve ./my-checkpoint --num-workers 2  a folder with config.json and safetensors
  penstock serve ./model.Q4_K_M.gguf              a GGUF file
  penstock serve org/name --host 0.0.0.0 --api-keys-file keys.txt
  penstock serve --config penstock.yaml --http-port 9000

A file for --config holds the same settings, one a line (num_workers: 2); flags override it.
It may list several models, each with settings of its own (docs/guide/several-models.md).
Numbers may end in k, M or G (x1000), or Ki, Mi or Gi (x1024). Most of vLLM's flags are understood
(docs/reference/vllm.md).
"""
# What a first screen shows, as most servers need no more.
FIRST = (
    *("served_model_name", "host", "http_port", "grpc_port", "api_keys_file", "num_workers"),
    *("weights", "max_model_len", "kv_cache_gb", "max_num_seqs"),
)
ALL = "all"
NOT_SETTINGS = ("run", "config", "dump_config")  # of the parsed arguments
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_serve(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `serve` to the commands of the command line."""
    serve = add_command(
        commands,
        "serve",
        help="serve a model over HTTP and gRPC",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EXAMPLES,
        add_help=False,
    )
    _add_fixed(serve)
    for title, settings_of_group in settings_by_group().items():
        _add_settings(serve, title, settings_of_group)
    for flag in FLAGS:
        serve.add_argument(
            *flag.names,
            action=_Translate,
            flag=flag,
            nargs=flag.nargs,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    serve.set_defaults(run=run)


def settings_given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of the parsed arguments, over those of the file of --config.

    The file may use vLLM's names too, also in its list of models. Raises ConfigError.
    """
    given = {name: value for name, value in vars(args).items() if name not in NOT_SETTINGS}
    names = given.get("served_model_name", ())
    if len(names) > 1 and "model" not in given and not args.config:
        raise ConfigError(
            "--served-model-name takes all that follows it as names; write MODEL before it: "
            f"`penstock serve {names[-1]} --served-model-name {' '.join(names[:-1])}`"
        )
    if not args.config:
        return given
    known = frozenset(setting.name for setting in settings())
    read = translated(read_config(args.config), known, BY_NAME)
    if isinstance(entries := read.get(MODELS), list):
        read[MODELS] = [_translated_entry(i, each, known) for i, each in enumerate(entries)]
    return {**read, **given}


def _translated_entry(index: int, entry: Any, known: frozenset[str]) -> Any:
    """An entry of the list of models; what is none is left to config.py."""
    if not isinstance(entry, dict) or not all(isinstance(name, str) for name in entry):
        return entry
    with within(place(index)):
        return translated({k.replace("-", "_"): v for k, v in entry.items()}, known, BY_NAME)


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return f"--{name.replace('_', '-')}"


def help_text(topic: str | None) -> str:
    """The help for the first settings (None), for all, or for a group or setting of that name.

    Raises ConfigError for another topic.
    """
    groups = settings_by_group()
    parser = Parser(
        prog="penstock serve",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EXAMPLES if topic == ALL else f"{EXAMPLES}\n{_topics(groups)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    if topic is None:
        by_name = {setting.name: setting for setting in settings()}
        _add_fixed(parser)
        _add_settings(parser, "settings that most servers need", [by_name[each] for each in FIRST])
        return parser.format_help()
    if topic == ALL:
        _add_fixed(parser)
        shown = groups
    else:
        parser.epilog, parser.description = None, None
        shown = _shown(groups, topic)
    for title, of_group in shown.items():
        _add_settings(parser, title, of_group)
    return parser.format_help()


def _topics(groups: dict[str, list[Setting]]) -> str:
    width = max(len(_slug(title)) for title in groups)
    lines = [
        f"  --help={_slug(title):{width}}  {len(of_group)} setting{'s'[: len(of_group) - 1]}"
        for title, of_group in groups.items()
    ]
    head = f"{sum(map(len, groups.values()))} settings in all: --help=all shows them, or"
    return "\n".join([head, *lines])


def _shown(groups: dict[str, list[Setting]], topic: str) -> dict[str, list[Setting]]:
    """The group whose name begins with `topic`, or the setting of that name."""
    slug = _slug(topic.removeprefix("--"))
    if found := {title: each for title, each in groups.items() if _slug(title) == slug}:
        return found
    for title, of_group in groups.items():
        for setting in of_group:
            if _slug(setting.name) == slug:
                return {title: [setting]}
    if found := {title: each for title, each in groups.items() if _slug(title).startswith(slug)}:
        return found
    raise ConfigError(
        f"--help={topic}: there is no such setting, nor a group of them; groups: {ALL}, "
        f"{', '.join(map(_slug, groups))}"
    )


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-").replace("_", "-")


class _Help(argparse.Action):
    """Prints the help of a topic, and ends."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print(help_text(values if isinstance(values, str) else None), end="")
        parser.exit()


class _Translate(argparse.Action):
    """Puts the settings of a flag of vLLM into the namespace."""

    def __init__(self, option_strings: Sequence[str], dest: str, flag: VllmFlag, **options: Any):
        super().__init__(option_strings, argparse.SUPPRESS, **options)
        self._flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        value = values if isinstance(values, str) else " ".join(values or ()) or None
        add_given(vars(namespace), self._flag, str(option_string), value)


def _add_fixed(parser: argparse.ArgumentParser) -> None:
    """The arguments that are no flags of settings."""
    (model,) = (setting for setting in settings() if setting.name == "model")
    # Flags that are not given have no default here, so that the file's settings show through.
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help=f"{model.help} (default: {model.default})",
    )
    parser.add_argument(
        *("-h", "--help"),
        action=_Help,
        nargs="?",
        metavar="GROUP",
        default=argparse.SUPPRESS,
        help="show the help; GROUP: all, or a group of settings, or one setting",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these settings")
    parser.add_argument(
        "--dump-config",
        action="store_true",
        help="print all settings, as file and flags make them, in a form that --config reads; then "
        "end",
    )


def _add_settings(parser: argparse.ArgumentParser, title: str, group: Sequence[Setting]) -> None:
    shown = parser.add_argument_group(title)
    for setting in group:
        if setting.name != "model":
            _add_setting(shown, setting)


def _add_setting(group: Any, setting: Setting) -> None:
    flag = flag_of(setting.name)
    text = setting.help  # it says what no value means
    if setting.default is not None:
        text += f" (default: {setting.default})"
    text = text.replace("%", "%%")
    common = {"dest": setting.name, "default": argparse.SUPPRESS, "help": text}
    if setting.kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif {"on", "off"} <= {*setting.choices}:  # the flag alone is "on"
        group.add_argument(flag, choices=setting.choices, nargs="?", const="on", **common)
    elif setting.is_list:
        group.add_argument(flag, nargs="+", metavar=_METAVARS[setting.kind], **common)
    elif setting.choices:
        group.add_argument(flag, choices=setting.choices, **common)
    else:
        metavar = "N|MIN:MAX" if setting.is_range else _METAVARS[setting.kind]
        group.add_argument(flag, metavar=metavar, **common)
