"""Write the generated parts of docs/reference: settings, command line, vLLM's flags,
metrics, errors, fields of bodies, clients, supported models.

    python -m tools.generate_reference [--check]

A page holds hand-written text, and blocks between `<!-- generated: NAME -->` and `<!-- end -->`,
which this program replaces. With --check it writes nothing, and exits with 1 if a page is out of
date.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.deployments.cli.flags.serve import flag_of
from penstock.deployments.cli.main import build_parser
from penstock.deployments.config import settings_by_group
from penstock.deployments.ingress.core.bounds.connections import Connections
from penstock.deployments.ingress.core.bounds.loop_watch import LoopWatch
from penstock.deployments.ingress.core.errors import CATALOGUE
from penstock.deployments.ingress.core.request_metrics import RequestMetrics
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.dispatch.lost_requests import LostRequests
from penstock.deployments.ingress.http.field_table import field_table
from penstock.deployments.ingress.journal.journals import JournalCounts
from penstock.deployments.ingress.metrics.collector import PenstockCollector
from penstock.deployments.security.api_keys import ApiKeys
from penstock.deployments.security.roles import ROUTES, RPCS
from penstock.deployments.security.watch import KeyFileWatch
from penstock.deployments.state.store import StoreStatus
from penstock.deployments.vllm_names.flag import NO_VALUE, VllmFlag
from penstock.deployments.vllm_names.table import SAME, TOPICS
from penstock.workers.settings import Setting
from penstock.workers.stats import EngineStats, WorkerInfo
from tools import supported_models
from tools.client_recordings import table as client_table

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def settings_tables() -> str:
    """One table for each group of settings, in the order of `penstock serve --help`."""
    parts = []
    for title, group in settings_by_group().items():
        rows = [
            (f"`{each.name}`", _values(each), _default(each.default), _sentence(each.help))
            for each in group
        ]
        table = _table(("setting", "values", "default", "meaning"), rows)
        parts.append(f"## {title[0].upper()}{title[1:]}\n\n{table}")
    return "\n".join(parts)


def _values(setting: Setting) -> str:
    """The allowed values: choices, or the type with its bounds."""
    if setting.choices:
        return ", ".join(f"`{each}`" for each in setting.choices)
    kind = {int: "whole number", float: "number", bool: "true, false", str: "text"}[setting.kind]
    kind += ", or a list of texts" if setting.is_list else ""
    return f"{kind}, {setting.bounds}" if setting.bounds else kind


def _default(value: Any) -> str:
    if value is None:
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def command_tables() -> str:
    """The commands of `penstock`, each with its arguments. `serve` refers to the settings."""
    return "\n".join(_commands("penstock", build_parser(), ""))


def _commands(name: str, parser: argparse.ArgumentParser, summary: str) -> Iterator[str]:
    """The section of one command, then those of its subcommands."""
    hidden = {"help", "version"}
    if name == "penstock serve":
        hidden |= {each.name for group in settings_by_group().values() for each in group}
        hidden -= {"model"}  # the one positional argument
    actions = [
        each
        for each in parser._actions
        if each.dest not in hidden and each.help is not argparse.SUPPRESS  # vLLM's names
    ]
    subparsers = [each for each in actions if isinstance(each, argparse._SubParsersAction)]
    rows = [_argument(each) for each in actions if each not in subparsers]
    if not subparsers:
        yield f"## `{name}`\n\n{_sentence(parser.description or summary)}\n"
    if name == "penstock serve":
        yield "Every [setting](settings.md) is a flag too: `num_workers` is `--num-workers N`.\n"
    if rows:
        yield _table(("argument", "meaning"), rows)
    for each in subparsers:
        summaries = {choice.dest: choice.help or "" for choice in each._choices_actions}
        for choice, subparser in each.choices.items():
            yield from _commands(f"{name} {choice}", subparser, summaries.get(choice, ""))


def _argument(action: argparse.Action) -> tuple[str, str]:
    flags = [f"`{flag}`" for flag in action.option_strings]
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    if action.choices is not None:
        value = "|".join(map(str, action.choices))
    if not flags:
        name = f"`{value}`"
    else:
        name = ", ".join(flags) + ("" if action.nargs == 0 else f" `{value}`")
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    return name, _sentence(text)


def vllm_tables() -> str:
    """vLLM's flags of `serve` by topic: the setting here, or the sentence that refuses them."""
    same = ", ".join(f"`{flag_of(name)}`" for name in SAME)
    parts = [f"The same flag in both: {same}, `--config`.\n"]
    for title, flags in TOPICS.items():
        rows = [(", ".join(f"`{name}`" for name in flag.names), *_answer(flag)) for flag in flags]
        table = _table(("vLLM", "Penstock", "remark"), rows)
        parts.append(f"## {title[0].upper()}{title[1:]}\n\n{table}")
    return "\n".join(parts)


