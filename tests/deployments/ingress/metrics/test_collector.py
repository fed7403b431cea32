"""Metrics after known traffic: what is scraped equals what was sent, to the token."""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import aclosing, contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.deployments.client import Client
from penstock.deployments.ingress.core.bounds.connections import Connections
from penstock.deployments.ingress.core.bounds.loop_watch import LoopWatch
from penstock.deployments.ingress.core.call import TokenUsage
from penstock.deployments.ingress.core.errors import CATALOGUE
from penstock.deployments.ingress.core.request_metrics import (
    DISCONNECT,
    FORGET_S,
    RequestMetrics,
    RequestTimes,
    token_bounds,
)
from penstock.deployments.ingress.dispatch.gate_client import GateClient
from penstock.deployments.ingress.dispatch.lost_requests import LostRequests
from penstock.deployments.ingress.journal.journals import JournalCounts
from penstock.deployments.ingress.metrics.collector import ModelSources, PenstockCollector
from penstock.deployments.ingress.metrics.server import MetricsServer
from penstock.deployments.security.api_keys import ApiKeys
from penstock.deployments.security.watch import KeyFileWatch
from penstock.deployments.state.store import StoreStatus
from penstock.workers.execution.timing import PHASES
from penstock.workers.request import Delta, FirstTokenTimes
from penstock.workers.stats import DeferralStats, EngineStats, RankStats, WorkerInfo
from tests.deployments.serving import EngineBackend, ScriptedBackend, Serving, reference_ids

DOCS = Path(__file__).resolve().parents[4] / "docs"
ENGINE = "127.0.0.1:4242"
LABELS = {"model_name": "builtin", "engine": ENGINE}
GREEDY = {"temperature": 0, "ignore_eos": True}
PER_REQUEST = (
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
)


class NamedBackend(EngineBackend):
    """The real engine, under an address as the channel gives it."""

    async def generate(self, request):
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                delta.engine = ENGINE
                yield delta

    def workers(self):
        info = WorkerInfo(ENGINE, epoch=1, token="", pid=1, model="builtin", max_model_len=512)
        return [(info, self._thread.stats())]


class Scrape:
    """One reading of all metrics."""

    def __init__(self, text: str):
        self.families = {each.name: each for each in text_string_to_metric_families(text)}
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name, **labels):
        """The value with exactly these labels beside LABELS."""
        return self.samples[name, frozenset((LABELS | labels).items())]

    def plain(self, name, **labels):
        return self.samples[name, frozenset(labels.items())]


@contextmanager
def watched(backend, *, api_keys=()):
    """Servers, a plain client, and a function that scrapes."""
    with Serving(backend, api_keys=api_keys) as servers:
        workers = getattr(backend, "workers", tuple)
        collector = PenstockCollector(servers.core.metrics, workers)
        metrics = MetricsServer(collector, "127.0.0.1", 0)

        def scrape():
            return Scrape(httpx.get(f"http://{metrics.address}/metrics").text)

        try:
            with httpx.Client(base_url=servers.base_url, timeout=60) as plain:
                yield servers, plain, scrape
        finally:
            metrics.close()
            if isinstance(backend, EngineBackend):
                backend.stop()


def complete(plain, prompt, **body):
    return plain.post("/v1/completions", json={"prompt": prompt, **GREEDY, **body})


