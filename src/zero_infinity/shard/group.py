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

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store

from zero_infinity.errors import LostRankError, RankError, UsageError
from zero_infinity.shard.wire import Traffic, Wire

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
        self._members = dist.get_process_group_ranks(group)
        self._store = PrefixStore(f"zero_infinity/{next(_numbers)}", _get_process_group_store(group))
        self._timeout = _timeout_of(group)
        # Those that share this machine's memory, as torchrun says it.
        self.num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))
        self.traffic = Traffic()
        self.names: dict[int, str] = {}  # of what is exchanged, by number
        self._groups: list[ProcessGroup] = []
        self._least: dict[str, int] = {}

    def wire(self, purpose: str, device: torch.device = _CPU) -> Wire:
        """A wire for one thread, and tensors on `device`. Every rank makes the same ones in the same order."""
        control = self._new_group("gloo", f"{purpose}, control")
        data = None if device.type == "cpu" else self._new_group(dist.get_default_backend_for_device(device), purpose)
        return Wire(control, self.traffic, self.describe, lambda number: self.names.get(number, f"#{number}"), data)

    def _new_group(self, backend: str, purpose: str) -> ProcessGroup:
        group = dist.new_group(
            self._members,
            timeout=self._timeout,
            backend=backend,
            use_local_synchronization=True,
            group_desc=f"zero-infinity {purpose}",
        )
        if not isinstance(group, ProcessGroup):
            raise UsageError(f"this process is not one of the ranks {self._members}")
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Give the connections back."""
        while self._groups:
            if dist.is_initialized():
                dist.destroy_process_group(self._groups.pop())
            else:
                self._groups.clear()

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

    def tell(self, what: str, value: str) -> list[str]:
        """Tell the others, and hear what each says (by rank). Each `what` can be told once."""
        try:
            self._store.set(f"{what}/{self.rank}", value)
        except RuntimeError as lost:
            raise LostRankError(f"the ranks' common store is gone ({lost})") from lost
        return [self._told(what, rank) for rank in range(self.num_ranks)]

    def least(self, what: str, value: int) -> int:
        """The least that any rank says; who asks again gets the same answer."""
        if what not in self._least:
            self._least[what] = min(map(int, self.tell(what, str(value))))
        return self._least[what]

    def is_first_to(self, act: str) -> bool:
        """Whether no rank has asked this before."""
        return bool(self._store.add(f"first/{act}", 1) == 1)

    def all_same(self, what: str, value: str, fix: str) -> None:
        """Raise when ranks differ in `what`."""
        found = self.tell(what, value)
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
            timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        return timeout
    return timedelta(minutes=30)
