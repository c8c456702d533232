"""This process's engine with a part of it left out, or on a slower drive: for ablations only.

None of this is a setting, because nobody should train so. It is reached the way tests reach it: by what the engine's
modules call, before a model is made, and for the rest of the process.
"""

from __future__ import annotations

from collections.abc import Collection

from zero_infinity.runtime import host, placement, residency
from zero_infinity.schedule.policy import BlockId, Decision, Policy
from zero_infinity.store.files import FileDevice
from zero_infinity.store.throttled_device import ThrottledDevice

PARTS = ("prefetch", "cache")


class Forgetful(Policy):
    """Keeps what is in use or about to be used, and nothing for later."""

    def access(self, block: BlockId) -> Decision:
        decision = super().access(block)
        idle = [b for b in sorted(self._cached) if b != block and not self._window[b] and not self._in_use(b)]
        for other in idle:
            self._remove(other)
        return Decision((*decision.evict, *idle), decision.fetch)


def leave_out(parts: Collection[str], bytes_per_second: float | None = None) -> None:
    """From now on, in this process. `bytes_per_second`: of every drive, both directions together."""
    if "prefetch" in parts:
        placement._LOOKAHEAD_SHARE = 0
    if "cache" in parts:
        setattr(residency, "Policy", Forgetful)  # noqa: B010 - of another module, on purpose
    if bytes_per_second is not None:
        speed = bytes_per_second
        setattr(host, "FileDevice", lambda paths: ThrottledDevice(FileDevice(paths), speed))  # noqa: B010 - as above
