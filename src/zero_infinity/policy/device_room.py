"""How much memory of a device the cache of copies may take: what all else leaves free at its peak. Pure arithmetic.

*Others* are all bytes on the device that the cache does not hold: activations, gradients, and what other programs took.
"""

from __future__ import annotations

# Of what is free when the model is prepared. Layers are planned to fit in the first share. The cache begins with the
# second: nothing is known about activations yet, and a cache that is too small costs one slow step.
_PLANNED_SHARE = 1 / 2
_FIRST_SHARE = 1 / 4
# Kept free beside the peak: others may grow with the next batch, and free memory is in pieces.
_RESERVE_OF_OTHERS = 1 / 8
_RESERVE_OF_ALL = 1 / 32
# A smaller change of the budget is not worth moving copies.
_LEAST_CHANGE = 1 / 32


def planned_budget(free: int) -> int:
    """The device memory that the layers of a model may need at once, if `free` bytes are free."""
    return int(free * _PLANNED_SHARE)


def first_budget(planned: int, least: int) -> int:
    """The budget of the first step; `least` is what the largest layer needs."""
    return min(planned, max(2 * least, int(planned * _FIRST_SHARE / _PLANNED_SHARE)))


def learnt_budget(capacity: int, others: int, least: int) -> int:
    """The budget when others have needed at most `others` of the `capacity` bytes that this process may have."""
    reserve = int(others * _RESERVE_OF_OTHERS + capacity * _RESERVE_OF_ALL)
    return max(least, capacity - others - reserve)


def is_worth_changing(budget: int, learnt: int) -> bool:
    """True unless the two budgets are nearly the same."""
    return abs(budget - learnt) > budget * _LEAST_CHANGE


def is_learnt_after(num_steps: int) -> bool:
    """True after the first three steps (updates during backward begin in the third) and after each power of two.

    On every rank alike, so that ranks agree on what they have learnt.
    """
    return num_steps <= 3 or num_steps & (num_steps - 1) == 0
