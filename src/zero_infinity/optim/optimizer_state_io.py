"""Reads and writes optimizer state records outside of updates: for state dicts and master weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zero_infinity.comm.channel import Channel
from zero_infinity.comm.topics import SCALARS, Topic
from zero_infinity.errors import UsageError
from zero_infinity.optim.nested_state import flat_state, nested_state, tensors_of
from zero_infinity.optim.state_records import MASTER, Chunk, Segment, StateRecord
from zero_infinity.optim.state_slots import check_forms
from zero_infinity.optim.update_rule import copy_scalars
from zero_infinity.params.dtensor import like, local_of
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.policy.partition import Span
from zero_infinity.tiers.host_cache import HostCache
from zero_infinity.tiers.rounded_copies import take_edits


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
        if parameter in record.wholes:
            self._share_scalars([parameter])
        names = record.started.get(parameter)
        return nested_state({name: self._read(parameter, name) for name in names}) if names else None

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
        form = record.form_of(parameter, name)
        flat = torch.zeros(form.num_elements, dtype=form.dtype)
        for _, segment, slot in self._slots(parameter, name):
            flat[segment.start : segment.start + len(slot)] = slot
        if self._channel is not None and parameter.unit.is_updated_in_parts:
            topic = Topic("state gather", parameter.unit.number, f"the optimizer state of {parameter.name}")
            self._channel.agree(topic)
            self._channel.gather(topic, [(flat, _spans(parameter, flat))])
        whole = form.of(flat)
        return like(parameter.parameter, whole) if parameter not in record.wholes else whole

    def share_scalars(self) -> None:
        """Tell every rank the scalars of the parameters that another rank updates whole. Collective."""
        self._share_scalars([parameter for record in self._records.values() for parameter in record.wholes])

    def _share_scalars(self, parameters: Sequence[ManagedParameter]) -> None:
        shared = [p for p in parameters if p.unit.is_updated_in_parts]
        if self._channel is None or not shared:
            return
        mine = [
            [number, list(record.started[p]), record.scalars[p]]
            for number, p in enumerate(shared)
            for record in [self._records[p.unit]]
            if p in record.started and len(p.unit.owned.overlap(p.offset, p.end))
        ]
        said = self._channel.tell(SCALARS, json.dumps(mine))
        for number, names, scalars in (one for text in said for one in json.loads(text)):
            record = self._records[shared[number].unit]
            record.started[shared[number]], record.scalars[shared[number]] = tuple(names), scalars

    def write_state(self, parameter: ManagedParameter, state: dict[str, Any]) -> None:
        """Store a state of the plain optimizer."""
        self.check_state(parameter, state)
        for tile in parameter.tiles:
            names = self._records[tile.unit].state_names[tile]
            self.write_state(tile, {k: tile.rows_of(v) if k in names else v for k, v in state.items()})
        if parameter.tiles:
            return
        record = self._records[parameter.unit]
        flat = flat_state(state) if parameter in record.wholes else state
        names = record.state_names[parameter]
        for name in flat.keys() & set(names):
            self._write(parameter, name, flat[name])
        record.scalars[parameter] = {name: value for name, value in flat.items() if name not in names}
        record.started[parameter] = tuple(flat)

    def check_state(self, parameter: ManagedParameter, state: dict[str, Any]) -> None:
        """Raise if `state` does not belong to this optimizer."""
        part = parameter.parts[0]
        record = self._records[part.unit]
        if part in record.wholes:
            # `Optimizer.load_state_dict` casts states to the dtype of their parameter; they are cast back here.
            check_forms(parameter.name, tensors_of(flat_state(state)), record.wholes[part].forms, any_dtype=True)
            return
        names = record.state_names[part]
        missing = [name for name in names if name not in state]
        if missing:
            raise UsageError(
                f"the state of {parameter.name!r} has {sorted(state)} and lacks {missing}: it is another optimizer's"
            )
        for name in names:
            shape = list(local_of(state[name]).shape)
            if shape != list(parameter.shape):
                raise UsageError(
                    f"state {name!r} of {parameter.name!r} is {shape}, and the parameter {list(parameter.shape)}\n"
                    "  fix:   the state of this parameter, whole"
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

    def forget_state(self, parameter: ManagedParameter) -> None:
        """Reset one parameter to the state before its first step."""
        for part in parameter.parts:
            record = self._records[part.unit]
            record.started.pop(part, None)
            record.scalars.pop(part, None)

    def restore_scalars(self, parameter: ManagedParameter, names: tuple[str, ...], scalars: dict[str, Any]) -> None:
        """Set the scalars of a state whose tensors are in the record's blocks. `names` are those of both, in order."""
        for part in parameter.parts:
            record = self._records[part.unit]
            record.started[part] = names
            record.scalars[part] = copy_scalars(scalars)

    def _write(self, parameter: ManagedParameter, name: str, value: torch.Tensor) -> None:
        form = self._records[parameter.unit].form_of(parameter, name)
        flat = form.flattened(local_of(value.detach()))
        for chunk, segment, slot in self._slots(parameter, name):
            slot.copy_(flat[segment.start : segment.start + len(slot)])
            if chunk.record is not None:
                self._host_cache.store.mark_dirty(chunk.record)

    def _slots(self, parameter: ManagedParameter, name: str) -> Iterator[tuple[Chunk, Segment, torch.Tensor]]:
        """Yield the parts of one slot that belong to the parameter, each valid until the next is requested."""
        for chunk in self._records[parameter.unit].chunks:
            for segment in chunk.segments:
                if segment.parameter is parameter and chunk.record is not None:
                    with self._memory(chunk) as memory:
                        yield chunk, segment, chunk.state(memory, name, segment)

    @contextmanager
    def _memory(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        if chunk.record is None:
            raise UsageError("this optimizer keeps no state per element")
        with self._host_cache.reading(chunk.record) as memory, torch.no_grad():
            yield memory


def _spans(parameter: ManagedParameter, flat: torch.Tensor) -> list[Span]:
    """Each rank's part of a state: as of the parameter, or all on the rank that updates it whole."""
    if len(flat) == parameter.num_elements:
        return parameter.spans
    return [Span(0, len(flat)) if len(span) else Span(0, 0) for span in parameter.spans]
