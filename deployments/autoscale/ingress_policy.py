"""The number of ingresses: one for each ingress node, and enough for the connections. Pure.

An ingress that ends breaks connections, so the number falls slowly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CONNECTIONS = 2000  # of one ingress
DOWN_S = 1800.0  # an ingress is removed once it was not needed for this time


@dataclass(frozen=True, slots=True)
class IngressState:
    """The numbers that were wanted recently, (time, number); the largest decides."""

    wanted: tuple[tuple[float, int], ...] = ()


def decide_ingresses(
    num_nodes: int, num_connections: int, state: IngressState, now: float
) -> tuple[int, str, IngressState]:
    """The number, its reason, and the next state.

    num_nodes: living nodes on which an ingress may run; 0 where none is declared.
    num_connections: HTTP connections and running gRPC calls, of all ingresses.
    """
    by_load = math.ceil(num_connections / CONNECTIONS)
    wanted = max(1, num_nodes, by_load)
    kept = tuple(each for each in state.wanted if now - each[0] < DOWN_S and each[1] > wanted)
    number = max(wanted, *(count for _, count in kept), 0)
    reason = f"{num_nodes} nodes for ingresses, {num_connections} connections"
    if number > wanted:
        reason += f": {wanted} would suffice, holds {number} for {DOWN_S / 60:g} minutes"
    return number, reason, IngressState((*kept, (now, wanted)))
