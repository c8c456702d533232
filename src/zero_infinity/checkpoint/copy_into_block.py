"""Converts tensors between a model's blocks and the bytes of files: dtypes, memory order and complex numbers.

On load, elements are converted to the dtype of the block they are copied into (`copies_into_block`). On export, to the
dtype that the user asks for (`to_file_bytes`). A save converts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from zero_infinity.checkpoint.rank_parts import TensorPart, order_of
from zero_infinity.checkpoint.safetensors_header import DTYPES, NAMES
from zero_infinity.checkpoint.verify import StoredTensor
from zero_infinity.errors import UsageError

TensorSource = StoredTensor | torch.Tensor  # in a file, or in memory
BlockBytes = memoryview | torch.Tensor  # in host memory, or on a device
BlockCopy = Callable[[BlockBytes, memoryview], None]  # into the bytes of a block, using a staging buffer

# ---------------------------------------------------------------------- tensors in memory


def bytes_of(value: torch.Tensor) -> Any:
    """The bytes of a tensor in row-major order, as an array."""
    return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def dtype_name(value: torch.Tensor, name: str) -> str:
    """The name in files of the tensor's dtype; raises if it cannot be saved."""
    if value.layout is not torch.strided or value.dtype not in NAMES:
        raise UsageError(
            f"{name!r} is a {value.dtype} tensor ({value.layout}), which cannot be saved\n"
            f"  fix:   a dense tensor of one of {', '.join(str(dtype).removeprefix('torch.') for dtype in NAMES)}"
        )
    return NAMES[value.dtype]


def to_file_bytes(value: torch.Tensor, dtype: str) -> memoryview:
    """The bytes of a tensor after conversion to a dtype, given by its name in files."""
    return memoryview(bytes_of(value.to(DTYPES[dtype])))


# ---------------------------------------------------------------------- from files into blocks


def copies_into_block(part: TensorPart, source: TensorSource) -> Iterator[BlockCopy]:
    """Copies that together fill a part of a block."""
    if isinstance(source, StoredTensor) and source.order == order_of(part.form):
        for number in source.pieces(part.start, part.stop):
            yield partial(_copy_piece, source, number, part)
    else:
        yield partial(_copy_whole, source, part)


def _copy_piece(source: StoredTensor, number: int, part: TensorPart, block: BlockBytes, room: memoryview) -> None:
    """Copy the elements of a part that are in one piece."""
    whole, dtype = source.elements(number), part.dtype
    is_inside = part.start <= whole.start and whole.stop <= part.stop
    if isinstance(block, memoryview) and source.dtype == dtype and is_inside:
        # No tensors here: each torch operation releases the GIL, and twelve threads would queue for it.
        before = part.at - part.start
        place = block[(before + whole.start) * dtype.itemsize : (before + whole.stop) * dtype.itemsize]
        if source.read_into(number, place):
            return
    target = _elements(part, block)

    def copy(elements: torch.Tensor, first: int) -> None:
        start, stop = max(first, part.start), min(first + len(elements), part.stop)
        if start < stop:
            target[start - part.start : stop - part.start].copy_(elements[start - first : stop - first])

    source.read_piece(number, room, copy)


def _copy_whole(source: TensorSource, part: TensorPart, block: BlockBytes, room: memoryview) -> None:
    whole = source.whole(room) if isinstance(source, StoredTensor) else source
    form = part.owner.whole or part.form
    with torch.no_grad():
        _elements(part, block).copy_(form.flattened(whole)[part.start : part.stop])


def _elements(part: TensorPart, block: BlockBytes) -> torch.Tensor:
    """The elements of a part within its block."""
    first, num_elements = part.at * part.dtype.itemsize, part.stop - part.start
    if isinstance(block, torch.Tensor):
        return block[first : first + num_elements * part.dtype.itemsize].view(part.dtype)
    return torch.frombuffer(block, dtype=part.dtype, offset=first, count=num_elements)
