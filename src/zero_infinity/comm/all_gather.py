"""Sends updated parameters to every rank, where each keeps all parameters and updates a part of them (stages 1 and 2).

One thread does it, in the order of the updates, which is the same on every rank. A unit's block is held from the moment
its update is submitted, so that nobody reads it half old and half new.
"""

from __future__ import annotations

import queue
import threading

import torch

from zero_infinity.comm.channel import Channel, Topic
from zero_infinity.errors import EngineClosedError, again
from zero_infinity.interrupts import through
from zero_infinity.one_core_thread import use_one_core
from zero_infinity.params.unit import Unit
from zero_infinity.storage.block import Turn
from zero_infinity.storage.block_store import BlockStore


class ParameterAllGather:
    """Completes units of which this rank has updated its part."""

    def __init__(self, store: BlockStore, channel: Channel) -> None:
        self._store = store
        self._channel = channel
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
        self._channel.end(self._thread, lambda: self._store.fail(EngineClosedError("the engine is closed")))

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
            self._channel.agree(topic)
            self._channel.gather(topic, [(memory.view(unit.dtype)[: unit.num_elements], unit.spans)])
