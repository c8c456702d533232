"""What ranks do about layers that they call alike, and about layers that each of them chooses from.

`alternatives` watches and tells them apart; here ranks agree on what was seen, and those that store parts of every
layer gather the layers of a list of experts together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zero_infinity.comm.channel import Channel, Topic
from zero_infinity.optim.sharded_gradients import ShardedGradients
from zero_infinity.params.moe_routing import RoutingWatch
from zero_infinity.params.unit import Unit
from zero_infinity.tiers.device_cache import DeviceCache

# The topic of what was seen; no unit has this number.
_LAYERS = -11


def find_choices(
    watch: RoutingWatch, channel: Channel, gradients: ShardedGradients, gathered: DeviceCache | None
) -> None:
    """Let ranks find out, with the first gradient, what each of them chooses from. `gathered`: who gathers parts."""

    def classify() -> Collection[Unit]:
        seen = channel.agree(Topic("layers", _LAYERS, "the first gradient"), watch.evidence())
        found = watch.end(seen)
        if gathered is not None:
            gathered.on_mismatch = lambda _: None
            for container in found:
                gathered.join(container.name, container.units)
        return {unit for container in found for unit in container.units}

    def resolve(wanted: Sequence[int]) -> tuple[str, Sequence[Unit]] | None:
        """What ranks that ask for different units before that want to have together."""
        for number in sorted(set(wanted)):
            joined = gathered.group_of(number) if gathered is not None else None
            if joined is not None:
                return joined
            container = watch.innermost(number)
            if container is not None and container.may_be_chosen_from:
                return container.name, container.units
        return None

    gradients.find_late_units = classify
    if gathered is not None:
        gathered.on_mismatch = resolve
