"""Sums gradients over ranks while backward goes on: each rank gets the sum of its own part.

Gradients come whole and leave in rows, one for each rank, through buckets of constant size: what this takes of memory
does not grow with the model. A row that lies in one gradient is sent from where it is; one that crosses parameters, or
goes in another dtype, is put together in the bucket first. Small units are summed together in one bucket.

One thread does it, in the order in which sums were asked for, which is the same on every rank.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from zero_infinity.comm.channel import Channel, Topic
from zero_infinity.errors import EngineClosedError, again
from zero_infinity.one_core_thread import use_one_core
from zero_infinity.optim.state_records import Segment
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.policy.partition import Span

Whole = dict[ManagedParameter, torch.Tensor]  # gradients of a unit, flat, as this rank has them


class Reduced:
    """The average over ranks of one unit's gradients: elements `span` of the unit, some time later."""

    __slots__ = ("_ready", "elements", "error", "parameters", "span")

    def __init__(self, parameters: Sequence[ManagedParameter], span: Span) -> None:
        self.parameters = parameters  # that have a gradient, on some rank
        self.span = span
        self.elements: torch.Tensor | None = None
        self.error: BaseException | None = None
        self._ready = threading.Event()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    def wait(self) -> torch.Tensor:
        """The elements."""
        self._ready.wait()
        if self.error is not None:
            raise again(self.error)
        if self.elements is None:
            raise RuntimeError("a sum over ranks is ready and has no elements")
        return self.elements

    def part(self, segment: Segment) -> torch.Tensor | None:
        """The elements of `segment`; None when no rank has a gradient of its parameter."""
        if segment.parameter not in self.parameters:
            return None
        first = segment.parameter.offset - self.span.start
        return self.wait()[first + segment.start : first + segment.stop]

    def done(self, elements: torch.Tensor | None, error: BaseException | None = None) -> None:
        self.elements = elements
        self.error = error
        self._ready.set()


class _Task:
    """Sums that go together."""

    __slots__ = ("released", "results", "topic", "units")

    def __init__(
        self, topic: Topic, units: list[tuple[Unit, Whole]], results: list[Reduced], released: Callable[[], None]
    ) -> None:
        self.topic = topic
        self.units = units
        self.results = results
        self.released = released


