"""One process group, used by one thread: the only place that talks to other ranks.

Facts about gloo that decide the shape of this (seen with torch 2.13):
- Its `all_gather` and `reduce_scatter` copy everything once more, and the order in which `reduce_scatter` sums depends
  on where an element lies in the buffer. Here parts go from rank to rank, straight into their final place, and are
  summed in the order of ranks: the same bits for every stage, bucket size and budget.
- A message that is longer than the buffer that waits for it ends the process. So ranks first tell each other what they
  are about to exchange; when that differs, everybody gets an error that says who wants what.
- A group that two threads use mixes up their messages. So every thread that talks has a wire of its own.

On an accelerator the bytes go by the backend's own collectives (NCCL); what is agreed upon goes by gloo all the same.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import AllToAllOptions, Work

from zero_infinity.errors import DivergenceError, EngineClosedError, LostRankError, StuckThreadError, again
from zero_infinity.policy.partition import Span
from zero_infinity.trace import RANKS, Category, Trace

_AGREEMENT, _DATA, _CUT = 0, 1, 2  # tags
_AT_ONCE = timedelta(milliseconds=1)
# How long it may take until all threads that met the same divergence have noticed it.
_PARTED_SECONDS = 1.0
# Of a thread that was told to end, for what it is in the middle of.
_GRACE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Topic:
    """What an exchange is about: `number` is the same on every rank that means the same."""

    kind: str
    number: int
    name: str


class Traffic:
    """Bytes that this rank has sent, and calls, by kind of exchange."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    def add(self, kind: str, num_bytes: int) -> None:
        with self._lock:
            self._bytes[kind] += num_bytes
            self._calls[kind] += 1

    def snapshot(self) -> tuple[dict[str, int], dict[str, int]]:
        with self._lock:
            return dict(self._bytes), dict(self._calls)


class RankStatus(Protocol):
    """What is known of ranks and of what they exchange."""

    divergences: dict[Channel, DivergenceError]  # that this rank has seen, on wires that have not agreed again since

    def describe(self, rank: int) -> list[str]:
        """What is known of a rank that is lost, and of others that have ended."""

    def name_of(self, number: int) -> str:
        """The name of what another rank wants."""

    def note(self, text: str) -> None:
        """Leave word of how this rank has fared."""


