"""Which experts lie on which machine of a group that has expert caches: those of its ranks."""

from __future__ import annotations

from penstock.workers.config import EngineConfig
from penstock.workers.experts.expert_file import ExpertShare
from penstock.workers.model_config import ModelConfig
from penstock.workers.models.shards.memory import ExchangeSizes
from penstock.workers.models.shards.rank import MEMORY, Rank


def shares_of_machine(
    config: EngineConfig, model: ModelConfig, machine: int
) -> tuple[ExpertShare, ...]:
    """The shares of the ranks of a machine, the first one being 0; empty where its ranks have no
    routed experts. Raises ConfigError for a model that cannot be divided so."""
    num_each = config.num_ranks // config.nodes_per_worker
    first = Rank(
        0, config.tensor_parallel_size, MEMORY, ExchangeSizes(0, 0),
        num_stages=config.pipeline_parallel_size, whole_experts=True,
    )  # fmt: skip
    ranks = range(machine * num_each, (machine + 1) * num_each)
    shares = (first.numbered(number).expert_share(model) for number in ranks)
    return tuple(share for share in shares if share is not None)
