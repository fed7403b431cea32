"""How the router of a mixture of experts chooses a token's experts and weighs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.workers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What differs between routers, besides the number of experts.

    `scoring`: of the router's logits. `has_bias`: the logits have one. `has_choice_bias`: a bias
    that only chooses, added to the scores and not in the weights (DeepSeek V3, arXiv 2412.19437,
    section 2.1.2). `num_groups`, `num_kept_groups`: experts are chosen from the groups whose two
    best sum to most. `eps`: added to the sum that weights are divided by. `scale`: of the weights.
    `in_fp32`: the product is, whatever the model computes in.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    has_choice_bias: bool = False
    num_groups: int = 1
    num_kept_groups: int = 1
    eps: float = 0.0
    scale: float = 1.0
    in_fp32: bool = False

    def check(self, num_experts: int, num_experts_per_token: int) -> None:
        """Raise ConfigError unless the groups and the experts of a token fit together."""
        groups, kept = self.num_groups, self.num_kept_groups
        if groups < 1 or not 1 <= kept <= groups or num_experts % groups:
            raise ConfigError(
                f"n_group ({groups}) must divide the {num_experts} experts, and topk_group "
                f"({kept}) lie in [1, n_group]"
            )
        if groups > 1 and (num_experts // groups < 2):
            raise ConfigError(f"groups of {num_experts // groups} experts: they need two at least")
        if num_experts_per_token > kept * (num_experts // groups):
            raise ConfigError(
                f"num_experts_per_tok ({num_experts_per_token}) is more than the "
                f"{kept * (num_experts // groups)} experts of {kept} groups"
            )


PLAIN_ROUTER = RouterConfig()  # softmax, and no more
