"""Which lost requests continue, which wait for others, and which one is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.dispatch.in_flight import InFlightRequest
from penstock.deployments.ingress.dispatch.lost_requests import (
    MOST_STRIKES,
    LostRequests,
    fingerprint,
)
from penstock.deployments.ingress.dispatch.shared_refusals import REMEMBER_S
from penstock.workers.request import Request, SamplingParams


def call(name: str = "a", **params) -> InFlightRequest:
    request = Request(name, (5, 6), SamplingParams(**params))
    return InFlightRequest(AdmissionRequest(request), num_expected=30, is_accepted=True)


def test_one_loss_is_nobodys_fault():
    lost, calls = LostRequests(), [call() for _ in range(5)]
    lost.lost(calls, 1, has_others=False)
    assert not any(each.is_suspect or each.waits_for or each.trial for each in calls)


def test_a_request_that_was_alone_at_three_losses_without_a_token_is_refused():
    lost, one = LostRequests(), call()
    for epoch in (1, 2, 3):
        assert not one.is_suspect
        lost.lost([one], epoch, has_others=False)
    assert one.is_suspect and not lost.acquit(one, lambda epoch: False)


def test_a_token_between_two_losses_takes_the_strike_back():
    lost, one = LostRequests(), call()
    for epoch in range(1, 20):
        lost.lost([one], epoch, has_others=False)
        assert not one.is_suspect
        one.emitted.append(7)


def test_a_request_that_its_worker_had_not_begun_is_not_at_fault():
    lost, one = LostRequests(), call()
    one.is_accepted = False
    for epoch in range(1, 20):
        lost.lost([one], epoch, has_others=False)
    assert not one.strikes and not one.is_suspect


def test_a_worker_that_is_connected_again_was_not_killed():
    lost, one = LostRequests(), call()
    for epoch in (1, 2, 3):
        lost.lost([one], epoch, has_others=False)
    assert one.is_suspect
    assert lost.acquit(one, lambda epoch: epoch == 2) and one.strikes == [1, 3]


def test_with_requests_of_other_ingresses_more_losses_are_needed():
    lost, one = LostRequests(), call()
    for epoch in (1, 2, 3):
        lost.lost([one], epoch, has_others=True)
    assert not one.is_suspect
    lost.lost([one], 4, has_others=True)
    assert one.is_suspect


@pytest.mark.parametrize("num_calls", [2, 3, 7, 16, 64])
@pytest.mark.parametrize("arrivals", [0, 2])
def test_the_one_that_kills_is_found_and_no_other_is_refused(num_calls: int, arrivals: int):
    """Workers of a simulation: one dies while the killer is on it, before any token.

    `arrivals`: new requests that are on each worker, too.
    """
    rng = random.Random(num_calls)
    lost = LostRequests()
    killer = call("killer")
    waiting = [killer, *(call(f"r{n}") for n in range(num_calls - 1))]
    rng.shuffle(waiting)
    refused, num_deaths = [], 0
    while waiting:
        new = [call(f"new{num_deaths}.{n}") for n in range(arrivals)]
        able = [
            each for each in waiting if each.waits_for is None or each.waits_for.is_over.is_set()
        ]
        assert able, "nothing goes on"
        waiting = [each for each in waiting if each not in able]
        for each in able:
            each.waits_for = None
        if killer not in able:
            for each in able:  # they get their token, and then all others
                if each.trial is not None:
                    each.trial.passed(each)
            continue
        num_deaths += 1
        lost.lost([*able, *new], num_deaths, has_others=False)
        refused += [each for each in able if each.is_suspect]
        for each in refused:
            if each.trial is not None:
                each.trial.passed(each)
        waiting += [each for each in [*able, *new] if each not in refused]
    assert refused == [killer]
    assert num_deaths < min(MOST_STRIKES, (num_calls + arrivals).bit_length() + 4)


def test_a_refused_request_is_refused_at_once_when_it_comes_again(run):
    async def scenario():
        lost, one = LostRequests(), call(temperature=0.5, seed=3)
        one.strikes = [1, 2]
        assert not await lost.is_refused(one.admission, 0.0)
        await lost.refuse(one, 0.0)
        again = call("b", temperature=0.5, seed=4)  # another seed, as the ingress draws them
        assert await lost.is_refused(again.admission, REMEMBER_S - 1)
        assert not await lost.is_refused(again.admission, REMEMBER_S + 1)
        assert not await lost.is_refused(call("c", temperature=0.7).admission, 1.0)

    run(scenario())


def test_the_fingerprint_does_not_change_with_what_was_emitted():
    one = call(prompt_logprobs=2)
    before = fingerprint(one.admission)
    one.emitted.extend([7, 8])
    one.continue_after_emitted()
    assert fingerprint(one.admission) == before


def test_a_continued_request_asks_for_what_is_missing_only():
    one = call(max_tokens=9, prompt_logprobs=2)
    one.emitted.extend([7, 8])
    one.num_expected = 26  # its worker had computed the prompt and two tokens
    one.continue_after_emitted()
    assert list(one.request.emitted_ids) == [7, 8]
    assert one.request.params.prompt_logprobs is None
    assert one.num_to_prefill == 4 and one.num_expected == 30
    assert not one.is_begun
    one.emitted.append(9)
    one.continue_after_emitted()
    assert list(one.request.emitted_ids) == [7, 8, 9]
    assert one.request.params == replace(one.request.params, max_tokens=9)


def test_a_request_that_emitted_nothing_is_sent_as_it_was():
    one = call(prompt_logprobs=2)
    before = one.request
    one.continue_after_emitted()
    assert one.request == replace(before, is_continued=True) and one.num_expected == 30
