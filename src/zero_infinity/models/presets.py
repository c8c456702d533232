"""Shapes of the built-in model by name, with exact parameter counts. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero_infinity.byte_sizes import parse_count
from zero_infinity.errors import ConfigError

VOCABULARY = 256  # one token per byte


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a byte-level GPT. `tied` shares the embedding's matrix with the head."""

    layers: int
    hidden: int
    heads: int
    seq: int
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: an integer of at least 1")
        if self.hidden % self.heads:
            near = min(_divisors(self.hidden), key=lambda divisor: (abs(divisor - self.heads), divisor))
            raise ConfigError(
                f"hidden is {self.hidden} and heads is {self.heads}, but each head takes an equal part of hidden\n"
                f"  fix:   heads={near}, or hidden={-(-self.hidden // self.heads) * self.heads}"
            )

    @property
    def num_parameters(self) -> int:
        """The exact number of parameters of `ByteGPT(shape)`."""
        norm = 2 * self.hidden  # weight and bias
        block = 2 * norm + 12 * self.hidden**2  # queries, keys and values 3, projection 1, two of the MLP 4 each
        head = 0 if self.tied else VOCABULARY * self.hidden
        return (VOCABULARY + self.seq) * self.hidden + self.layers * block + norm + head


# The usual widths; depths are chosen so that the count matches the name. Bytes need a vocabulary of only 256, so there
# is no large embedding as in GPT-2, and "125M" has fewer and wider layers than its 12 x 768.
PRESETS = {
    "1M": Shape(layers=5, hidden=128, heads=4, seq=128),
    "5M": Shape(layers=6, hidden=256, heads=4, seq=256),
    "25M": Shape(layers=8, hidden=512, heads=8, seq=256),
    "125M": Shape(layers=10, hidden=1024, heads=16, seq=512),
    "350M": Shape(layers=28, hidden=1024, heads=16, seq=512),
    "760M": Shape(layers=27, hidden=1536, heads=16, seq=1024),
    "1.3B": Shape(layers=26, hidden=2048, heads=16, seq=1024),
    "2.7B": Shape(layers=34, hidden=2560, heads=32, seq=1024),
    "6.7B": Shape(layers=33, hidden=4096, heads=32, seq=2048),
    "13B": Shape(layers=41, hidden=5120, heads=40, seq=2048),
}


def preset(name: str) -> Shape:
    """Return the shape with that name, in either case."""
    by_name = {known.lower(): shape for known, shape in PRESETS.items()}
    if name.lower() in by_name:
        return by_name[name.lower()]
    near = _nearest(name)
    hint = f"did you mean {near}? " if near else ""
    raise ConfigError(f"there is no preset {name!r}; {hint}there are: {', '.join(PRESETS)}")


def _nearest(name: str) -> str | None:
    """The preset with about as many parameters; None if the name is no count."""
    try:
        count = parse_count(name)
    except ConfigError:
        return None
    return min(PRESETS, key=lambda known: abs(math.log(max(1, count) / parse_count(known))))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
