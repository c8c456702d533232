"""The ranks of a command that `torchrun` (or srun) has started: who is who, what they tell each other, how one leaves.

A command that was started plainly is one rank, and nothing here costs it anything. Imports no torch before ranks are
joined, so that a mistake in the options answers at once.

A rank that fails must not wait for threads that wait for other ranks: it says why and ends its process at once. The
broken connections tell the others.
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

from zero_infinity.cli.exit_codes import describe, exit_code
from zero_infinity.errors import ConfigError, LostRankError, RankError, ZeroInfinityError

if TYPE_CHECKING:
    from zero_infinity.comm.channel import Channel
    from zero_infinity.comm.process_group import RankGroup

# How long the rank that keeps the ranks' common store stays, after it has failed, for others to read there.
_STORE_SECONDS = 1.0
# What init_process_group needs to know, in the environment.
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Start:
    """What the launcher says of this process."""

    rank: int
    num_ranks: int
    local_rank: int
    node: int

    @classmethod
    def from_environment(cls) -> Start | None:
        """None: this is the only rank."""
        numbers = {name: _number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")}
        rank, num_ranks = numbers["RANK"], numbers["WORLD_SIZE"]
        if num_ranks is None or num_ranks <= 1:
            return None
        if rank is None:
            raise ConfigError(
                f"WORLD_SIZE is {num_ranks} in the environment, but RANK is not there\n"
                "  fix:   start with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
            )
        local = numbers["LOCAL_RANK"]
        return cls(rank, num_ranks, rank if local is None else local, numbers["GROUP_RANK"] or 0)


def speaks() -> bool:
    """Whether this process says what all processes on its machine would say: mistakes in the command, warnings."""
    return (_number("WORLD_SIZE") or 1) <= 1 or not _number("LOCAL_RANK")


class Ranks:
    """This rank and the others: here, the only one."""

    rank = 0
    num_ranks = 1

    def tell(self, numbers: Sequence[float]) -> list[list[float]]:
        """Tell the others these numbers, at the end of a step; returns everybody's, by rank."""
        return [list(numbers)]

    def tell_text(self, what: str, text: str) -> list[str]:  # noqa: ARG002 - nobody listens
        """Likewise a text. Each `what` can be told once."""
        return [text]

    def agreed(self, phase: str) -> AbstractContextManager[None]:  # noqa: ARG002 - nobody listens
        """Go on after `phase` only when it went well on every rank."""
        return nullcontext()

    def all_same(self, what: str, value: str, fix: str) -> None:
        """Raise when ranks differ in `what`."""


class SeveralRanks(Ranks):
    """One of several."""

    def __init__(self, start: Start, group: RankGroup) -> None:
        self.rank = start.rank
        self.num_ranks = start.num_ranks
        self._node = start.node
        self._group = group
        self._channel: Channel = group.channel("command")
        self._num_told = 0
        self._nodes = [int(node) for node in self.tell_text("nodes", str(start.node))]

    def tell(self, numbers: Sequence[float]) -> list[list[float]]:
        import torch

        from zero_infinity.comm.channel import Topic

        self._num_told += 1
        topic = Topic("command", self._num_told, f"the end of step {self._num_told}")
        self._group.names[self._num_told] = topic.name
        bits = torch.tensor(list(numbers), dtype=torch.float64).view(torch.int64).tolist()
        said = torch.tensor(self._channel.agree(topic, bits)).view(torch.float64)
        return [[float(number) for number in row] for row in said]

    def tell_text(self, what: str, text: str) -> list[str]:
        return self._group.tell(what, text)

    def agreed(self, phase: str) -> AbstractContextManager[None]:
        return self._group.agreed(phase)

    def all_same(self, what: str, value: str, fix: str) -> None:
        self._group.all_same(what, value, fix)

    def says(self, error: ZeroInfinityError | KeyboardInterrupt) -> bool:
        """Whether it is for this rank to print `error`."""
        if isinstance(error, RankError) and error.failed_rank is not None:
            if self._nodes[error.failed_rank] == self._node:
                return False  # it has said so itself, on the same screen
            topic = str(error.failed_rank)
        else:
            # Those who lose a rank lose each other a moment later: the first to notice names the right one.
            topic = "lost" if isinstance(error, LostRankError) else describe(error)
        digest = hashlib.sha256(topic.encode()).hexdigest()[:16]
        try:
            return self._group.is_first_to(f"say/{self._node}/{digest}")
        except RuntimeError:  # the store went with the rank that kept it
            return True

    def close(self) -> None:
        self._group.close()


@contextmanager
def joined(timeout_seconds: float) -> Iterator[Ranks]:
    """Inside, the ranks know each other. With several, an error in here ends the process."""
    start = Start.from_environment()
    if start is None:
        yield Ranks()
        return
    ranks: SeveralRanks | None = None
    try:
        ranks = _join(start, timeout_seconds)
        yield ranks
        ranks.close()
        _part()
    except BaseException as error:  # noqa: BLE001 - the process ends here, whatever it was
        _leave(start, ranks, error)


def _join(start: Start, timeout_seconds: float) -> SeveralRanks:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from zero_infinity.comm.process_group import find_group

    missing = [name for name in _ADDRESS if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"there are {start.num_ranks} ranks, but {' and '.join(missing)} is not in the environment\n"
            "  fix:   start with torchrun; or set it to the address (a free port) of the machine with rank 0"
        )
    backend = "gloo"
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        if device is not None:
            torch.accelerator.set_device_index(start.local_rank)
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    try:
        timeout = timedelta(seconds=timeout_seconds)
        if os.environ.get("LOCAL_WORLD_SIZE") == str(start.num_ranks):
            # torchrun keeps its store over restarts, where ranks find the addresses of those that are gone. Only on one
            # machine is the number of restarts sure to be the same for all.
            store, _, _ = next(rendezvous("env://", start.rank, start.num_ranks, timeout=timeout))
            store.set_timeout(timeout)
            own = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            dist.init_process_group(backend, store=own, rank=start.rank, world_size=start.num_ranks, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
        group = find_group(None)
        if group is None:
            raise RankError("torch's process group has one rank")
        return SeveralRanks(start, group)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, ZeroInfinityError):
            raise
        where = ":".join(os.environ[name] for name in _ADDRESS)
        raise LostRankError(
            f"the {start.num_ranks} ranks do not find each other at {where}\n"
            f"  why:   {str(error).splitlines()[0]}\n"
            "  fix:   the same address on every machine, reachable from it; GLOO_SOCKET_IFNAME names the network "
            "interface to use; as many processes as WORLD_SIZE says"
        ) from error


def _part() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def _leave(start: Start, ranks: SeveralRanks | None, error: BaseException) -> None:
    """Say what happened and end the process."""
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
