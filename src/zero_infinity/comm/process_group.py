"""The ranks that train one model: their channels, and the notes they exchange through the key-value store.

The key-value store is the one that torch's process groups use. Each rank leaves notes there, which other ranks read
when it stops answering, and outcomes that every rank needs before any rank continues.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from zero_infinity._torch import store_of, timeout_of
from zero_infinity.comm.channel import Channel, GroupConnections, Traffic
from zero_infinity.errors import DivergenceError, LostRankError, RankError, UsageError
from zero_infinity.trace import Trace

# A lost rank may close its connections before it writes its note: wait this long for the note.
_NOTE_SECONDS = 0.5
_CPU = torch.device("cpu")
# Prefixes of engines in the group's store. The members of a group create engines on it in the same order.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def find_group(
    group: ProcessGroup | DeviceMesh | None, make_traffic: Callable[[], Traffic] = Traffic
) -> RankGroup | None:
    """Return the ranks of `group`, or of the default group; None for a single rank."""
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            return None
        group = dist.group.WORLD
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(
                f"the device mesh has {group.ndim} dimensions, {group.mesh_dim_names}\n"
                '  fix:   pass the dimension to shard over: group=mesh["dp"]'
            )
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise UsageError(
            "this process is not a member of the given process group\n"
            "  fix:   call zi.prepare on the ranks of the group only"
        )
    return RankGroup(group, make_traffic()) if group.size() > 1 else None


class RankGroup:
    """One engine's view of its ranks."""

    def __init__(self, group: ProcessGroup, traffic: Traffic) -> None:
        self.group = group
        self.rank = group.rank()
        self.num_ranks = group.size()
        number = next(_numbers[group.group_name])
        self._store = PrefixStore(f"zero_infinity/{number}", store_of(group))
        self._timeout = _timeout_of(group)
        # The ranks that share this machine's memory, according to torchrun.
        self.num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))
        self.traffic = traffic
        self._trace: Trace | None = None
        self.names: dict[int, str] = {}  # of topics, by number
        self.divergences: dict[object, DivergenceError] = {}
        self._num_steps = 0
        # Numbers of calls in which ranks exchange values; each value can be set only once.
        self.call_numbers = itertools.count()
        self._noted = False
        self._channels: list[Channel] = []

    def channel(self, purpose: str, device: torch.device = _CPU) -> Channel:
        """Create a channel for one thread and tensors on `device`. All ranks create the same ones in the same order."""
        data = None if device.type == "cpu" else self._accelerator_group(device)
        name = f"wire/{len(self._channels)}"
        try:
            # Not dist.new_group: the names it generates depend on how many groups a process currently has, and each
            # rank's garbage collector decides when a group goes away.
            control = ProcessGroupGloo(PrefixStore(name, self._store), self.rank, self.num_ranks, self._timeout)
        except RuntimeError as lost:
            raise LostRankError(
                f"rank {self.rank} could not connect to every other rank for {purpose}\n  why:   {_first_line(lost)}"
            ) from lost
        channel = Channel(cast(GroupConnections, control), self.traffic, self, data, self._trace)
        self._channels.append(channel)
        return channel

    def _accelerator_group(self, device: torch.device) -> ProcessGroup:
        """A group of the same ranks, with the backend that the user's group has for the device.

        Never destroyed: torch names a group by the groups that a process has, and ranks would end theirs at different
        times.
        """
        backends = dict(pair.split(":") for pair in dist.get_backend_config(self.group).split(","))
        backend = backends.get(device.type)
        if backend is None:
            raise UsageError(
                f"the process group has no backend for tensors on {device.type}: {backends}\n"
                f"  fix:   torch.distributed.init_process_group() without backend=, or a backend for {device.type}"
            )
        ranks = dist.get_process_group_ranks(self.group)
        group = dist.new_group(ranks, self._timeout, backend, use_local_synchronization=True)
        if not isinstance(group, ProcessGroup):
            raise UsageError("this process is not a member of the given process group")
        return group

    def trace_into(self, trace: Trace) -> None:
        """Record the exchanges of channels created from now on."""
        self._trace = trace

    def steps_taken(self, num_steps: int) -> None:
        """Set the step count that this rank's note reports."""
        self._num_steps = num_steps

    def close(self) -> None:
        """Release the connections."""
        for channel in self._channels:
            channel.close()

    # ------------------------------------------------------------------ notes

    def note(self, text: str) -> None:
        """Leave a note about how this rank ended, for ranks that wait for it. Only the first note is kept."""
        if self._noted:
            return
        self._noted = True
        try:
            self._store.set(f"note/{self.rank}", text)
        except RuntimeError:
            return  # the store's process is gone; the channels report that

    def leave(self) -> None:
        """Note that this rank's engine ends, for ranks that may still wait for it."""
        error: BaseException | None = getattr(sys, "last_value", None)  # the exception that ends the interpreter
        reason = f" with {type(error).__name__}: {_first_line(error)}" if error is not None else ""
        self.note(f"ended after {self._num_steps} steps{reason}")

    def describe(self, rank: int) -> list[str]:
        """Return what is known about a rank that no longer answers, and about others that have ended."""
        deadline = time.monotonic() + _NOTE_SECONDS
        try:
            while not self._store.check([f"note/{rank}"]) and time.monotonic() < deadline:
                time.sleep(0.01)
            others = [r for r in range(self.num_ranks) if r != self.rank and self._store.check([f"note/{r}"])]
            return [f"rank {r} {self._store.get(f'note/{r}').decode()}" for r in others]
        except RuntimeError:  # the store's process is gone
            return []

    def name_of(self, number: int) -> str:
        """Return the name of the topic with this number."""
        return self.names.get(number, f"#{number}")

    @contextmanager
    def agreed(self, phase: str) -> Iterator[None]:
        """Continue after `phase` only if it succeeded on every rank."""
        try:
            yield
        except Exception as error:
            self.all_well(phase, error)
            raise
        self.all_well(phase, None)

    def tell(self, what: str, value: str) -> list[str]:
        """Exchange one value per rank; returns all of them by rank. Each `what` can be used once."""
        try:
            self._store.set(f"{what}/{self.rank}", value)
        except RuntimeError as lost:
            raise LostRankError(f"the ranks' key-value store is gone ({lost})") from lost
        return [self._told(what, rank) for rank in range(self.num_ranks)]

    def is_first_to(self, act: str) -> bool:
        """True if no rank has asked this before."""
        return bool(self._store.add(f"first/{act}", 1) == 1)

    def all_same(self, what: str, value: str, fix: str) -> None:
        """Raise if ranks differ in `what`."""
        found = self.tell(what, value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise UsageError(f"rank {rank} differs from rank 0 in {what}: {other} and {found[0]}\n  fix:   {fix}")

    def smallest(self, what: str, value: int) -> int:
        """Return the smallest value of `what` over all ranks."""
        return min(map(int, self.tell(what, str(value))))

    def all_well(self, phase: str, error: Exception | None) -> None:
        """Tell the other ranks the outcome of `phase` here, and raise if it failed on any rank."""
        try:
            self._store.set(f"{phase}/{self.rank}", f"{type(error).__name__}: {error}" if error is not None else "")
        except RuntimeError as lost:
            raise error or LostRankError(f"the ranks' key-value store is gone ({lost})") from error
        if error is not None:
            raise error
        for rank in range(self.num_ranks):
            outcome = self._told(phase, rank)
            if outcome:
                failure = RankError(f"rank {rank} failed in {phase}: {outcome}")
                failure.failed_rank = rank
                raise failure

    def _told(self, phase: str, rank: int) -> str:
        key = f"{phase}/{rank}"
        try:
            self._store.wait([key], self._timeout)
            return str(self._store.get(key).decode())
        except RuntimeError as lost:
            raise LostRankError(
                f"rank {rank} did not complete {phase} ({lost})\n"
                "  fix:   read that rank's output; it hangs or has ended"
            ) from lost


def _timeout_of(group: ProcessGroup) -> timedelta:
    """Return the timeout that the user set for the group, or torch's default."""
    for device in ("cpu", torch.accelerator.current_accelerator() or "cpu"):
        try:
            return timeout_of(group, torch.device(device))
        except (RuntimeError, AttributeError):
            continue
    return timedelta(minutes=30)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
