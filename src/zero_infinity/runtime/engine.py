"""One prepared model: the parts put together, and what can be asked of the whole.

The engine owns the store, the policy's executor, the worker and the hooks of one model. Several live side by side in one
process; there are no globals. It ends with the model: when that is collected, or the process ends, threads, memory and
swap files go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_infinity.config import Config
from zero_infinity.errors import UsageError
from zero_infinity.runtime import hooks, parked
from zero_infinity.runtime.exposure import Exposure
from zero_infinity.runtime.gradients import Gradients
from zero_infinity.runtime.placement import Placement, UnitSize, place
from zero_infinity.runtime.record import MASTER, Chunk, Record, cut
from zero_infinity.runtime.residency import Residency
from zero_infinity.runtime.unit import ManagedParameter, Unit, find_parameters, make_unit
from zero_infinity.runtime.update_rule import probe_state_names
from zero_infinity.runtime.updater import Updater
from zero_infinity.store.blocks import BlockStore, Home
from zero_infinity.store.buffers import BufferPool
from zero_infinity.store.extents import round_up
from zero_infinity.store.files import FileDevice
from zero_infinity.store.queue import QueuedEngine


class TrainingEngine:
    """Trains one model with one optimizer within a byte budget."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: Config) -> None:
        self.config = config
        self.user_optimizer = optimizer
        self.grad_norm: torch.Tensor | None = None
        self._model_parameters = list(model.parameters())
        owners = _make_units(model, config)
        self.units = list(dict.fromkeys(p.unit for parameters in owners.values() for p in parameters))
        self._managed = {p.parameter: p for unit in self.units for p in unit.parameters}
        _assign_groups(optimizer, self._managed)
        self.records = {
            unit: record for unit in self.units if (record := _make_record(unit, optimizer, config)) is not None
        }
        sizes = [_size(unit, self.records.get(unit)) for unit in self.units]
        self.placement = place(sizes, config.memory_budget(), nvme=bool(config.nvme))
        self.store = _make_store(config, self.placement)
        self.residency = Residency(self.store, self.placement.cache, self.placement.lookahead)
        self._make_blocks(self.placement)
        self.store.pool.charge(self.placement.set_aside)
        self._updater = Updater(self.store)
        self.gradients = Gradients(
            self.residency,
            self._updater,
            optimizer,
            self.records,
            reserve=self.placement.set_aside,
            num_backwards=config.gradient_accumulation_steps,
            early=config.update == "auto" and config.max_grad_norm is None,
            norms=config.max_grad_norm is not None,
        )
        self.exposure = Exposure(self.residency, self.gradients.on_read)
        for unit in self.units:
            self._move_in(unit)
        self._take_states(optimizer)
        self._hook_gradients()
        hooks.attach(model, self.exposure, owners)
        self._finalizer = weakref.finalize(model, _close, self._updater, self.store)

    # ------------------------------------------------------------------ the step

    def step(self) -> None:
        self._take_hand_made_gradients()
        factors: tuple[torch.Tensor, ...] = ()
        if self.config.max_grad_norm is not None:
            factors = self.clip(self._model_parameters, self.config.max_grad_norm)
        self.gradients.step(factors)

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float) -> tuple[torch.Tensor, ...]:
        """The factor that `torch.nn.utils.clip_grad_norm_` would multiply gradients by; sets `grad_norm`."""
        norms = self.gradients.norms
        found = [norms[m] for p in parameters if (m := self._managed.get(p)) is not None and m in norms]  # type: ignore[call-overload]
        if not found:
            self.grad_norm = torch.tensor(0.0)
            return ()
        self.grad_norm = torch.linalg.vector_norm(torch.stack(found))
        return (torch.clamp(max_norm / (self.grad_norm + 1e-6), max=1.0),)

    def discard_gradients(self) -> None:
        self.gradients.discard()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        before = self.gradients.synchronised
        self.gradients.synchronised = False
        try:
            yield
        finally:
            self.gradients.synchronised = before

    def _take_hand_made_gradients(self) -> None:
        """Gradients that the user put on parameters himself."""
        with torch._C.DisableTorchFunctionSubclass():
            found = [(m, p.grad) for p, m in self._managed.items() if p.grad is not None and m.group is not None]
            for managed, _ in found:
                managed.parameter.grad = None
        for managed, gradient in found:
            self.gradients.take(managed, gradient)

    def _hook_gradients(self) -> None:
        for managed in self._managed.values():
            if managed.group is not None and managed.parameter.requires_grad:
                managed.parameter.register_post_accumulate_grad_hook(_GradientHook(self.gradients, managed))

    # ------------------------------------------------------------------ values and states

    @contextmanager
    def gathered(self, parameters: Sequence[ManagedParameter]) -> Iterator[None]:
        """Show values (and retained gradients) in full; changes are kept."""
        with ExitStack() as stack:
            stack.enter_context(self.exposure.exposed(parameters))
            for managed in parameters:
                managed.parameter.grad = self.gradients.gather(managed)
            try:
                yield
            finally:
                for managed in parameters:
                    managed.parameter.grad = None
                    # Changes through .data or numpy leave no trace: take it that there were some.
                    self.exposure.mark_edited(managed)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """What the plain optimizer's `state_dict()` would be, in memory."""
        self._updater.drain()
        numbers = {p: i for i, p in enumerate(p for g in self.user_optimizer.param_groups for p in g["params"])}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [numbers[p] for p in group["params"]]}
            for group in self.user_optimizer.param_groups
        ]
        state = {}
        for parameter, number in numbers.items():
            managed = self._managed.get(parameter)
            if managed is not None and managed in self.records[managed.unit].started:
                state[number] = self._read_state(managed)
            elif parameter in self.user_optimizer.state:
                state[number] = self.user_optimizer.state[parameter]
        return {"state": state, "param_groups": groups}

    def load_optimizer_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updater.drain()
        self.user_optimizer.load_state_dict(state_dict)
        for record in self.records.values():
            record.started.clear()
            record.scalars.clear()
        self._take_states(self.user_optimizer)

    def _take_states(self, optimizer: Optimizer) -> None:
        """Move states that the user's optimizer has (it was used before) into records."""
        for parameter, managed in self._managed.items():
            if managed.group is not None and parameter in optimizer.state:
                self._write_state(managed, optimizer.state.pop(parameter))

    def _read_state(self, managed: ManagedParameter) -> dict[str, Any]:
        record = self.records[managed.unit]
        state: dict[str, Any] = dict(record.scalars[managed])
        for name in record.state_names[managed]:
            flat = torch.empty(managed.num_elements, dtype=record.dtype)
            for chunk, begin, segment in self._segments(managed):
                with self._record_memory(chunk) as memory:
                    part = chunk.slot(memory, name, record.dtype)[begin : begin + segment.stop - segment.start]
                    flat[segment.start : segment.stop] = part
            state[name] = flat.as_strided(managed.shape, managed.stride)
        return state

    def _write_state(self, managed: ManagedParameter, state: dict[str, Any]) -> None:
        record = self.records[managed.unit]
        missing = [name for name in record.state_names[managed] if name not in state]
        if missing:
            raise UsageError(f"the optimizer's state of {managed.name!r} lacks {missing}: it is another optimizer's")
        for chunk, begin, segment in self._segments(managed):
            if chunk.record is None:
                continue
            with self._record_memory(chunk) as memory:
                for name in record.state_names[managed]:
                    flat = managed.flattened(state[name])
                    slot = chunk.slot(memory, name, record.dtype)
                    slot[begin : begin + segment.stop - segment.start] = flat[segment.start : segment.stop]
                self.store.mark_dirty(chunk.record)
        record.scalars[managed] = {k: v for k, v in state.items() if k not in record.state_names[managed]}
        managed.edited = True  # a master copy is made from the value at the next update
        record.started.add(managed)

    def _segments(self, managed: ManagedParameter) -> Iterator[tuple[Chunk, int, Any]]:
        for chunk in self.records[managed.unit].chunks:
            for segment in chunk.segments:
                if segment.parameter is managed:
                    yield chunk, segment.offset, segment

    @contextmanager
    def _record_memory(self, chunk: Chunk) -> Iterator[torch.Tensor]:
        if chunk.record is None:
            raise UsageError("this optimizer keeps no state per element")
        self.residency.access(chunk.record)
        self.residency.wait(chunk.record)
        with self.store.changing(chunk.record) as memory:
            yield memory

    # ------------------------------------------------------------------ setting up

    def _make_blocks(self, placement: Placement) -> None:
        self.store.reserve(placement.swap)
        for unit in self.units:
            home = placement.homes[unit.name]
            unit.block = self.store.create(unit.name, unit.num_bytes, home)
            self.residency.add(unit.block)
            record = self.records.get(unit)
            if record is not None:
                _make_chunks(record, placement.chunk_bytes, home, self.store, self.residency)

    def _move_in(self, unit: Unit) -> None:
        """Copy the values of a unit's parameters into its block and park them."""
        block = unit.the_block()
        self.residency.access(block)
        self.residency.wait(block)
        with self.store.changing(block) as memory:
            flat = memory.view(unit.dtype)
            for managed in unit.parameters:
                managed.of(flat).copy_(managed.parameter.detach())
        self.store.mark_dirty(block)
        for managed in unit.parameters:
            parked.adopt(managed, self.exposure)
            parked.park(managed)


