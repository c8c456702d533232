"""Sizes of units, as `policy` takes them."""

from __future__ import annotations

from zero_infinity.policy.unit_sizes import UnitSize


def adam(name: str, parameters: int) -> UnitSize:
    """What a unit takes with AdamW in float32."""
    return UnitSize(name, parameters, 2 * parameters, parameters, parameters)
