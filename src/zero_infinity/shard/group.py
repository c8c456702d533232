"""The ranks that train one model together: their wires, and what they tell each other about how they are.

Beside the wires there is the store that torch's process groups keep: each rank leaves notes there, which the others
read when it does not answer, and outcomes that all have to know before anyone goes on.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store

from zero_infinity.errors import LostRankError, RankError, UsageError
from zero_infinity.shard.wire import Channel, Traffic, Wire
from zero_infinity.trace import Trace

_CPU = torch.device("cpu")
# Every engine of this process has names of its own in the store. Engines are made in the same order on every rank.
_numbers = itertools.count()


def find_group(group: ProcessGroup | DeviceMesh | None) -> RankGroup | None:
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
    return RankGroup(group) if group.size() > 1 else None


class RankGroup:
    """One engine's view of its ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank = group.rank()
        self.num_ranks = group.size()
        self._num_wires = itertools.count()
        self._store = PrefixStore(f"zero_infinity/{next(_numbers)}", _get_process_group_store(group))
        self._timeout = _timeout_of(group)
        # Those that share this machine's memory, as torchrun says it.
        self.num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))
        self.traffic = Traffic()
        self.trace: Trace | None = None
        self.names: dict[int, str] = {}  # of what is exchanged, by number

    def wire(self, purpose: str, device: torch.device = _CPU) -> Wire:
        """A wire for one thread, and tensors on `device`. Every rank makes the same ones in the same order."""
        gloo = ProcessGroupGloo(self._store_of(purpose), self.rank, self.num_ranks, self._timeout)
        control = cast(Channel, gloo)
        data = None if device.type == "cpu" else self._accelerator_group(purpose, device)
        return Wire(control, self.traffic, self.describe, self._name_of, data, self.trace)

    def _name_of(self, number: int) -> str:
        return self.names.get(number, f"#{number}")

    def _accelerator_group(self, purpose: str, device: torch.device) -> Channel:
        if device.type != "cuda":
            raise UsageError(
                f"several ranks are not supported on {device.type}: there is no backend to exchange its tensors with\n"
                "  fix:   one rank, or CUDA"
            )
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        store = self._store_of(f"{purpose} on {device.type}")
        return cast(Channel, dist.ProcessGroupNCCL(store, self.rank, self.num_ranks, options))

    def _store_of(self, purpose: str) -> PrefixStore:
        """What a group of our own meets its other ranks in.

        Not `dist.new_group`: it is a collective of all ranks, and names groups by how many there are at the moment,
        which differs between ranks when an engine ends.
        """
        return PrefixStore(f"{purpose}/{next(self._num_wires)}", self._store)

    # ------------------------------------------------------------------ notes

    def note(self, text: str) -> None:
        """Leave word of what this rank is doing, for those who miss it."""
        try:
            self._store.set(f"note/{self.rank}", text)
        except RuntimeError:
            return  # whoever keeps the store is gone; that is told by the wires

    def describe(self, rank: int) -> str:
        """What is known of another rank."""
        try:
            if self._store.check([f"note/{rank}"]):
                return f" (rank {rank}: {self._store.get(f'note/{rank}').decode()})"
        except RuntimeError:
            return ""
        return ""

    @contextmanager
    def agreed(self, phase: str) -> Iterator[None]:
        """Go on after `phase` only when it went well on every rank."""
        try:
            yield
        except Exception as error:
            self.all_well(phase, error)
            raise
        self.all_well(phase, None)

    def all_same(self, what: str, value: str, fix: str) -> None:
        """Raise when ranks differ in `what`."""
        self._store.set(f"{what}/{self.rank}", value)
        found = [self._told(what, rank) for rank in range(self.num_ranks)]
        for rank, other in enumerate(found):
            if other != found[0]:
                raise UsageError(f"rank {rank} differs from rank 0 in {what}: {other} and {found[0]}\n  fix:   {fix}")

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
                raise RankError(f"rank {rank} failed in {phase}: {outcome}")

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
            timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        return timeout
    return timedelta(minutes=30)
