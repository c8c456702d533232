"""Matrices of variants, thinned for `make test`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def thinned(rows: Sequence[Any], columns: Sequence[Any], name: Callable[[Any], str] = str) -> list[Any]:
    """Every pair of a row and a column as parameters of a test; about half of them only in `make test-all`.

    Every row and every column is in `make test`: with as many columns as there are, a row has every second one, and the
    next row has the others.
    """
    return [
        pytest.param(
            row,
            column,
            id=f"{name(row)}-{name(column)}",
            marks=[pytest.mark.long] if (at + number) % 2 else [],
        )
        for at, row in enumerate(rows)
        for number, column in enumerate(columns)
    ]
