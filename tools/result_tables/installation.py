"""Tables of installations that were executed step by step: cluster.yaml's, and the image's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.result_files import Result, fixed, markdown

SHOWN = 100  # characters of a command


def cluster_setup(result: Result) -> str:
    """Each command and its seconds, what sudo was asked for, and what a client then saw."""
    seen = result.figures
    rows = ((_code(each["command"]), _seconds(each)) for each in seen["steps"])
    asked = ", ".join(_code(each) for each in seen["sudo"])
    return "\n\n".join(
        (
            markdown(("command", "took"), rows),
            f"Asked of sudo: {asked}. Then {_about(seen['serving'])}",
        )
    )


def clean_root(result: Result) -> str:
    """Each instruction and its seconds, the root's size, and what the command did."""
    seen = result.figures
    rows = ((each["stage"], _code(each["instruction"]), _seconds(each)) for each in seen["steps"])
    ended = seen["command"]
    about = (
        f"The root has {seen['root_mib']:,} MiB; torch came {seen['torch']}. As user "
        f"{ended['user']}: {_about(ended)} `/live` {ended['live']}. After SIGTERM exit status "
        f"{ended['exit_status']} in {ended['stop_s']} s, {ended['processes_left']} processes left."
    )
    return "\n\n".join((markdown(("stage", "instruction", "took"), rows), about))


def _about(seen: Mapping[str, Any]) -> str:
    code = seen.get("completion", seen.get("chat"))
    return (
        f"ready after {seen['ready_s']} s; a request of a client: {code}, "
        f"{seen['completion_tokens']} tokens; without a key: {seen['without_key']}."
    )


def _seconds(step: Mapping[str, Any]) -> str:
    """Empty for what was not waited for, or took no time."""
    return fixed(step["seconds"], 1, " s") if step["seconds"] else ""


def _code(command: str) -> str:
    text = " ".join(command.split())
    shown = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
    return f"`{shown}`".replace("|", "\\|")
