"""What a step costs: seconds = c0 + c1 * decode rows + c2 * cached tokens that they read + c3 *
prompt tokens, which is the roofline of a batch with the worker's own coefficients.

Least squares, refitted as steps go by. A worker may do steps of one size for minutes, and these say
nothing of the single coefficients: with plain forgetting the fit would lose them, and be far off at
the next load. So steps of each size have sums of their own, which fade as newer ones of that size
come, and slowly as time goes by (cf. directional forgetting, Kulhavy and Karny, 1984). No
coefficient is below 0.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TERMS = ("step", "row", "cached_token", "prompt_token")
# The size of each term in a usual step, so that all columns are about as large.
SCALE = np.array([1.0, 16.0, 4096.0, 256.0])
KEPT = 48.0  # steps of one size that the fit remembers: older ones fade
FADE_S = 300.0  # of steps, in which all else fades to a third
OUTLIER = 3.0  # a step that took more than this many times its prediction counts as this many
MIN_STEPS = 50  # before a prediction is worth telling, and good enough to recognise outliers
RIDGE = 1e-6  # of the mean of all terms: what never varies must not make its coefficient arbitrary
RENEWED = 8  # the fit is renewed after an eighth more steps, RARELY at most
RARELY = 64


class _Size:
    """Sums over the steps of about one size, the latest weighing most."""

    __slots__ = ("at_s", "num", "products", "seconds", "targets")

    def __init__(self) -> None:
        self.num = self.seconds = self.at_s = 0.0
        self.products = np.zeros((4, 4))
        self.targets = np.zeros(4)

    def add(self, x: Floats, seconds: float, now_s: float) -> None:
        faded = (1.0 - 1.0 / KEPT) * self.faded(now_s)
        self.at_s = now_s
        self.num = faded * self.num + 1.0
        self.seconds = faded * self.seconds + seconds
        self.products *= faded
        self.products += np.outer(x, x)
        self.targets *= faded
        self.targets += x * seconds

    def faded(self, now_s: float) -> float:
        """The share that is left since the last one."""
        return math.exp((self.at_s - now_s) / FADE_S)


class StepModel:
    """Coefficients of TERMS, in seconds each."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._busy_s = 0.0  # of all steps
        self._sizes: dict[tuple[int, int], _Size] = {}
        self._weights = np.zeros(4)
        self._renew_at = 0  # steps

    def observe(self, num_rows: int, num_cached: int, num_prompt: int, seconds: float) -> None:
        """A step took `seconds`; a time that other processes made implausible is cut."""
        size = num_rows.bit_length(), -(-num_prompt.bit_length() // 3)
        found = self._sizes.get(size)
        if found is None:
            found = self._sizes[size] = _Size()
        x = _scaled(num_rows, num_cached, num_prompt)
        if self.num_steps >= MIN_STEPS and (predicted := float(x @ self._weights)) > 0:
            seconds = min(seconds, OUTLIER * predicted)
        self._busy_s += seconds
        found.add(x, seconds, self._busy_s)
        if self.num_steps % RARELY == 0:
            self._renew()
        self.num_steps += 1

    def seconds(self, num_rows: int, num_cached: int, num_prompt: int) -> float:
        """The predicted time of such a step."""
        self._renew()
        return float(_scaled(num_rows, num_cached, num_prompt) @ self._weights)

    def coefficients(self) -> dict[str, float]:
        """Seconds by term."""
        self._renew()
        return dict(zip(TERMS, (self._weights / SCALE).tolist(), strict=True))

    def _renew(self) -> None:
        if self.num_steps < self._renew_at or not self._sizes:
            return
        self._renew_at = self.num_steps + min(RARELY, 1 + self.num_steps // RENEWED)
        products, targets = np.zeros((4, 4)), np.zeros(4)
        for size in self._sizes.values():
            # Relative errors: short steps count as much as long ones.
            weight = (size.num / max(size.seconds, 1e-9)) ** 2 * size.faded(self._busy_s)
            products += weight * size.products
            targets += weight * size.targets
        products += RIDGE * np.trace(products) / 4 * np.eye(4)
        self._weights = _not_negative(products, targets)


def _scaled(num_rows: int, num_cached: int, num_prompt: int) -> Floats:
    scaled: Floats = np.array([1, num_rows, num_cached, num_prompt]) / SCALE
    return scaled


def _not_negative(products: Floats, targets: Floats) -> Floats:
    """x >= 0 with the least x' products x / 2 - targets' x: the best of the solutions where some
    are 0 (the usual case, where none is, comes first)."""
    best, least = np.zeros(4), 0.0
    for num in range(4, 0, -1):
        for some in combinations(range(4), num):
            chosen = list(some)
            solved = np.linalg.solve(products[np.ix_(chosen, chosen)], targets[chosen])
            loss = -float(targets[chosen] @ solved) / 2
            if (solved >= 0).all() and loss < least:
                best, least = np.zeros(4), loss
                best[chosen] = solved
        if num == 4 and least < 0:
            break
    return best
