"""Whichever library computes or combines checksums, they are zlib's."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.storage import crc32 as crc32_module
from zero_infinity.storage.crc32 import crc32


@given(st.binary(max_size=70_000), st.integers(0, 2**32 - 1))
def test_checksums_are_those_of_zlib(data: bytes, before: int) -> None:
    assert crc32(data, before) == zlib.crc32(data, before)
    assert crc32(memoryview(data)[3:]) == zlib.crc32(data[3:])


@pytest.fixture(scope="module", params=["isal", "zlib"])
def checksums(request: pytest.FixtureRequest) -> ModuleType:
    """The module as it is where isal is installed, and where it is not."""
    spec = importlib.util.spec_from_file_location("checksums", crc32_module.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "zlib":
            patch.setitem(sys.modules, "isal.isal_zlib", None)
        spec.loader.exec_module(module)
    assert (module.crc32 is zlib.crc32) == (request.param == "zlib")
    return module


@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_of_two(checksums: ModuleType, first: bytes, second: bytes) -> None:
    assert checksums.crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@given(parts=st.lists(st.binary(max_size=100), max_size=6))
def test_of_many(checksums: ModuleType, parts: list[bytes]) -> None:
    assert checksums.combine_all((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(b"".join(parts))


def test_of_large_ones(checksums: ModuleType) -> None:
    first, second = bytes(range(256)) * 5000, b"abc" * 1_000_003
    assert checksums.crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
