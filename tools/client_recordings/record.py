"""Run a client against a server of Penstock and write down what it sent.

    python -m tools.client_recordings.record --url http://127.0.0.1:8000 --out FOLDER litellm
    python -m tools.client_recordings.record --url ... --out FOLDER --name guidellm \\
        --version 0.8.1 -- guidellm run --backend kind=openai_http,target=URL ...

The first form runs a scenario of scenarios.py with a package installed here. The second runs any
command, in which the word URL stands for the address to give to the client.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.client_recordings.agents import forced_call, shortened
from tools.client_recordings.proxy import Exchange, RecordingProxy
from tools.client_recordings.scenarios import SCENARIOS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="of the server of Penstock")
    parser.add_argument("--out", required=True, type=Path, help="folder for NAME.json")
    parser.add_argument("--name", help="of the client, with a command")
    parser.add_argument("--version", help="of the client, with a command")
    parser.add_argument("--limit-s", type=float, default=120, help="of a command")
    parser.add_argument(
        "--call", default="", help='of an agent: the call asked for first, as NAME {"a": "value"}'
    )
    parser.add_argument("what", nargs="+", help="a client of scenarios.py, or a command")
    given = parser.parse_args()
    name = given.name or given.what[0]
    failure = ""
    change = forced_call(given.call) if given.call else shortened if given.name else dict
    with RecordingProxy(given.url, change) as proxy:
        try:
            if given.name:
                command = [word.replace("URL", proxy.url) for word in given.what]
                subprocess.run(command, timeout=given.limit_s, check=True)
            else:
                SCENARIOS[name](proxy.url)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    for each in proxy.exchanges:
        print(each.method, each.path, each.status, each.ignored, each.error, file=sys.stderr)
    refused = [each for each in proxy.exchanges if each.body is not None and each.error]
    if failure or refused:
        print(f"{name} failed: {failure[:2000] or refused}", file=sys.stderr)
        return 1
    version = given.version or importlib.metadata.version(name)
    recording = {"client": name, "version": version, "exchanges": unlike(proxy.exchanges)}
    path = given.out / f"{name}.json"
    path.write_text(json.dumps(recording, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def unlike(exchanges: list[Exchange]) -> list[dict[str, Any]]:
    """The exchanges with a body, without those that have the form of one before."""
    kept, forms = [], set()
    for each in exchanges:
        if each.body is None or each.body.get("previous_response_id"):  # which one server knows
            continue
        form = (each.path, json.dumps(form_of(each.body), sort_keys=True))
        if form not in forms:
            forms.add(form)
            parts = {"path": each.path, "headers": each.headers, "ignored": each.ignored}
            kept.append({name: part for name, part in parts.items() if part} | {"body": each.body})
    return kept


def form_of(value: Any) -> Any:
    """The value with the types of its texts and numbers in their place."""
    if isinstance(value, dict):
        return {name: form_of(part) for name, part in value.items()}
    if isinstance(value, list):
        return [form_of(part) for part in value]
    return value if isinstance(value, bool) else type(value).__name__


if __name__ == "__main__":
    sys.exit(main())
