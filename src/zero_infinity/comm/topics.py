"""Numbers and names of the exchanges between ranks that belong to no unit: the same on every rank.

A unit's exchanges have the unit's number, which is not negative.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topic:
    """What an exchange is about. `number` is the same on every rank for the same topic."""

    kind: str
    number: int
    name: str


END_OF_BACKWARD = Topic("gradients", -1, "the end of backward")
STEP = Topic("gradients", -2, "optimizer.step()")
SHOWN_GRADIENTS = Topic("gradients", -3, "gradients that are read (zi.gathered, zi.clip_grad_norm_)")
NORMS = Topic("norms", -4, "the norms of gradients")
LEFT_OVER_SUM = Topic("gradient sum", -5, "small and unused units")
START = Topic("start", -6, "the start")
LAYERS = Topic("layers", -7, "the first gradient")
RESIDENT = Topic("gradient sum", -8, "parameters that are no part of a unit")
DEVICE_MEMORY = Topic("device memory", -9, "the device memory for copies")
EDITS = Topic("edits", -10, "the end of zi.gathered")
EXISTING_GRADIENTS = Topic("gradients", -11, "which parameters have a gradient (p.grad)")
UPDATED = Topic("parameter gather", -12, "updated parameters on devices")
SCALARS = Topic("state gather", -13, "numbers in the states of the optimizer")
MICRO_BATCHES = Topic("micro-batches", -14, "zi.accumulate")

NAMES = {
    topic.number: topic.name
    for topic in (
        END_OF_BACKWARD,
        STEP,
        SHOWN_GRADIENTS,
        NORMS,
        LEFT_OVER_SUM,
        START,
        LAYERS,
        RESIDENT,
        DEVICE_MEMORY,
        EDITS,
        EXISTING_GRADIENTS,
        UPDATED,
        SCALARS,
        MICRO_BATCHES,
    )
}
# Topics of phases are numbered by a checksum of their names, from here on; other ranks do not know these names.
FIRST_PHASE = 1 << 40
OTHER_CALL = "another call (zi.prepare, zi.save, zi.load, ...)"
# What a thread says that wants nothing and takes part in what other ranks want: until every rank pauses, or once.
PAUSE = Topic("pause", -100, "what other ranks need, until all have it")
IDLE = Topic("idle", -101, "what other ranks need")