def _answer(flag: VllmFlag) -> tuple[str, str]:
    """What becomes of a flag, and the remark."""
    remark = _sentence(flag.sentence)
    if flag.is_absent:
        return "refused", remark
    answers = []
    if flag.setting is not None:
        answers.append("MODEL" if flag.setting == "model" else f"`{flag_of(flag.setting)}`")
    if flag.read is not None:
        answers.append(", ".join(f"`{flag_of(name)}`" for name in flag.becomes))
    for value, settings in flag.values.items():
        shown = " ".join(f"`{_as_flag(*each)}`" for each in settings.items()) or "nothing to do"
        answers.append(shown if value == NO_VALUE else f"`{value}`: {shown}")
    if flag.setting is None and NO_VALUE not in flag.values:
        answers.append("others are refused")
    return "; ".join(answers), remark


def _as_flag(name: str, value: str | bool) -> str:
    """The flag that gives a setting this value."""
    if isinstance(value, bool):
        return flag_of(name if value else f"no_{name}")
    return f"{flag_of(name)} {shlex.quote(value)}"


def metrics_table() -> str:
    """Every metric that an ingress with a gate and a worker exports, as its collector names it."""
    info = WorkerInfo("a:1", epoch=1, token="", pid=1, model="m", max_model_len=9)
    gate = GateClient("ingress", where=None)  # type: ignore[arg-type]  # it never connects
    collector = PenstockCollector(
        RequestMetrics("m", 9),
        lambda: [(info, EngineStats())],
        gate,
        LostRequests(),
        JournalCounts(),
        Connections(1),
        LoopWatch(lambda: None),
        certificates={},
        store=lambda: StoreStatus("a kind", is_up=True),
        keys=KeyFileWatch(ApiKeys(), "keys", lambda: None),
    )
    rows = []
    for family in collector.collect():
        suffix = "_total" if family.type == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ()))
        name = f"`{family.name}{suffix}`"
        rows.append((name, family.type, labels, _sentence(family.documentation)))
    return _table(("metric", "type", "labels", "meaning"), rows)


def errors_table() -> str:
    """The error catalogue: what each code is over HTTP and over gRPC."""
    rows = [
        (f"`{code}`", str(entry.http_status), entry.grpc_status, entry.openai_type, entry.message)
        for code, entry in CATALOGUE.items()
    ]
    return _table(("code", "HTTP", "gRPC", "`error.type`", "message"), rows)


def access_tables() -> str:
    """Which role each route and each method asks for."""
    routes = [(f"`{method}`", f"`{path}`", need) for (method, path), need in ROUTES.items()]
    http = _table(("method", "path", "asks for"), routes)
    grpc = _table(("method", "asks for"), [(f"`{name}`", need) for name, need in RPCS.items()])
    return f"## HTTP\n\n{http}\n## gRPC\n\n{grpc}"


def field_tables() -> str:
    """What becomes of each field of a body, for each API."""
    parts = []
    for path, rows in field_table().items():
        table = _table(
            ("field", "it is", "meaning"),
            [(f"`{name}`", row.verdict, _sentence(row.about)) for name, row in rows.items()],
        )
        parts.append(f"## `{path}`\n\n{table}")
    return "\n".join(parts)


def clients_table() -> str:
    """Which client sends to which endpoint, and what of its bodies is ignored."""
    return _table(client_table.HEAD, client_table.rows())


def architectures_table() -> str:
    """The architectures that load."""
    head = ("architecture in `config.json`", "kind", "in GGUF files", "models")
    return _table(head, supported_models.architectures())


def switches_table() -> str:
    """The switches in which families differ."""
    return _table(("switch", "default", "what", "turned by"), supported_models.switches())


def absent_table() -> str:
    """Known architectures that do not load."""
    return _table(("architecture", "models", "not there yet"), supported_models.absent())


def memory_table() -> str:
    """Memory of known models by number format."""
    weights = [f"weights {each}, GB" for each in supported_models.FORMATS]
    kv = [f"KV {each}, MB" for each in supported_models.KV_FORMATS]
    head = ("model", "parameters", *weights, *kv, "context")
    return _table(head, supported_models.memory())


BLOCKS: dict[str, Callable[[], str]] = {
    "fields": field_tables,
    "access": access_tables,
    "settings": settings_tables,
    "commands": command_tables,
    "metrics": metrics_table,
    "errors": errors_table,
    "vllm": vllm_tables,
    "clients": clients_table,
    "architectures": architectures_table,
    "absent": absent_table,
    "switches": switches_table,
    "memory": memory_table,
}


def _sentence(text: str) -> str:
    """`text` in one line, with paths of pages as links relative to docs/reference."""
    line = " ".join(text.split())
    return re.sub(r"docs/((?:guide|design|operations)/([\w-]+)\.md)", r"[\2](../\1)", line)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def generated(page: str) -> str:
    """The text of a page with its generated blocks made anew."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]()}\n{match[3]}", page)


def pages() -> dict[Path, str]:
    """The pages of the reference that hold a generated block, with their text as it must be."""
    found = {path: path.read_text(encoding="utf-8") for path in sorted(REFERENCE.glob("*.md"))}
    return {path: generated(text) for path, text in found.items() if BLOCK.search(text)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    is_check = parser.parse_args().check
    stale = {p: text for p, text in pages().items() if p.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        if not is_check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.name} is out of date: run `make docs`" if is_check else f"wrote {path.name}")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