class _GradientHook:
    """Called by autograd when a parameter's gradient is there."""

    def __init__(self, gradients: Gradients, managed: ManagedParameter) -> None:
        self._gradients = gradients
        self._managed = managed

    def __call__(self, _: torch.Tensor) -> None:
        self._gradients.on_gradient(self._managed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return lambda *_: None


def _close(updater: Updater, store: BlockStore) -> None:
    updater.close()
    store.close()


def _make_store(config: Config, placement: Placement) -> BlockStore:
    pool = BufferPool(config.memory_budget())
    engine = QueuedEngine(FileDevice(config.nvme)) if config.nvme else None
    return BlockStore(pool, engine, verify=config.verify)


def _make_units(model: nn.Module, config: Config) -> dict[nn.Module, list[ManagedParameter]]:
    """The units of a model, as the parameters of each module that owns some."""
    owners: dict[nn.Module, list[ManagedParameter]] = {}
    for module, name, parameters in find_parameters(model):
        by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for full_name, parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append((full_name, parameter))
        for dtype, members in by_dtype.items():
            unit_name = name or type(model).__name__
            if len(by_dtype) > 1:
                unit_name += f" ({dtype})"
            unit = make_unit(unit_name, members, dtype, dtype)
            owners.setdefault(module, []).extend(unit.parameters)
    return owners


def _assign_groups(optimizer: Optimizer, managed: dict[nn.Parameter, ManagedParameter]) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in managed:
                raise UsageError(
                    f"parameter group {number} has a parameter of shape {tuple(parameter.shape)} ({parameter.dtype}) "
                    "that is not one of the model's floating-point parameters\n"
                    "  fix:   make the optimizer from model.parameters()"
                )
            managed[parameter].group = number


def _make_record(unit: Unit, optimizer: Optimizer, config: Config) -> Record | None:
    trained = [p for p in unit.parameters if p.group is not None]
    if not trained:
        return None
    dtype = torch.float32 if unit.dtype.itemsize < 4 else unit.dtype
    names = {
        number: probe_state_names(optimizer, optimizer.param_groups[number], dtype)
        for number in {p.group for p in trained if p.group is not None}
    }
    state_names = {p: names[p.group] for p in trained if p.group is not None}
    return Record(unit, dtype, has_master=dtype != unit.dtype, state_names=state_names)


def _slots(record: Record) -> tuple[str, ...]:
    names = dict.fromkeys(name for names in record.state_names.values() for name in names)
    return ((MASTER,) if record.has_master else ()) + tuple(names)


def _size(unit: Unit, record: Record | None) -> UnitSize:
    if record is None:
        return UnitSize(unit.name, round_up(unit.num_bytes), 0, 0, 0)
    trained = sum(p.num_elements for p in record.state_names)
    per_element = len(_slots(record)) * record.dtype.itemsize
    gradients = trained * record.dtype.itemsize
    return UnitSize(unit.name, round_up(unit.num_bytes), trained * per_element, gradients, per_element)


def _make_chunks(record: Record, chunk_bytes: int, home: Home, store: BlockStore, residency: Residency) -> None:
    slots = _slots(record)
    per_element = max(1, len(slots)) * record.dtype.itemsize
    trained = list(record.state_names)
    for number, (start, stop, segments) in enumerate(cut(trained, chunk_bytes // per_element)):
        name = f"{record.unit.name}[{number}]"
        size = (stop - start) * record.dtype.itemsize
        kept = store.create(f"{name} optimizer record", size * len(slots), home) if slots else None
        gradient = store.create(f"{name} gradient", size, home)
        for block in (kept, gradient):
            if block is not None:
                residency.add(block)
        record.chunks.append(Chunk(start, stop, segments, slots, kept, gradient))
