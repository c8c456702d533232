"""The tier executor: carries out one cache policy under one byte budget, for host RAM and device memory.

Host RAM over NVMe and device memory over host RAM run the same code; only how an entry gets in and out differs, and
that is the `Mover`. Every use of an entry goes through `access`, on the compute thread. The mover starts transfers in
the order of the policy's decisions, and `wait` blocks only for the one entry that is needed now.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from zero_infinity.engine_parts import PolicyFactory
from zero_infinity.errors import CapacityError
from zero_infinity.policy.access_order import BlockId
from zero_infinity.policy.cache_policy import Decision, NoRoomError
from zero_infinity.tiers.compute_thread import ComputeThread


class TierEntry(Protocol):
    """Something that is either entirely in a tier or not at all."""

    @property
    def key(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def held_bytes(self) -> int:
        """Bytes that it takes in the tier."""


Entry = TypeVar("Entry", bound=TierEntry)


class Mover(Protocol[Entry]):
    """How entries get into and out of one tier. Called with the tier's lock held."""

    def fetch(self, entry: Entry, *, ahead: bool) -> None:
        """Start bringing it in: as a prefetch (`ahead`), or because it is used now."""

    def evict(self, entry: Entry) -> None:
        """Evict it as soon as nothing uses it; write it back first if it was changed."""

    def is_leased(self, entry: Entry) -> bool:
        """True if a tensor over its memory is alive: evicting it would free nothing."""

    def is_ready(self, entry: Entry) -> bool:
        """True if `wait` would return immediately."""

    def wait(self, entry: Entry) -> None:
        """Wait until it is in the tier and no change to it is pending."""

    def no_room(self, entry: Entry, error: NoRoomError, in_use: list[Entry]) -> CapacityError:
        """Return the error for an entry that does not fit next to those in use."""

    def moved(self, cached_bytes: int) -> None:
        """All decisions so far are carried out; by the policy's count the tier now holds `cached_bytes`."""


