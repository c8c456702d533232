"""Memory-centric tiling: decides which parameters are split into tiles, and how.

A layer larger than memory is computed as a mathematically equivalent sequence of smaller ones: its weight is split into
tiles of rows, and each is fetched, used and released before the next, in forward and in backward. A tile is an ordinary
unit with an ordinary optimizer state record. The user's parameter stays one parameter, with its name and shape: it is
materialized for code that needs it whole (`tiling/materialize.py`), and torch functions that support tiles use them
(`tiling/tiled_ops.py`).

Only matrices of layers that support tiles are split: `nn.Linear`, `nn.Embedding`, and transformers' `Conv1D`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from zero_infinity._torch import has_gradient_hooks, no_torch_function
from zero_infinity.byte_sizes import format_bytes, suggest_bytes
from zero_infinity.errors import CapacityError, ConfigError
from zero_infinity.params.dtensor import is_distributed
from zero_infinity.params.find_parameters import manageable, own_parameters
from zero_infinity.params.precision import Precision
from zero_infinity.params.unit import ATTRIBUTE, ManagedParameter, dense_stride, make_unit
from zero_infinity.policy.alignment import round_up
from zero_infinity.policy.homes import Home
from zero_infinity.policy.partition import Sharding
from zero_infinity.policy.tile_sizes import default_tile_bytes, rows_per_tile


@dataclass(frozen=True, slots=True)
class Tiling:
    """Which parameters are split, and how small the tiles are."""

    above: int  # bytes of a parameter and its gradient; larger ones are split into tiles of at most this
    is_default: bool = False  # not set by the user: a larger row still becomes a tile

    @classmethod
    def by_default(cls, memory: int) -> Tiling:
        return cls(default_tile_bytes(memory), is_default=True)

    def rows(self, name: str, shape: torch.Size, precision: Precision) -> int | None:
        """Return the rows per tile of this parameter; None if it stays whole."""
        row_bytes = shape[1:].numel() * (precision.stored.itemsize + precision.optimized.itemsize)
        if shape[0] * row_bytes > self.above and row_bytes > self.above and not self.is_default:
            raise ConfigError(
                f"tile_above is {format_bytes(self.above)}, but one row of {name!r} {tuple(shape)} takes "
                f"{format_bytes(row_bytes)} with its gradient, and a tile has at least one row\n"
                f'  fix:   tile_above="{-(-row_bytes // 1024)}KiB" or more'
            )
        return rows_per_tile(shape[0], row_bytes, self.above)


def find_tileable(model: nn.Module) -> dict[nn.Parameter, bool]:
    """Return the weights that support tiles, and whether each produces logits over a vocabulary."""
    found: dict[nn.Parameter, bool] = {}
    # Position tables are embeddings too: the largest embedding is the vocabulary.
    num_words = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
    for module in model.modules():
        weight = own_parameters(module).get("weight")
        if weight is not None and is_tileable(module, weight):
            makes_logits = isinstance(module, nn.Linear) and module.out_features == num_words
            found[weight] = found.get(weight, False) or makes_logits
    return found


def is_tileable(module: nn.Module, weight: nn.Parameter) -> bool:
    """True if this weight of this module can be used in tiles."""
    return _does_with_tiles(module) and _may_be_cut(weight)


def check_room_to_cut(wholes: Iterable[ManagedParameter], cache: int, memory: int) -> None:
    """Raise if a parameter that `zi.init` stored in other blocks cannot be read from there to be split."""
    for whole in wholes:
        built: ManagedParameter | None = whole.parameter.__dict__.get(ATTRIBUTE)
        if built is None or built is whole:
            continue
        old = max((part.unit.the_block() for part in built.parts), key=lambda block: block.held_bytes)
        needed = old.held_bytes + round_up(max(tile.unit.stored_bytes for tile in whole.tiles))
        if old.home is Home.NVME and needed > cache:
            raise CapacityError(
                f"{whole.name!r} was built by zi.init in {_number(built)}, and takes {format_bytes(needed)} with its "
                f"first tile to be split into {len(whole.tiles)}, but of memory {format_bytes(memory)} only "
                f"{format_bytes(cache)} can be used\n  fix:   memory={suggest_bytes(memory + needed - cache)}, or "
                "tile_above= in zi.Config, or build the model without zi.init"
            )


def _number(built: ManagedParameter) -> str:
    return f"{len(built.tiles)} tiles" if built.tiles else "one piece"


def _does_with_tiles(module: nn.Module) -> bool:
    """True if its forward is a single operation that supports tiles and is not overridden."""
    forward = type(module).forward
    if "forward" in module.__dict__ or parametrize.is_parametrized(module):
        return False
    # nn.MultiheadAttention uses its output projection's weight without calling the layer.
    if forward is nn.Linear.forward:
        return not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    if forward is nn.Embedding.forward:
        # `sparse` is not set yet while an embedding is being constructed.
        is_sparse = module.__dict__.get("sparse", False)
        return isinstance(module, nn.Embedding) and module.max_norm is None and not is_sparse
    transformers = sys.modules.get("transformers.pytorch_utils")  # slow to import, and may not be installed
    return transformers is not None and forward is transformers.Conv1D.forward


def _may_be_cut(weight: nn.Parameter) -> bool:
    with no_torch_function():
        hooked = has_gradient_hooks(weight)
    if (
        is_distributed(weight)
        or weight.dim() != 2
        or hooked
        or not manageable(weight)
        or weight.layout is not torch.strided
    ):
        return False
    built: ManagedParameter | None = weight.__dict__.get(ATTRIBUTE)
    stride = built.stride if built is not None else dense_stride(weight.detach())
    return stride == (weight.shape[1], 1)


def cut(
    unit_name: str,
    full_name: str,
    parameter: nn.Parameter,
    num_rows: int,
    *,
    precision: Precision,
    device: torch.device,
    numbers: Iterator[int],
    sharding: Sharding,
) -> ManagedParameter:
    """Return the parameter with tiles of `num_rows` rows each, all in separate units."""

    def managed(name: str, tensor: torch.Tensor, number: int, sharding: Sharding) -> ManagedParameter:
        unit = make_unit(
            f"{unit_name}{name}",
            [(full_name + name, cast(nn.Parameter, tensor))],
            dtype=precision.stored,
            compute_dtype=precision.computed,
            device=device,
            number=number,
            sharding=sharding,
        )
        return unit.parameters[0]

    whole = managed("", parameter, -1, Sharding())
    for first in range(0, parameter.shape[0], num_rows):
        last = min(first + num_rows, parameter.shape[0])
        rows = torch.empty(last - first, parameter.shape[1], dtype=parameter.dtype, device="meta")
        tile = managed(f"[{first}:{last}]", rows, next(numbers), sharding)
        tile.parameter, tile.plain_class, tile.whole, tile.first_row = parameter, whole.plain_class, whole, first
        whole.tiles.append(tile)
    return whole