def test_counts_are_what_was_sent():
    prompts = [list(range(10 * n, 10 * n + 4 + n)) for n in range(1, 7)]
    with watched(NamedBackend()) as (servers, plain, scrape):
        for n, prompt in enumerate(prompts):
            answer = complete(plain, prompt, max_tokens=4 + n, stream=n % 2 == 0)
            assert answer.status_code == 200
        # The third token ends it. It is counted; the first time that it comes is what ends it.
        stop_id = reference_ids(prompts[0], temperature=0, max_tokens=8, ignore_eos=True)[2]
        ids = reference_ids(
            prompts[0], temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=(stop_id,)
        )
        assert complete(plain, prompts[0], max_tokens=8, stop_token_ids=[stop_id]).is_success
        # Ended by Cancel after some tokens, which the client has counted, too.
        with Client(servers.grpc_target) as client:
            num_cancelled = 0
            stream = client.generate("A river", temperature=0.0, max_tokens=400, ignore_eos=True)
            for piece in stream:
                num_cancelled += len(piece.token_ids)
                if piece.request_id:
                    client.cancel(piece.request_id)
            num_river = piece.usage.prompt_tokens
        for wrong in ({"temperature": -1}, {"model": "other"}, {"nonsense": 1}):
            assert complete(plain, [5], **wrong).is_error
        assert plain.post("/v1/completions", content=b"{}").status_code == 415
        seen = scrape()

    num_done = len(prompts)
    num_prompt = sum(map(len, prompts)) + len(prompts[0]) + num_river
    num_generated = sum(range(4, 4 + num_done)) + len(ids) + num_cancelled
    assert seen("vllm:request_success_total", finished_reason="length") == num_done
    assert seen("vllm:request_success_total", finished_reason="stop") == 1
    assert seen("vllm:request_success_total", finished_reason="abort") == 1
    assert seen("vllm:request_success_total", finished_reason="error") == 0
    assert seen("vllm:prompt_tokens_total") == num_prompt
    assert seen("vllm:generation_tokens_total") == num_generated
    num_requests = num_done + 2
    for name in PER_REQUEST:
        assert seen(f"vllm:{name}_count") == num_requests, name
        assert seen(f"vllm:{name}_bucket", le="+Inf") == num_requests, name
    assert seen("vllm:time_to_first_token_seconds_count") == num_requests
    assert seen("vllm:inter_token_latency_seconds_count") == num_generated - num_requests
    assert seen("vllm:request_prompt_tokens_sum") == num_prompt
    assert seen("vllm:request_generation_tokens_sum") == num_generated
    short = sum(len(prompt) <= 5 for prompt in [*prompts, prompts[0]]) + (num_river <= 5)
    assert seen("vllm:request_prompt_tokens_bucket", le="5.0") == short
    counted = {"invalid_value", "model_not_found", "unknown_parameter", "unsupported_media_type"}
    for code in CATALOGUE:
        num = seen.plain("penstock_request_errors_total", code=code)
        assert num == (code in counted), code
    total = seen("vllm:e2e_request_latency_seconds_sum")
    assert 0 < seen("vllm:request_decode_time_seconds_sum") < total
    assert 0 < seen("vllm:request_prefill_time_seconds_sum") < total
    assert seen("vllm:time_to_first_token_seconds_sum") >= (
        seen("vllm:request_queue_time_seconds_sum") + seen("vllm:request_prefill_time_seconds_sum")
    )


def test_the_worker_metrics_are_those_of_its_stats():
    prompt = list(range(100, 140))  # two full blocks of 16, and 8 more
    began_s = time.perf_counter()
    with watched(backend := NamedBackend()) as (_, plain, scrape):
        for _ in range(3):
            assert complete(plain, prompt, max_tokens=5).is_success
        stats = backend.workers()[0][1]
        seen = scrape()
        passed_s = time.perf_counter() - began_s
    assert seen("vllm:prefix_cache_queries_total") == 3 * 40
    assert seen("vllm:prefix_cache_hits_total") == 2 * 32
    assert seen("vllm:num_preemptions_total") == 0
    assert seen("vllm:corrupted_requests_total") == 0
    assert seen("vllm:num_requests_running") == seen("vllm:num_requests_waiting") == 0
    assert seen("vllm:kv_cache_usage_perc") == 0
    assert seen("penstock_tail_saved_bytes") == stats.num_saved_bytes > 0
    assert seen("penstock_tail_saved_blocks") == stats.num_saved_blocks > 0
    assert seen("penstock_shortened_steps_total") == stats.num_shortened_steps
    assert seen.plain("penstock_workers_alive") == 1
    assert seen("penstock_steps_total") == stats.num_steps == 3 * 5
    assert seen("vllm:iteration_tokens_total_count") == 15
    assert seen("vllm:iteration_tokens_total_sum") == 40 + 2 * 8 + 3 * 4
    assert seen("vllm:iteration_tokens_total_bucket", le="1.0") == 12
    assert seen("vllm:iteration_tokens_total_bucket", le="8.0") == 14
    for phase in PHASES:
        assert seen("penstock_step_seconds_total", phase=phase) > 0
    stepped = sum(seen("penstock_step_seconds_total", phase=phase) for phase in PHASES)
    assert stepped < passed_s  # one thread cannot have more steps than time


def test_a_client_that_leaves_is_an_abort_and_a_disconnect():
    with watched(ScriptedBackend([5], 30.0)) as (servers, plain, scrape):
        body = {"prompt": [5], "stream": True, "max_tokens": 9}
        with plain.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        deadline_s = time.monotonic() + 60
        while servers.call(lambda: servers.core.metrics.num_disconnects) == 0:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        seen = scrape()
    no_worker = {"engine": "none"}
    assert seen("vllm:request_success_total", finished_reason="abort", **no_worker) == 1
    assert seen("vllm:generation_tokens_total", **no_worker) == 1
    assert seen.plain("penstock_ingress_disconnects_total") == 1


