"""When a weight is cut into tiles of rows, and how many rows a tile has. Pure arithmetic.

Which weights can be tiled at all is decided in `tiling/tile_plan.py`.
"""

from __future__ import annotations

# If tile_above is not set and the model does not fit otherwise, a tile and its gradient take this share of memory.
# That leaves room for the tile in use, the one being fetched, the one being updated, and optimizer state.
_DEFAULT_SHARE = 1 / 8


def default_tile_bytes(memory: int) -> int:
    """The size of a tile with its gradient if nobody has set `tile_above`."""
    return max(1, int(memory * _DEFAULT_SHARE))


def rows_per_tile(num_rows: int, row_size: int, max_size: int) -> int | None:
    """Rows of a tile that is at most `max_size` large; None if the weight stays whole.

    Sizes are bytes or elements, both in the same unit. A tile has at least one row, also if that is larger.
    """
    if num_rows * row_size <= max_size:
        return None
    num_tiles = -(-num_rows // max(1, max_size // row_size))
    return -(-num_rows // num_tiles) if num_tiles > 1 else None
