"""The `penstock` command as people run it: its output, its server, and what remains afterwards."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.deployments.cli.flags.parser import with_dashes
from penstock.deployments.cli.main import build_parser, main
from penstock.deployments.cli.throughput import Throughput
from penstock.deployments.client import Client
from penstock.deployments.config import settings, settings_by_group
from penstock.deployments.prediction import predictor_file
from penstock.deployments.supervision.processes import descendants, is_running
from penstock.workers.stats import EngineStats
from penstock.workers.weights.hub import resolve_model
from tests.deployments.ports import free_port
from tests.deployments.waiting import eventually
from tests.hub.client import environment
from tests.hub.server import Hub, Repository, running_hub

PENSTOCK = [sys.executable, "-m", "penstock.deployments.cli"]
# Whatever `penstock serve` prints. Nothing of Ray is among it, also where a replica dies.
LINES = (
    *(r"Penstock \S+ serves org/builtin@v1 as 'builtin'", "starting Ray"),
    *(r"org/builtin is at commit \w{40}; 9.6 MiB to download to \S+", r"loading the model \(.*\)"),
    *(r"downloading \d+ % .*", r"loading weights \d+ % .*", "preparing the engine, for .*"),
    *(r"ready after \S+ s; fp32 weights of .* a worker", r"  (HTTP|gRPC|watch|try) +\S.*"),
    r"  model      org/builtin at \w{12}: up to 2,048 tokens of prompt and answer; fp32 weights",
    r"  computes   in float32 on the CPU with \d+ threads; native attention",
    r"  KV cache   float32, [\d,]+ blocks of 16 tokens a worker: [\d,]+ tokens, [\d.]+ requests "
    r"of 2,048 tokens at a time; at most 64 in a step; prefix caching on",
    r"  admission  predicted; at most 1,024 requests wait, each up to 120 s; num_workers 1, .*",
    r"  access     no TLS; no API keys, from this machine only",
    r"  logs       \S+/session_latest/logs/serve \(removed at the end; --ray-dir keeps them\)",
    "the chat template renders no tools: they are described in the system message",
    *("Ctrl-C stops", r"\d\d:\d\d:\d\d prompt .* tok/s.*", "stopped"),
    r"\d\d:\d\d:\d\d worker \w{8} does not report, and is replaced if it has ended: [01] of 1 .*",
    r"\d\d:\d\d:\d\d worker \w{8} (reports again|is ready): 1 of 1 workers serve",
)
PROMPT = [{"role": "user", "content": "Who was at the door?"}]


class Served:
    """A `penstock serve` process and all that it prints."""

    def __init__(self, *arguments: str, folder: Path, **environment: str):
        # Everything that it makes in passing goes into `folder`, where it shows if it stays.
        self.folder = folder
        self.began_s = time.monotonic()
        self.process = subprocess.Popen(
            [*PENSTOCK, "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
            env={**os.environ, "TMPDIR": str(folder), **environment},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str, within_s: float = 600) -> float:
        """Seconds from the start until `text` is printed. Fails if it never is."""
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() - self.began_s < within_s, self.output
            time.sleep(0.05)
        return time.monotonic() - self.began_s

    def end(self, number: int = signal.SIGINT) -> int:
        """Ctrl-C reaches all processes of the command, as a terminal sends it."""
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(timeout=200)
        self._reader.join(timeout=60)
        return status

    def assert_nothing_left(self, pids: list[int], *ports: int) -> None:
        deadline_s = time.monotonic() + 60
        while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not left
        assert list(self.folder.glob("penstock*")) == []  # torch keeps a cache of its own there
        for port in ports:
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def folder() -> Iterator[Path]:
    # Short, for Ray puts sockets below it, whose paths have a limit of 107 characters.
    path = Path(f"/tmp/pst-{os.getpid()}")
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def hub() -> Iterator[Hub]:
    builtin = Repository.of(resolve_model("builtin"), v1=0)
    builtin.token = "hf_secret0123"
    with running_hub(org__builtin=builtin) as hub:
        yield hub


def _wait_for_the_hub(served: Served, hub: Hub, http: int) -> None:
    """Let the weights come only when it has been seen that all wait for them."""
    served.wait_for("loading the model")
    is_asked = lambda: "model.safetensors" in hub.fetched()  # noqa: E731
    eventually(is_asked, 100, "the worker to fetch the weights")

    def told() -> str:
        try:
            return str(httpx.get(f"http://127.0.0.1:{http}/ready").json())
        except httpx.TransportError:
            return ""

    start = "no worker is ready yet: downloading 0 % (0 bytes of 9.6 MiB)"
    eventually(lambda: start in told(), 100, "the ingress to tell of the download")
    hub.is_free.set()


def test_serve_chat_and_leave_nothing_behind(folder, hub, tmp_path):
    http, grpc = free_port(), free_port()
    hub.is_free.clear()
    served = Served(
        *("org/builtin@v1", "--download-dir", str(tmp_path / "models")),
        *("--http-port", str(http), "--grpc-port", str(grpc), "--weights", "fp32"),
        folder=folder,
        **environment(hub, tmp_path / "home"),
        HF_TOKEN="hf_secret0123",
    )
    try:
        _wait_for_the_hub(served, hub, http)
        served.wait_for("ready after")
        fetched = hub.fetched()
        assert sorted(fetched) == sorted(set(fetched)) and fetched[-1] == "model.safetensors"
        assert not list((tmp_path / "home").glob("hub/models*"))
        pids = descendants(served.process.pid)
        assert len(pids) > 5
        with openai.OpenAI(base_url=f"http://127.0.0.1:{http}/v1", api_key="none") as client:
            _use_openai(client)
        with Client(f"127.0.0.1:{grpc}") as client:
            first = client.reply(PROMPT, temperature=0.9, seed=3, max_tokens=20)
            second = client.reply(PROMPT, temperature=0.9, seed=3, max_tokens=20)
            assert first.text == second.text
            assert first.usage.completion_tokens <= 20
            assert [model.name for model in client.models()] == ["builtin"]
        _use_commands(http, grpc)
        served.wait_for("tok/s")  # the line about throughput, as there was some
        metrics = _watch_metrics(served.output, http)
        _kill_the_worker(served)
        assert hub.fetched() == fetched  # the next one finds the files
        ready = f"http://127.0.0.1:{http}/ready"
        eventually(lambda: httpx.get(ready).status_code == 200, 60, "the ingress to reach it")
        pids = descendants(served.process.pid)
        with Client(f"127.0.0.1:{grpc}") as client:
            third = client.reply(PROMPT, temperature=0.9, seed=3, max_tokens=20)
            assert third.text == first.text
        # Its last heartbeat may be of the time when the request ran: "stopping" would be printed.
        eventually(lambda: _num_running(metrics) == 0, 30, "the worker to report that it is idle")
        time.sleep(1.5)  # until the registry has its next report, too
        assert served.end(signal.SIGINT) == 0
    finally:
        served.process.kill()
    assert served.lines[-1] == "stopped"
    assert "hf_secret" not in served.output
    assert [line for line in served.lines if not re.fullmatch("|".join(LINES), line)] == []
    served.assert_nothing_left(pids, http, grpc, metrics)


def _num_running(metrics: int) -> float:
    text = httpx.get(f"http://127.0.0.1:{metrics}/metrics").text
    found = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)
    assert found
    return sum(map(float, found))


def _kill_the_worker(served: Served) -> None:
    """As the kernel does for want of memory; returns once another one serves."""
    (worker,) = (
        pid
        for pid in descendants(served.process.pid)
        if b":Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(worker, signal.SIGKILL)
    served.wait_for("does not report")
    served.wait_for("is ready: 1 of 1")


def _cores_of(pid: int) -> dict[int, set[int]]:
    """By thread, those that it may run on; nothing if the process has ended."""
    cores = {}
    with contextlib.suppress(FileNotFoundError):
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            with contextlib.suppress(ProcessLookupError):
                cores[thread] = set(os.sched_getaffinity(thread))
    return cores


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a second core")
def test_the_engine_has_its_cores_for_itself_and_a_short_life_is_remembered(folder, tmp_path):
    mine = {max(os.sched_getaffinity(0))}
    http, grpc = free_port(), free_port()
    served = Served(
        *("--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", "0"),
        *("--compute-cores", str(*mine)),
        folder=folder,
        XDG_STATE_HOME=str(tmp_path),
    )
    try:
        served.wait_for("ready after")
        with Client(f"127.0.0.1:{grpc}") as client:
            assert client.reply(PROMPT, max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
        of_engines = []
        for pid in descendants(served.process.pid):
            cores = _cores_of(pid)
            if mine in cores.values():  # the worker: what else may run there came up as it loaded
                of_engines += [each for each in cores.values() if each == mine]
                cores = {pid: cores[pid]}
            assert all(each.isdisjoint(mine) for each in cores.values()), pid
        assert of_engines == [mine]
        with Client(f"127.0.0.1:{grpc}") as client:
            client.reply(PROMPT, max_tokens=4)
        assert served.end(signal.SIGTERM) == 0
    finally:
        served.process.kill()
    assert served.lines[-1] == "stopped" and "SIGTERM received" not in served.output
    (file,) = (tmp_path / "penstock").iterdir()  # saved in the end: no minute was over
    assert file.name.startswith("penstock_builtin_")
    learnt = predictor_file.load(str(file))
    assert ("builtin",) in learnt.ends.groups


def _watch_metrics(output: str, http: int) -> int:
    """One more request shows in the metrics, whose port is returned."""
    announced = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", output)
    assert announced, output
    port = int(announced[1])

    def value(name: str, **labels: str) -> float:
        """The sum over all series that have these labels."""
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        assert {s.labels["engine"] for s in samples if s.name == "penstock_steps_total"} <= {
            s.labels["engine"] for s in samples if s.name == "vllm:generation_tokens_total"
        }
        found = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, name
        return sum(found)

    watched: tuple[tuple[str, dict[str, str], int], ...] = (
        ("vllm:generation_tokens_total", {}, 7),
        ("vllm:prompt_tokens_total", {}, 3),
        ("vllm:request_success_total", {"finished_reason": "length"}, 1),
        ("vllm:request_success_total", {}, 1),
        ("vllm:request_queue_time_seconds_count", {}, 1),
        ("vllm:iteration_tokens_total_count", {}, 7),
        ("vllm:iteration_tokens_total_sum", {}, 3 + 6),
        ("penstock_steps_total", {}, 7),
    )
    before: list[float] = []
    while (now := [value(name, **labels) for name, labels, _ in watched]) != before:
        before = now
        time.sleep(2.5)  # workers announce theirs every second
    body = {"prompt": [5, 6, 7], "max_tokens": 7, "ignore_eos": True}
    assert httpx.post(f"http://127.0.0.1:{http}/v1/completions", json=body).is_success
    expected = [num + more for num, (_, _, more) in zip(before, watched)]
    deadline_s = time.monotonic() + 60
    while (seen := [value(name, **labels) for name, labels, _ in watched]) != expected:
        assert time.monotonic() < deadline_s, (seen, expected)
        time.sleep(0.2)
    assert value("penstock_workers_alive") == 1
    return port


def _use_openai(client: openai.OpenAI) -> None:
    call: dict[str, Any] = {
        "model": "builtin",
        "messages": PROMPT,
        "max_tokens": 24,
        "seed": 5,
    }
    whole = client.chat.completions.create(**call)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens <= 24
    chunks = list(
        client.chat.completions.create(**call, stream=True, stream_options={"include_usage": True})
    )
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    stop = text.split()[2]
    stopped = client.chat.completions.create(**call, stop=[stop])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**call, "model": "another"})


def _use_commands(http: int, grpc: int) -> None:
    for url in (f"http://127.0.0.1:{http}", f"grpc://127.0.0.1:{grpc}"):
        common = ["--url", url, "--max-tokens", "12", "--temperature", "0"]
        assert run("models", "--url", url) == "builtin\n"
        completed = run("complete", "It was a dark", *common)
        assert completed == run("complete", "-", *common, stdin="It was a dark")
        talked = run("chat", *common, stdin="Hello\n/nonsense\n/reset\nHello\n/quit\nnever said\n")
        answers, _, again = talked.partition("/nonsense is no command; /help lists them\n")
        assert answers == again  # after a reset the same question has the same answer
        assert answers.strip()
        assert run("chat", "Hello", *common) == answers


def run(*arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        [*PENSTOCK, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_corrupt_checkpoint_is_named_and_nothing_is_left(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(resolve_model("builtin"), broken)
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(5_000_000)
    http = free_port()
    served = Served(
        str(broken), "--http-port", str(http), "--grpc-port", str(free_port()), folder=folder
    )
    try:
        assert served.wait() == 1
    finally:
        served.process.kill()
    assert "model.safetensors" in served.output
    assert "truncated" in served.output
    assert "Traceback" not in served.output
    served.assert_nothing_left([], http)


def test_ray_without_tokens_is_refused_before_it_starts():
    done = subprocess.run(
        [*PENSTOCK, "serve", "--http-port", str(free_port()), "--grpc-port", str(free_port())],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode == 2 and "starting Ray" not in done.stdout
    assert "RAY_AUTH_MODE is 'disabled'" in done.stderr and "--insecure" in done.stderr


# The promise is 2 s. On this machine others may compute: what the process does by itself takes
# 0.5 s of waiting and little CPU, so the rest is the time that a busy machine takes to run it.
ENDED_S = 2.0
SLACK_S = 3.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("after", "later_s"),
    [("starting Ray", 0.0), ("starting Ray", 2.0), ("loading the model", 0.0)],
)
def test_a_signal_while_starting_ends_it_at_once(folder, after, later_s, number):
    served = Served("--http-port", str(free_port()), "--grpc-port", str(free_port()), folder=folder)
    try:
        served.wait_for(after)
        time.sleep(later_s)
        pids = descendants(served.process.pid)
        began_s, load = time.monotonic(), os.getloadavg()[0] / (os.cpu_count() or 1)
        assert served.end(number) == 130
        took_s = time.monotonic() - began_s
    finally:
        served.process.kill()
    assert took_s < (ENDED_S if load < 1.0 else ENDED_S + SLACK_S)
    assert "Traceback" not in served.output
    served.assert_nothing_left(pids)


@pytest.mark.parametrize("after", ["loading the model", "Ctrl-C stops"])
def test_the_end_of_its_raylet_ends_it_and_is_said(folder, after):
    """All processes that serve end with the raylet; without a word the driver waited for ever."""
    http, grpc = free_port(), free_port()
    served = Served("--http-port", str(http), "--grpc-port", str(grpc), folder=folder)
    try:
        served.wait_for(after)
        pids = descendants(served.process.pid)
        [raylet] = [pid for pid in pids if psutil.Process(pid).name() == "raylet"]
        os.kill(raylet, signal.SIGKILL)
        assert served.wait() == 1
    finally:
        served.process.kill()
    assert "penstock: Ray's process of this machine (raylet) has ended (SIGKILL)" in served.output
    assert "out of memory" in served.output and "Traceback" not in served.output
    served.assert_nothing_left(pids, http, grpc)


def test_every_setting_has_its_flag():
    named = [setting.name for group in settings_by_group().values() for setting in group]
    assert sorted(named) == sorted(setting.name for setting in settings())
    serve = build_parser()._subparsers._group_actions[0].choices["serve"]
    flags = {action.dest for action in serve._actions} - {argparse.SUPPRESS}  # vLLM's
    assert flags == {*named, "help", "config", "dump_config"}
    args = build_parser().parse_args(["serve", "m", "--no-prefix-cache", "--max-model-len", "4k"])
    assert (args.model, args.prefix_cache, args.max_model_len) == ("m", False, "4k")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--num-worker", "2"], "did you mean --num-workers?"),
        (["serve", "--kv-cache-gbb", "2"], "did you mean --kv-cache-gb?"),
        (["serve", "--frobnicate"], "unknown flag --frobnicate; see `penstock serve --help`"),
        (["serve", "a", "b"], "unexpected argument 'b'; see `penstock serve --help`"),
        (["serve", "--weights", "int3"], "--weights: invalid choice: 'int3'"),
        (["serve", "--help=everything"], "--help=everything: there is no such setting"),
        (["bench", "serve", "--num-request", "3"], "did you mean --num-requests?"),
        (["bench"], "required: WHAT; see `penstock bench --help`"),
        (["quantize", "m"], "required: --to"),
        (["chat", "--frobnicate"], "unknown flag --frobnicate; see `penstock chat --help`"),
        (["status", "--model", "m"], "unknown flag --model; see `penstock status --help`"),
        (["models", "--api-key", "x"], "unknown flag --api-key; did you mean --api-key-file?"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["serve", "/nowhere"], "not found"),
        (["serve", "hf://org/name"], "write the hub id without the address: org/name"),
        (["serve", "org/name@v2", "--revision", "v3"], "names the revision v2, and revision is v3"),
        (["serve", "name:Q4_K_M"], "'name:Q4_K_M' not found"),
        (["serve", "--num-workers", "many"], "whole number"),
        (["serve", "--config", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
        (["chat", "--url", "ftp://x"], "grpc://host:port"),
    ],
)
def test_misuse_is_explained_and_has_status_2(capsys, arguments, words):
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.startswith("penstock: ") and not said.out


def test_threads_of_an_engine_in_this_process_spin_briefly():
    """Set before PyTorch is loaded, when OpenMP reads it; a value of the caller stays."""
    script = (
        "import os, sys; from penstock.deployments.cli.main import main; main(['version']); "
        "print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    )
    plain = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    for given, count in (({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")):
        ran = subprocess.run(
            [sys.executable, "-c", script], env=plain | given, capture_output=True, text=True
        )
        assert ran.stdout.splitlines()[-1] == f"{count} False", ran.stderr


def test_a_reader_of_the_output_that_ends_early_is_no_error_to_report():
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run([*PENSTOCK, "plan", "Llama-3-8B"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (ran.returncode, ran.stderr) == (1, b"")


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 0
    assert "penstock COMMAND" in capsys.readouterr().out.replace("[-h] [--version] ", "")


def test_underscores_are_dashes_in_names_and_stay_in_values():
    given = ["--max_model_len=4_000", "--", "--a_b"]
    assert with_dashes(given) == ["--max-model-len=4_000", "--", "--a_b"]
    assert with_dashes(["--a_b c", "_x", "-a_b"]) == ["--a_b c", "_x", "-a_b"]
    args = build_parser().parse_args(["serve", "my_model", "--max_num_seqs", "8"])
    assert (args.model, args.max_num_seqs) == ("my_model", "8")


def test_no_server_is_said_in_plain_words(capsys):
    for scheme in ("http://", "grpc://", ""):
        url = f"{scheme}127.0.0.1:{free_port()}"
        assert main(["models", "--url", url]) == 1
        assert "penstock serve" in capsys.readouterr().err


def test_a_script_learns_that_its_message_got_no_answer(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/quit\n"))
    assert main(["chat", "--url", f"127.0.0.1:{free_port()}"]) == 1
    assert "no server answers" in capsys.readouterr().out


def test_throughput_is_said_while_there_is_some():
    now_s = 100.0
    throughput = Throughput(lambda: now_s)
    idle = EngineStats(num_blocks=50)
    busy = EngineStats(
        num_blocks=50,
        num_live_blocks=20,
        num_running=3,
        num_prompt_tokens=1000,
        num_generated_tokens=50,
        num_prefix_queried_tokens=1000,
        num_prefix_hit_tokens=250,
    )
    now_s += 1
    assert throughput.line([(1, busy)]) is None  # too soon
    now_s += 4
    line = throughput.line([(1, busy), (2, idle)])
    assert line is not None
    for part in ("prompt 200 tok/s", "generated 10 tok/s", "running 3", "KV 20 %", "hits 25 %"):
        assert part in line
    now_s += 5
    done = EngineStats(num_blocks=50, num_prompt_tokens=1000, num_generated_tokens=60)
    assert "generated 2 tok/s" in (throughput.line([(1, done)]) or "")
    now_s += 5
    assert throughput.line([(1, done), (3, idle)]) is None  # silent when idle
    now_s += 5
    assert "running 0, waiting 4," in (throughput.line([(1, done), (3, idle)], 4) or "")
