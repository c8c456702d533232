"""Sends updated parameters to every rank, where each keeps all parameters and updates a part of them (stages 1 and 2).

One thread does it, in the order of the updates, which is the same on every rank. A unit's block is held from the moment
its update is submitted, so that nobody reads it half old and half new.
"""

from __future__ import annotations

import queue
import threading

import torch

from zero_infinity.errors import EngineClosedError, again
from zero_infinity.interrupts import through
from zero_infinity.runtime.one_core import use_one_core
from zero_infinity.runtime.unit import Unit
from zero_infinity.shard.wire import Topic, Wire
from zero_infinity.store.block import Turn
from zero_infinity.store.blocks import BlockStore


class ParameterExchange:
    """Completes units of which this rank has updated its part."""

    def __init__(self, store: BlockStore, wire: Wire) -> None:
        self._store = store
        self._wire = wire
        self._changed = threading.Condition()
        self._num_pending = 0
        self._error: BaseException | None = None
        self._units: queue.SimpleQueue[tuple[Unit, Turn] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="zero-infinity-exchange", daemon=True)
        self._thread.start()

    def submit(self, unit: Unit) -> None:
        """The unit's update was submitted, and its block is fetched: complete it after that."""
        with self._changed:
            self._num_pending += 1
        self._units.put((unit, self._store.claim(unit.the_block())))

    def drain(self) -> None:
        """Wait until every unit is complete, or none will be any more."""
        with self._changed:
            while self._num_pending and self._error is None:
                with through():
                    self._changed.wait()
            error = self._error
        if error is not None:
            raise again(error)

    def close(self) -> None:
        """End the thread when all units are complete, unless that does not get on."""
        self._units.put(None)
        self._wire.end(self._thread, lambda: self._store.fail(EngineClosedError("the engine is closed")))

    def _work(self) -> None:
        use_one_core()
        while (task := self._units.get()) is not None:
            if self._error is None:
                try:
                    self._complete(*task)
                except BaseException as error:  # noqa: BLE001 - whoever waits for a block gets it
                    self._error = error.with_traceback(None)
                    self._store.fail(self._error)
            with self._changed:
                self._num_pending -= 1
                self._changed.notify_all()
            del task

    def _complete(self, unit: Unit, turn: Turn) -> None:
        topic = Topic("parameter gather", unit.number, unit.name)
        with self._store.in_turn(unit.the_block(), turn) as memory, torch.no_grad():
            self._wire.agree(topic)
            self._wire.gather(topic, [(memory.view(unit.dtype)[: unit.num_elements], unit.spans)])
