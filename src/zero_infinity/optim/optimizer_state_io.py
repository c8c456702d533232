"""Reads and writes optimizer state records outside of updates: for state dicts and master weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.topics import Topic
from zero_infinity.errors import UsageError
from zero_infinity.optim.chunk_update import take_edits
from zero_infinity.optim.state_records import MASTER, Chunk, Segment, StateRecord
from zero_infinity.optim.update_rule import copy_scalars
from zero_infinity.params.dtensor import like, local_of
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.tiers.host_cache import HostCache


class OptimizerStateIO:
    """Access to records between steps, on the compute thread."""

    def __init__(self, host_cache: HostCache, records: dict[Unit, StateRecord], channel: Channel | None = None) -> None:
        self._host_cache = host_cache
        self._records = records
        self._channel = channel  # to other ranks that have parts of the records

    def read_state(self, parameter: ManagedParameter) -> dict[str, Any] | None:
        """Return the parameter's optimizer state in the plain optimizer's form; None if there is none yet."""
        if parameter.tiles:
            return self._read_tiles(parameter.tiles)
        record = self._records[parameter.unit]
        names = record.started.get(parameter)
        return {name: self._read(parameter, name) for name in names} if names else None

    def _read_tiles(self, tiles: list[ManagedParameter]) -> dict[str, Any] | None:
        states = [state for tile in tiles if (state := self.read_state(tile)) is not None]
        if len(states) < len(tiles):
            return None
        names = self._records[tiles[0].unit].state_names[tiles[0]]
        # Scalars (the step count) are the same for all tiles.
        return {k: torch.cat([state[k] for state in states]) if k in names else v for k, v in states[0].items()}

    def _read(self, parameter: ManagedParameter, name: str) -> Any:
        record = self._records[parameter.unit]
        if name in record.scalars[parameter]:
            return record.scalars[parameter][name]
        flat = torch.zeros(parameter.num_elements, dtype=record.dtype)
        for _, segment, slot in self._slots(parameter, name):
            flat[segment.start : segment.stop] = slot
        if self._channel is not None and parameter.unit.is_updated_in_parts:
            topic = Topic("state gather", parameter.unit.number, f"the optimizer state of {parameter.name}")
            self._channel.agree(topic)
            self._channel.gather(topic, [(flat, parameter.spans)])
        return like(parameter.parameter, flat.as_strided(parameter.shape, parameter.stride))

    def write_state(self, parameter: ManagedParameter, state: dict[str, Any]) -> None:
        """Store a state of the plain optimizer."""
        self.check_state(parameter, state)
        for tile in parameter.tiles:
            names = self._records[tile.unit].state_names[tile]
            self.write_state(tile, {k: tile.rows_of(v) if k in names else v for k, v in state.items()})
        if parameter.tiles:
            return
        record = self._records[parameter.unit]
        names = record.state_names[parameter]
        for name in names:
            self._write(parameter, name, state[name])
        record.scalars[parameter] = {name: value for name, value in state.items() if name not in names}
        record.started[parameter] = tuple(state)

    def check_state(self, parameter: ManagedParameter, state: dict[str, Any]) -> None:
        """Raise if `state` does not belong to this optimizer."""
        part = parameter.parts[0]
        names = self._records[part.unit].state_names[part]
        missing = [name for name in names if name not in state]
        if missing:
            raise UsageError(
                f"the state of {parameter.name!r} has {sorted(state)} and lacks {missing}: it is another optimizer's"
            )

    def write_master(self, parameter: ManagedParameter, value: torch.Tensor) -> None:
        """Set the master weights, if the parameter has any."""
        if self._records[parameter.unit].has_master:
            self._write(parameter, MASTER, value)
            parameter.state.edits_taken()

    def take_edits(self, parameter: ManagedParameter) -> None:
        """Copy user changes of the stored value into the master weights, as the next update would."""
        unit, store = parameter.unit, self._host_cache.store
        block = unit.the_block()
        with self._host_cache.pinned(block), self._host_cache.reading(block) as memory:
            values = memory.view(unit.dtype)
            for chunk, segment, master in self._slots(parameter, MASTER):
                first = parameter.offset + segment.start - unit.stored.start
                take_edits(master, values[first : first + len(master)])
                if chunk.record is not None:
                    store.mark_dirty(chunk.record)

    def forget_states(self) -> None:
        """Reset to the state before the first step."""
        for record in self._records.values():
            record.started.clear()
            record.scalars.clear()

    def restore_scalars(self, parameter: ManagedParameter, names: tuple[str, ...], scalars: dict[str, Any]) -> None:
        """Set the scalars of a state whose tensors are in the record's blocks. `names` are those of both, in order."""
        for part in parameter.parts:
            record = self._records[part.unit]
            record.started[part] = names
            record.scalars[part] = copy_scalars(scalars)

    def _write(self, parameter: ManagedParameter, name: str, value: torch.Tensor) -> None:
        flat = parameter.flattened(local_of(value.detach()))
        for chunk, segment, slot in self._slots(parameter, name):
            slot.copy_(flat[segment.start : segment.stop])
            if chunk.record is not None:
                self._host_cache.store.mark_dirty(chunk.record)

    def _slots(self, parameter: ManagedParameter, name: str) -> Iterator[tuple[Chunk, Segment, torch.Tensor]]:
        """Yield the parts of one slot that belong to the parameter, each valid until the next is requested."""
        record = self._records[parameter.unit]
        for chunk in record.chunks:
            for segment in chunk.segments:
                if segment.parameter is parameter and chunk.record is not None:
                    with self._memory(chunk) as memory:
                        slot = chunk.slot(memory, name, record.dtype)
                        yield chunk, segment, slot[segment.offset : segment.offset + segment.stop - segment.start]

    @contextmanager
    def _memory(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        if chunk.record is None:
            raise UsageError("this optimizer keeps no state per element")
        with self._host_cache.reading(chunk.record) as memory, torch.no_grad():
            yield memory
