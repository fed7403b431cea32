"""Reports of batches that run elsewhere: who sees them, for how long, and through which ingress."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from dataclasses import replace

import httpx
import pytest

from penstock.deployments.batch import job_reports
from penstock.deployments.batch.lease import Owner
from penstock.deployments.batch.runner import Progress
from penstock.deployments.batch.server_target import ServerTarget
from penstock.deployments.cli import main as cli
from penstock.deployments.ingress.http.jobs import KEPT_S, MAX_JOBS, JobBoard
from penstock.deployments.supervision.view import ClusterView, IngressInfo, JobReport
from penstock.workers.request import FinishReason
from tests.deployments.serving import ScriptedBackend, Serving, tokenizer
from tests.deployments.waiting import until

REPORT = JobReport("j", 1, "a", "in.jsonl", "host", "running", 10, 3, 1, 2, "", at=1000.0)
BODY = {
    "id": "j", "number": 1, "name": "in.jsonl", "host": "host", "state": "running",
    "num_lines": 10, "num_completed": 3, "num_failed": 1, "num_in_flight": 2,
}  # fmt: skip
OWNER = Owner(fence=2, host="host-a", kernel="k", pid=7, token="0badcafe")


def ingress(*jobs: JobReport) -> IngressInfo:
    return IngressInfo("other", 1, "", "", num_workers=1, jobs=jobs)


def test_a_report_is_kept_for_a_minute_and_the_newest_counts():
    now = 1000.0
    board = JobBoard(lambda: now)
    board.add(replace(REPORT, number=2, num_completed=5))
    board.add(REPORT)  # overtaken on its way
    now += KEPT_S - 1
    (job,) = board.of("a", ClusterView())
    assert (job.num_completed, job.age_s) == (5, KEPT_S - 1)
    now += 2
    assert board.of("a", ClusterView()) == []
    assert board.own() == ()


def test_a_key_sees_its_own_jobs_whichever_ingress_got_the_report():
    board = JobBoard(lambda: 1001.0)
    board.add(REPORT)
    newer = replace(REPORT, number=2, num_completed=6)
    foreign = replace(REPORT, job="k", owner="b")
    view = ClusterView(ingresses=(ingress(newer, foreign), ingress(REPORT)))
    assert [job.num_completed for job in board.of("a", view)] == [6]
    assert [job.id for job in board.of("b", view)] == ["k"]
    assert board.of("", view) == []


def test_there_is_a_limit():
    board = JobBoard(lambda: 1000.0)
    for number in range(MAX_JOBS + 3):
        board.add(replace(REPORT, job=str(number)))
    kept = [each.job for each in board.own()]
    assert kept == [str(number) for number in range(3, MAX_JOBS + 3)]


def test_the_route_wants_a_key_and_shows_a_job_to_this_key_alone():
    with Serving(ScriptedBackend([5]), api_keys=("one", "two")) as servers:

        def call(method: str, path: str, key: str | None, **given: object) -> httpx.Response:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            url = servers.base_url + path
            return httpx.request(method, url, headers=headers, timeout=30, **given)  # type: ignore[arg-type]

        jobs, status = "/v1/penstock/jobs", "/v1/penstock/status"
        assert call("POST", jobs, None, json=BODY).status_code == 401
        assert call("POST", jobs, "one", json=BODY).json() == {"kept_s": KEPT_S}
        (job,) = call("GET", status, "one").json()["jobs"]
        assert job.pop("age_s") < 30
        assert job == {name: BODY[name] for name in BODY if name != "number"} | {"cause": ""}
        assert call("GET", status, "two").json()["jobs"] == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"state": "done"}, "state"),
        ({"num_lines": -1}, "num_lines"),
        ({"id": ""}, "id"),
        ({"host": "x" * 201}, "host"),
        ({"more": 1}, "more"),
    ],
)
def test_a_wrong_report_is_refused(change, named):
    with Serving(ScriptedBackend([5])) as servers:
        answer = httpx.post(f"{servers.base_url}/v1/penstock/jobs", json=BODY | change, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == named


def test_a_batch_shows_in_the_status_of_its_server_while_it_runs_and_afterwards(
    tmp_path, monkeypatch, capsys
):
    """`penstock batch` as it is run, also in a job of Ray."""
    monkeypatch.setattr(job_reports, "REPORT_S", 0.1)
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
        for n in range(30)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    backend = ScriptedBackend(tokenizer().encode("water"), 0.3, FinishReason.STOP)
    with Serving(backend) as servers:
        arguments = ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
        ended: list[int] = []
        program = [*arguments, "--url", servers.base_url, "--max-in-flight", "4", "--no-progress"]
        monkeypatch.setattr("penstock.deployments.cli.batch._run_until_signal", _without_signals)
        running = threading.Thread(target=lambda: ended.append(cli.main(program)))
        running.start()
        seen = set()
        while running.is_alive():
            jobs = httpx.get(f"{servers.base_url}/v1/penstock/status", timeout=30).json()["jobs"]
            seen |= {(each["state"], each["num_completed"], each["name"]) for each in jobs}
            time.sleep(0.05)
        running.join()
        assert ended == [0]
        under_way = {num for state, num, _ in seen if state == "running"}
        assert len(under_way) >= 3 and {name for _, _, name in seen} == {"in.jsonl"}
        capsys.readouterr()
        assert cli.main(["status", "--url", servers.base_url]) == 0
    shown = capsys.readouterr().out
    (line,) = (line for line in shown.splitlines() if " in.jsonl " in line)
    assert " finished " in line and " 30 " in line and "100 %" in line


async def _without_signals(args, where):
    from penstock.deployments.cli.batch import _run_on_loop

    return await _run_on_loop(args, where)


def test_reports_cost_a_batch_nothing_where_the_server_takes_none(monkeypatch):
    """Another OpenAI-compatible server; and a server that went away."""
    monkeypatch.setattr(job_reports, "REPORT_S", 0.01)
    statuses: list[int | None] = []

    class Server(ServerTarget):
        async def report(self, body):
            statuses.append(404 if len(statuses) >= 3 else None)
            return statuses[-1]

    async def scenario():
        server = Server("http://127.0.0.1:1", api_key=None, max_connections=1)
        async with server, job_reports.reported(server, OWNER, "in.jsonl", Progress(3)):
            await until(lambda: len(statuses) >= 4)
            await asyncio.sleep(0.1)  # for one too many

    asyncio.run(scenario())
    assert statuses == [None, None, None, 404]


def test_the_last_report_says_how_the_batch_ended(monkeypatch):
    bodies = []

    class Server(ServerTarget):
        async def report(self, body):
            bodies.append(body)
            return 200

    async def ended_by(error: BaseException | None) -> dict:
        server = Server("http://127.0.0.1:1", api_key=None, max_connections=1)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            async with server, job_reports.reported(server, OWNER, "in.jsonl", Progress(3)):
                await asyncio.sleep(0.01)
                if error is not None:
                    raise error
        return bodies[-1]

    for error, state in (
        (None, "finished"),
        (OSError("disk"), "failed"),
        (asyncio.CancelledError(), "interrupted"),
    ):
        last = asyncio.run(ended_by(error))
        assert (last["state"], last["id"], last["host"]) == (state, "0badcafe-2", "host-a")
        assert last["number"] >= 2
