"""What ranks talk through: connections between every two ranks, and a key-value store.

`RankGroup` gets a transport when it is made. `TorchTransport` is the one of real processes: gloo for connections, and
the store that torch's process groups use. The fault simulation passes one whose ranks are threads of one process.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import PrefixStore

from zero_infinity._torch import cpu_backend_of, store_of, timeout_of
from zero_infinity.errors import LostRankError, UsageError

# How long making connections may take once every rank has begun to. gloo takes five times as long if a rank that has
# published its address does not connect.
_CONNECT_SECONDS = 10.0
# Prefixes of engines in the group's store. The members of a group create engines on it in the same order.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class Connections(Protocol):
    """Connections to every other rank, for one thread. Errors are RuntimeErrors."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...


class KeyValueStore(Protocol):
    """A store that all ranks share. Errors are RuntimeErrors: the store's process is gone."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


class Transport(Protocol):
    """One engine's way to the other ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def timeout(self) -> timedelta:
        """How long to wait for a rank that is there and does not answer."""

    @property
    def store(self) -> KeyValueStore: ...

    def meet(self) -> Connections | None:
        """The connections that ranks have already; None after waiting for all ranks, if they have none."""

    def connect(self, name: str) -> Connections:
        """Connect to every other rank; all do so now. Raises RuntimeError."""

    def group_on(self, device: torch.device) -> ProcessGroup:
        """A group of the same ranks for tensors on an accelerator."""


class TorchTransport:
    """The ranks of a process group of torch."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.num_ranks = group.size()
        self.timeout = _timeout_of(group)
        self._torch_store = PrefixStore(f"zero_infinity/{next(_numbers[group.group_name])}", store_of(group))
        self.store = cast(KeyValueStore, self._torch_store)

    def meet(self) -> Connections | None:
        own = cpu_backend_of(self.group)
        if isinstance(own, ProcessGroupGloo):
            return cast(Connections, own)
        keys = [f"here/{rank}" for rank in range(self.num_ranks)]
        try:
            self._torch_store.set(keys[self.rank], "")
            self._torch_store.wait(keys, self.timeout)
        except RuntimeError as error:
            missing = self._missing(keys)
            raise LostRankError(f"{missing} did not arrive at zi.prepare or zi.init\n  why:   {error}") from error
        return None

    def _missing(self, keys: list[str]) -> str:
        try:
            return ", ".join(f"rank {rank}" for rank, key in enumerate(keys) if not self._torch_store.check([key]))
        except RuntimeError:
            return "rank 0, or the launcher that hosts the ranks' key-value store,"

    def connect(self, name: str) -> Connections:
        # Not dist.new_group: the names it generates depend on how many groups a process currently has, and each rank's
        # garbage collector decides when a group goes away.
        timeout = min(self.timeout, timedelta(seconds=_CONNECT_SECONDS))
        made = ProcessGroupGloo(PrefixStore(name, self._torch_store), self.rank, self.num_ranks, timeout)
        return cast(Connections, made)

    def group_on(self, device: torch.device) -> ProcessGroup:
        """A group with the backend that the user's group has for the device.

        Never destroyed: torch names a group by the groups that a process has, and ranks would end theirs at different
        times.
        """
        backends = dict(pair.split(":") for pair in dist.get_backend_config(self.group).split(","))
        backend = backends.get(device.type)
        if backend in (None, "gloo"):  # gloo claims CUDA's tensors, and has not all collectives for them
            raise UsageError(
                f"the process group has no backend for tensors on {device.type}: {backends}\n"
                f"  fix:   torch.distributed.init_process_group() without backend=, or a backend for {device.type}"
            )
        ranks = dist.get_process_group_ranks(self.group)
        group = dist.new_group(ranks, self.timeout, backend, use_local_synchronization=True)
        if not isinstance(group, ProcessGroup):
            raise UsageError("this process is not a member of the given process group")
        return group


def num_local_ranks(num_ranks: int) -> int:
    """The ranks that share this machine's memory, according to torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))


def _timeout_of(group: ProcessGroup) -> timedelta:
    """Return the timeout that the user set for the group, or torch's default."""
    for device in ("cpu", torch.accelerator.current_accelerator() or "cpu"):
        try:
            return timeout_of(group, torch.device(device))
        except (RuntimeError, AttributeError):
            continue
    return timedelta(minutes=30)