def test_metrics_are_on_their_own_port_only_and_want_no_key():
    backend = ScriptedBackend([5])
    with watched(backend, api_keys=["k"]) as (_, plain, scrape):
        assert plain.get("/metrics").status_code == 401
        key = {"authorization": "Bearer k"}
        assert plain.get("/metrics", headers=key).status_code == 404
        families = scrape().families
        scraped = scrape()
    assert "vllm:time_to_first_token_seconds" in families
    assert "process_resident_memory_bytes" in families
    assert scraped.plain("penstock_request_errors_total", code="invalid_api_key") >= 1


def test_names_are_whole_in_whatever_format_prometheus_asks_for():
    server = MetricsServer(PenstockCollector(RequestMetrics("m", 9), tuple), "127.0.0.1", 0)
    newest = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5"
    older = "application/openmetrics-text; version=1.0.0,text/plain; version=0.0.4;q=0.5,*/*;q=0.1"
    try:
        for accept in (newest, older, "*/*", "text/plain;version=1.0.0;escaping=underscores"):
            answer = httpx.get(f"http://{server.address}/metrics", headers={"accept": accept})
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert "# TYPE vllm:time_to_first_token_seconds histogram" in answer.text
        assert httpx.get(f"http://{server.address}/").status_code == 404
        assert httpx.post(f"http://{server.address}/metrics").status_code == 501
    finally:
        server.close()


def test_each_ingress_of_a_machine_has_a_port_of_its_own():
    metrics = [RequestMetrics("builtin", 512) for _ in range(2)]
    metrics[1].count_end(RequestTimes(0.0), DISCONNECT, TokenUsage(3, 0))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        first_port = probe.getsockname()[1]
    servers = [
        MetricsServer(PenstockCollector(each, tuple), "127.0.0.1", first_port) for each in metrics
    ]
    try:
        assert servers[0].port == first_port < servers[1].port
        for server, num in zip(servers, (0, 1)):
            for _ in range(5):
                seen = Scrape(httpx.get(f"http://{server.address}/metrics").text)
                assert seen.plain("penstock_ingress_disconnects_total") == num
    finally:
        for server in servers:
            server.close()


def test_phases_and_gaps_by_the_clock():
    now_s = 100.0
    metrics = RequestMetrics("m", 1000, clock=lambda: now_s)
    times, used = RequestTimes(now_s, engine="a"), TokenUsage(30, 7)
    now_s += 2.0
    first = Delta("r", [1, 2], times=FirstTokenTimes(0.5, 1.25))
    metrics.count_tokens(times, first, 2, used)
    now_s += 0.5
    metrics.count_tokens(times, Delta("r", [3]), 1, used)
    now_s += 2.0
    metrics.count_tokens(times, Delta("r", [4, 5, 6, 7]), 4, used)  # 0.5 s each
    now_s += 0.25
    metrics.count_end(times, "stop", used)
    timings = times.timings(now_s)
    assert (timings.queue_s, timings.prefill_s, timings.first_token_s) == (0.5, 1.25, 2.0)
    assert (timings.decode_s, timings.total_s) == (2.5, 4.75)
    counts = metrics.engines["a"]
    totals = {
        "first_token": (1, 2.0),
        "token_gap": (6, 2.5),
        "time_per_token": (1, 2.5 / 6),
        "total": (1, 4.75),
        "queue": (1, 0.5),
        "prefill": (1, 1.25),
        "decode": (1, 2.5),
        "prompt_length": (1, 30),
        "answer_length": (1, 7),
    }
    for name, (num, total) in totals.items():
        seen = getattr(counts, name).snapshot()
        assert (sum(seen.counts), seen.total) == (num, pytest.approx(total)), name
    gaps = counts.token_gap.snapshot()
    at_half = gaps.bounds.index(0.5)
    assert (gaps.counts[0], gaps.counts[at_half]) == (1, 5)


def test_a_worker_that_is_long_gone_is_forgotten():
    now_s = 0.0
    metrics = RequestMetrics("m", 1000, clock=lambda: now_s)
    metrics.count_end(RequestTimes(0.0), "no_worker", TokenUsage(3, 0))
    metrics.keep(["a", "b"])
    now_s = FORGET_S - 1
    metrics.keep(["b"])
    assert set(metrics.engines) == {"", "a", "b"}
    now_s = FORGET_S + 1
    metrics.keep(["b"])
    assert set(metrics.engines) == {"", "b"}
    assert metrics.engines[""].num_finished["error"] == 1


