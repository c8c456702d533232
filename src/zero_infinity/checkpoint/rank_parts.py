"""A model's tensors by name, and where in which block their elements are. The same for saving and loading.

A parameter is saved once, at full precision: its master copy if it has one, else its stored value. The value stored
next to a master copy is the rounded master, and is recomputed from it on load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from zero_infinity._torch import persistent_buffers
from zero_infinity.checkpoint.manifest import MODEL, OPTIMIZER, StateEntry
from zero_infinity.checkpoint.training_view import WeightsView
from zero_infinity.errors import UsageError
from zero_infinity.optim.state_records import MASTER, StateRecord
from zero_infinity.optim.state_slots import TensorForm
from zero_infinity.params.dtensor import is_distributed
from zero_infinity.params.offloaded_param import managed
from zero_infinity.params.packed_layers import HOLDER, holder_of
from zero_infinity.params.packed_tensor import PackedTensor
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.policy.partition import Span
from zero_infinity.storage.block import Block

Key = tuple[str, str]  # section and name


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Elements `start` to `stop` of a tensor, in memory order, and the place of the first one in a block."""

    key: Key
    start: int
    stop: int
    at: int  # in elements of `dtype` from the start of the block
    dtype: torch.dtype
    owner: ManagedParameter
    form: ManagedParameter | TensorForm  # shape and memory order of the tensor
    is_derived: bool = False  # rounded from a master copy, which is saved instead

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize

    def elements_of_rank(self, rank: int) -> Span:
        """The elements that this rank writes into a checkpoint: its own part, or all of what it updates whole."""
        mine, begin = self.owner.spans[rank], first_element(self.owner)
        if self.form is not self.owner:
            return Span(self.start, self.stop if len(mine) else self.start)
        return Span(self.start, self.stop).overlap(begin + mine.start, begin + mine.stop)


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What one block holds."""

    block: Block
    parts: tuple[TensorPart, ...]


@dataclass(slots=True)
class ModelContents:
    """A model's tensors. `names` has every name of each parameter, the first one first."""

    records: Mapping[Unit, StateRecord]
    names: dict[nn.Parameter, list[str]] = field(default_factory=dict)
    managed: dict[str, ManagedParameter] = field(default_factory=dict)  # by first name
    plain: dict[str, torch.Tensor] = field(default_factory=dict)  # outside of blocks: buffers, parameters in no unit
    tied: dict[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> Iterator[tuple[str, list[str], tuple[int, ...], torch.dtype]]:
        """Every tensor: its first name, all of its names, its shape and dtype in the model."""
        names = {all_names[0]: all_names for all_names in self.names.values()}
        for name, known in self.managed.items():
            yield name, names[name], tuple(known.shape), known.parts[0].unit.dtype
        for name, value in self.plain.items():
            real = as_real(value)
            yield name, names.get(name, [name]), tuple(real.shape), real.dtype

    @property
    def units(self) -> list[Unit]:
        return list(dict.fromkeys(part.unit for known in self.managed.values() for part in known.parts))

    def leave_out_frozen(self) -> None:
        """Keep only parameters that are trained, and buffers."""
        for parameter, names in self.names.items():
            if not parameter.requires_grad:
                self.managed.pop(names[0], None)
                self.plain.pop(names[0], None)
        self.tied = {name: first for name, first in self.tied.items() if first in self.managed or first in self.plain}

    def _holds(self, known: ManagedParameter) -> bool:
        """False if it was replaced while the model was built, or is left out."""
        return known.parameter in self.names and self.first_name(known) in self.managed

    def first_name(self, known: ManagedParameter) -> str:
        return self.names[known.parameter][0]

    def of_unit(self, unit: Unit) -> BlockContent:
        """The block of a unit's parameters."""
        record = self.records.get(unit)
        parts = []
        for known in unit.parameters:
            mine = unit.stored.overlap(known.offset, known.end)
            if len(mine) and self._holds(known):
                start = first_element(known) + mine.start - known.offset
                derived = record is not None and record.has_master and known in record.state_names
                key = (MODEL, self.first_name(known))
                at = mine.start - unit.stored.start
                parts.append(
                    TensorPart(key, start, start + len(mine), at, unit.dtype, known, known, is_derived=derived)
                )
        return BlockContent(unit.the_block(), tuple(parts))

    def of_record(self, unit: Unit, states: Mapping[str, StateEntry]) -> Iterator[BlockContent]:
        """The blocks of a unit's optimizer record: its master copies, and the states of the parameters in `states`."""
        record = self.records.get(unit)
        for chunk in record.chunks if record is not None else ():
            if record is None or chunk.record is None:
                continue
            parts = []
            for segment in filter(lambda segment: self._holds(segment.parameter), chunk.segments):
                name = self.first_name(segment.parameter)
                first = first_element(segment.parameter)
                for slot_name in (*record.master, *(states[name].slots if name in states else ())):
                    key = (MODEL, name) if slot_name == MASTER else (OPTIMIZER, state_key(slot_name, name))
                    slot, owner = chunk.slots[slot_name], segment.parameter
                    at, start, stop = slot.start // slot.dtype.itemsize, 0, slot.num_elements
                    if slot.form is None:
                        at, start, stop = at + segment.offset, first + segment.start, first + segment.stop
                    parts.append(TensorPart(key, start, stop, at, slot.dtype, owner, slot.form or owner))
            if parts:
                yield BlockContent(chunk.record, tuple(parts))

    def value_dtype(self, known: ManagedParameter) -> torch.dtype:
        """The dtype in which a parameter is saved."""
        part = known.parts[0]
        record = self.records.get(part.unit)
        has_master = record is not None and record.has_master and part in record.state_names
        return record.dtype if record is not None and has_master else part.unit.dtype


def as_real(value: torch.Tensor) -> torch.Tensor:
    """The tensor as it is stored in a file: complex numbers are pairs."""
    value = value.detach()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def state_key(slot: str, name: str) -> str:
    """The name of a state among the optimizer's tensors."""
    return f"{slot}/{name}"


def contents_of(model: nn.Module, view: WeightsView, *, of_part: bool = False) -> ModelContents:
    """The tensors of a model whose parameters are in the blocks of `view`; `of_part`: some may be gone from it."""
    contents = ModelContents(view.records)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names = contents.names.setdefault(parameter, [])
        names.append(name)
        if len(names) > 1:
            contents.tied[name] = names[0]
            continue
        if isinstance(parameter, PackedTensor):
            continue  # in the holder of its layer
        known = managed(parameter)
        if is_distributed(parameter):
            raise UsageError(
                f"{name!r} is sharded over ranks (tensor parallel), which zi.save and zi.load do not support\n"
                "  fix:   model.state_dict() and torch.distributed.checkpoint"
            )
        if known is None:
            contents.plain[name] = parameter.data
        else:
            contents.managed[name] = known
    for prefix, module in model.named_modules():
        for name, buffer in persistent_buffers(module):
            if not isinstance(buffer, PackedTensor):
                contents.plain[f"{prefix}.{name}" if prefix else name] = buffer
        holder = holder_of(module)
        if holder is not None and holder not in contents.names and (known := managed(holder)) is not None:
            name = f"{prefix}.{HOLDER}" if prefix else HOLDER
            contents.names[holder] = [name]
            contents.managed[name] = known
    strangers = [p.name for unit in view.units for p in unit.parameters if p.parameter not in contents.names]
    if strangers and not of_part:
        raise UsageError(
            f"{strangers[0]!r} and {len(strangers) - 1} more parameters of the prepared model are not in this one\n"
            "  fix:   pass the model that zi.prepare or zi.init returned, not a part of it"
        )
    return contents


def first_element(known: ManagedParameter) -> int:
    """Index of a tile's first element within its parameter; 0 for whole parameters."""
    return known.first_row * known.shape[1:].numel() if known.whole is not None else 0


def order_of(known: ManagedParameter | TensorForm) -> tuple[int, ...] | None:
    """The dimensions in memory order; None if that is row-major."""
    sizes = zip(known.stride, known.shape, range(len(known.shape)), strict=True)
    order = tuple(number for _, _, number in sorted(sizes, key=lambda item: (-item[0], -item[1], item[2])))
    return None if order == tuple(range(len(order))) or _is_row_major(known) else order


def _is_row_major(known: ManagedParameter | TensorForm) -> bool:
    expected = 1
    for size, stride in zip(reversed(known.shape), reversed(known.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
