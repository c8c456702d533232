"""Memory-centric tiling: which parameters are used in parts, and how they are cut.

A layer larger than memory is a sequence of smaller ones that is mathematically the same: its weight is cut into tiles
of rows, and each is fetched, used and let go before the next, in forward and in backward. A tile is an ordinary unit
with an ordinary record of optimizer state. The user's parameter stays one parameter, with its name and shape: who needs
it whole finds it put together (`tiling/materialize.py`); torch functions that can do with tiles get them
(`tiling/tiled_ops.py`).

Only matrices are cut whose layer is known to do with tiles: `nn.Linear`, `nn.Embedding`, and `Conv1D` of transformers.
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
from zero_infinity.errors import CapacityError, ConfigError
from zero_infinity.params.dtensor import is_distributed
from zero_infinity.params.precision import Precision
from zero_infinity.params.unit import ATTRIBUTE, ManagedParameter, dense_stride, make_unit, own_parameters
from zero_infinity.policy.memory_budget import Home
from zero_infinity.policy.partition import Sharding
from zero_infinity.policy.sizes import round_up
from zero_infinity.policy.tile_sizes import default_tile_bytes, rows_per_tile
from zero_infinity.units import format_bytes, suggest_bytes


@dataclass(frozen=True, slots=True)
class Tiling:
    """What is cut, and how small."""

    above: int  # bytes of a parameter and its gradient: what takes more is cut into tiles that do not
    is_default: bool = False  # nobody has set it: a row that takes more is a tile all the same

    @classmethod
    def by_default(cls, memory: int) -> Tiling:
        return cls(default_tile_bytes(memory), is_default=True)

    def rows(self, name: str, shape: torch.Size, precision: Precision) -> int | None:
        """Rows of a tile of this parameter; None when it stays whole."""
        row_bytes = shape[1:].numel() * (precision.stored.itemsize + precision.optimized.itemsize)
        if shape[0] * row_bytes > self.above and row_bytes > self.above and not self.is_default:
            raise ConfigError(
                f"tile_above is {format_bytes(self.above)}, but one row of {name!r} {tuple(shape)} takes "
                f"{format_bytes(row_bytes)} with its gradient, and a tile has at least one row\n"
                f'  fix:   tile_above="{-(-row_bytes // 1024)}KiB" or more'
            )
        return rows_per_tile(shape[0], row_bytes, self.above)


def find_tileable(model: nn.Module) -> dict[nn.Parameter, bool]:
    """The weights that can be used in tiles; and whether logits over a vocabulary are made with one."""
    found: dict[nn.Parameter, bool] = {}
    # Tables of positions are embeddings, too: words are those of which there are most.
    num_words = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
    for module in model.modules():
        weight = own_parameters(module).get("weight")
        if weight is not None and is_tileable(module, weight):
            makes_logits = isinstance(module, nn.Linear) and module.out_features == num_words
            found[weight] = found.get(weight, False) or makes_logits
    return found


def is_tileable(module: nn.Module, weight: nn.Parameter) -> bool:
    """Whether this weight of this module can be used in tiles."""
    return _does_with_tiles(module) and _may_be_cut(weight)


def check_room_to_cut(wholes: Iterable[ManagedParameter], cache: int, memory: int) -> None:
    """Raise when a parameter that `zi.init` has put in other blocks cannot be read from there to be cut."""
    for whole in wholes:
        built: ManagedParameter | None = whole.parameter.__dict__.get(ATTRIBUTE)
        if built is None or built is whole:
            continue
        old = max((part.unit.the_block() for part in built.parts), key=lambda block: block.held_bytes)
        needed = old.held_bytes + round_up(max(tile.unit.stored_bytes for tile in whole.tiles))
        if old.home is Home.NVME and needed > cache:
            raise CapacityError(
                f"{whole.name!r} was built by zi.init in {_number(built)}, and takes {format_bytes(needed)} with its "
                f"first tile to be cut into {len(whole.tiles)}, but of memory {format_bytes(memory)} there are "
                f"{format_bytes(cache)} for that\n  fix:   memory={suggest_bytes(memory + needed - cache)}, or "
                "tile_above= in zi.Config, or build the model without zi.init"
            )


def _number(built: ManagedParameter) -> str:
    return f"{len(built.tiles)} tiles" if built.tiles else "one piece"


def _does_with_tiles(module: nn.Module) -> bool:
    """Whether its forward is one operation with the weight that can be done in tiles, and nobody has changed that."""
    forward = type(module).forward
    if "forward" in module.__dict__ or parametrize.is_parametrized(module):
        return False
    # Attention takes the weight of its output projection and does not call the layer.
    if forward is nn.Linear.forward:
        return not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    if forward is nn.Embedding.forward:
        # An embedding that is being built does not know of the last yet.
        is_sparse = module.__dict__.get("sparse", False)
        return isinstance(module, nn.Embedding) and module.max_norm is None and not is_sparse
    transformers = sys.modules.get("transformers.pytorch_utils")  # it takes seconds to import, and need not be there
    return transformers is not None and forward is transformers.Conv1D.forward


def _may_be_cut(weight: nn.Parameter) -> bool:
    with no_torch_function():
        hooked = has_gradient_hooks(weight)
    if (
        is_distributed(weight)
        or weight.dim() != 2
        or hooked
        or not weight.is_floating_point()
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
    """The parameter with its tiles of `num_rows` rows each, all in units of their own."""

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