def test_bounds_of_lengths():
    assert token_bounds(512) == (1, 2, 5, 10, 20, 50, 100, 200, 500)
    assert token_bounds(1) == (1,)


@pytest.mark.parametrize("streams", [False, True])
def test_timings_come_where_they_are_requested(streams):
    body = {"prompt": ["A river", "A mill"], "max_tokens": 6, **GREEDY, "stream": streams}
    if streams:
        body["stream_options"] = {"include_usage": True}
    with watched(NamedBackend()) as (_, plain, _):
        without = plain.post("/v1/completions", json=body)
        answer = plain.post("/v1/completions", json=body, headers={"x-penstock-timings": "1"})
    assert "timings" not in without.text
    if streams:
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        timings = json.loads(events[-1])["usage"]["timings"]
    else:
        timings = answer.json()["usage"]["timings"]
    assert set(timings) == {"queue_s", "prefill_s", "first_token_s", "decode_s", "total_s"}
    assert 0 < timings["prefill_s"] < timings["first_token_s"] < timings["total_s"]
    assert 0 <= timings["queue_s"] < timings["first_token_s"]
    assert 0 < timings["decode_s"] < timings["total_s"]


def all_names():
    info = WorkerInfo("a:1", epoch=1, token="", pid=1, model="m", max_model_len=9)
    gate = GateClient("ingress", where=None)  # the address is never looked up
    workers = [(info, EngineStats())]

    collector = PenstockCollector(
        RequestMetrics("m", 9),
        lambda: workers,
        gate,
        LostRequests(),
        JournalCounts(),
        Connections(1),
        LoopWatch(lambda: None),
        certificates={},
        store=lambda: StoreStatus("a kind", is_up=True),
        keys=KeyFileWatch(ApiKeys(), "keys", lambda: None),
    )
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in collector.collect()
    }


def labels_of(*further):
    """The label names of each metric of two gates, or of one, which have counted nothing."""
    gate = GateClient("ingress", where=None)
    first = ModelSources(RequestMetrics("a", 9), gate, LostRequests())
    collector = PenstockCollector(*(first.requests, tuple, first.gate, first.lost), further=further)
    return {
        family.name: [tuple(sample.labels.items()) for sample in family.samples]
        for family in collector.collect()
    }


def test_of_several_models_every_series_says_whose_it_is():
    other = ModelSources(RequestMetrics("b", 9), GateClient("x", where=None), LostRequests())
    alone, both = labels_of(), labels_of(other)
    assert alone.keys() == both.keys()
    for name in ("penstock_gate_waiting", "penstock_gate_declined", "penstock_requests_continued"):
        assert alone[name] == [()]
        assert both[name] == [(("model_name", "a"),), (("model_name", "b"),)]
    ways = ("pass", "ticket", "fallback")
    assert alone["penstock_admissions"] == [(("by", way),) for way in ways]
    assert both["penstock_admissions"] == [
        (("model_name", model), ("by", way)) for model in "ab" for way in ways
    ]
    for name in ("penstock_gate_wait_seconds", "penstock_continuation_pause_seconds"):
        assert {labels[0] for labels in both[name]} == {("model_name", "a"), ("model_name", "b")}
        assert not any("model_name" in dict(labels) for labels in alone[name])
    without = ModelSources(RequestMetrics("b", 9), None, LostRequests())
    assert labels_of(without)["penstock_gate_waiting"] == [(("model_name", "a"),)]