class Tier(Generic[Entry]):
    """The entries of one tier under a byte budget."""

    def __init__(
        self,
        mover: Mover[Entry],
        compute_thread: ComputeThread,
        make_policy: PolicyFactory,
        budget: int,
        lookahead: int,
        *,
        collective: bool = False,
    ) -> None:
        """`collective`: a fetch is a collective, so all ranks must make the same decisions.

        Then decisions depend only on the order of accesses, never on when a tensor dies. Repeated uses of one entry
        count once, since their number may differ between ranks. Entries made stale by an update are dropped at the end
        of the step, and the first entries of the next step are prefetched only then, because updates are local to each
        rank.
        """
        self.compute_thread = compute_thread
        self._mover = mover
        self._collective = collective
        self.policy = make_policy(budget, lookahead, self._in_use, wraps=not collective)
        self._entries: dict[int, Entry] = {}
        self._pins: Counter[int] = Counter()
        self._lent = 0
        self._last_key: int | None = None  # of the last access
        self._stale: set[int] = set()
        # Autograd runs hooks of accelerator graphs on its own thread.
        self.lock = threading.RLock()

    # ------------------------------------------------------------------ entries

    def add(self, entry: Entry) -> None:
        """Register an entry with the policy. An unregistered entry is resident: once fetched, it is never evicted."""
        self._entries[entry.key] = entry
        self.policy.add(entry.key, entry.held_bytes)

    def remove(self, entry: Entry) -> None:
        """Drop an entry that the recorded order does not contain."""
        with self.lock:
            self.forget(entry)
            self._entries.pop(entry.key, None)

    def forget(self, entry: Entry) -> None:
        """The entry has left memory, or is about to, without a policy decision."""
        with self.lock:
            if entry.key in self._entries:
                self.policy.forget(entry.key)

    def drop(self, entry: Entry) -> None:
        """Evict it now, without a policy decision."""
        with self.lock:
            self.forget(entry)
            self._mover.evict(entry)

    def drop_unpinned(self) -> None:
        """Evict every entry that is not pinned."""
        with self.lock:
            for entry in [e for e in self._entries.values() if e.key in self.policy and e.key not in self._pins]:
                self.drop(entry)
            self._last_key = None

    def start_over(self) -> None:
        """End a step, keep nothing and forget the order of accesses."""
        with self.lock:
            for key in sorted(self._stale):
                self.drop(self._entries[key])
            self._stale.clear()
            self.drop_unpinned()
            self.policy.end_cycle(same_order=False)
        self._mover.moved(self.policy.cached_bytes)

    def invalidate(self, entry: Entry) -> None:
        """The entry is stale: it is not used again before the end of the step."""
        with self.lock:
            if self._collective:
                self._stale.add(entry.key)
                return
            if entry.key in self._entries:
                self.policy.expire(entry.key)
            self._mover.evict(entry)

    def look_ahead(self) -> None:
        """Between two accesses: prefetch what the next ones need."""
        with self.lock:
            if not self._collective:
                self._carry_out(self.policy.look_ahead(), None)

    def end_cycle(self, *, same_order: bool) -> None:
        """End a step. `same_order`: the next step is expected to use entries in the same order."""
        with self.lock:
            for key in sorted(self._stale):
                self.drop(self._entries[key])
            self._stale.clear()
            self._last_key = None
            # Ranks may differ in which updates run early; that does not change the order of collectives.
            self.policy.end_cycle(same_order=same_order or self._collective)
            if self._collective:
                self._carry_out(self.policy.look_ahead(), None)
        self._mover.moved(self.policy.cached_bytes)

    def follow(self, *, inference: bool) -> None:
        """From now on accesses belong to a cycle of inference, or of training."""
        with self.lock:
            self.policy.follow(inference=inference)

    # ------------------------------------------------------------------ use

    def access(self, entry: Entry) -> None:
        """`entry` is used now: fetch it, and prefetch what the policy decides. Does not wait."""
        if entry.key not in self._entries:
            self._mover.fetch(entry, ahead=False)
            return
        with self.lock:
            if self.is_last(entry):
                return
            try:
                decision = self.policy.access(entry.key)
            except NoRoomError as error:
                in_use = [self._entries[key] for key in error.in_use]
                raise self._mover.no_room(entry, error, in_use) from None
            self._last_key = entry.key
            self._carry_out(decision, entry)
        if decision.fetch:
            self._mover.moved(self.policy.cached_bytes)

    def is_last(self, entry: Entry) -> bool:
        """True if this repeats the last access, where repeats do not count as accesses."""
        return self._collective and self._last_key == entry.key and entry.key in self.policy

    def wait(self, entry: Entry) -> None:
        """Wait until an accessed entry is in memory and no change to it is pending."""
        if not self._mover.is_ready(entry):
            with self.compute_thread.waiting(entry.name):
                self._mover.wait(entry)

    def bring(self, entry: Entry) -> None:
        """Access `entry` and wait for it."""
        self.access(entry)
        self.wait(entry)

    def pin(self, entry: Entry) -> None:
        """Keep it in memory until `unpin`."""
        self._pins[entry.key] += 1

    def unpin(self, entry: Entry) -> None:
        self._pins[entry.key] -= 1
        if not self._pins[entry.key]:
            del self._pins[entry.key]

    @contextmanager
    def pinned(self, entry: Entry) -> Iterator[None]:
        """Keep it in memory inside this context."""
        self.pin(entry)
        try:
            yield
        finally:
            self.unpin(entry)

    def is_pinned(self, entry: Entry) -> bool:
        return entry.key in self._pins

    # ------------------------------------------------------------------ the budget

    @property
    def total_bytes(self) -> int:
        """The size of all entries together, whether they are in the tier or not."""
        return sum(entry.held_bytes for entry in list(self._entries.values()))

    def limit(self, budget: int, lookahead: int) -> None:
        """Set the budget of all entries together; evicts what exceeds it."""
        with self.lock:
            self.policy.lookahead = lookahead
            self._shrink(budget - self._lent)

    def lend(self, num_bytes: int) -> bool:
        """Reduce the budget by `num_bytes`; returns False and changes nothing if too much is in use."""
        with self.lock:
            before = self.policy.budget
            if num_bytes > before:
                return False
            self._shrink(before - num_bytes)
            if self.policy.cached_bytes > self.policy.budget:
                self.policy.shrink(before)
                return False
            self._lent += num_bytes
        return True

    def take_back(self, num_bytes: int) -> None:
        """Return lent bytes to the budget."""
        with self.lock:
            self._lent -= num_bytes
            self.policy.shrink(self.policy.budget + num_bytes)

    # ------------------------------------------------------------------ inside

    def _shrink(self, budget: int) -> None:
        for key in self.policy.shrink(budget):
            self._mover.evict(self._entries[key])

    def _carry_out(self, decision: Decision, used: Entry | None) -> None:
        for key in decision.evict:
            self._mover.evict(self._entries[key])
        for key in decision.fetch:
            self._mover.fetch(self._entries[key], ahead=used is None or key != used.key)

    def _in_use(self, key: BlockId) -> bool:
        if self._collective:
            return key in self._pins
        return key in self._pins or self._mover.is_leased(self._entries[key])