class ReduceScatter:
    """Sums gradients over ranks, on a thread of its own."""

    def __init__(
        self, channel: Channel, bucket_bytes: int, *, wire_dtype: torch.dtype | None, everywhere: bool
    ) -> None:
        self._channel = channel
        self._bucket_bytes = bucket_bytes  # for all rows that leave, and as much for those that come in
        self._dtype = wire_dtype  # None: the gradients' own
        self._everywhere = everywhere  # every rank gets the whole sum (stage 0)
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._buckets: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
        self._thread = threading.Thread(target=self._work, name="zero-infinity-reduce", daemon=True)
        self._thread.start()

    def submit(
        self,
        topic: Topic,
        units: Sequence[tuple[Unit, Whole, Sequence[ManagedParameter]]],
        released: Callable[[], None],
    ) -> list[Reduced]:
        """Sum these gradients; parameters of a unit that this rank has no gradient of count as zeros.

        `released` is called when the gradients are not needed any more.
        """
        results = [
            Reduced(parameters, Span(0, unit.num_elements) if self._everywhere else unit.owned)
            for unit, _, parameters in units
        ]
        self._tasks.put(_Task(topic, [(unit, whole) for unit, whole, _ in units], results, released))
        return results

    def close(self) -> None:
        """End the thread after the sum that it takes now."""
        if self._error is None:
            self._error = EngineClosedError("sums over ranks have ended")
        self._tasks.put(None)
        self._channel.end(self._thread)

    def _work(self) -> None:
        use_one_core()
        while (task := self._tasks.get()) is not None:
            try:
                if self._error is not None:
                    raise again(self._error)
                with torch.no_grad():
                    self._reduce(task)
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the sum
                self._error = error.with_traceback(None)
                for result in task.results:
                    result.done(None, self._error)
            task.units.clear()
            task.released()
            del task

    def _reduce(self, task: _Task) -> None:
        self._channel.agree(task.topic)
        sums = [
            torch.zeros(len(result.span), dtype=_sum_dtype(unit))
            for result, (unit, _) in zip(task.results, task.units, strict=True)
        ]
        for dtype in dict.fromkeys(total.dtype for total in sums):
            members = [(*unit, total) for unit, total in zip(task.units, sums, strict=True) if total.dtype == dtype]
            self._reduce_alike(task.topic, members, dtype)
        if self._everywhere:
            wholes = [(total, unit.spans) for (unit, _), total in zip(task.units, sums, strict=True)]
            self._channel.gather(Topic("gradient gather", task.topic.number, task.topic.name), wholes)
        for result, total in zip(task.results, sums, strict=True):
            result.done(total.div_(self._channel.num_ranks))

    def _reduce_alike(self, topic: Topic, members: list[tuple[Unit, Whole, torch.Tensor]], dtype: torch.dtype) -> None:
        sent, received = self._bucket(self._dtype or dtype)
        rank = self._channel.rank
        for pieces in _fill(members, sent.shape[1]):
            rows = [_row(pieces, to, sent[to]) for to in range(self._channel.num_ranks)]
            length = len(rows[rank])
            total = torch.empty(length, dtype=dtype)
            self._channel.reduce(topic, rows, received, total)
            done = 0
            for unit, _, into, begin, size in pieces:
                span = unit.spans[rank].overlap(unit.spans[rank].start + begin, unit.spans[rank].start + begin + size)
                first = span.start if self._everywhere else span.start - unit.owned.start
                into[first : first + len(span)] = total[done : done + len(span)]
                done += len(span)

    def _bucket(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        if dtype not in self._buckets:
            length = self._bucket_bytes // dtype.itemsize // self._channel.num_ranks
            self._buckets.clear()  # one pair at a time is all that is counted
            self._buckets[dtype] = (
                torch.empty(self._channel.num_ranks, length, dtype=dtype),
                torch.empty(self._channel.num_ranks - 1, length, dtype=dtype),
            )
        return self._buckets[dtype]


_Piece = tuple[Unit, Whole, torch.Tensor, int, int]


def _fill(members: list[tuple[Unit, Whole, torch.Tensor]], length: int) -> Iterator[list[_Piece]]:
    """Cut the units' spans so that the rows of what is yielded are at most `length` elements long."""
    pieces: list[_Piece] = []
    room = length
    for unit, whole, total in members:
        begin, longest = 0, max(map(len, unit.spans))
        while begin < longest:
            size = min(room, longest - begin)
            pieces.append((unit, whole, total, begin, size))
            begin += size
            room -= size
            if not room:
                yield pieces
                pieces, room = [], length
    if pieces:
        yield pieces


def _row(pieces: list[_Piece], rank: int, bucket: torch.Tensor) -> torch.Tensor:
    """What goes to `rank` of these pieces."""
    ranges = []
    for unit, whole, _, begin, size in pieces:
        span = unit.spans[rank]
        ranges.append((whole, span.overlap(span.start + begin, span.start + begin + size)))
    if len(ranges) == 1:
        found = _inside_one(*ranges[0], bucket.dtype)
        if found is not None:
            return found
    done = 0
    for whole, span in ranges:
        target = bucket[done : done + len(span)]
        target.zero_()
        for parameter, flat in whole.items():
            common = span.overlap(parameter.offset, parameter.end)
            if len(common):
                target[common.start - span.start : common.stop - span.start] = flat[
                    common.start - parameter.offset : common.stop - parameter.offset
                ]
        done += len(span)
    return bucket[:done]


def _inside_one(whole: Whole, span: Span, dtype: torch.dtype) -> torch.Tensor | None:
    """The elements of `span` where they are, when one gradient has all of them."""
    for parameter, flat in whole.items():
        if parameter.offset <= span.start and span.stop <= parameter.end and flat.dtype == dtype:
            return flat[span.start - parameter.offset : span.stop - parameter.offset]
    return None


def _sum_dtype(unit: Unit) -> torch.dtype:
    return torch.float64 if unit.dtype is torch.float64 else torch.float32
