"""Reduce-scatters gradients during backward: each rank gets the average of its own shard.

Whole gradients come in and are sent as rows, one per rank, through buckets of constant size, so memory does not grow
with the model. A row that lies inside one gradient is sent without a copy; a row that spans several gradients, or is
sent in another dtype, is first copied into the bucket. Small units share a bucket.

A single thread does this, in the order that all ranks agree on (`proposals.py`). A rank that has no gradients of a unit
now (an *absent* unit) takes part in its sum with zeros, and gets its shard. Such a sum is *partial*, as this rank may
submit gradients of that unit later.

On an accelerator the thread launches the work on a stream of the device, where gradients are summed; only this rank's
shard of the sum is downloaded.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.proposals import Proposals
from zero_infinity.comm.topics import PAUSE, Topic
from zero_infinity.errors import EngineClosedError, again
from zero_infinity.interrupts import through
from zero_infinity.one_core_thread import use_one_core
from zero_infinity.policy.partition import ShardLayout, Span


class PendingDownload(Protocol):
    """Work of a device that may still be under way."""

    @property
    def is_done(self) -> bool: ...
    def wait(self) -> None: ...
    def order(self) -> None: ...


class GradientDevice(Protocol):
    """The accelerator that has the gradients and sums them."""

    @property
    def device(self) -> torch.device: ...

    def computed(self) -> torch.Event:
        """Return an event after what this thread has launched so far."""

    def reducing(self, computed: torch.Event) -> AbstractContextManager[object]:
        """Inside, this thread launches on the stream of reductions, after `computed`."""

    def read_by_reduction(self, gradient: torch.Tensor) -> None:
        """The memory of this gradient is reused only after what the stream of reductions does until now."""

    def reduced(self) -> PendingDownload:
        """Return what is launched on the stream of reductions so far."""

    def download(self, source: torch.Tensor) -> tuple[torch.Tensor, PendingDownload]:
        """Return a copy in host memory, to be read when the download is done."""


@dataclass(frozen=True, slots=True)
class LocalGradients:
    """This rank's gradients of one unit: flat tensors by their offset in the unit; the rest is zero."""

    shards: ShardLayout
    sum_dtype: torch.dtype
    pieces: Mapping[int, torch.Tensor]
    stays: bool = False  # the sum is used on the accelerator

    def inside_one(self, span: Span, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the elements of `span` without a copy if a single gradient of this dtype contains them all."""
        for offset, flat in self.pieces.items():
            if offset <= span.start and span.stop <= offset + len(flat) and flat.dtype == dtype:
                return flat[span.start - offset : span.stop - offset]
        return None

    def copy(self, span: Span, target: torch.Tensor) -> None:
        """Copy the elements of `span` into `target`."""
        target.zero_()
        for offset, flat in self.pieces.items():
            common = span.overlap(offset, offset + len(flat))
            if len(common):
                target[common.start - span.start : common.stop - span.start] = flat[
                    common.start - offset : common.stop - offset
                ]


class SumKind:
    """Whether a sum has the gradients of every rank."""

    __slots__ = ("is_partial",)

    def __init__(self) -> None:
        self.is_partial = False  # not every rank had submitted its gradients; valid once the sum is made


class ReducedShard:
    """The average over ranks of the elements `span` of a unit, available once it is ready."""

    __slots__ = ("_download", "_elements", "_error", "_ready", "kind", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.kind = SumKind()
        self._download: PendingDownload | None = None
        self._elements: torch.Tensor | None = None
        self._error: BaseException | None = None
        self._ready = threading.Event()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set() and (self._download is None or self._download.is_done)

    def wait(self) -> torch.Tensor:
        """The elements, in host memory."""
        elements = self._launched()
        if self._download is not None:
            self._download.wait()
        return elements

    def there(self) -> torch.Tensor:
        """The elements on the accelerator, for what this thread launches from now on. Does not wait for the device."""
        elements = self._launched()
        if self._download is not None:
            self._download.order()
            elements.record_stream(torch.accelerator.current_stream(elements.device))
        return elements

    def _launched(self) -> torch.Tensor:
        self._ready.wait()
        if self._error is not None:
            raise again(self._error)
        if self._elements is None:
            raise RuntimeError("a reduced shard is ready and has no elements")
        return self._elements

    def finish(self, elements: torch.Tensor, download: PendingDownload | None = None) -> None:
        self._elements = elements
        self._download = download
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ready.set()


@dataclass(frozen=True, slots=True)
class _Task:
    """Units that are reduced together."""

    topic: Topic
    units: list[LocalGradients]
    results: list[ReducedShard]
    released: Callable[[], None]
    computed: torch.Event | None  # after the gradients, on an accelerator


@dataclass(frozen=True, slots=True)
class _Pause:
    """The submitting thread waits until every rank does."""

    ended: threading.Event


class ReduceScatter:
    """Averages gradients over ranks on its own thread."""

    def __init__(
        self,
        channel: Channel,
        bucket_bytes: int,
        *,
        wire_dtype: torch.dtype | None,
        all_reduce: bool,
        absent: Callable[[int], LocalGradients],
        accelerator: GradientDevice | None = None,
    ) -> None:
        """`absent`: returns the gradients of the unit with this number where there are none."""
        self._channel = channel
        self._proposals = Proposals(channel)
        self._absent = absent
        self._absent_sums: list[tuple[int, ReducedShard]] = []
        self._accelerator = accelerator
        self._device = accelerator.device if accelerator is not None else torch.device("cpu")
        self._bucket_bytes = bucket_bytes  # for all rows sent, and the same again for rows received
        self._dtype = wire_dtype  # None: the dtype of the gradients
        self._all_reduce = all_reduce  # every rank gets the whole average (stage 0)
        self._tasks: queue.SimpleQueue[_Task | _Pause | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._buckets: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
        self._thread = threading.Thread(target=self._work, name="zero-infinity-reduce", daemon=True)
        self._thread.start()

    def submit(self, topic: Topic, units: Sequence[LocalGradients], released: Callable[[], None]) -> list[ReducedShard]:
        """Average these gradients over all ranks. `released` is called once the gradients are no longer needed."""
        results = [self._result_of(unit) for unit in units]
        computed = self._accelerator.computed() if self._accelerator is not None else None
        self._tasks.put(_Task(topic, list(units), results, released, computed))
        return results

    def _result_of(self, unit: LocalGradients) -> ReducedShard:
        return ReducedShard(Span(0, unit.shards.num_elements) if self._all_reduce else unit.shards.owned)

    def pause(self) -> Callable[[], None]:
        """From now on take part in the sums of other ranks. Call the result to wait until every rank pauses."""
        pause = _Pause(threading.Event())
        self._tasks.put(pause)

        def wait() -> None:
            with through():
                pause.ended.wait()
            if self._error is not None:
                raise again(self._error)

        return wait

    def take_absent(self) -> list[tuple[int, ReducedShard]]:
        """Return the sums that this rank took part in without gradients, by unit number; during a pause only."""
        taken, self._absent_sums = self._absent_sums, []
        return taken

    def close(self) -> None:
        """End the thread after its current task."""
        if self._error is None:
            self._error = EngineClosedError("the reduce-scatter thread is closed")
        self._tasks.put(None)
        self._channel.end(self._thread)

    def _work(self) -> None:
        use_one_core()
        while (task := self._tasks.get()) is not None:
            if isinstance(task, _Pause):
                self._end_pause(task)
                continue
            try:
                if self._error is not None:
                    raise again(self._error)
                self._reduce_in_turn(task)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for the result
                self._error = error.with_traceback(None)
                for result in task.results:
                    result.fail(self._error)
            task.units.clear()
            task.released()
            del task

    def _end_pause(self, pause: _Pause) -> None:
        try:
            while self._error is None and (chosen := self._proposals.choose(PAUSE)) is not None:
                self._take_part(chosen.number)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self._error = error.with_traceback(None)
        pause.ended.set()

    def _reduce_in_turn(self, task: _Task) -> None:
        """Reduce this task, after what other ranks want first."""
        while (chosen := self._proposals.choose(task.topic)) is not None:
            if chosen.number != task.topic.number:
                self._take_part(chosen.number)
                continue
            for result in task.results:
                result.kind.is_partial = not chosen.is_common
            with torch.no_grad(), self._launching(task):
                self._reduce(task)
            return

    def _take_part(self, number: int) -> None:
        """Take part in the sum of a unit of which this rank has submitted no gradients."""
        unit = self._absent(number)
        result = self._result_of(unit)
        result.kind.is_partial = True
        computed = self._accelerator.computed() if self._accelerator is not None else None
        task = _Task(Topic("gradient sum", number, f"unit {number}"), [unit], [result], _nothing, computed)
        with torch.no_grad(), self._launching(task):
            self._reduce(task)
        self._absent_sums.append((number, result))

    def _launching(self, task: _Task) -> AbstractContextManager[object]:
        if self._accelerator is None or task.computed is None:
            return nullcontext()
        return self._accelerator.reducing(task.computed)

    def _reduce(self, task: _Task) -> None:
        sums = [
            torch.zeros(len(result.span), dtype=unit.sum_dtype, device=self._device)
            for result, unit in zip(task.results, task.units, strict=True)
        ]
        for dtype in dict.fromkeys(total.dtype for total in sums):
            members = [(unit, total) for unit, total in zip(task.units, sums, strict=True) if total.dtype == dtype]
            self._reduce_alike(task.topic, members, dtype)
        if self._all_reduce:
            wholes = [(total, unit.shards.spans) for unit, total in zip(task.units, sums, strict=True)]
            self._channel.gather(Topic("gradient gather", task.topic.number, task.topic.name), wholes)
        for unit, result, total in zip(task.units, task.results, sums, strict=True):
            total.div_(self._channel.num_ranks)
            if self._accelerator is None:
                result.finish(total)
            elif unit.stays:
                result.finish(total, self._accelerator.reduced())
            else:
                result.finish(*self._accelerator.download(total))
        if self._accelerator is not None:
            for gradient in [gradient for unit in task.units for gradient in unit.pieces.values()]:
                self._accelerator.read_by_reduction(gradient)

    def _reduce_alike(
        self, topic: Topic, members: list[tuple[LocalGradients, torch.Tensor]], dtype: torch.dtype
    ) -> None:
        sent, received = self._bucket(self._dtype or dtype)
        rank = self._channel.rank
        for pieces in _fill(members, sent.shape[1]):
            rows = [_row(pieces, to, sent[to]) for to in range(self._channel.num_ranks)]
            length = len(rows[rank])
            total = torch.empty(length, dtype=dtype, device=self._device)
            self._channel.reduce(topic, rows, received, total)
            done = 0
            for piece in pieces:
                span = piece.span_of(rank)
                first = span.start if self._all_reduce else span.start - piece.unit.shards.owned.start
                piece.total[first : first + len(span)] = total[done : done + len(span)]
                done += len(span)

    def _bucket(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        if dtype not in self._buckets:
            length = self._bucket_bytes // dtype.itemsize // self._channel.num_ranks
            self._buckets.clear()  # the budget has room for one pair
            self._buckets[dtype] = (
                torch.empty(self._channel.num_ranks, length, dtype=dtype, device=self._device),
                torch.empty(self._channel.num_ranks - 1, length, dtype=dtype, device=self._device),
            )
        return self._buckets[dtype]


@dataclass(frozen=True, slots=True)
class _Piece:
    """`size` elements, starting at `begin`, of every rank's shard of a unit."""

    unit: LocalGradients
    total: torch.Tensor
    begin: int
    size: int

    def span_of(self, rank: int) -> Span:
        shard = self.unit.shards.spans[rank]
        return shard.overlap(shard.start + self.begin, shard.start + self.begin + self.size)


def _fill(members: list[tuple[LocalGradients, torch.Tensor]], length: int) -> Iterator[list[_Piece]]:
    """Split the shards so that each yielded row has at most `length` elements."""
    pieces: list[_Piece] = []
    room = length
    for unit, total in members:
        begin, longest = 0, max(map(len, unit.shards.spans))
        while begin < longest:
            size = min(room, longest - begin)
            pieces.append(_Piece(unit, total, begin, size))
            begin += size
            room -= size
            if not room:
                yield pieces
                pieces, room = [], length
    if pieces:
        yield pieces


def _row(pieces: list[_Piece], rank: int, bucket: torch.Tensor) -> torch.Tensor:
    """Return the row of these pieces for `rank`."""
    if len(pieces) == 1:
        found = pieces[0].unit.inside_one(pieces[0].span_of(rank), bucket.dtype)
        if found is not None:
            return found
    done = 0
    for piece in pieces:
        span = piece.span_of(rank)
        piece.unit.copy(span, bucket[done : done + len(span)])
        done += len(span)
    return bucket[:done]


def _nothing() -> None:
    return None
