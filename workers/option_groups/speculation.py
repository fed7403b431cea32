"""The settings of draft tokens, which a step verifies beside the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from penstock.workers.errors import ConfigError
from penstock.workers.settings import option

Speculation = Literal["auto", "off", "lookup", "suffix", "draft"]
DraftWeights = Literal["auto", "fp32", "bf16", "int8", "int4", "nf4", "fp8"]

SPECULATIONS: tuple[str, ...] = get_args(Speculation)


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Draft tokens, which a step verifies beside the next token."""

    GROUP: ClassVar[str] = "speculation"

    speculate: Speculation = option(
        "off",
        "where draft tokens come from, which a step verifies beside the next token: answers are "
        "the same, and come faster (docs/guide/speculation.md); lookup: the request's own prompt "
        "and answer; suffix: also earlier answers of the same tenant; draft: also a draft model; "
        "auto: suffix on a CPU, off on a GPU",
    )
    speculate_tokens: int = option(
        15, "maximum draft tokens of one sequence in a step", min=1, max=64
    )
    draft_model: str | None = option(
        None,
        "with speculate draft, a smaller model with the same vocabulary, named as model is; none: "
        "the model itself, in the format of draft_weights, which reads the model's KV cache",
    )
    draft_weights: DraftWeights = option(
        "int4", "number format of the draft model's linear layers, its LM head included"
    )

    def check_speculation(self) -> None:
        """Raises ConfigError."""
        if self.draft_model is not None and self.speculate != "draft":
            raise ConfigError(
                f"draft_model {self.draft_model} needs speculate draft; got speculate "
                f"{self.speculate}"
            )
