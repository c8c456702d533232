"""Makes torch functions use tiled parameters tile by tile where possible, and materialized elsewhere."""

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
) -> None:
    """`tiled`: weights with tiles, and whether they produce logits, which then stay unmaterialized."""
    for whole, makes_logits in tiled.items():
        unsharder.access.sources.serve(whole.unit, materializer)
        make = make_logits if makes_logits else None
        whole.use_tiles(TiledWeight(whole, unsharder, materializer, trainer, make))
