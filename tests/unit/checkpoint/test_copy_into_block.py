from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.prepared import Prepared
from torch import nn

import zero_infinity as zi
from zero_infinity.checkpoint.copy_into_block import bytes_of, copies_into_block, dtype_name, to_file_bytes
from zero_infinity.checkpoint.rank_parts import as_real, contents_of


def test_complex_numbers_are_pairs() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert as_real(value).tolist() == [[1, 2], [3, -4]]
    assert as_real(value.conj()).tolist() == [[1, -2], [3, 4]]
    assert as_real(torch.ones(2)).tolist() == [1, 1]


def test_bytes_are_row_major() -> None:
    value = torch.arange(6, dtype=torch.uint8).view(2, 3)
    assert bytes_of(value.t()).tolist() == [0, 3, 1, 4, 2, 5]


def test_conversion_for_a_file() -> None:
    assert bytes(to_file_bytes(torch.tensor([1.0]), "BF16")) == b"\x80\x3f"


def test_what_cannot_be_saved() -> None:
    assert dtype_name(torch.ones(1, dtype=torch.bfloat16), "a") == "BF16"
    with pytest.raises(zi.UsageError, match="'a' is a torch.float32 tensor .torch.sparse_coo., which cannot be saved"):
        dtype_name(torch.eye(2).to_sparse(), "a")
    with pytest.raises(zi.UsageError, match="torch.complex64"):
        dtype_name(torch.ones(1, dtype=torch.complex64), "a")


def test_elements_are_converted_to_the_dtype_of_the_block(prepared: Prepared) -> None:
    model, _, view = prepared
    contents = contents_of(model, view)
    part = next(p for unit in contents.units for p in contents.of_unit(unit).parts if p.key == ("model", "0.bias"))
    block = bytearray(8 * 1024)
    value = nn.Parameter(torch.tensor([1.5, 2.5, -3.0, 4.0], dtype=torch.bfloat16))
    (copy,) = copies_into_block(replace(part, dtype=torch.float64), value)
    copy(memoryview(block), memoryview(bytearray(0)))
    assert torch.frombuffer(block, dtype=torch.float64)[part.at : part.at + 4].tolist() == [1.5, 2.5, -3.0, 4.0]
