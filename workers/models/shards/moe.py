"""The routed MLP of one rank: some columns of all experts, or some experts whole.

Every rank routes alike, since all have the same rows. In columns, each computes as much as the
others, whatever the routes are. Whole experts (expert parallelism) need one gather a layer where
columns need two, and can come out of a rank's expert cache.

Rows that are not exact ask a cache for E + e in place of expert e of E. Here the ids of an expert
are neighbours, 2 e and 2 e + 1: so what a rank computes is one range of the routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.moe.columns import ExpertColumns, moe_columns
from penstock.kernels.moe.mlp import Expert, Visited
from penstock.workers.experts.modes import StepRows
from penstock.workers.experts.routing import ExpertSource, LayerRouting
from penstock.workers.memory.workspace import Workspace
from penstock.workers.models.layers import Mlp
from penstock.workers.models.moe import MoeMlp
from penstock.workers.models.shards.exchange import Exchange, Spans
from penstock.workers.models.shards.layers import ShardMlp
from penstock.workers.models.shards.shard import Shard, Span


class _GroupMoe(MoeMlp):
    """The router, and some columns of the shared expert, beside routed experts."""

    def join(self, shard: Shard, exchange: Exchange) -> None:
        self.exchange = exchange
        if isinstance(self.shared, ShardMlp):
            self.shared.join(shard, exchange, "shared_inner")

    def _run_shared(self, shared: Mlp, x: Tensor, ws: Workspace) -> None:
        assert isinstance(shared, ShardMlp)
        shared.run(x, ws.inner, ws.shared, ws)


class ColumnMoe(_GroupMoe):
    """Some columns of every expert."""

    def join(self, shard: Shard, exchange: Exchange) -> None:
        super().join(shard, exchange)
        self.columns = ExpertColumns(
            self.inner_size,
            self._gather(shard.spans("expert_inner")),
            self._gather(shard.spans("hidden")),
        )

    def _gather(self, spans: Spans) -> Callable[[Tensor, Tensor], Tensor]:
        def gather(own: Tensor, out: Tensor) -> Tensor:
            return self.exchange.gather(own, spans, out)

        return gather

    def _run_experts(
        self, x: Tensor, routing: LayerRouting, weights: Tensor, grouped: Tensor, ws: Workspace
    ) -> None:
        moe_columns(
            x, routing.ids, weights, self.held, self.columns,
            grouped=grouped, memory=ws.inner, out=x, clamp=self.clamp,
        )  # fmt: skip


class ShardMoe(_GroupMoe):
    """Some of the experts.

    A token's outputs are added in the order of its routes, as in one process, once those of all
    ranks are there.
    """

    def join(self, shard: Shard, exchange: Exchange) -> None:
        super().join(shard, exchange)
        self.complete = self._gather
        # The first expert of each rank, and the end of the last one's.
        self.firsts = [*(span.first for span in shard.spans("experts")), shard.experts.whole]

    @property
    def held(self) -> Sequence[Expert]:
        return self.experts.experts if isinstance(self.experts, HeldExperts) else ()

    def _gather(self, outputs: Tensor, ends: list[int]) -> None:
        rows, num_ids = [0, *ends], len(ends) // self.firsts[-1]  # of an expert
        self.exchange.gather_rows(outputs, [rows[first * num_ids] for first in self.firsts])


class HeldExperts:
    """The experts of one rank, as an ExpertSource that yields no others."""

    def __init__(self, experts: Sequence[Expert], span: Span):
        self.experts, self.span = experts, span

    def route(self, ids: Tensor, x: Tensor, state: Callable[[], Tensor]) -> LayerRouting:
        return LayerRouting(ids, self.span.whole, self._held)

    def _held(self, used: list[int]) -> Iterator[Visited]:
        for number in used:
            if self.span.first <= number < self.span.end:
                yield number, self.experts[number - self.span.first]


class AbsentExperts:
    """The ExpertSource of a rank that has no experts, while other ranks have some."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self.rows: StepRows | None = None  # of the current step; None: all rows are exact

    def route(self, ids: Tensor, x: Tensor, state: Callable[[], Tensor]) -> LayerRouting:
        copied, num_ids = None if self.rows is None else self.rows.copied, 1
        if copied is not None:  # as OwnExperts: all ranks group the rows alike
            ids, num_ids = 2 * ids + copied[:, None], 2
        return LayerRouting(ids, num_ids * self.num_experts, lambda used: iter(()))


@dataclass(frozen=True, slots=True)
class OwnExperts:
    """The experts of one rank out of its expert cache, as an ExpertSource that yields no others."""

    source: ExpertSource
    span: Span

    def route(self, ids: Tensor, x: Tensor, state: Callable[[], Tensor]) -> LayerRouting:
        routing = self.source.route(ids, x, state)
        visit, whole, asked = routing.experts, self.span.whole, routing.ids
        assert callable(visit), "experts of a cache are visited"
        num_ids = routing.num_experts // whole  # of an expert
        if num_ids > 1:
            asked = asked % whole * num_ids + asked // whole

        def own(used: list[int]) -> Iterator[Visited]:
            here = (divmod(each, num_ids) for each in used)
            wanted = [
                e + which * whole for e, which in here if self.span.first <= e < self.span.end
            ]
            for each, found in visit(wanted):
                yield each % whole * num_ids + each // whole, found

        return LayerRouting(asked, routing.num_experts, own)
