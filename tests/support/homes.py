"""Chooses the units that live on the device, instead of the arithmetic of `policy/device_homes.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from zero_infinity import model_layout as layout_module
from zero_infinity.policy.device_homes import DeviceDivision, DeviceUnit

AtHome = Callable[[int], bool]  # whether the unit of this number lives on the device


@contextmanager
def living_on_device(at_home: AtHome) -> Iterator[None]:
    """Inside, these units live on the device; all of device_memory is for copies of the others.

    For models that are prepared with a number for `device_memory`: without one, nothing lives there.
    """
    was_asked = False

    def divide(units: Sequence[DeviceUnit], budget: int, *_: Any) -> DeviceDivision:
        nonlocal was_asked
        was_asked = True
        chosen = tuple(unit.may_move and at_home(number) for number, unit in enumerate(units))
        return DeviceDivision(chosen, 0, budget)

    with mock.patch.object(layout_module, "divide_device", divide):
        yield
    assert was_asked, "no unit can live on the device: prepare the model with device_memory="
