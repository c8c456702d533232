"""This process's engine with a part of it left out, or on slower links: for ablations only.

None of this is a setting, because nobody should train so. It is reached the way tests reach it: by what the engine's
modules call, before a model is made, and for the rest of the process.
"""

from __future__ import annotations

from collections.abc import Collection

from zero_infinity.comm.channel import Channel, Topic
from zero_infinity.params import parameter_store
from zero_infinity.policy.cache_policy import BlockId, CachePolicy, Decision
from zero_infinity.storage.striped_files import FileDevice
from zero_infinity.storage.throttled_device import ThrottledDevice
from zero_infinity.tiers.accelerator import SlowLink

_access = CachePolicy.access
_note = Channel._note


def leave_out(parts: Collection[str], bytes_per_second: float | None = None) -> None:
    """From now on, in this process. `bytes_per_second`: of each drive, both ways together, and of what a rank sends."""
    if "prefetch" in parts:
        CachePolicy._look_ahead = _nothing_ahead  # type: ignore[method-assign, assignment]
    if "cache" in parts:
        CachePolicy.access = _forgetful  # type: ignore[method-assign, assignment]
    if bytes_per_second is not None:
        speed = bytes_per_second
        setattr(parameter_store, "FileDevice", lambda paths: ThrottledDevice(FileDevice(paths), speed))  # noqa: B010 - not exported
        link = SlowLink(bytes_per_second, latency_seconds=0.0)

        def sent(channel: Channel, topic: Topic, start: float, num_bytes: int) -> None:
            link.carry(num_bytes)
            _note(channel, topic, start, num_bytes)

        Channel._note = sent  # type: ignore[method-assign, assignment]


def _nothing_ahead(policy: CachePolicy, current: BlockId | None, evict: list[BlockId], fetch: list[BlockId]) -> None:
    """Instead of `CachePolicy._look_ahead`: everything is fetched when it is asked for."""


def _forgetful(policy: CachePolicy, block: BlockId) -> Decision:
    """Instead of `CachePolicy.access`: what is in use or about to be used stays, and nothing for later."""
    decision = _access(policy, block)
    idle = [b for b in sorted(policy._cached) if b != block and not policy._window[b] and not policy._in_use(b)]
    for other in idle:
        policy._remove(other)
    return Decision((*decision.evict, *idle), decision.fetch)
