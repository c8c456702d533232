"""Ranks of a command started by `torchrun` (or srun): joining, exchanging figures, ending after an error.

Without a launcher there is one rank, at no cost. torch is imported only when ranks join, so that invalid options fail
at once.

A rank that fails must not wait for threads that wait for other ranks: it prints the error and ends its process at
once. The others see the broken connections.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from zero_infinity.cli import signals
from zero_infinity.cli.exit_codes import describe, exit_code
from zero_infinity.errors import ConfigError, LostRankError, RankError, ZeroInfinityError

if TYPE_CHECKING:
    from zero_infinity.comm.channel import Channel
    from zero_infinity.comm.process_group import RankGroup

# How long rank 0 stays alive after it has failed: the others still read from its store.
_STORE_SECONDS = 1.0
# Environment variables that init_process_group needs.
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """This process as the launcher describes it in the environment."""

    rank: int
    num_ranks: int
    local_rank: int
    node: int

    @classmethod
    def from_environment(cls) -> LaunchedRank | None:
        """None if there is only one rank."""
        rank, num_ranks, local = (_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        if num_ranks is None or num_ranks <= 1:
            return None
        if rank is None:
            raise ConfigError(
                f"WORLD_SIZE is {num_ranks} in the environment, but RANK is not set\n"
                "  fix:   start with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
            )
        return cls(rank, num_ranks, rank if local is None else local, _number("GROUP_RANK") or 0)


def speaks() -> bool:
    """True if this process prints messages that are the same for all processes on its machine."""
    return (_number("WORLD_SIZE") or 1) <= 1 or not _number("LOCAL_RANK")


class Ranks:
    """The ranks of a run; this class is for a single one."""

    rank = 0
    num_ranks = 1

    def tell(self, numbers: Sequence[float]) -> list[list[float]]:
        """All-gather numbers at the end of a step; returns a row for each rank."""
        return [list(numbers)]

    def tell_text(self, what: str, text: str) -> list[str]:  # noqa: ARG002 - nobody listens
        """All-gather a text."""
        return [text]

    def agreed(self, phase: str) -> AbstractContextManager[None]:  # noqa: ARG002 - nobody listens
        """A context that raises on all ranks if `phase` fails on one."""
        return nullcontext()

    def all_same(self, what: str, value: str, fix: str) -> None:
        """Raise if the ranks' values of `what` differ."""


class SeveralRanks(Ranks):
    """One of several ranks."""

    def __init__(self, start: LaunchedRank, group: RankGroup) -> None:
        self.rank = start.rank
        self.num_ranks = start.num_ranks
        self._node = start.node
        self._group = group
        self._channel: Channel = group.channel("command")
        self._num_told = 0
        self._nodes = [int(node) for node in self.tell_text("nodes", str(start.node))]

    def tell(self, numbers: Sequence[float]) -> list[list[float]]:
        import torch

        from zero_infinity.comm.topics import Topic

        self._num_told += 1
        topic = Topic("command", self._num_told, f"the end of step {self._num_told}")
        self._group.names[self._num_told] = topic.name
        bits = torch.tensor(list(numbers), dtype=torch.float64).view(torch.int64).tolist()
        said = torch.tensor(self._channel.agree(topic, bits)).view(torch.float64)
        return [[float(number) for number in row] for row in said]

    def tell_text(self, what: str, text: str) -> list[str]:
        return self._group.phases.tell(what, text)

    def agreed(self, phase: str) -> AbstractContextManager[None]:
        return self._group.phases.agreed(phase)

    def all_same(self, what: str, value: str, fix: str) -> None:
        self._group.phases.all_same(what, value, fix)

    def says(self, error: ZeroInfinityError | KeyboardInterrupt) -> bool:
        """True if this rank should print `error`."""
        if isinstance(error, RankError) and error.failed_rank is not None:
            if self._nodes[error.failed_rank] == self._node:
                return False  # the failed rank prints it itself, on the same terminal
            topic = str(error.failed_rank)
        else:
            # Survivors of a lost rank lose each other a moment later: only the first to notice names the right one.
            topic = "lost" if isinstance(error, LostRankError) else describe(error)
        digest = hashlib.sha256(topic.encode()).hexdigest()[:16]
        try:
            return self._group.is_first_to(f"say/{self._node}/{digest}")
        except RuntimeError:  # the store ended with rank 0
            return True

    def close(self) -> None:
        import torch.distributed as dist

        self._group.close()
        dist.destroy_process_group()


@contextmanager
def joined(timeout_seconds: float) -> Iterator[Ranks]:
    """Join the ranks. With several, an error inside ends the process."""
    start = LaunchedRank.from_environment()
    if start is None:
        yield Ranks()
        return
    ranks: SeveralRanks | None = None
    try:
        with signals.immediate():  # a rank that ends before it joins is waited for in C++
            group = _join(start, timeout_seconds)
        ranks = SeveralRanks(start, group)
        yield ranks
        ranks.close()
    except BaseException as error:  # noqa: BLE001 - the process ends here, whatever it was
        _leave(start, ranks, error)


def _join(start: LaunchedRank, timeout_seconds: float) -> RankGroup:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from zero_infinity.comm.process_group import find_group

    missing = [name for name in _ADDRESS if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"there are {start.num_ranks} ranks, but {' and '.join(missing)} is not set in the environment\n"
            "  fix:   start with torchrun, or set the address and a free port of the machine with rank 0"
        )
    backend = "gloo"
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        torch.accelerator.set_device_index(start.local_rank)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    try:
        timeout = timedelta(seconds=timeout_seconds)
        if os.environ.get("LOCAL_WORLD_SIZE") == str(start.num_ranks):
            # torchrun keeps its store over restarts, with stale addresses of earlier ranks: each restart needs a prefix
            # of its own. Only on a single machine is the number of restarts known to be the same for all ranks.
            store, _, _ = next(rendezvous("env://", start.rank, start.num_ranks, timeout=timeout))
            store.set_timeout(timeout)
            own = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            dist.init_process_group(backend, store=own, rank=start.rank, world_size=start.num_ranks, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
        group = find_group(None)
        if group is None:
            raise RankError("torch's process group has one rank")
        return group
    except (RuntimeError, ValueError) as error:
        if isinstance(error, ZeroInfinityError):
            raise
        where = ":".join(os.environ[name] for name in _ADDRESS)
        raise LostRankError(
            f"the {start.num_ranks} ranks cannot connect at {where}\n"
            f"  why:   {str(error).splitlines()[0]}\n"
            "  fix:   start WORLD_SIZE processes, each with the same MASTER_ADDR and MASTER_PORT; make it reachable; "
            "set GLOO_SOCKET_IFNAME to choose the network interface"
        ) from error


def _leave(start: LaunchedRank, ranks: SeveralRanks | None, error: BaseException) -> None:
    """Print the error and end the process."""
    try:
        if isinstance(error, ZeroInfinityError | KeyboardInterrupt):
            if ranks is None or ranks.says(error):
                print(f"rank {start.rank}: {describe(error)}", file=sys.stderr)
        elif not isinstance(error, SystemExit | BrokenPipeError):
            print(f"rank {start.rank}:", file=sys.stderr)
            traceback.print_exception(error)
        if start.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(_STORE_SECONDS)
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(exit_code(error) or 1)


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    return int(text) if text is not None and text.isdigit() else None
