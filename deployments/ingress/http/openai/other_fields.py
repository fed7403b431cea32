"""Fields of OpenAI's bodies that other servers know: ignored, refused, or another name of ours.

parse() in requests.py reads a body by these tables.
"""

from __future__ import annotations

from typing import Any

from penstock.deployments.ingress.http.ignored_fields import IgnoredFields
from penstock.workers.request import RequestError

# Harmless to ignore: they tell the provider about the caller, or hint at something that is not
# here; of other servers, where to compute, what to log, and how an answer is cut into pieces.
IGNORED = frozenset(
    (
        *("metadata", "store", "service_tier", "safety_identifier", "verbosity", "prediction"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("session_id", "request_id", "rid", "extra_key", "cache_prompt", "id_slot", "n_keep"),
        *("return_progress", "timings_per_token", "sse_ping_interval", "stream_reasoning"),
    )
)

# Known to clients but not served: without them the answer would be another one. At these values
# they change nothing, so they may be sent.
_OFF = (None, False)
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    **dict.fromkeys(("echo", "use_beam_search", "early_stopping"), _OFF),
    **dict.fromkeys(("length_penalty", "typical_p"), (None, 1.0)),
    **dict.fromkeys(("functions", "documents"), (None, [])),
    "function_call": (None, "none", "auto"),
    "chat_template": (None,),
    "modalities": (None, ["text"]),
    **dict.fromkeys(("audio", "moderation"), (None,)),
    **dict.fromkeys(("suffix",), (None, "")),
    "kv_transfer_params": (None,),
    **dict.fromkeys(("lora", "lora_path", "custom_logit_processor", "stop_regex"), (None, [], "")),
    **dict.fromkeys(("input_ids", "input_embeds", "prompt_embeds"), (None, [])),
    "structural_tag": (None, ""),
    **dict.fromkeys(("return_hidden_states", "return_routed_experts"), _OFF),
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability"), (None, 0)),
    **dict.fromkeys(("dry_multiplier", "adaptive_target"), (None, 0)),
    "top_n_sigma": (None, 0, -1),
}
# Known to clients, and hints: the setting unknown_fields decides on them.
HINTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("web_search_options", "thinking_token_budget", "samplers"), (None, [])),
    **dict.fromkeys(("reasoning_budget_tokens", "repeat_last_n"), (None, -1)),
    "stream_interval": (None, 1),
}
# What other servers call a field.
OTHER_NAMES = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
# All that `in_our_words` turns into fields of ours.
MAPPED_IN_CHAT = ("reasoning", "reasoning_format", "add_special_tokens")
MAPPED = {
    **{theirs: f"another name of `{ours}`" for theirs, ours in OTHER_NAMES.items()},
    "reasoning": "`effort` and `enabled` in it are `reasoning_effort`",
    "reasoning_format": "`none` is `separate_reasoning: false`; `auto` and `deepseek` are true",
    "add_special_tokens": "false changes nothing: the chat template writes them",
}


def in_our_words(
    values: dict[str, Any], left_out: IgnoredFields, *, is_chat: bool
) -> dict[str, Any]:
    """`values` of a body that was written for another server. Raises RequestError."""
    for theirs, ours in OTHER_NAMES.items():
        if (value := values.pop(theirs, None)) is None or (theirs, value) == ("n_predict", -1):
            continue
        if values.get(ours) is not None:
            raise RequestError(f"{theirs} is another name of {ours}: send one", param=theirs)
        values[ours] = value
    for name in ("grammar", "regex", "ebnf"):
        if values.get(name) == "":
            del values[name]
    if "best_of" in values and values["best_of"] == values.get("n"):
        del values["best_of"]  # all of them are given
    if is_chat:
        _say_chat_fields(values, left_out)
    elif values.pop("reasoning_effort", None) is not None:
        left_out.add("reasoning_effort")  # a prompt has no template
    return values


def _say_chat_fields(values: dict[str, Any], left_out: IgnoredFields) -> None:
    """How others ask for reasoning, in the words of ChatCompletionRequest. Changes `values`."""
    for name in ("reasoning_effort", "reasoning"):
        given = values.get(name)
        if not isinstance(given, dict):
            continue
        del values[name]
        given = dict(given)
        level, enabled = given.pop("effort", None), given.pop("enabled", None)
        for other, value in given.items():
            left_out.add(f"{name}.{other}", value)
        if level is None and isinstance(enabled, bool):
            level = "medium" if enabled else "none"
        if level is not None:
            values.setdefault("reasoning_effort", level)
    if values.get("reasoning_format") in ("none", "auto", "deepseek"):
        separate = values.pop("reasoning_format") != "none"
        values.setdefault("separate_reasoning", separate)
    if values.pop("add_special_tokens", None):  # templates write them, and nothing else does
        left_out.add("add_special_tokens")
