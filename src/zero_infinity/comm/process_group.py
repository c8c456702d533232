"""The ranks that train one model together: their wires, and what they tell each other about how they are.

Beside the wires there is the store that torch's process groups keep: each rank leaves notes there, which the others
read when it does not answer, and outcomes that all have to know before anyone goes on.
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

from zero_infinity._torch import nccl_options, store_of, timeout_of
from zero_infinity.comm.channel import Channel, GroupConnections, Traffic
from zero_infinity.errors import DivergenceError, LostRankError, RankError, UsageError
from zero_infinity.trace import Trace

# A rank that is gone has closed its connections before, or after, it left word: wait a moment for that.
_NOTE_SECONDS = 0.5
_CPU = torch.device("cpu")
# Every engine has names of its own in its group's store: the members of a group make engines on it in the same order.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def find_group(
    group: ProcessGroup | DeviceMesh | None, make_traffic: Callable[[], Traffic] = Traffic
) -> RankGroup | None:
    """The ranks of `group`, or of the default group; None when there is one rank."""
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            return None
        group = dist.group.WORLD
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(
                f"the device mesh has {group.ndim} dimensions, {group.mesh_dim_names}\n"
                '  fix:   give the one to shard over: group=mesh["dp"]'
            )
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise UsageError(
            "this process is not a member of the process group that it was given\n"
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
        # Those that share this machine's memory, as torchrun says it.
        self.num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))
        self.traffic = traffic
        self._trace: Trace | None = None
        self.names: dict[int, str] = {}  # of what is exchanged, by number
        self.divergences: dict[Channel, DivergenceError] = {}
        self._num_steps = 0
        # Numbers for calls in which ranks tell each other things, each of which can be told once.
        self.call_numbers = itertools.count()
        self._noted = False
        self._channels: list[Channel] = []

    def channel(self, purpose: str, device: torch.device = _CPU) -> Channel:
        """A wire for one thread, and tensors on `device`. Every rank makes the same ones in the same order."""
        data = None if device.type == "cpu" else self._accelerator_group(device)
        name = f"wire/{len(self._channels)}"
        try:
            # Not dist.new_group: the names that it makes up depend on how many groups a process has at the moment, and
            # when one goes is up to each rank's garbage collector.
            control = ProcessGroupGloo(PrefixStore(name, self._store), self.rank, self.num_ranks, self._timeout)
        except RuntimeError as lost:
            raise LostRankError(
                f"rank {self.rank} could not connect to every other rank for {purpose}\n  why:   {_first_line(lost)}"
            ) from lost
        channel = Channel(cast(GroupConnections, control), self.traffic, self, data, self._trace)
        self._channels.append(channel)
        return channel

    def _accelerator_group(self, device: torch.device) -> GroupConnections:
        if device.type != "cuda":
            raise UsageError(
                f"several ranks are not supported on {device.type}: there is no backend to exchange its tensors with\n"
                "  fix:   one rank, or CUDA"
            )
        store = PrefixStore(f"wire/{len(self._channels)} on {device.type}", self._store)
        return cast(
            GroupConnections, dist.ProcessGroupNCCL(store, self.rank, self.num_ranks, nccl_options(self._timeout))
        )

    def trace_into(self, trace: Trace) -> None:
        """Channels that are made from now on record what they exchange."""
        self._trace = trace

    def steps_taken(self, num_steps: int) -> None:
        """How far this rank has come, for the note that it leaves."""
        self._num_steps = num_steps

    def close(self) -> None:
        """Give the connections back."""
        for channel in self._channels:
            channel.close()

    # ------------------------------------------------------------------ notes

    def note(self, text: str) -> None:
        """Leave word of how this rank has fared, for those who miss it. The first word counts."""
        if self._noted:
            return
        self._noted = True
        try:
            self._store.set(f"note/{self.rank}", text)
        except RuntimeError:
            return  # whoever keeps the store is gone; that is told by the wires

    def leave(self) -> None:
        """This rank's engine ends: say so to those who may still wait for it."""
        error: BaseException | None = getattr(sys, "last_value", None)  # of which the interpreter ends
        reason = f" with {type(error).__name__}: {_first_line(error)}" if error is not None else ""
        self.note(f"ended after {self._num_steps} steps{reason}")

    def describe(self, rank: int) -> list[str]:
        """What is known of another rank that does not answer any more, and of others that have ended."""
        deadline = time.monotonic() + _NOTE_SECONDS
        try:
            while not self._store.check([f"note/{rank}"]) and time.monotonic() < deadline:
                time.sleep(0.01)
            others = [r for r in range(self.num_ranks) if r != self.rank and self._store.check([f"note/{r}"])]
            return [f"rank {r} {self._store.get(f'note/{r}').decode()}" for r in others]
        except RuntimeError:  # whoever keeps the store is gone
            return []

    def name_of(self, number: int) -> str:
        """The name of what is exchanged under a number."""
        return self.names.get(number, f"#{number}")

    @contextmanager
    def agreed(self, phase: str) -> Iterator[None]:
        """Go on after `phase` only when it went well on every rank."""
        try:
            yield
        except Exception as error:
            self.all_well(phase, error)
            raise
        self.all_well(phase, None)

    def tell(self, what: str, value: str) -> list[str]:
        """Tell the others, and hear what each says (by rank). Each `what` can be told once."""
        try:
            self._store.set(f"{what}/{self.rank}", value)
        except RuntimeError as lost:
            raise LostRankError(f"the ranks' common store is gone ({lost})") from lost
        return [self._told(what, rank) for rank in range(self.num_ranks)]

    def is_first_to(self, act: str) -> bool:
        """Whether no rank has asked this before."""
        return bool(self._store.add(f"first/{act}", 1) == 1)

    def all_same(self, what: str, value: str, fix: str) -> None:
        """Raise when ranks differ in `what`."""
        found = self.tell(what, value)
        for rank, other in enumerate(found):
            if other != found[0]:
                raise UsageError(f"rank {rank} differs from rank 0 in {what}: {other} and {found[0]}\n  fix:   {fix}")

    def smallest(self, what: str, value: int) -> int:
        """The smallest value that any rank has of `what`."""
        return min(map(int, self.tell(what, str(value))))

    def all_well(self, phase: str, error: Exception | None) -> None:
        """Tell the others how `phase` went here, and raise when it failed anywhere."""
        try:
            self._store.set(f"{phase}/{self.rank}", f"{type(error).__name__}: {error}" if error is not None else "")
        except RuntimeError as lost:
            raise error or LostRankError(f"the ranks' common store is gone ({lost})") from error
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
            raise LostRankError(f"rank {rank} did not get through {phase} ({lost})") from lost


def _timeout_of(group: ProcessGroup) -> timedelta:
    """What the user set for the group, or torch's own."""
    for device in ("cpu", "cuda"):
        try:
            return timeout_of(group, torch.device(device))
        except (RuntimeError, AttributeError):
            continue
    return timedelta(minutes=30)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
