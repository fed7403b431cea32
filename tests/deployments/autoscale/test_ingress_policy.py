"""The number of ingresses: one on each node for them, more for connections, slowly down."""

from __future__ import annotations

from penstock.deployments.autoscale.ingress_policy import (
    CONNECTIONS,
    DOWN_S,
    IngressState,
    decide_ingresses,
)


def number(nodes: int, connections: int, state: IngressState | None = None, now: float = 0.0):
    wanted, reason, after = decide_ingresses(nodes, connections, state or IngressState(), now)
    assert str(nodes) in reason and str(connections) in reason
    return wanted, after


def test_one_on_each_node_and_at_least_one():
    assert [number(nodes, 0)[0] for nodes in (0, 1, 3)] == [1, 1, 3]


def test_more_where_connections_need_them():
    assert [number(2, CONNECTIONS * n)[0] for n in (1, 2, 3)] == [2, 2, 3]
    assert number(0, CONNECTIONS + 1)[0] == 2


def test_the_number_falls_only_after_a_while():
    most, state = number(1, 4 * CONNECTIONS)
    assert most == 4
    held = []
    for now in (60.0, DOWN_S - 1, DOWN_S + 1):
        wanted, state = number(1, 0, state, now)
        held.append(wanted)
    assert held == [4, 4, 1]


def test_a_smaller_need_of_later_is_what_it_falls_to():
    _, state = number(1, 4 * CONNECTIONS)
    _, state = number(1, 2 * CONNECTIONS, state, DOWN_S / 2)
    assert number(1, 0, state, DOWN_S + 1)[0] == 2
