"""All-gathers updated shards where each rank stores whole units and updates one shard (ZeRO stages 1, 2).

A single thread runs the all-gathers in update order, which is the same on every rank. A unit's block is held from the
moment its update is submitted, so it is never read half updated.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.topics import Topic
from zero_infinity.errors import EngineClosedError, again
from zero_infinity.interrupts import through
from zero_infinity.one_core_thread import use_one_core
from zero_infinity.policy.partition import Span
from zero_infinity.storage.block import Block, BlockUse
from zero_infinity.storage.block_store import BlockStore


@dataclass(frozen=True, slots=True)
class _Task:
    topic: Topic
    block: Block
    use: BlockUse
    dtype: torch.dtype
    spans: Sequence[Span]  # each rank's shard


class UpdateAllGather:
    """Completes units of which this rank has updated only its shard."""

    def __init__(self, store: BlockStore, channel: Channel) -> None:
        self._store = store
        self._channel = channel
        self._changed = threading.Condition()
        self._num_pending = 0
        self._error: BaseException | None = None
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="zero-infinity-exchange", daemon=True)
        self._thread.start()

    def submit(self, topic: Topic, block: Block, dtype: torch.dtype, spans: Sequence[Span]) -> None:
        """All-gather `block` after its update, which has been submitted. The block must have been fetched."""
        with self._changed:
            self._num_pending += 1
        self._tasks.put(_Task(topic, block, self._store.claim(block), dtype, spans))

    def drain(self) -> None:
        """Wait until every unit is complete; raises if one failed."""
        with self._changed:
            while self._num_pending and self._error is None:
                with through():
                    self._changed.wait()
            error = self._error
        if error is not None:
            raise again(error)

    def close(self) -> None:
        """End the thread once all units are complete; cut the connections if it makes no progress."""
        self._tasks.put(None)
        self._channel.end(self._thread, lambda: self._store.fail(EngineClosedError("the engine is closed")))

    def _work(self) -> None:
        use_one_core()
        while (task := self._tasks.get()) is not None:
            if self._error is None:
                try:
                    self._gather(task)
                except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for a block
                    self._error = error.with_traceback(None)
                    self._store.fail(self._error)
            with self._changed:
                self._num_pending -= 1
                self._changed.notify_all()
            del task

    def _gather(self, task: _Task) -> None:
        with self._store.changing_claimed(task.block, task.use) as memory, torch.no_grad():
            self._channel.agree(task.topic)
            self._channel.gather(task.topic, [(memory.view(task.dtype)[: task.spans[-1].stop], task.spans)])
