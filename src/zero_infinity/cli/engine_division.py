"""Hands the engine's own decisions to the planner, which may not import the engine: memory, and what is a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zero_infinity.errors import UsageError
from zero_infinity.planner.plan_inputs import PlannedDivision, UnitBytes
from zero_infinity.policy.memory_budget import Home, UnitSize, bucket_bytes, place, room_for_copies

if TYPE_CHECKING:
    from torch import nn


def divide(units: Sequence[UnitBytes], memory: int, streams: bool, num_ranks: int) -> PlannedDivision:
    """What `zi.prepare` would decide for a rank with these units and this much host memory."""
    copied = [unit.copied for unit in units if unit.copied]
    copies = room_for_copies(copied, max(copied), memory, gathered=True) if copied else 0
    buckets = 2 * bucket_bytes(memory) if num_ranks > 1 else 0
    sizes = [UnitSize(unit.name, unit.parameters, unit.record, unit.gradients, unit.arriving) for unit in units]
    placement = place(sizes, memory - copies - buckets, [], nvme=streams)
    resident = (unit.name for unit, home in zip(units, placement.homes, strict=True) if home is Home.RAM)
    return PlannedDivision(
        resident_units=frozenset(resident),
        resident=placement.resident,
        set_aside=placement.set_aside,
        cache=placement.cache,
        lookahead=placement.lookahead,
        chunk_bytes=placement.chunk_bytes,
        copies=copies,
        buckets=buckets,
    )


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """What `checkpoint_activations=True` would compute again in backward, in order; nothing where it would refuse."""
    from zero_infinity.activations.block_finder import (
        find_stacks,  # only a module needs torch, a plan by numbers does not
    )

    try:
        return [block for stack in find_stacks(model) for block in stack]
    except UsageError:
        return []
