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
from typing import Protocol

import torch
from torch._C._distributed_c10d import AllToAllOptions
from torch.distributed import Work

from zero_infinity.errors import DivergenceError, LostRankError
from zero_infinity.shard.partition import Span
from zero_infinity.trace import RANKS, Category, Trace

_AGREEMENT, _DATA = 0, 1  # tags


@dataclass(frozen=True, slots=True)
class Topic:
    """What an exchange is about: `number` is the same on every rank that means the same."""

    kind: str
    number: int
    name: str


class Channel(Protocol):
    """What is used of torch's process group backends, whose stubs do not have it."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int, /) -> Work: ...

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: AllToAllOptions, /
    ) -> Work: ...


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


class Wire:
    """Exchanges of one thread with the same thread of every other rank."""

    def __init__(
        self,
        control: Channel,
        traffic: Traffic,
        describe: Callable[[int], str],
        topics: Callable[[int], str],
        data: Channel | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._control = control
        self._data = data  # of an accelerator; None: everything goes by the control group
        self._traffic = traffic
        self._trace = trace
        self._describe = describe  # what is known of a rank that is lost
        self._topics = topics  # the name of what another rank wants
        self.rank = control.rank()
        self.num_ranks = control.size()
        self.peers = [rank for rank in range(self.num_ranks) if rank != self.rank]
        self._num_exchanges = 0

    def agree(self, topic: Topic, say: Sequence[int] = ()) -> list[list[int]]:
        """Make sure that every rank is about to do the same, and hear what each has to say of it (by rank)."""
        self._num_exchanges += 1
        mine = torch.tensor([self._num_exchanges, topic.number, *say], dtype=torch.int64)
        theirs = {rank: torch.empty_like(mine) for rank in self.peers}
        self._exchange({r: [mine] for r in self.peers}, {r: [theirs[r]] for r in self.peers}, _AGREEMENT, topic.name)
        said = [theirs.get(rank, mine).tolist() for rank in range(self.num_ranks)]
        if any(numbers[:2] != said[self.rank][:2] for numbers in said):
            raise self._divergence(topic, [numbers[1] for numbers in said])
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
        try:
            for rank, tensors in received.items():
                works += [(rank, self._control.recv([t], rank, tag)) for t in tensors if t.numel()]
            for rank, tensors in sent.items():
                works += [(rank, self._control.send([t], rank, tag)) for t in tensors if t.numel()]
        except RuntimeError as error:
            raise self._lost(self.peers[0] if len(self.peers) == 1 else None, name, error) from error
        for rank, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(rank, name, error) from error

    def _exchange_on_accelerator(
        self,
        group: Channel,
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

    def _lost(self, rank: int | None, name: str, error: RuntimeError) -> LostRankError:
        who = f"rank {rank}" if rank is not None else "another rank"
        known = self._describe(rank) if rank is not None else ""
        reason = str(error).partition("] ")[2] or str(error)
        return LostRankError(
            f"{who} did not answer while rank {self.rank} was waiting for {name!r}{known}\n"
            f"  why:   {reason.splitlines()[0]}\n"
            "  fix:   see what that rank has printed; the same number of batches and the same calls on every rank"
        )

    def _divergence(self, topic: Topic, numbers: list[int]) -> DivergenceError:
        wanted: dict[int, list[int]] = {}
        for rank, number in enumerate(numbers):
            wanted.setdefault(number, []).append(rank)
        sides = "".join(
            f"\n  {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {self._topics(number)!r}"
            for number, ranks in sorted(wanted.items(), key=lambda item: item[1])
        )
        error = DivergenceError(
            f"ranks have parted: they want different things next ({topic.kind}){sides}\n"
            "  fix:   let every rank call the same modules in the same order, as often"
        )
        error.wanted = tuple(numbers)
        return error
