"""The web console as people see it: headless Chromium, a live server, the real engine."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from dataclasses import replace

import httpx
import pytest

from penstock.deployments.batch.batch_store import (
    BatchSpec,
    BatchState,
    BatchStatus,
    BatchStore,
    new_batch_id,
)
from penstock.deployments.ingress.http.static import API_PAGE, FILES, FOLDER
from penstock.deployments.ingress.http.status.cluster import Status
from penstock.deployments.supervision.view import (
    ClusterView,
    IngressInfo,
    NodeInfo,
    OperatorWarning,
    ScaleReport,
)
from penstock.workers.request import FinishReason
from penstock.workers.stats import EngineStats, WorkerInfo
from tests.deployments.security.keys import key_of
from tests.deployments.serving import MODEL, EngineBackend, ScriptedBackend, Serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
KEY = "key-of-the-console-test"
STATUS = "/v1/penstock/status"
MARKUP = "<img src=/none onerror=alert(1)> Tell me of <b>a river</b>."
MAX_TOKENS = 60
# Notes each state of the answer's text, and does `then` when the first text is there.
WATCH = """(then) => {
  window.seen = [];
  new MutationObserver(() => {
    const text = [...document.querySelectorAll(".assistant .text")].at(-1)?.textContent;
    if (!text || window.seen.at(-1) === text) return;
    if (window.seen.push(text) === 1 && then === "stop")
      document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
  }).observe(document.getElementById("log"), { childList: true, subtree: true });
}"""


def worker(epoch, stats, **of_info):
    address = f"127.0.0.1:{epoch}"
    info = WorkerInfo(address, epoch=epoch << 32, token="", pid=1, model=MODEL, max_model_len=512)
    return replace(info, **of_info), stats


class WatchedBackend(EngineBackend):
    """The real engine, which tells how it does; with `endless`, no answer ends by itself."""

    endless = False

    def workers(self):
        return [worker(1, self._thread.stats())]

    def generate(self, admission):
        if self.endless:
            request = admission.request
            request = replace(request, params=replace(request.params, ignore_eos=True))
            admission = replace(admission, request=request)
        return super().generate(admission)


class CountingBackend(ScriptedBackend):
    """Workers whose figures a test sets."""

    alive: tuple[tuple[WorkerInfo, EngineStats], ...] = ()

    def workers(self):
        return self.alive


class ClusterBackend(CountingBackend):
    """Workers in a cluster of two nodes that is being scaled."""

    # The first is of both ingresses, all are of one.
    warnings: tuple[OperatorWarning, ...] = ()

    def view(self):
        first = ScaleReport("Worker", 2, 1, 1, 8, "up", "1 to 2: work waits", time.time() - 300)
        second = ScaleReport("Worker", 3, 2, 1, 8, "up", "2 to 3: work waits", time.time() - 10)
        ingress = IngressInfo(
            "a-machine-beefcafe", 1, "10.0.0.9:8000", "10.0.0.9:8001", num_workers=2, node="b"
        )
        other = replace(ingress, ingress_id="a-machine-0ddba115", node="c")
        ingress = replace(ingress, num_waiting=4, warnings=self.warnings)
        return ClusterView(
            workers=self.alive,
            ingresses=(ingress, replace(other, warnings=self.warnings[:1])),
            failures=("a worker could not start: no such file",),
            num_failures=2,
            nodes=(NodeInfo("head0000", 0, 0, is_head=True), NodeInfo("b", 8, 1)),
            scaling=(second,),
            scale_changes=(first, second),
        )


REFUSED = r"error: Failed to load resource: .* status of {} .*"  # what a browser says of one


@pytest.fixture(scope="module")
def serving():
    backend = WatchedBackend()
    with Serving(backend) as running:
        yield running
    backend.stop()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no chromium: `apt-get install chromium`")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser):
    """Opens the console of a server; afterwards nothing must have left its origin or gone wrong."""
    contexts, urls, complaints = [], [], []

    def open_console(servers, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("request", lambda request: urls.append((servers.base_url, request.url)))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        return page

    open_console.complaints = complaints
    yield open_console
    for context in contexts:
        context.close()
    assert urls and all(url.startswith(origin + "/") for origin, url in urls)
    assert complaints == []


def state(page, which):
    page.wait_for_selector(f"#state[data-state={which}]")
    return page.text_content("#state")


def set_fields(page, **fields):
    if page.get_attribute("#settings", "open") is None:
        page.click("#settings summary")
    for name, value in fields.items():
        page.get_by_label(name.replace("_", " ")).fill(str(value))


def ask(page, text):
    """Type a message and send it, with the keyboard alone."""
    page.focus("#message")
    page.keyboard.insert_text(text)
    page.keyboard.press("Enter")


def answer_of(page):
    page.wait_for_selector("#stop", state="hidden")
    page.wait_for_selector(".assistant.busy", state="detached")
    return page.text_content(".assistant >> nth=-1 >> .text")


def test_every_file_is_served_without_a_key_and_names_no_other_host():
    names = [API_PAGE.name, *(name for name, _ in FILES.values())]
    assert sorted(names) == sorted(p.name for p in FOLDER.iterdir())
    backend = ScriptedBackend([5], FinishReason.STOP)
    with (
        Serving(backend, api_keys=[KEY]) as servers,
        httpx.Client(base_url=servers.base_url) as plain,
    ):
        for path, (name, media_type) in FILES.items():
            answer = plain.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"] == media_type
            assert answer.content == (FOLDER / name).read_bytes()
            hosts = set(re.findall(r"https?://[^/\"]*", answer.text))
            assert hosts <= {"http://www.w3.org"}  # the name of SVG's vocabulary
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
        assert plain.get(STATUS).status_code == 401
        allowed = plain.get(STATUS, headers={"authorization": f"Bearer {KEY}"})
        assert Status.model_validate(allowed.json()).workers == []


def test_status_tells_what_workers_announced(serving):
    with httpx.Client(base_url=serving.base_url, timeout=30) as plain:
        body = {"prompt": "The river", "max_tokens": 7, "temperature": 0}
        before = Status.model_validate(plain.get(STATUS).json())
        usage = plain.post("/v1/completions", json=body).json()["usage"]
        deadline_s = time.monotonic() + 60
        while True:
            now = Status.model_validate(plain.get(STATUS).json())
            (old,), (new,) = before.workers, now.workers
            made = new.num_generated_tokens - old.num_generated_tokens
            if made == usage["completion_tokens"] and new.num_running == 0:
                break
            assert time.monotonic() < deadline_s, now
            time.sleep(0.02)
        raw = plain.get(STATUS).text
    assert now.is_ready
    assert [model.id for model in now.models] == [MODEL]
    assert new.num_blocks == serving.backend.engine.pool.num_blocks
    assert "127.0.0.1" not in raw and 'token"' not in raw


WARNINGS = (
    OperatorWarning("the store is away", "10.0.0.9:6379 refuses"),
    OperatorWarning("the keys are bad"),
)


def test_status_has_nodes_ingresses_and_scaling_and_no_address():
    backend = ClusterBackend([5])
    backend.warnings = WARNINGS
    with Serving(backend) as servers:
        raw = httpx.get(servers.base_url + STATUS).text
    status = Status.model_validate_json(raw)
    assert [(each.node, each.is_head) for each in status.nodes] == [
        ("head0000", True),
        ("b", False),
    ]
    assert [(each.id, each.node, each.warnings) for each in status.ingresses] == [
        ("beefcafe", "b", ["the store is away", "the keys are bad"]),
        ("0ddba115", "c", ["the store is away"]),
    ]
    (now,) = status.scaling
    assert (now.number, now.minimum, now.maximum, now.reason) == (3, 1, 8, "2 to 3: work waits")
    assert 9 <= now.age_s < 60
    assert [each.number for each in status.scale_changes] == [3, 2]  # newest first
    assert status.num_failed_starts == 2
    for secret in ("10.0.0.9", "a-machine", "no such file"):
        assert secret not in raw


def test_the_panel_shows_nodes_and_what_the_autoscaler_decided(opened):
    backend = ClusterBackend([5])
    backend.alive = (worker(1, EngineStats(), node="b"), worker(2, EngineStats(), node="b"))
    with Serving(backend) as servers:
        page = opened(servers)
        page.goto(servers.base_url + "/")
        page.wait_for_selector("#nodes li >> nth=1")
        texts = "(all) => all.map((each) => each.innerText.replace(/\\s+/g, ' '))"
        assert page.eval_on_selector_all("#nodes li", texts) == [
            "head0000 (head) 0 workers, 0 ingresses, 0 GPUs",
            "b 2 workers, 1 ingress, 1 GPU",
        ]
        lines = page.eval_on_selector_all("#scaling li", texts)
        assert lines[0] == "Worker: 2 ready, 3 wanted (1 to 8) 2 to 3: work waits"
        assert re.fullmatch(r"1\d s ago, Worker up to 3 2 to 3: work waits", lines[1])
        assert page.is_visible("#scaling-title")
        assert not page.is_visible("#warnings-title")
        backend.warnings = WARNINGS
        page.wait_for_selector("#warnings li >> nth=1")
        assert page.eval_on_selector_all("#warnings li", texts) == [
            "the store is away",
            "the keys are bad ingress beefcafe",
        ]
        backend.warnings = ()
        page.wait_for_selector("#warnings-title", state="hidden")
        page.close()


def test_the_panel_shows_batches_where_the_server_runs_some(opened, tmp_path):
    lock = os.open(tmp_path / "executor.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)  # nobody runs them: the test writes how far they are
    (tmp_path / "content").write_text("{}")
    now = int(time.time())
    batches = []
    for age_s in (0, 60):
        spec = BatchSpec(
            new_batch_id(), "", "/v1/completions", "file", "24h", now - age_s, now + 7230
        )
        batches.append(BatchStore(tmp_path).of("").create(spec, tmp_path / "content"))
    runs, failed = batches
    counts = {"num_lines": 2400, "num_completed": 1310, "num_failed": 10}
    runs.write(BatchState().to(BatchStatus.IN_PROGRESS, **counts))
    problem = {"line": 3, "param": "url", "code": "invalid_url", "message": "url must be <b>x</b>"}
    failed.write(BatchState().to(BatchStatus.FAILED, errors=[problem, problem]))
    texts = "(all) => all.map((each) => each.innerText)"
    with Serving(ScriptedBackend([5]), data_dir=tmp_path) as servers:
        page = opened(servers)
        page.goto(servers.base_url + "/")
        page.wait_for_selector("#batches li >> nth=1")
        first, second = page.eval_on_selector_all("#batches li", texts)
        assert first == (
            f"{runs.spec.id[:14]} 55 %\n"
            "in progress, 1,310 of 2,400 answered, 10 failed, expires in 2.0 h"
        )
        assert second == (
            f"{failed.spec.id[:14]}\nfailed: line 3: url must be <b>x</b> (and others)"
        )
        runs.write(replace(runs.recorded(), num_completed=2390, cause="worker_lost"))
        page.wait_for_function(
            "() => document.getElementById('batches').innerText.includes('sent again: worker_lost')"
        )
        runs.write(runs.recorded().to(BatchStatus.COMPLETED))
        page.wait_for_function(
            "() => document.getElementById('batches').innerText.includes('completed, 2,390 of')"
        )
        page.close()
    os.close(lock)
    with Serving(ScriptedBackend([5])) as servers:
        page = opened(servers)
        page.goto(servers.base_url + "/")
        assert state(page, "ready") == "ready"
        assert not page.is_visible("#batches-title")
        page.close()


def test_a_conversation_streams_and_the_live_figures_move(serving, opened):
    page = opened(serving)
    page.goto(serving.base_url + "/")
    assert state(page, "ready") == "ready"
    assert page.input_value("#model") == MODEL
    set_fields(page, System_prompt="Be brief.", Temperature=1, Max_tokens=MAX_TOKENS, Seed=11)
    page.evaluate(WATCH, "")

    messages = [{"role": "system", "content": "Be brief."}]
    sampling = {"temperature": 1, "max_tokens": MAX_TOKENS, "seed": 11}
    for text in (MARKUP, "And then?\nTell me."):
        ask(page, text)
        shown = answer_of(page)
        messages.append({"role": "user", "content": text})
        # The oracle: the same conversation, without the console.
        body = {"messages": messages, **sampling}
        answer = httpx.post(serving.base_url + "/v1/chat/completions", json=body, timeout=60).json()
        assert shown == answer["choices"][0]["message"]["content"]
        assert page.text_content(".user >> nth=-1 >> .text") == text
        num_tokens = answer["usage"]["completion_tokens"]
        assert page.text_content("#length") == f"{num_tokens} tokens"
        assert page.text_content("#prompt").startswith(f"{answer['usage']['prompt_tokens']} tokens")
        assert float(page.text_content("#rate")) > 0
        assert re.fullmatch(r"\d+ ms", page.text_content("#first"))
        messages.append({"role": "assistant", "content": shown})

    seen = page.evaluate("window.seen")
    assert len(seen) > 3 and seen[1].startswith(seen[0])  # it came in pieces
    assert page.locator("#log img, #log b").count() == 0  # texts are texts
    # Polled from here: the page's own policy forbids a predicate given as a string.
    deadline_s = time.monotonic() + 60
    while float(page.text_content("#total .big") or 0) <= 0:
        assert time.monotonic() < deadline_s, "the live rate never moved"
        time.sleep(0.02)
    painted = "(c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((x) => x)"
    assert page.eval_on_selector("#total canvas", painted)
    assert page.text_content("#models").startswith(MODEL)

    page.click("#clear")
    assert page.locator(".turn").count() == 0
    assert page.text_content("#rate") == "–"


def test_stop_ends_the_generation(serving, opened):
    page = opened(serving, viewport={"width": 390, "height": 800}, color_scheme="dark")
    page.goto(serving.base_url + "/")
    state(page, "ready")
    page.evaluate(WATCH, "stop")
    engine = serving.backend.engine
    before = engine.stats()
    serving.backend.endless = True
    try:
        ask(page, "Tell me a story without an end.")
        text = answer_of(page)
    finally:
        serving.backend.endless = False
    assert text == page.evaluate("window.seen").pop()
    assert page.text_content(".assistant .note") == "stopped"
    assert page.is_visible("#send") and page.is_hidden("#problem")
    deadline_s = time.monotonic() + 60
    while engine.stats().num_running or engine.stats().num_live_blocks:
        assert time.monotonic() < deadline_s, "the generation goes on"
        time.sleep(0.02)
    ended = engine.stats().num_finished
    assert ended.get("abort", 0) == before.num_finished.get("abort", 0) + 1

    # The conversation goes on from what was said.
    set_fields(page, Temperature=0, Max_tokens=5, Seed=123456789)
    page.click("#settings summary")
    width = "document.documentElement.scrollWidth <= window.innerWidth"
    assert page.evaluate(width)  # on a phone nothing sticks out
    ask(page, "Go on.")
    assert answer_of(page)
    assert page.locator(".turn").count() == 4


def test_a_bad_key_and_other_refusals_are_shown_in_words(opened):
    backend = WatchedBackend()
    with Serving(backend, api_keys=[KEY]) as servers:
        page = opened(servers)
        page.goto(servers.base_url + "/")
        assert state(page, "bad") == "wants a key"
        set_fields(page, API_key="not-the-key", Temperature=0, Max_tokens=5)
        ask(page, "Hello?")
        page.wait_for_selector("#problem")
        problem = page.text_content("#problem")
        assert "wants an API key" in problem and "not known to this server" in problem
        assert page.input_value("#message") == "Hello?"  # to be sent again
        assert page.evaluate("document.activeElement.id") == "key"

        set_fields(page, API_key=KEY)
        assert state(page, "ready") == "ready"
        assert page.is_hidden("#problem")  # it is mended
        page.focus("#message")
        page.keyboard.press("Enter")
        assert answer_of(page)
        assert page.is_hidden("#problem")

        set_fields(page, Max_tokens=100_000)
        ask(page, "Hello again?")
        page.wait_for_selector("#problem")
        problem = page.text_content("#problem")
        assert "too long for this model" in problem and "512 tokens" in problem
        page.focus("#max_tokens")
        page.keyboard.type("0")
        assert page.is_visible("#problem")  # while its advice is followed
        page.keyboard.press("Tab")
        assert page.is_hidden("#problem")
        set_fields(page, Temperature=9)  # what the form itself refuses is not sent
        page.focus("#message")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "temperature"

        kept = page.evaluate("[{...sessionStorage}, localStorage.length, document.cookie]")
        assert kept == [{"penstock-key": KEY}, 0, ""]
        page.close()  # before its server: it asks for the figures every second
    backend.stop()
    # Chromium itself notes each refusal; nothing else may stand there.
    assert [
        each for each in opened.complaints if not re.fullmatch(REFUSED.format("40[01]"), each)
    ] == []
    opened.complaints.clear()


def test_a_key_for_the_model_alone_chats_without_live_figures(opened):
    key, record = key_of()
    backend = WatchedBackend()
    with Serving(backend, api_keys=[record]) as servers:
        page = opened(servers)
        page.goto(servers.base_url + "/")
        set_fields(page, API_key=key, Max_tokens=5)
        assert state(page, "ready") == "connected"
        assert "an API key with the role metrics" in page.text_content("#live-note")
        page.wait_for_function("document.getElementById('model').value !== ''")
        ask(page, "Hello?")
        assert answer_of(page)
        page.close()
    backend.stop()
    assert [
        each for each in opened.complaints if not re.fullmatch(REFUSED.format("40[13]"), each)
    ] == []
    opened.complaints.clear()


def test_the_panel_adds_workers_up_and_rests_while_hidden(opened):
    busy = EngineStats(
        num_running=3,
        num_waiting=1,
        num_blocks=100,
        num_live_blocks=10,
        num_prefix_queried_tokens=100,
        num_prefix_hit_tokens=50,
    )
    full = replace(
        busy, num_running=4, num_live_blocks=30, num_cached_blocks=30, num_prefix_hit_tokens=0
    )
    backend = CountingBackend([5])
    backend.alive = (worker(1, busy), worker(2, full))
    with Serving(backend) as servers:
        page = opened(servers)
        urls = []
        page.on("request", lambda request: urls.append(request.url))
        page.clock.install()
        page.goto(servers.base_url + "/")
        page.wait_for_selector("#workers .card >> nth=1")
        figures = "(all) => all.map((each) => each.textContent)"
        assert page.eval_on_selector_all("#total dd", figures) == [
            *("7", "2", "20 %", "15 %", "25 %")
        ]
        assert page.eval_on_selector_all("#workers .card:first-child dd", figures) == [
            *("3", "1", "10 %", "0 %", "50 %")
        ]
        backend.alive = (worker(2, full),)
        page.wait_for_selector("#workers .card >> nth=1", state="detached")
        assert page.eval_on_selector_all("#total dd", figures) == [
            *("4", "1", "30 %", "30 %", "0 %")
        ]

        show = """(hidden) => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }"""
        page.wait_for_load_state("networkidle")
        page.evaluate(show, True)
        num_urls = len(urls)
        page.clock.run_for(60_000)
        assert len(urls) <= num_urls + 1  # one may have been under way
        with page.expect_response("**" + STATUS):
            page.evaluate(show, False)
        page.close()


def test_the_panel_shows_batches_that_run_elsewhere(opened):
    job = {
        "id": "j", "number": 1, "name": "in.jsonl", "host": "a-host", "state": "running",
        "num_lines": 2400, "num_completed": 1310, "num_failed": 10, "num_in_flight": 8,
        "cause": "no_worker",
    }  # fmt: skip
    with Serving(ScriptedBackend([5])) as servers:
        page = opened(servers)
        page.goto(servers.base_url + "/")
        assert state(page, "ready") == "ready"
        assert not page.is_visible("#jobs-title")
        assert httpx.post(f"{servers.base_url}/v1/penstock/jobs", json=job).is_success
        page.wait_for_selector("#jobs li")
        (line,) = page.eval_on_selector_all(
            "#jobs li", "(all) => all.map((each) => each.innerText)"
        )
        assert line == (
            "in.jsonl 55 %\nrunning on a-host, 1,310 of 2,400 answered, 10 failed, requests are "
            "sent again: no_worker"
        )
        assert page.is_visible("#jobs-title")
        page.close()
