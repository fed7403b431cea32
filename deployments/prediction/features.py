"""What is known of a request before it runs: the length predictor's input.

Small and immutable: made at the ingress, where the prompt is, and sent to the gate.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.deployments.prediction.text_digest import FACTS, TextDigest

NUM_FACTS = 11 + len(FACTS)  # the request's own, and the text's


@dataclass(frozen=True, slots=True)
class Features:
    """What is known of a request before it runs. Made at the ingress, carried to the gate.

    `max_tokens` is the true limit: what was asked for, or what the context leaves. `template` is
    a digest of what a tenant's requests of one application share, such as the system prompt, or "".
    """

    model: str
    tenant: str = ""
    template: str = ""
    prompt_tokens: int = 0
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    ignore_eos: bool = False
    num_stop: int = 0
    structured: bool = False
    num_messages: int = 1
    has_tools: bool = False
    text: TextDigest | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1 or None, not {self.max_tokens}")
        for name in ("prompt_tokens", "min_tokens", "num_stop", "num_messages"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("temperature", "top_p"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, not {getattr(self, name)}")

    def path(self) -> list[Hashable]:
        """The groups of this request, from the widest to the narrowest: all, model..."""
        keys: list[Hashable] = [(), (self.model,), (self.model, self.tenant)]
        if self.template:
            keys.append((self.model, self.tenant, self.template))
        return keys

    def size_group(self) -> Hashable:
        """One more group, in addition to the narrowest: prompts of about the same size (octaves).

        Where one tenant runs several applications, sizes tell them apart (Azure's chat trace).
        """
        return (self.model, self.tenant, self.template, str(self.prompt_tokens.bit_length()))

    def facts(self) -> NDArray[np.float64]:
        """[NUM_FACTS], NaN where unknown."""
        own = (
            math.log1p(self.prompt_tokens),
            math.log1p(self.prompt_tokens) ** 2,
            float(self.max_tokens is None),
            math.nan if self.max_tokens is None else math.log1p(self.max_tokens),
            math.log1p(self.min_tokens),
            self.temperature,
            self.top_p,
            float(self.num_stop),
            float(self.structured),
            math.log1p(self.num_messages),
            float(self.has_tools),
        )
        text = self.text.facts if self.text is not None else None
        return np.array(own + (text or (math.nan,) * len(FACTS)))
