"""Slots: where in the bytes of an optimizer record each state is, and what shape it has.

A slot of a chunk of elements has one value for each of them. A slot of a whole parameter has a tensor of any shape and
dtype: a momentum, the factors of a matrix, quantised values with their scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zero_infinity.errors import UsageError
from zero_infinity.policy.alignment import round_up

# Slots start at whole cache lines, like parameters in their unit.
_SLOT_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Shape, strides (dense) and dtype of a state."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        return self.shape.numel()

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return flat memory in this form."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def flattened(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this shape flat, in the order in which its elements are stored."""
        if tensor.stride() != self.stride:
            tensor = torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype).copy_(tensor)
        return tensor.as_strided((self.num_elements,), (1,))


@dataclass(frozen=True, slots=True)
class WholeState:
    """The state of a parameter that is updated whole: all names in the optimizer's order, and the forms of tensors."""

    names: tuple[str, ...]
    forms: Mapping[str, TensorForm]


@dataclass(frozen=True, slots=True)
class Slot:
    """A part of a record."""

    start: int  # in bytes
    num_elements: int
    dtype: torch.dtype
    form: TensorForm | None = None  # None: one value for each element of the chunk

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return it flat, given the bytes of the record."""
        return memory[self.start : self.start + self.num_elements * self.dtype.itemsize].view(self.dtype)


def element_slots(dtypes: Mapping[str, torch.dtype], num_elements: int) -> dict[str, Slot]:
    """Slots with one value for each of `num_elements` elements, one after the other."""
    slots: dict[str, Slot] = {}
    for name, dtype in dtypes.items():
        slots[name] = Slot(record_bytes(slots), num_elements, dtype)
    return slots


def whole_slots(before: Mapping[str, Slot], forms: Mapping[str, TensorForm]) -> dict[str, Slot]:
    """These slots, and after them one for each form."""
    slots = dict(before)
    for name, form in forms.items():
        slots[name] = Slot(round_up(record_bytes(slots), _SLOT_ALIGNMENT), form.num_elements, form.dtype, form)
    return slots


def record_bytes(slots: Mapping[str, Slot]) -> int:
    """Size of a record with these slots."""
    return max((slot.start + slot.num_elements * slot.dtype.itemsize for slot in slots.values()), default=0)


def check_forms(
    parameter: str, tensors: Mapping[str, torch.Tensor], forms: Mapping[str, TensorForm], *, any_dtype: bool = False
) -> None:
    """Raise if the tensors of a parameter's state are not what its record was made for."""
    for name, tensor in tensors.items():
        form = forms.get(name)
        if form is None or tensor.shape != form.shape or (tensor.dtype != form.dtype and not any_dtype):
            expected = f"{list(form.shape)} of {form.dtype}" if form is not None else "not there"
            raise UsageError(
                f"state {name!r} of {parameter!r} is {list(tensor.shape)} of {tensor.dtype}, and was {expected} when "
                "the optimizer was probed\n  fix:   an optimizer whose states keep their shapes from step to step"
            )