class GroupConnections(Protocol):
    """A backend's, as far as they are used here: to every other rank."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...
    def alltoall(self, into: list[torch.Tensor], sent: list[torch.Tensor], options: AllToAllOptions) -> Work: ...


class Channel:
    """Exchanges of one thread with the same thread of every other rank."""

    def __init__(
        self,
        control: GroupConnections,
        traffic: Traffic,
        directory: RankStatus,
        data: GroupConnections | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._control: GroupConnections | None = control
        self._data = data  # of an accelerator; None: everything goes by the control group
        self._traffic = traffic
        self._directory = directory
        self._trace = trace
        self.rank = control.rank()
        self.num_ranks = control.size()
        self.peers = [rank for rank in range(self.num_ranks) if rank != self.rank]
        self._num_exchanges = 0

    def cut(self) -> None:
        """Break the connections: whoever waits on them, here or on another rank, gets an error at once."""
        if self._control is None:
            return
        try:
            # A wait that has timed out closes everything; gloo has no other way to be told.
            self._control.recv([torch.empty(1)], self.peers[0], _CUT).wait(_AT_ONCE)
        except RuntimeError:
            return

    def end(self, thread: threading.Thread, wake: Callable[[], None] | None = None) -> None:
        """Wait for the end of the thread that uses the wire, which has been told to end.

        The others may be about to exchange the same as it: it may go on while that gets anywhere. Then the wire is cut,
        and `wake` is called, which is to end all its other waits.
        """
        if threading.current_thread() is thread:
            return
        before = -1
        while before != self._num_exchanges:
            before = self._num_exchanges
            thread.join(_GRACE_SECONDS)
            if not thread.is_alive():
                return
        self.cut()
        if wake is not None:
            wake()
        thread.join(_GRACE_SECONDS)
        if thread.is_alive():
            raise StuckThreadError(thread.name)

    def close(self) -> None:
        """Give the connections back. Nobody may be waiting on them."""
        self._control = None

    def agree(self, topic: Topic, say: Sequence[int] = ()) -> list[list[int]]:
        """Make sure that every rank is about to do the same, and hear what each has to say of it (by rank)."""
        self._num_exchanges += 1
        mine = torch.tensor([self._num_exchanges, topic.number, *say], dtype=torch.int64)
        theirs = {rank: torch.empty_like(mine) for rank in self.peers}
        self._exchange({r: [mine] for r in self.peers}, {r: [theirs[r]] for r in self.peers}, _AGREEMENT, topic.name)
        said = [theirs.get(rank, mine).tolist() for rank in range(self.num_ranks)]
        if any(numbers[:2] != said[self.rank][:2] for numbers in said):
            error = self._directory.divergences[self] = self._divergence(topic, [numbers[1] for numbers in said])
            raise error
        self._directory.divergences.pop(self, None)
        return [numbers[2:] for numbers in said]

    def gather(self, topic: Topic, wholes: Sequence[tuple[torch.Tensor, Sequence[Span]]]) -> None:
        """Each rank has its own span of each tensor in place, and gets all others."""
        own = [whole[spans[self.rank].start : spans[self.rank].stop] for whole, spans in wholes]
        theirs = {rank: [whole[spans[rank].start : spans[rank].stop] for whole, spans in wholes] for rank in self.peers}
        start = time.perf_counter()
        self._exchange(dict.fromkeys(self.peers, own), theirs, _DATA, topic.name)
        self._note(topic, start, sum(part.nbytes for part in own) * len(self.peers))

    def spread(self, topic: Topic, whole: torch.Tensor) -> None:
        """Give every rank the values that the first one has."""
        if self.rank == 0:
            start = time.perf_counter()
            self._exchange({rank: [whole] for rank in self.peers}, {}, _DATA, topic.name)
            self._note(topic, start, whole.nbytes * len(self.peers))
        else:
            self._exchange({}, {0: [whole]}, _DATA, topic.name)

    def reduce(self, topic: Topic, rows: Sequence[torch.Tensor], received: torch.Tensor, out: torch.Tensor) -> None:
        """Send each rank its row, and put the sum of one's own rows, taken in the order of ranks, into `out`.

        `received` is room for one row of each other rank.
        """
        length = len(out)
        theirs = {rank: received[number, :length] for number, rank in enumerate(self.peers)}
        start = time.perf_counter()
        self._exchange({r: [rows[r]] for r in self.peers}, {r: [theirs[r]] for r in self.peers}, _DATA, topic.name)
        self._note(topic, start, sum(rows[rank].nbytes for rank in self.peers))
        for rank in range(self.num_ranks):
            row = rows[rank] if rank == self.rank else theirs[rank]
            if rank == 0:
                out.copy_(row)
            else:
                out.add_(row)

    def _note(self, topic: Topic, start: float, num_bytes: int) -> None:
        """Something was exchanged."""
        self._traffic.add(topic.kind, num_bytes)
        if self._trace is not None:
            name, seconds = f"{topic.name}: {topic.kind}", time.perf_counter() - start
            self._trace.span(name, Category.COLLECTIVE, RANKS, start, seconds, num_bytes)

    def _exchange(
        self,
        sent: Mapping[int, Sequence[torch.Tensor]],
        received: Mapping[int, Sequence[torch.Tensor]],
        tag: int,
        name: str,
    ) -> None:
        works: list[tuple[int, Work]] = []
        if self._data is not None and tag == _DATA:
            self._exchange_on_accelerator(self._data, sent, received)
            return
        control = self._control
        if control is None:
            raise EngineClosedError(f"the connections between ranks were closed before {name!r} was exchanged")
        for start, parts in ((control.recv, received), (control.send, sent)):
            for rank, tensors in parts.items():
                try:
                    works += [(rank, start([tensor], rank, tag)) for tensor in tensors if tensor.numel()]
                except RuntimeError as error:
                    raise self._lost(rank, name, error) from error
        for rank, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(rank, name, error) from error

    def _exchange_on_accelerator(
        self,
        group: GroupConnections,
        sent: Mapping[int, Sequence[torch.Tensor]],
        received: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        tensors = next(tensors for tensors in (*sent.values(), *received.values()))
        nothing = tensors[0].new_empty(0)
        for number in range(len(tensors)):
            outputs = [received[rank][number] if rank in received else nothing for rank in range(self.num_ranks)]
            inputs = [sent[rank][number] if rank in sent else nothing for rank in range(self.num_ranks)]
            group.alltoall(outputs, inputs, AllToAllOptions()).wait()
        torch.accelerator.current_stream().synchronize()

    def _lost(self, rank: int, name: str, error: RuntimeError) -> BaseException:
        # A rank that finds that ranks have parted leaves. Then that is the reason, and another thread of this rank
        # knows it, or will in a moment.
        deadline = time.monotonic() + _PARTED_SECONDS
        while not self._directory.divergences and time.monotonic() < deadline:
            time.sleep(_PARTED_SECONDS / 100)
        divergence = next(iter(self._directory.divergences.values()), None)
        if divergence is not None:
            return again(divergence)
        reason = (str(error).partition("] ")[2] or str(error)).splitlines()[0].partition(". This is")[0]
        self._directory.note(f"failed, as rank {rank} did not answer while it was waiting for {name!r}")
        known = "".join(f"\n  known: {line}" for line in self._directory.describe(rank))
        return LostRankError(
            f"rank {rank} did not answer while rank {self.rank} was waiting for {name!r}\n"
            f"  why:   {reason}{known}\n"
            "  fix:   see what that rank has printed; the same number of batches and the same calls on every rank"
        )

    def _divergence(self, topic: Topic, numbers: list[int]) -> DivergenceError:
        wanted: dict[int, list[int]] = {}
        for rank, number in enumerate(numbers):
            wanted.setdefault(number, []).append(rank)
        name_of = self._directory.name_of
        sides = "".join(
            f"\n  {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {name_of(number)!r}"
            for number, ranks in sorted(wanted.items(), key=lambda item: item[1])
        )
        error = DivergenceError(
            f"ranks have parted: they want different things next ({topic.kind}){sides}\n"
            "  fix:   let every rank call the same modules in the same order, as often"
        )
        error.wanted = tuple(numbers)
        return error
