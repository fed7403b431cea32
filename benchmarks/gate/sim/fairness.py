"""Was what could be served shared fairly between tenants? Jain's index, and max-min fair shares.

Tokens alone do not tell: who asks for a tenth of what another asks for may have all that it wants.
So what each was served is set against its max-min fair share of what all were served: as much as
it asked for, or, of whoever asked for more, as much as any other of them. Knows nothing of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 if all are equal, 1 / n if one has everything."""
    squares = sum(each * each for each in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def fair_shares(asked: Mapping[str, float], total: float) -> dict[str, float]:
    """Max-min fair: the smallest wishes first, each at most an equal part of what is left."""
    shares: dict[str, float] = {}
    left = total
    for number, tenant in enumerate(sorted(asked, key=lambda each: asked[each])):
        shares[tenant] = min(asked[tenant], left / (len(asked) - number))
        left -= shares[tenant]
    return shares


def fairness(served: Mapping[str, float], asked: Mapping[str, float]) -> float:
    """Jain's index of what each was served over its fair share of all that was: 1 is fair."""
    shares = fair_shares(asked, sum(served.values()))
    return jain([served.get(each, 0.0) / share for each, share in shares.items() if share])
