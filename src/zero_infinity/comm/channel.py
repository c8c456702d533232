"""The collectives of one thread over its own process group: the only module that talks to other ranks.

Facts about gloo that shaped this module (seen with torch 2.13):
- Its `all_gather` and `reduce_scatter` make an extra copy of everything, and the summation order of `reduce_scatter`
  depends on an element's position in the buffer. Here, parts are sent point to point, directly to their final
  location, and summed in rank order: the same bits for every stage, bucket size and budget.
- A message longer than the receiving buffer aborts the process. So ranks first tell each other what they are about to
  exchange; on a mismatch every rank raises an error that lists what each rank asked for.
- Two threads that share a group mix up their messages. So every communicating thread has its own channel.

On an accelerator the data goes through the collectives of the backend that the user's process group has for it (NCCL,
XCCL, ...). They are launched on the current stream, and no thread waits for them. The agreement goes through gloo.
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
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from zero_infinity.comm.lost_rank import RankStatus, lost_rank
from zero_infinity.errors import DivergenceError, EngineClosedError, StuckThreadError
from zero_infinity.policy.partition import Span
from zero_infinity.trace import RANKS, Category, Trace

_AGREEMENT, _DATA, _CUT = 0, 1, 2  # message tags
_AT_ONCE = timedelta(milliseconds=1)
# How long a thread that was told to end may take to finish its current exchange.
_GRACE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Topic:
    """What an exchange is about. `number` is the same on every rank for the same topic."""

    kind: str
    number: int
    name: str


class Traffic:
    """Bytes sent by this rank, and number of calls, by kind of exchange."""

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


class GroupConnections(Protocol):
    """The part of a backend's process group that is used here."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...


class Channel:
    """Collectives of one thread with the same thread of every other rank."""

    def __init__(
        self,
        control: GroupConnections,
        traffic: Traffic,
        directory: RankStatus,
        data: ProcessGroup | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._control: GroupConnections | None = control
        self._data = data  # the accelerator's group; None: everything goes through the control group
        self._traffic = traffic
        self._directory = directory
        self._trace = trace
        self.rank = control.rank()
        self.num_ranks = control.size()
        self.peers = [rank for rank in range(self.num_ranks) if rank != self.rank]
        self._num_exchanges = 0

    def cut(self) -> None:
        """Break the connections: every thread waiting on them, on any rank, gets an error immediately."""
        if self._control is None:
            return
        try:
            # A wait that times out closes all connections; gloo offers no other way to close them.
            self._control.recv([torch.empty(1)], self.peers[0], _CUT).wait(_AT_ONCE)
        except RuntimeError:
            return

    def end(self, thread: threading.Thread, wake: Callable[[], None] | None = None) -> None:
        """Join the thread that uses this channel; it has already been told to end.

        Other ranks may be in the same exchange, so the thread may continue while exchanges make progress. After that
        the connections are cut and `wake` is called, which must end all of the thread's other waits.
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
        """Release the connections. No thread may be waiting on them."""
        self._control = None

    def agree(self, topic: Topic, say: Sequence[int] = ()) -> list[list[int]]:
        """Check that every rank is about to do the same exchange. Returns each rank's `say`, by rank."""
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
        """All-gather: each rank has its own span of each tensor in place and receives all others."""
        own = [whole[spans[self.rank].start : spans[self.rank].stop] for whole, spans in wholes]
        theirs = {rank: [whole[spans[rank].start : spans[rank].stop] for whole, spans in wholes] for rank in self.peers}
        start = time.perf_counter()
        self._exchange(dict.fromkeys(self.peers, own), theirs, _DATA, topic.name)
        self._note(topic, start, sum(part.nbytes for part in own) * len(self.peers))

    def spread(self, topic: Topic, whole: torch.Tensor) -> None:
        """Broadcast the values of rank 0."""
        if self.rank == 0:
            start = time.perf_counter()
            self._exchange({rank: [whole] for rank in self.peers}, {}, _DATA, topic.name)
            self._note(topic, start, whole.nbytes * len(self.peers))
        else:
            self._exchange({}, {0: [whole]}, _DATA, topic.name)

    def reduce(self, topic: Topic, rows: Sequence[torch.Tensor], received: torch.Tensor, out: torch.Tensor) -> None:
        """Reduce-scatter: send each rank its row, and sum this rank's rows, in rank order, into `out`.

        `received` holds one row from each other rank.
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
        """Record an exchange."""
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
                    raise lost_rank(rank, self.rank, name, error, self._directory) from error
        for rank, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise lost_rank(rank, self.rank, name, error, self._directory) from error

    def _exchange_on_accelerator(
        self,
        group: ProcessGroup,
        sent: Mapping[int, Sequence[torch.Tensor]],
        received: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        tensors = next(tensors for tensors in (*sent.values(), *received.values()))
        nothing = tensors[0].new_empty(0)
        for number in range(len(tensors)):
            outputs = [received[rank][number] if rank in received else nothing for rank in range(self.num_ranks)]
            inputs = [sent[rank][number] if rank in sent else nothing for rank in range(self.num_ranks)]
            dist.all_to_all(outputs, inputs, group=group)

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
            f"ranks diverged: mismatched collectives ({topic.kind}){sides}\n"
            "  fix:   every rank must call the same modules in the same order, the same number of times"
        )
        error.wanted = tuple(numbers)
        return error
