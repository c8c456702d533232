"""How many bytes of states a unit has in a plan, where it differs from the others: frozen, quantised, updated whole.

Also the optimizers by name: states per element, and what an update moves. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero_infinity.errors import ConfigError
from zero_infinity.policy.alignment import round_up, round_up_elements
from zero_infinity.policy.unit_sizes import ElementBytes

_MASTER_BYTES = 4
_GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class StateBytes(ElementBytes):
    """Bytes per parameter of the model, by kind of state."""

    update: int  # read and written in memory by an update


def update_bytes(widths: ElementBytes, *, has_master: bool) -> int:
    """Bytes that an update of one element reads and writes: its gradient, its record, and the value."""
    value = widths.parameter if has_master else 2 * widths.parameter
    return widths.gradient + 2 * widths.record + value


@dataclass(frozen=True, slots=True)
class WholeParameter:
    """A parameter that its optimizer must see whole: its elements, with padding, and the bytes of its record."""

    num_elements: int
    record: int


@dataclass(frozen=True, slots=True)
class UnitStates:
    """The states of one unit."""

    widths: StateBytes
    trained: int  # elements that are updated in slices; none where all are frozen or updated whole
    wholes: tuple[WholeParameter, ...] = ()
    flops: float = 0.0  # of matrix products in an update, on all ranks together

    @property
    def is_frozen(self) -> bool:
        return not self.trained and not self.wholes

    @property
    def record_bytes(self) -> int:
        """On all ranks together."""
        return self.trained * self.widths.record + sum(whole.record for whole in self.wholes)

    @property
    def gradient_elements(self) -> int:
        """On all ranks together."""
        return self.trained + sum(whole.num_elements for whole in self.wholes)

    @property
    def largest_whole(self) -> int:
        """Record and gradient of the largest parameter that is updated whole."""
        sizes = [round_up(whole.record) + round_up(whole.num_elements * self.widths.gradient) for whole in self.wholes]
        return max(sizes, default=0)

    def part(self, num_elements: int, of: int) -> UnitStates:
        """Those of a tile with `num_elements` elements `of` so many; what is updated whole is never cut."""
        return replace(self, trained=-(-self.trained * num_elements // of))


def frozen(parameter_bytes: int) -> UnitStates:
    """A unit that is never trained: no gradient, no record, and nothing is written back."""
    return UnitStates(StateBytes(parameter_bytes, record=0, gradient=0, update=0), trained=0)


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """What an optimizer keeps besides values: bytes per element, or of a matrix as a whole."""

    name: str
    element_bytes: float  # of its states
    is_whole: bool = False  # it must see a matrix whole
    axis_bytes: int = 0  # for each row and each column of a matrix, instead of `element_bytes`
    passes: int = 0  # matrix products with the shorter side, as Newton-Schulz iterations make them

    def widths(self, parameter_bytes: int) -> StateBytes:
        """Bytes per element with parameters of this size, where it updates in slices; 16-bit ones have a master."""
        master = _MASTER_BYTES if parameter_bytes < _MASTER_BYTES else 0
        kept = ElementBytes(parameter_bytes, master + round(self.element_bytes), _GRADIENT_BYTES)
        update = update_bytes(kept, has_master=master > 0)
        return StateBytes(kept.parameter, kept.record, kept.gradient, update)

    def of_matrix(self, rows: int, columns: int, parameter_bytes: int) -> UnitStates:
        """The states of a matrix that is updated whole."""
        num_elements = round_up_elements(rows * columns)
        master = _MASTER_BYTES * num_elements if parameter_bytes < _MASTER_BYTES else 0
        states = self.axis_bytes * (rows + columns) or int(self.element_bytes * rows * columns)
        short, long = sorted((rows, columns))
        flops = self.passes * (4.0 * short**2 * long + 2.0 * short**3)
        return UnitStates(self.widths(parameter_bytes), 0, (WholeParameter(num_elements, master + states),), flops)


# States in float32 unless the name says otherwise. Muon: Newton-Schulz with five iterations of three products
# (Jordan 2024); torch.optim.Muon keeps one momentum. Adafactor: a row and a column (arXiv 1804.04235), no momentum.
# 8-bit AdamW: two bytes, and a float32 scale for each block of 256 (bitsandbytes).
_KINDS = (
    OptimizerStates("adamw", 8),
    OptimizerStates("adam", 8),
    OptimizerStates("sgd", 0),
    OptimizerStates("sgd-momentum", 4),
    OptimizerStates("lion", 4),
    OptimizerStates("adamw-8bit", 2 * (1 + 4 / 256), is_whole=True),
    OptimizerStates("adafactor", 0, is_whole=True, axis_bytes=4),
    OptimizerStates("muon", 4, is_whole=True, passes=5),
)
_BY_NAME = {kind.name: kind for kind in _KINDS}


def optimizer_names() -> Sequence[str]:
    return tuple(_BY_NAME)


def optimizer_named(name: str) -> OptimizerStates:
    """An optimizer by its name, in either case."""
    found = _BY_NAME.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), _BY_NAME, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"there is no optimizer {name!r} to plan; {hint}there are: {', '.join(_BY_NAME)}\n"
            "  fix:   one of these; zi.plan(model, optimizer) takes any optimizer of your own"
        )
    return found
