"""How much a body may hold: entries of its lists, parts of its conversation.

Checked before validation, because refusing a huge body must be cheap too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.deployments.ingress.core.prompts import MAX_MESSAGES, MAX_VARIABLES
from penstock.deployments.ingress.core.tools import MAX_TOOLS
from penstock.deployments.ingress.core.validation import MAX_BAD_WORD_STRINGS
from penstock.workers.request import (
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RequestError,
)
from penstock.workers.structured_spec import MAX_CHOICES

MAX_PARTS = 8192  # messages, their parts and their calls, all together
MAX_PART_FIELDS = 64  # of one of these

# Field: most entries, and what these are called.
LIMITS: dict[str, tuple[int, str]] = {
    "messages": (MAX_MESSAGES, "messages"),
    "input": (MAX_MESSAGES, "items"),
    "tools": (MAX_TOOLS, "tools"),
    "stop": (MAX_STOP_STRINGS, "strings"),
    "stop_sequences": (MAX_STOP_STRINGS, "strings"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, "ids"),
    "logit_bias": (MAX_LOGIT_BIAS, "tokens"),
    "bad_words": (MAX_BAD_WORD_STRINGS, "words"),
    "guided_choice": (MAX_CHOICES, "choices"),
    "chat_template_kwargs": (MAX_VARIABLES, "variables"),
}


def check_sizes(values: Mapping[str, Any], limits: Mapping[str, tuple[int, str]]) -> None:
    """Raise RequestError for the first list or object that has too many entries."""
    for name, (most, noun) in limits.items():
        value = values.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise RequestError(f"{name} takes at most {most} {noun}", param=name)


def check_num_parts(conversation: Any, param: str) -> None:
    """Raise RequestError for a conversation of too many parts; looks at no more than may be there.

    What a call was given (`input`) is the model's matter, and not looked into.
    """
    num_parts = 0
    left = [conversation] if isinstance(conversation, list) else []
    while left:
        for part in left.pop():
            num_parts += 1
            if num_parts > MAX_PARTS:
                raise RequestError(
                    f"{param} takes at most {MAX_PARTS} messages, parts and calls, all together",
                    param=param,
                )
            if isinstance(part, list):
                left.append(part)
            elif isinstance(part, dict):
                if len(part) > MAX_PART_FIELDS:
                    raise RequestError(
                        f"{param}: a part has at most {MAX_PART_FIELDS} fields", param=param
                    )
                left += [v for k, v in part.items() if isinstance(v, list) and k != "input"]
