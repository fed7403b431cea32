"""Every parameter of a request is exact under drafts, or turns them off: none is overlooked."""

from __future__ import annotations

from penstock.workers.parameters import parameters_of
from penstock.workers.request import SamplingParams
from tests.workers.speculation import test_exact, test_grammar

# The case of test_exact.py, or the test, that compares answers with this parameter.
CASE_OF = {
    "temperature": "hot",
    "top_k": "sampled",
    "top_p": "sampled",
    "min_p": "hot",
    "min_tokens": "ends",
    "ignore_eos": "ends",
    "stop_token_ids": "ends",
    "repetition_penalty": "penalties",
    "presence_penalty": "penalties",
    "frequency_penalty": "penalties",
    "logit_bias": "bias",
    "allowed_token_ids": "few allowed",
    "bad_words_ids": "bad words",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt logprobs",
    "context_policy": "sinks",
    "sinks": "sinks",
    "window": "sinks",
    "roll": "sinks",
}
IN_ALL = {"seed", "max_tokens"}  # of the cases
TESTS = {
    "structured": test_grammar.test_a_grammar_allows_the_same_tokens,
    "speculate": test_exact.test_a_request_can_have_no_drafts,
}
# Read by the ingress alone, which sees the same ids.
NOT_FOR_THE_ENGINE = {"stop"}
# Only of cached experts, whose engines have no drafts (engine/speculation.py).
TURNS_DRAFTS_OFF = {"moe_mode"}


def test_no_parameter_is_overlooked():
    known = {*CASE_OF, *IN_ALL, *TESTS, *NOT_FOR_THE_ENGINE, *TURNS_DRAFTS_OFF}
    assert set(parameters_of(SamplingParams)) == known
    for name, case in CASE_OF.items():
        assert name in test_exact.CASES[case][2], (name, case)
