"""Third-party judges against a live server: clients, a property tester, a linter.

Each judge runs in a process of its own and says pass, FAIL with its last words, or what is missing
to run it. Exit status 1 if one failed.

    penstock serve --max-model-len 256 &    # so that no answer to a property tester is long
    python -m tools.conformance --http http://127.0.0.1:8000 --grpc 127.0.0.1:8001

Python judges want `pip install -e .[conformance]`; those in JavaScript want `npm install openai
@bufbuild/buf` in the folder that --npm names.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300

OPENAI = """
import openai
client = openai.OpenAI(base_url=HTTP + "/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Tell me of the sea."}]
ask = dict(model=model, messages=messages, max_tokens=12, temperature=0)
whole = client.chat.completions.create(**ask)
stream = list(client.chat.completions.create(
    **ask, stream=True, stream_options={"include_usage": True}))
text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
assert text == whole.choices[0].message.content, (text, whole)
assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens
go_on = dict(model=model, prompt="It was", max_tokens=20)
seeded = [client.completions.create(**go_on, seed=4).choices[0].text for _ in range(2)]
assert seeded[0] == seeded[1]
long = client.completions.create(**go_on, temperature=0)
stop = long.choices[0].text.strip().split()[1]
cut = client.completions.create(**go_on, temperature=0, stop=stop)
assert cut.choices[0].finish_reason == "stop" and stop not in cut.choices[0].text
for wrong, kind in (({"model": "nope"}, openai.NotFoundError), ({"temperature": -1},
                    openai.BadRequestError), ({"max_tokens": 10**9}, openai.BadRequestError)):
    try:
        client.chat.completions.create(**{**ask, **wrong})
    except kind:
        continue
    raise AssertionError(f"{wrong} was accepted")
"""

OPENAI_RESPONSES = """
import openai
client = openai.OpenAI(base_url=HTTP + "/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
ask = dict(model=model, input="Tell me of the sea.", max_output_tokens=10, temperature=0)
whole = client.responses.create(**ask)
events = list(client.responses.create(**ask, stream=True))
pieces = [e.delta for e in events if e.type == "response.output_text.delta"]
assert "".join(pieces) == whole.output_text
assert client.responses.retrieve(whole.id).output_text == whole.output_text
"""

ANTHROPIC = """
import anthropic
client = anthropic.Anthropic(base_url=HTTP, api_key="none", max_retries=0)
ask = dict(model="builtin", max_tokens=10, messages=[{"role": "user", "content": "Hello"}],
           extra_body={"temperature": 0})
whole = client.messages.create(**ask)
with client.messages.stream(**ask) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
assert client.messages.count_tokens(model="builtin", messages=ask["messages"]).input_tokens > 0
"""

LANGCHAIN = """
from langchain_openai import ChatOpenAI
model = ChatOpenAI(
    base_url=HTTP + "/v1", api_key="none", model="builtin", max_tokens=10, temperature=0)
whole = model.invoke("Hello").content
assert "".join(piece.content for piece in model.stream("Hello")) == whole
"""

REFLECTION = """
import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase)
channel = grpc.insecure_channel(GRPC)
database = ProtoReflectionDescriptorDatabase(channel)
services = set(database.get_services())
assert {"penstock.v1.InferenceService", "grpc.health.v1.Health"} <= services, services
pool = DescriptorPool(database)
for name in services:
    assert pool.FindServiceByName(name).methods
answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
assert answer.status == health_pb2.HealthCheckResponse.SERVING
"""

OPENAI_NODE = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: HTTP + "/v1", apiKey: "none", maxRetries: 0 });
const ask = { model: "builtin", max_tokens: 10, temperature: 0,
  messages: [{ role: "user", content: "Hello" }] };
const whole = await client.chat.completions.create(ask);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? "";
if (text !== whole.choices[0].message.content) throw new Error(text);
"""


@dataclass(frozen=True)
class Judge:
    """One outsider's verdict: a command, and how to tell that it is not installed."""

    name: str
    command: list[str]
    missing: str | None = None
    cwd: Path | None = None


def judges(http: str, grpc: str, python: str, npm: Path | None, scratch: Path) -> list[Judge]:
    def script(name: str, needs: str, code: str) -> Judge:
        found = subprocess.run([python, "-c", f"import {needs}"], capture_output=True).returncode
        head = f"HTTP, GRPC = {http!r}, {grpc!r}\n"
        missing = f"pip install {needs.replace('_', '-')}" if found else None
        return Judge(name, [python, "-c", head + code], missing)

    tester = Path(python).with_name("schemathesis")
    node = scratch / "judge.mjs"
    node.write_text(f"const HTTP = {http!r};\n{OPENAI_NODE}")
    modules = npm / "node_modules" if npm else None
    if modules is not None and modules.exists():
        (scratch / "node_modules").symlink_to(modules.resolve())
    has_openai = modules is not None and (modules / "openai").exists()
    buf = shutil.which("buf") or (str(modules / ".bin" / "buf") if modules else "")
    return [
        script("openai (Python): chat, completions, errors", "openai", OPENAI),
        script("openai (Python): responses", "openai", OPENAI_RESPONSES),
        script("anthropic (Python): messages", "anthropic", ANTHROPIC),
        script("langchain-openai", "langchain_openai", LANGCHAIN),
        script("grpc reflection and health", "grpc_reflection", REFLECTION),
        Judge(
            "openai (npm): chat",
            ["node", str(node)],
            None if has_openai and shutil.which("node") else "npm install openai; --npm FOLDER",
        ),
        Judge(
            "schemathesis on /openapi.json",
            [
                *(str(tester), "run", f"{http}/openapi.json", "--max-examples", "25"),
                *("--request-timeout", "60"),
                *("--checks", "not_a_server_error,status_code_conformance,"
                  "content_type_conformance,response_schema_conformance"),
            ],
            None if tester.exists() else "pip install schemathesis",
        ),
        Judge(
            "buf lint",
            [buf, "lint", str(ROOT / "protos")],
            None if buf and Path(buf).exists() else "npm install @bufbuild/buf; --npm FOLDER",
        ),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--http", default="http://127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    parser.add_argument("--python", default=sys.executable, help="where the clients are installed")
    parser.add_argument("--npm", type=Path, help="folder with node_modules")
    args = parser.parse_args()
    num_failed = 0
    print("| judge | verdict |\n| --- | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        for judge in judges(args.http, args.grpc, args.python, args.npm, Path(scratch)):
            verdict = "pass"
            if judge.missing:
                verdict = f"not run: {judge.missing}"
            else:
                done = subprocess.run(
                    judge.command, capture_output=True, text=True, timeout=TIMEOUT_S
                )
                if done.returncode:
                    num_failed += 1
                    words = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
                    verdict = "FAIL: " + " / ".join(words[-6:])
            print(f"| {judge.name} | {verdict} |", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
