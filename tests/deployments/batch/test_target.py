"""What a reply means for its line, and how long a line waits before it is sent again."""

from __future__ import annotations

import pytest

from penstock.deployments.batch.target import Reply, TargetError, Verdict, cause_of, judge, wait_s


def reply(status, code=None, **fields):
    return Reply(status, {"error": {"code": code}} if code else {"ok": True}, **fields)


@pytest.mark.parametrize("num_failures", [0, 2, 1000])
@pytest.mark.parametrize("status", [408, 425, 429, 503, None])
def test_a_refusal_and_a_lost_connection_are_tried_without_end(status, num_failures):
    assert judge(status and reply(status), num_failures) is Verdict.AGAIN


@pytest.mark.parametrize("answer", [reply(500), reply(502), reply(504), Reply(200, None)])
def test_a_failure_is_tried_three_times(answer):
    verdicts = [judge(answer, num_failures) for num_failures in range(3)]
    assert verdicts == [Verdict.RETRY, Verdict.RETRY, Verdict.DONE]


@pytest.mark.parametrize("num_failures", [0, 2, 1000])
def test_a_lost_worker_is_no_failure_of_the_request(num_failures):
    assert judge(reply(503, "worker_lost"), num_failures) is Verdict.LOST


def test_a_request_that_killed_workers_is_not_sent_to_more_of_them():
    assert judge(reply(500, "request_killed_workers"), 0) is Verdict.DONE


def test_the_cause_of_a_wait_is_named():
    assert cause_of(None) == "server unreachable"
    assert cause_of(reply(503, "no_worker")) == "no_worker"
    assert cause_of(Reply(502, None)) == "HTTP 502"


@pytest.mark.parametrize("status", [200, 400, 404, 413, 422])
def test_an_answer_and_a_wrong_request_are_results_at_once(status):
    assert judge(reply(status), 0) is Verdict.DONE


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_ends_the_run_and_not_the_line(status):
    with pytest.raises(TargetError, match="API key"):
        judge(reply(status), 0)


def test_waits_grow_and_follow_what_the_server_said():
    for num_waits in range(2000):
        bound = min(0.5 * 2.0 ** min(num_waits, 60), 30.0)
        assert bound / 2 <= wait_s(None, num_waits) <= bound * 1.5
    assert 7 <= wait_s(reply(503, retry_after_s=7.0), 9) <= 10.5
    assert wait_s(reply(503, retry_after_s=1e9), 0) <= 180
    assert wait_s(reply(503, retry_after_s=-1), 0) > 0
