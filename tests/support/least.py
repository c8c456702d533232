"""Finds the smallest budget that `prepare` accepts, by calling it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import zero_infinity as zi
from zero_infinity import engine_builder as engine_module


class _Accepted(Exception):
    """`prepare` accepted the budget."""


def least_accepted(prepare: Callable[[int], Any], *, most: int = 8 << 20) -> int:
    """The smallest budget that `prepare(budget)` accepts, in whole pages.

    Nothing is made: each attempt is stopped where the store would be.
    """

    def stop(*_: Any) -> None:
        raise _Accepted

    page = 4096
    refused, enough = 0, -(-most // page)
    with mock.patch.object(engine_module, "ParameterStore", stop):
        while enough - refused > 1:
            middle = (refused + enough) // 2
            try:
                prepare(middle * page)
            except zi.CapacityError:
                refused = middle
            except _Accepted:
                enough = middle
    return enough * page
