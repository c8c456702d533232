"""The collectives of one thread over its own process group: the only module that talks to other ranks.

Facts about gloo that shaped this module (seen with torch 2.13):
- Its `all_gather` and `reduce_scatter` make an extra copy of everything, and the summation order of `reduce_scatter`
  depends on an element's position in the buffer. Here, parts are sent point to point, directly to their final
  location, and summed in rank order: the same bits for every stage, bucket size and budget.
- A message longer than the receiving buffer aborts the process. So ranks first tell each other what they are about to
  exchange. If they differ, they choose one of their proposals (`proposals.py`), or, where every rank has to do the
  same, each raises an error that lists what every rank asked for.
- Two threads that share a group mix up their messages. So every communicating thread has its own channel.

On an accelerator the data goes through the collectives of the backend that the user's process group has for it (NCCL,
XCCL, ...). They are launched on the current stream, in one order for all threads (`device_group.py`), and no thread
waits for them. The agreement goes through gloo.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import Work

from zero_infinity.comm.device_group import DeviceGroup
from zero_infinity.comm.lost_rank import RankStatus, lost_rank
from zero_infinity.comm.topics import Topic
from zero_infinity.comm.transport import Connections
from zero_infinity.errors import DivergenceError, EngineClosedError, StuckThreadError
from zero_infinity.policy.partition import Span
from zero_infinity.trace import RANKS, Category, Trace

# Message tags; ranks meet over the user's group, which has others.
_AGREEMENT, _DATA, _CUT, _PART, _LAUNCH = 21_580, 21_581, 21_582, 21_583, 21_584
_NUM_WORDS = 6  # numbers that ranks tell each other in one message, beside what it is about
_AT_ONCE = timedelta(milliseconds=1)
# How long a thread that was told to end may take to finish its current exchange.
_GRACE_SECONDS = 3.0


# Begins a pause; the result waits until every rank pauses.
Pause = Callable[[], Callable[[], None]]


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


class Channel:
    """Collectives of one thread with the same thread of every other rank."""

    def __init__(
        self,
        control: Connections,
        traffic: Traffic,
        directory: RankStatus,
        data: DeviceGroup | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._control: Connections | None = control
        self._data = data  # the accelerator's; None: everything goes through the control group
        self._traffic = traffic
        self._directory = directory
        self._trace = trace
        self.rank = control.rank()
        self.num_ranks = control.size()
        self.peers = [rank for rank in range(self.num_ranks) if rank != self.rank]
        self._num_exchanges = 0
        self._is_cut = False
        # Threads of this rank that take part in other ranks' exchanges while this channel's thread waits in `agree`.
        self.pauses: list[Pause] = []

    def cut(self) -> None:
        """Break the connections: every thread waiting on them, on any rank, gets an error immediately."""
        control = self._control
        if control is None:
            return
        self._is_cut = True
        if self._data is not None:
            self._data.cut()
        for rank in self.peers:
            with suppress(RuntimeError):
                # A wait that times out closes all connections; gloo offers no other way to close them. If this one is
                # closed already, the wait does not time out.
                control.recv([torch.empty(1)], rank, _CUT).wait(_AT_ONCE)

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

    def agree(self, topic: Topic, say: Sequence[int] | Callable[[], Sequence[int]] = ()) -> list[list[int]]:
        """Check that every rank is about to do the same exchange. Returns each rank's `say`, by rank.

        Until every rank is here, other threads of this one take part in what the others still need (`pauses`); a
        function as `say` is called after that.
        """
        for ended in [pause() for pause in self.pauses]:
            ended()
        topics, said = self._tell(topic, say() if callable(say) else say)
        if said is None:
            error = self._directory.divergences[self] = self._divergence(topic, topics)
            raise error
        self._directory.divergences.pop(self, None)
        return said

    def propose(self, topic: Topic) -> list[int]:
        """Tell every rank what this one wants next; returns the topic number that each rank wants, by rank."""
        return self._tell(topic, ())[0]

    def _tell(self, topic: Topic, say: Sequence[int]) -> tuple[list[int], list[list[int]] | None]:
        """Tell every rank a topic and numbers. Returns the topic number of each rank, and what each says.

        None if they differ in the topic, or in how much they say.
        """
        self._num_exchanges += 1
        # Every message has the same length, whatever it is about: what does not fit follows.
        first, rest = list(say[:_NUM_WORDS]), list(say[_NUM_WORDS:])
        said = self._swap([topic.number, len(say), *first, *[0] * (_NUM_WORDS - len(first))], topic.name)
        topics = [numbers[0] for numbers in said]
        if any(numbers[:2] != said[0][:2] for numbers in said):
            return topics, None
        following = self._swap(rest, topic.name) if rest else [[]] * self.num_ranks
        return topics, [said[r][2 : 2 + len(first)] + following[r] for r in range(self.num_ranks)]

    def _swap(self, numbers: Sequence[int], name: str) -> list[list[int]]:
        """Exchange the same count of numbers with every rank; by rank."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        theirs = {rank: torch.empty_like(mine) for rank in self.peers}
        self._exchange({r: [mine] for r in self.peers}, {r: [theirs[r]] for r in self.peers}, _AGREEMENT, name)
        return [theirs.get(rank, mine).tolist() for rank in range(self.num_ranks)]

    def tell(self, topic: Topic, text: str) -> list[str]:
        """All-gather a text; returns each rank's, by rank."""
        mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = self.agree(topic, [len(mine)])
        theirs = {rank: torch.empty(lengths[rank][0], dtype=torch.uint8) for rank in self.peers}
        self._exchange({r: [mine] for r in self.peers}, {r: [theirs[r]] for r in self.peers}, _AGREEMENT, topic.name)
        return [bytes(theirs.get(rank, mine).tolist()).decode() for rank in range(self.num_ranks)]

    def gather(self, topic: Topic, wholes: Sequence[tuple[torch.Tensor, Sequence[Span]]]) -> None:
        """All-gather: each rank has its own span of each tensor in place and receives all others."""
        own = [whole[spans[self.rank].start : spans[self.rank].stop] for whole, spans in wholes]
        theirs = {rank: [whole[spans[rank].start : spans[rank].stop] for whole, spans in wholes] for rank in self.peers}
        start = time.perf_counter()
        self._exchange(dict.fromkeys(self.peers, own), theirs, _DATA, topic.name)
        self._note(topic, start, sum(part.nbytes for part in own) * len(self.peers))

    def send_parts(self, topic: Topic, ranks: Collection[int], part: torch.Tensor) -> None:
        """Send elements of this rank's shard to `ranks`, which call `gather_parts`: this one does not want the unit."""
        start = time.perf_counter()
        self._exchange({rank: [part] for rank in sorted(ranks)}, {}, _PART, topic.name)
        self._note(topic, start, part.nbytes * len(ranks))

    def gather_parts(self, topic: Topic, ranks: Collection[int], whole: torch.Tensor, spans: Sequence[Span]) -> None:
        """Gather some elements of every rank's shard into `whole`, in host memory; only `ranks` want them."""
        own = whole[spans[self.rank].start : spans[self.rank].stop]
        theirs = {rank: [whole[spans[rank].start : spans[rank].stop]] for rank in self.peers}
        receivers = [rank for rank in sorted(ranks) if rank != self.rank]
        start = time.perf_counter()
        self._exchange({rank: [own] for rank in receivers}, theirs, _PART, topic.name)
        self._note(topic, start, own.nbytes * len(receivers))

    def spread(self, topic: Topic, whole: torch.Tensor, source: int = 0) -> None:
        """Broadcast the values of one rank."""
        if self.rank == source:
            start = time.perf_counter()
            self._exchange({rank: [whole] for rank in self.peers}, {}, _DATA, topic.name)
            self._note(topic, start, whole.nbytes * len(self.peers))
        else:
            self._exchange({}, {source: [whole]}, _DATA, topic.name)

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
            self._exchange_on_accelerator(self._data, sent, received, name)
            return
        control = self._control
        if control is None:
            raise EngineClosedError(f"the connections between ranks were closed before {name!r} was exchanged")
        timeout = self._directory.timeout
        for start, parts in ((control.recv, received), (control.send, sent)):
            for rank, tensors in parts.items():
                try:
                    works += [(rank, start([tensor], rank, tag)) for tensor in tensors if tensor.numel()]
                except RuntimeError as error:
                    raise self._failure(rank, name, error) from error
        for rank, work in works:
            try:
                work.wait(timeout)
            except RuntimeError as error:
                raise self._failure(rank, name, error) from error

    def _failure(self, rank: int, name: str, error: RuntimeError) -> BaseException:
        """Return the error to raise when the exchange of `name` with `rank` failed."""
        if self._is_cut and self._directory.loss is None:
            return EngineClosedError(f"the connections between ranks were closed while {name!r} was exchanged")
        return lost_rank(rank, self.rank, name, error, self._directory)

    def _exchange_on_accelerator(
        self,
        group: DeviceGroup,
        sent: Mapping[int, Sequence[torch.Tensor]],
        received: Mapping[int, Sequence[torch.Tensor]],
        name: str,
    ) -> None:
        """Every rank has agreed to this, and waits for nothing but earlier launches."""
        tensors = next(tensors for tensors in (*sent.values(), *received.values()))
        nothing = tensors[0].new_empty(0)
        exchanges = [
            (
                [received[rank][number] if rank in received else nothing for rank in range(self.num_ranks)],
                [sent[rank][number] if rank in sent else nothing for rank in range(self.num_ranks)],
            )
            for number in range(len(tensors))
        ]
        launch = torch.tensor([group.next_number() if self.rank == 0 else 0])
        if self.rank == 0:
            self._exchange({rank: [launch] for rank in self.peers}, {}, _LAUNCH, name)
        else:
            self._exchange({}, {0: [launch]}, _LAUNCH, name)
        group.launch(int(launch), exchanges)

    def _divergence(self, topic: Topic, numbers: list[int]) -> DivergenceError:
        wanted: dict[int, list[int]] = {}
        for rank, number in enumerate(numbers):
            wanted.setdefault(number, []).append(rank)
        sides = ""
        for number, ranks in sorted(wanted.items(), key=lambda item: item[1]):
            who = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
            sides += f"\n  {who}: {(topic.name if number == topic.number else self._directory.name_of(number))!r}"
        return DivergenceError(
            f"ranks diverged: mismatched collectives ({topic.kind}){sides}\n"
            "  fix:   every rank must run the same number of batches, backward passes, steps and calls of zero_infinity"
        )