def test_names_are_those_of_vllm_and_all_are_documented():
    names = all_names()
    assert names >= {
        *(f"vllm:{name}" for name in PER_REQUEST),
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"),
        *("vllm:request_time_per_output_token_seconds", "vllm:iteration_tokens_total"),
        *("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
        *("vllm:request_success_total", "vllm:num_preemptions_total"),
        *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
        "vllm:corrupted_requests_total",
    }
    page = (DOCS / "reference" / "metrics.md").read_text()
    documented = set(re.findall(r"`((?:vllm:|penstock_)\w+)", page))
    assert documented == names


def test_the_board_asks_for_what_there_is():
    board = json.loads((DOCS / "grafana" / "penstock.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(queries) >= 12
    named = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for expr in queries
        for name in re.findall(r"(?:vllm:|penstock_)\w+", expr)
    }
    assert named <= all_names()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


def test_what_the_gate_reports_of_retry_after_is_shown():
    gate = GateClient("ingress", where=None)
    gate.figures.retry_after_factor = 0.75
    gate.figures.num_retry_after_in_time, gate.figures.num_retry_after_late = 6, 4
    collector = PenstockCollector(RequestMetrics("m", 9), tuple, gate)
    samples = {
        (sample.name, sample.labels.get("outcome")): sample.value
        for family in collector.collect()
        for sample in family.samples
    }
    assert samples["penstock_gate_retry_after_factor", None] == 0.75
    assert samples["penstock_gate_retry_after_judged_total", "in_time"] == 6
    assert samples["penstock_gate_retry_after_judged_total", "late"] == 4


def test_each_reason_for_which_the_gate_refuses_is_shown():
    gate = GateClient("ingress", where=None)
    reasons = ("queue_full", "too_long", "displaced", "never_fits", "no_worker")
    for num, reason in enumerate(reasons, 1):
        gate.figures.num_refused[reason] = num
    collector = PenstockCollector(RequestMetrics("m", 9), tuple, gate)
    shown = {
        sample.labels["reason"]: sample.value
        for family in collector.collect()
        for sample in family.samples
        if sample.name == "penstock_gate_refusals_total"
    }
    assert shown == {**{reason: num for num, reason in enumerate(reasons, 1)}, "expired": 0}


def test_commit_or_recompute_has_its_numbers_and_decisions() -> None:
    stats = EngineStats(
        deferral=DeferralStats(
            ridge_tokens=12.0,
            read_s_per_token=1e-6,
            compute_s_per_token=2e-3,
            num_decisions={"free": 3, "cheaper": 2, "dearer": 1, "limit": 0},
            compute_s=0.5,
            load_s=0.75,
        )
    )
    info = WorkerInfo(ENGINE, epoch=1, token="", pid=1, model="builtin", max_model_len=512)
    eager = WorkerInfo("other", epoch=2, token="", pid=1, model="builtin", max_model_len=512)
    collector = PenstockCollector(
        RequestMetrics("builtin", 512), lambda: [(info, stats), (eager, EngineStats())]
    )
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in collector.collect()
        for sample in family.samples
        if sample.name.startswith(("penstock_commit", "penstock_ridge", "penstock_compute_s"))
    }
    of = ("builtin", ENGINE)
    assert found == {
        ("penstock_ridge_tokens", *of): 12.0,
        ("penstock_compute_seconds_per_token", *of): 2e-3,
        ("penstock_commit_decisions_total", *of, "free"): 3,
        ("penstock_commit_decisions_total", *of, "cheaper"): 2,
        ("penstock_commit_decisions_total", *of, "dearer"): 1,
        ("penstock_commit_decisions_total", *of, "limit"): 0,
        ("penstock_commit_compared_seconds_total", *of, "td"): 0.5,
        ("penstock_commit_compared_seconds_total", *of, "tl"): 0.75,
    }


def test_each_rank_of_a_group_has_its_memory_and_waits() -> None:
    ranks = (RankStats(100, 20, 7, 0.5, 640), RankStats(90, 10, 7, 0.25, 512, 3, 5, 2))
    info = WorkerInfo(ENGINE, epoch=1, token="", pid=1, model="builtin", max_model_len=512)
    alone = WorkerInfo("other", epoch=2, token="", pid=1, model="builtin", max_model_len=512)
    workers = [(info, EngineStats(ranks=ranks)), (alone, EngineStats())]
    collector = PenstockCollector(RequestMetrics("builtin", 512), lambda: workers)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in collector.collect()
        for sample in family.samples
        if sample.name.startswith("penstock_rank")
    }
    of = ("builtin", ENGINE)
    assert found == {
        ("penstock_rank_memory_bytes", *of, "0", "weights"): 100,
        ("penstock_rank_memory_bytes", *of, "0", "kv"): 20,
        ("penstock_rank_memory_bytes", *of, "0", "reserve"): 0,
        ("penstock_rank_gathers_total", *of, "0"): 7,
        ("penstock_rank_wait_seconds_total", *of, "0"): 0.5,
        ("penstock_rank_received_bytes_total", *of, "0"): 640,
        ("penstock_rank_memory_bytes", *of, "1", "weights"): 90,
        ("penstock_rank_memory_bytes", *of, "1", "kv"): 10,
        ("penstock_rank_memory_bytes", *of, "1", "reserve"): 2,
        ("penstock_rank_memory_bytes", *of, "1", "states"): 3,
        ("penstock_rank_memory_bytes", *of, "1", "adapters"): 5,
        ("penstock_rank_gathers_total", *of, "1"): 7,
        ("penstock_rank_wait_seconds_total", *of, "1"): 0.25,
        ("penstock_rank_received_bytes_total", *of, "1"): 512,
    }
