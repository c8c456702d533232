"""What a reader of a plan must not overlook, each in a sentence with the numbers and what to do. Pure.

Owns the limits from which something is worth a warning; the numbers are the plan's.
"""

from __future__ import annotations

from zero_infinity.byte_sizes import format_bytes, format_seconds
from zero_infinity.planner.hardware import HardwareTier, TierKind
from zero_infinity.planner.plan import Plan

_YEAR = 365 * 86_400.0
_LONG_STEP = 600.0
# What is held besides is not in any plan: Python, the data loader, memory that an allocator keeps in pieces.
_TIGHT = 0.95
_WAITS_MOST = 0.5


def warnings_of(plan: Plan) -> list[str]:
    """Warnings, the most important ones first."""
    found = [_drive_life(plan), _waiting(plan), _long_step(plan), _uncounted_products(plan)]
    return [text for text in (*found, *(_tight(plan, tier) for tier in plan.inputs.hardware.tiers)) if text]


def bandwidth_note(plan: Plan) -> str | None:
    """What the table of bandwidths says where one of them is too low."""
    if all(need.is_enough for need in plan.needs):
        return None
    hidden = any(need.overlapped and not need.is_enough for need in plan.needs)
    then = (
        " Overlapped transfers run beside the computation: only what is left of them is waited for." if hidden else ""
    )
    return (
        "needed: what a link would have to carry for that efficiency if its data moved alone, every byte in every "
        f"step; what is kept in faster tiers does not move.{then} The step below counts both."
    )


def _drive_life(plan: Plan) -> str | None:
    life = plan.drive_life_seconds
    if life is None or life >= _YEAR:
        return None
    return (
        f"the drives wear out after {format_seconds(life)} of training: each step writes "
        f"{format_bytes(plan.written_per_node)} per node, and they are rated for {_endurance(plan)}. More memory, a "
        "larger batch or gradient accumulation write less for each token"
    )


def _waiting(plan: Plan) -> str | None:
    outcome = plan.outcome
    share = outcome.wait_seconds / outcome.seconds
    if share < _WAITS_MOST:
        return None
    return (
        f"{share:.0%} of a step is waiting for {outcome.bottleneck}, which is busy for "
        f"{format_seconds(_busy(plan))} of {format_seconds(outcome.seconds)}: states move once a step whatever the "
        "batch, so more tokens in each step cost little"
    )


def _long_step(plan: Plan) -> str | None:
    seconds = plan.outcome.seconds
    if seconds < _LONG_STEP:
        return None
    days = 1000 * seconds / 86_400
    return f"a step takes {format_seconds(seconds)}: a thousand of them {days:,.1f} days"


def _uncounted_products(plan: Plan) -> str | None:
    hardware, flops = plan.inputs.hardware, sum(states.flops for states in plan.inputs.states.values())
    if not flops or hardware.device is None or hardware.host_flops is not None:
        return None
    return (
        f"each update multiplies matrices on the host, {plan.inputs.scale * flops / 1e12:,.1f} TFLOP a rank, which are "
        "not in the time: the profile does not say how fast its cores are (host_flops)"
    )


def _tight(plan: Plan, tier: HardwareTier) -> str | None:
    needed = plan.least_bytes(tier)
    if needed <= _TIGHT * tier.capacity:
        return None
    kind = "device" if tier.kind is TierKind.DEVICE else "node"
    return (
        f"{tier.name} is full to {needed / tier.capacity:.1%}: {format_bytes(needed)} of {format_bytes(tier.capacity)} "
        f"for each {kind}. What a plan does not count (Python, the loader, fragments of free memory) may not fit"
    )


def _endurance(plan: Plan) -> str:
    return format_bytes(sum(tier.endurance or 0 for tier in plan.inputs.hardware.storage))


def _busy(plan: Plan) -> float:
    return max(traffic.busy_seconds for traffic in plan.outcome.traffic)
