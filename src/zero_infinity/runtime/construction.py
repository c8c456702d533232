"""`zi.init`: a model that never exists whole, not even while it is built.

Every parameter that a module registers is noted. As soon as another module registers one, those noted before are moved
into blocks and parked. Whatever the constructor does to them afterwards (tying, a second initialisation over all
modules at the end) goes through the safety net, so that the values are those of a plain construction with the same
seed.
"""

from __future__ import annotations

import torch
from torch import nn

from zero_infinity.config import Config
from zero_infinity.errors import CapacityError
from zero_infinity.runtime import parked
from zero_infinity.runtime.host import ParameterHost
from zero_infinity.runtime.placement import home_while_building, suggest
from zero_infinity.runtime.unit import make_unit, manageable
from zero_infinity.store.block import Home
from zero_infinity.store.extents import round_up
from zero_infinity.store.memory import trim_heap
from zero_infinity.units import format_bytes


class Construction:
    """Moves parameters into a host while a model is built. Also the hook that torch calls at each registration."""

    def __init__(self, config: Config) -> None:
        self._host = ParameterHost(config)
        self._open: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._resident_bytes = 0
        self._untrimmed_bytes = 0

    def __call__(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or parked.managed(parameter) is not None:
            return
        if nn.parameter.is_lazy(parameter) or not manageable(parameter):
            return
        if module not in self._open:
            self.close()
        self._open.setdefault(module, {})[name] = parameter

    def close(self) -> None:
        """Move in what is noted."""
        noted, self._open = self._open, {}
        for module, parameters in noted.items():
            by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
            for name, parameter in parameters.items():
                # It may have been replaced meanwhile, or be managed by now under another name.
                if module._parameters.get(name) is parameter and parked.managed(parameter) is None:
                    by_dtype.setdefault(parameter.dtype, []).append((f"{type(module).__name__}.{name}", parameter))
            for dtype, members in by_dtype.items():
                self._move_in(type(module).__name__, members, dtype)

    def _move_in(self, name: str, members: list[tuple[str, nn.Parameter]], dtype: torch.dtype) -> None:
        unit = make_unit(name, members, dtype=dtype, compute_dtype=dtype, device=torch.device("cpu"))
        config, budget = self._host.config, self._host.store.pool.budget
        if unit.num_bytes > budget:
            raise CapacityError(
                f"{name} with {', '.join(f'{n} {tuple(p.shape)}' for n, p in members)} needs "
                f"{format_bytes(unit.num_bytes)} of host memory to be built, but memory is {format_bytes(budget)}\n"
                f"  fix:   memory={suggest(2 * unit.num_bytes)}"
            )
        home = home_while_building(unit.num_bytes, self._resident_bytes, config.memory_budget(), nvme=bool(config.nvme))
        if home is Home.RAM and config.nvme:
            self._resident_bytes += round_up(unit.num_bytes)
            self._host.residency.limit(budget - self._resident_bytes, 0)
        self._host.add(unit, home)
        self._host.move_in(unit)
        self._untrimmed_bytes += unit.num_bytes
        if self._untrimmed_bytes > budget // 4:
            trim_heap()
            self._untrimmed_bytes = 0
