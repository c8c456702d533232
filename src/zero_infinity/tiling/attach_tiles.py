"""Lets torch functions use parameters tile by tile where that can be done, and find them whole elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from zero_infinity.params.unit import ManagedParameter
from zero_infinity.params.unshard import Unsharder
from zero_infinity.tiling.lazy_logits import make_logits
from zero_infinity.tiling.materialize import Materializer
from zero_infinity.tiling.tiled_ops import TiledWeight, TileGradientTaker


def attach_tiles(
    tiled: Mapping[ManagedParameter, bool],
    unsharder: Unsharder,
    materializer: Materializer,
    trainer: TileGradientTaker,
    *,
    lazy_logits: bool,
) -> None:
    """`tiled`: weights that have tiles, and whether they make logits. `lazy_logits`: logits need not be whole."""
    for whole, makes_logits in tiled.items():
        unsharder.access.sources.serve(whole.unit, materializer)
        make = make_logits if makes_logits and lazy_logits else None
        whole.use_tiles(TiledWeight(whole, unsharder, materializer, trainer, make))
