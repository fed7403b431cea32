"""`penstock bench`: against live servers over the real engine, and against scripted ones.

Counts and tokens are checked exactly; of times, only what no slow machine can break.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock.deployments.bench.http_client import HttpConnections, HttpError
from penstock.deployments.bench.load import Job, WordPrompts
from penstock.deployments.bench.offline import drain_all
from penstock.deployments.bench.open_loop import BenchCall, calibrate, fitting, make_calls, run_load
from penstock.deployments.bench.report import PLOT_REMEDY
from penstock.deployments.bench.targets import TargetError, TargetModel, TargetPiece, target_of
from penstock.deployments.cli.main import main
from penstock.workers.errors import ConfigError
from penstock.workers.request import FinishReason
from tests.deployments.serving import ScriptedBackend, Serving, new_engine
from tests.deployments.waiting import eventually

NUM = 12
LOAD = ("--num-requests", str(NUM), "--rate", "200", "--input-len", "5:40", "--output-len", "2:9")


def url_of(serving: Serving, scheme: str) -> str:
    return serving.base_url if scheme == "http" else f"grpc://{serving.grpc_target}"


def bench(tmp_path, url: str, *flags: str) -> dict[str, Any]:
    path = tmp_path / "out.json"
    assert main(["bench", "serve", "--url", url, *flags, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_run_counts_every_request_and_token(serving, tmp_path, capsys, scheme):
    flags = (*LOAD, "--prompts", "ids", "--max-tokens-from-trace", "--slo-ttft-ms", "60000")
    result = bench(tmp_path, url_of(serving, scheme), *flags)
    figures, requests = result["figures"], result["requests"]
    assert figures["num_requests"] == figures["num_completed"] == len(requests) == NUM
    assert figures["errors"] == {} and figures["num_cut"] == 0
    assert all(row["output_tokens"] == row["wanted_output_tokens"] for row in requests)
    assert all(
        sum(row["chunk_tokens"]) in (row["output_tokens"], row["output_tokens"] - 1)
        for row in requests
    )
    assert figures["output_tokens"] == sum(row["wanted_output_tokens"] for row in requests)
    assert figures["input_tokens"] == sum(row["prompt_tokens"] for row in requests)
    assert figures["input_tokens_estimated"] == 0
    assert figures["goodput"]["share"] == 1
    assert [row["planned_s"] for row in requests] == sorted(row["planned_s"] for row in requests)
    assert f"{NUM} of {NUM}" in capsys.readouterr().out


def test_http_and_grpc_measure_the_same_load(serving, tmp_path):
    flags = (*LOAD, "--prompts", "ids", "--vocab-size", "500", "--max-tokens-from-trace")
    seen = [bench(tmp_path, url_of(serving, scheme), *flags) for scheme in ("http", "grpc")]
    facts = [
        [(r["planned_s"], r["prompt_tokens"], r["output_tokens"]) for r in each["requests"]]
        for each in seen
    ]
    assert facts[0] == facts[1]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_the_client_cuts_what_the_server_is_not_sent(serving, tmp_path, scheme):
    flags = (*LOAD, "--prompts", "ids", "--max-tokens", "400")
    result = bench(tmp_path, url_of(serving, scheme), *flags)
    figures, requests = result["figures"], result["requests"]
    assert figures["num_cut"] == figures["num_completed"] == NUM
    assert all(row["output_tokens"] >= row["wanted_output_tokens"] for row in requests)
    assert figures["output_tokens"] < NUM * 400  # no request ran to the limit
    # The server stops working for a client that has gone.
    eventually(lambda: serving.backend.num_live_blocks == 0, 180)


def test_chat_until_the_model_ends(serving, tmp_path):
    flags = ("--chat", "--until-eos", "--max-tokens", "30", "--num-requests", "3", "--rate", "50")
    result = bench(tmp_path, serving.base_url, *flags, "--input-len", "40")
    assert result["figures"]["num_completed"] == 3
    for row in result["requests"]:
        assert 1 <= row["output_tokens"] <= 30 and not row["was_cut"]
        assert 30 <= row["prompt_tokens"] <= 52  # of words: about 40


def test_what_does_not_fit_is_refused_or_left_out(serving, tmp_path, capsys):
    url = url_of(serving, "grpc")
    flags = ("--prompts", "ids", "--num-requests", "20", "--rate", "500", "--output-len", "2")
    assert main(["bench", "serve", "--url", url, *flags, "--input-len", "500:520"]) == 2
    assert "do not fit the 512 tokens" in capsys.readouterr().err
    figures = bench(tmp_path, url, *flags, "--input-len", "500:520", "--skip-too-long")["figures"]
    assert 0 < figures["num_completed"] == figures["num_requests"] < 20
    clipped = bench(tmp_path, url, *flags, "--input-len", "900", "--max-prompt-tokens", "30")
    assert clipped["figures"]["input_tokens"] == 20 * 30


def test_failures_are_counted_by_kind(tmp_path):
    script = ([300], [301], "worker_lost")
    with Serving(ScriptedBackend(*script)) as serving:
        for scheme in ("http", "grpc"):
            path = tmp_path / "out.json"
            flags = ("--num-requests", "4", "--rate", "100", "--prompts", "ids")
            url = url_of(serving, scheme)
            assert main(["bench", "serve", "--url", url, *flags, "--json", str(path)]) == 1
            figures = json.loads(path.read_text())["figures"]
            assert figures["errors"] == {"worker_lost": 4}
            assert figures["num_completed"] == figures["output_tokens"] == 0


def test_times_are_those_of_a_server_of_known_timing(tmp_path):
    script = (0.3, [300], 0.2, [301], 0.2, [302, 303], FinishReason.LENGTH)
    with Serving(ScriptedBackend(*script)) as serving:
        flags = ("--num-requests", "2", "--arrivals", "at-once", "--prompts", "ids", "--until-eos")
        result = bench(tmp_path, url_of(serving, "grpc"), *flags)
        figures = result["figures"]
        assert figures["token_counts"] == {"exact": 2}
        assert figures["ttft_ms"]["p50"] >= 300
        assert figures["e2e_ms"]["p50"] >= 700
        for row in result["requests"]:
            assert row["chunk_tokens"][:3] == [1, 1, 2] and row["output_tokens"] == 4
        # Three inter-token times each, which sum up to the time from first to last token.
        spans_s = [row["chunks_s"][2] - row["chunks_s"][0] for row in result["requests"]]
        assert figures["itl_ms"]["mean"] * 6 == pytest.approx(sum(spans_s) * 1e3)


def test_no_server_there_or_no_such_model(serving, capsys):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", "--num-requests", "1"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
    for scheme in ("http", "grpc"):
        flags = ("--url", url_of(serving, scheme), "--model", "other")
        assert main(["bench", "serve", *flags]) == 1
        assert "no such model: the server has: builtin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--url", "ftp://x"), "cannot read --url"),
        (("--chat", "--prompts", "ids"), "--prompts ids"),
        (("--extra-body", "{"), "--extra-body is not JSON"),
        (("--extra-body", "3"), "must be a JSON object"),
        (("--arrivals", "trace"), "needs a --trace"),
        (("--trace", "/nowhere"), "/nowhere"),
        (("--input-len", "x"), "cannot read the length"),
    ],
)
def test_misuse_is_reported(capsys, flags, message):
    assert main(["bench", "serve", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "serve", "--plot", "out.png"]) == 2
    assert PLOT_REMEDY in capsys.readouterr().err
    assert "pip install" in PLOT_REMEDY


def test_a_picture_is_drawn(serving, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    bench(tmp_path, serving.base_url, *LOAD, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_offline_serves_every_token():
    jobs = [Job(0.0, 3 + i, 1 + i) for i in range(20)]
    step_tokens: list[int] = []
    outcomes, figures = drain_all(new_engine(), jobs, seed=0, on_step=step_tokens.append)
    assert [each.num_output_tokens() for each in outcomes] == [job.output_tokens for job in jobs]
    assert figures["output_tokens"] == sum(step_tokens) == sum(job.output_tokens for job in jobs)
    assert figures["input_tokens"] == sum(job.prompt_tokens for job in jobs)
    assert figures["num_steps"] == len(step_tokens) and figures["errors"] == {}


def test_offline_command(tmp_path, capsys):
    path = tmp_path / "out.json"
    flags = ("--num-requests", "3", "--input-len", "9", "--output-len", "4", "--threads", "1")
    assert main(["bench", "offline", *flags, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert (figures["input_tokens"], figures["output_tokens"]) == (27, 12)
    assert "engine step" in capsys.readouterr().out
    assert main(["bench", "offline", "--input-len", "999999"]) == 2


class WaitingTarget:
    """A target that answers no request until `num` are under way, and counts them."""

    def __init__(self, num: int):
        self._num = num
        self._are_there = asyncio.Event()
        self.num_under_way = self.most_under_way = 0

    async def model(self) -> TargetModel:
        return TargetModel("m")

    async def answer(self, prompt: Any, max_tokens: int) -> AsyncGenerator[TargetPiece, None]:
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        if self.num_under_way >= self._num:
            self._are_there.set()
        try:
            await self._are_there.wait()
            await asyncio.sleep(0)
            for _ in range(max_tokens):
                yield TargetPiece(1, 1)
            yield TargetPiece(0, 0, 3, max_tokens)
        finally:
            self.num_under_way -= 1

    async def close(self) -> None: ...


def calls_of(num: int, gap_s: float = 0.0, cut_at: int | None = None) -> list[BenchCall]:
    return [BenchCall(Job(i * gap_s, 3, 5), "x", 5, cut_at) for i in range(num)]


def test_the_loop_is_open():
    """Requests go out while none is answered; a closed loop would wait for ever."""

    async def run() -> list[str | None]:
        outcomes = await run_load(WaitingTarget(8), calls_of(8, gap_s=0.002), timeout_s=60)
        return [each.error for each in outcomes]

    assert asyncio.run(run()) == [None] * 8


def test_max_concurrency_is_kept_and_timeouts_are_reported():
    async def run() -> None:
        target = WaitingTarget(3)
        outcomes = await run_load(target, calls_of(10), max_concurrency=3, timeout_s=60)
        assert target.most_under_way == 3
        assert [each.num_output_tokens() for each in outcomes] == [5] * 10
        never = await run_load(WaitingTarget(99), calls_of(2), timeout_s=0.01)
        assert [each.error for each in never] == ["timeout"] * 2
        cut = await run_load(WaitingTarget(1), calls_of(2, cut_at=2))
        assert [(each.was_cut, len(each.chunks)) for each in cut] == [(True, 2)] * 2

    asyncio.run(run())


def test_the_server_gets_the_true_length_only_when_requested():
    jobs = [Job(0.0, 10, n) for n in (3, 20, 7)]

    def sent(ending: str, max_tokens: int | None = None, length: int | None = None) -> list[Any]:
        calls = make_calls(
            jobs,
            lambda num, rng: [0] * num,
            TargetModel("m", length),
            ending=ending,
            max_tokens=max_tokens,
            is_exact=True,
            seed=0,
        )
        return [(call.max_tokens, call.cut_at) for call in calls]

    assert sent("cut") == [(20, 3), (20, None), (20, 7)]
    assert sent("cut", max_tokens=50) == [(50, 3), (50, 20), (50, 7)]
    assert sent("cut", max_tokens=5) == [(5, 3), (5, None), (5, None)]
    assert sent("known") == [(3, None), (20, None), (7, None)]
    assert sent("free", max_tokens=50, length=32) == [(22, None)] * 3  # what the context leaves
    with pytest.raises(ConfigError, match="1 of 3 requests do not fit the 29 tokens"):
        sent("cut", length=29)
    assert fitting(jobs, TargetModel("m", 29), is_exact=True) == [jobs[0], jobs[2]]
    assert fitting(jobs, TargetModel("m"), is_exact=False) == jobs


def test_calibration_asks_the_server(serving):
    async def run() -> WordPrompts:
        target = target_of(
            serving.base_url, model=None, api_key=None, is_chat=True, sampling={}, extra_body={}
        )
        try:
            await target.model()
            return await calibrate(target, seed=0)
        finally:
            await target.close()

    prompts = asyncio.run(run())
    assert 0.8 < prompts.tokens_per_word < 1.6
    assert prompts.overhead > 1  # a chat template adds tokens of its own


class RawServer:
    """Answers every request on a connection with the next of `answers`: bytes to send, each part
    on its own; None, also for a part, closes the connection."""

    def __init__(self, *answers: Sequence[bytes | None] | None):
        self._answers = list(answers)
        self.num_connections = 0

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while self._answers:
                head = await reader.readuntil(b"\r\n\r\n")
                if b"content-length" in head:
                    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                    await reader.readexactly(int(length))
                answer = self._answers.pop(0)
                if answer is None:
                    break
                for part in answer:
                    if part is None:
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.01)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


def test_http_bodies_of_every_form_and_connections_used_again():
    async def run() -> None:
        answers = [
            [CHUNKED[:9], CHUNKED[9:] + b"3\r\nab", b"c\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n"],
            [SIZED],
            None,  # closed just when it is needed again: sent once more on a new connection
            [SIZED],
            [b"HTTP/1.1 503 No\r\nConnection: close\r\ncontent-length: 2\r\n\r\nno"],
            [b"HTTP/1.1 200 OK\r\n\r\nuntil ", b"the end", None],
        ]
        async with RawServer(*answers) as server:
            connections = HttpConnections(urlsplit(server.url), {}, 60.0, None)
            assert await (await connections.get("/")).read() == b"abc0123456789"
            assert await (await connections.post_json("/", b"{}")).read() == b"hello"
            assert server.num_connections == 1
            assert await (await connections.get("/")).read() == b"hello"
            assert server.num_connections == 2
            refused = await connections.get("/")
            assert (refused.status, await refused.read()) == (503, b"no")
            assert await (await connections.get("/")).read() == b"until the end"
            assert server.num_connections == 3
            await connections.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        [b"SSH-2.0-x\r\n\r\n"],
        [CHUNKED + b"5\r\nhel", None],
        [CHUNKED + b"zz\r\n"],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello", None],
        None,
    ],
)
def test_http_that_breaks_off_is_an_error(answer):
    async def run() -> None:
        async with RawServer(answer) as server:
            connections = HttpConnections(urlsplit(server.url), {}, 60.0, None)
            try:
                await (await connections.get("/")).read()
            finally:
                await connections.close()

    with pytest.raises(HttpError):
        asyncio.run(run())


def sse(*bodies: str) -> list[bytes]:
    lines = "".join(f"data: {body}\n\n" for body in bodies).encode()
    return [CHUNKED, b"%x\r\n%s\r\n0\r\n\r\n" % (len(lines), lines)]


@pytest.mark.parametrize(
    ("events", "pieces"),
    [
        (  # token ids in each choice make the counts exact
            ('{"choices":[{"text":"ab","token_ids":[1,2],"finish_reason":"length"}]}', "[DONE]"),
            [TargetPiece(2, 2)],
        ),
        (  # so does usage in every event
            (
                '{"choices":[{"text":"abc"}],"usage":{"prompt_tokens":9,"completion_tokens":2}}',
                '{"choices":[{"text":"d","finish_reason":"stop"}],'
                '"usage":{"prompt_tokens":9,"completion_tokens":3}}',
                '{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}',
            ),
            [TargetPiece(3, 2, 9, 2), TargetPiece(1, 1, 9, 3), TargetPiece(0, None, 9, 3)],
        ),
        (  # chat: the role is no token, reasoning is
            (
                '{"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}',
                '{"choices":[{"delta":{"reasoning_content":"hm"}}]}',
                '{"choices":[{"delta":{"content":"yes"}}]}',
                '{"choices":[{"delta":{},"finish_reason":"stop"}]}',
            ),
            [TargetPiece(2), TargetPiece(3)],
        ),
        (('{"choices":[{"text":"a"}]}',), "broke off"),
        (('{"error":{"message":"m","code":"worker_lost"}}',), "worker_lost"),
        (("{}",), "protocol"),
        (("not json",), "protocol"),
    ],
)
def test_events_of_other_servers(events, pieces):
    async def run() -> list[TargetPiece]:
        async with RawServer(sse(*events)) as server:
            target = target_of(
                server.url, model="m", api_key=None, is_chat=False, sampling={}, extra_body={}
            )
            try:
                return [piece async for piece in target.answer("x", 5)]
            finally:
                await target.close()

    if isinstance(pieces, str):
        with pytest.raises(TargetError) as caught:
            asyncio.run(run())
        assert caught.value.kind == pieces
    else:
        assert asyncio.run(run()) == pieces
