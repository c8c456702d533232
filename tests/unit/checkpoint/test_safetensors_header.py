from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import zero_infinity as zi
from zero_infinity.checkpoint import safetensors_header

shapes = st.lists(st.integers(0, 5), max_size=3)
# Those that the oldest supported safetensors package knows, too.
dtypes = st.sampled_from(["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"])
tensors = st.dictionaries(
    st.text(min_size=1, max_size=20).filter(lambda n: n != "__metadata__"), st.tuples(dtypes, shapes)
)


@given(kinds=tensors)
def test_the_safetensors_package_reads_what_is_composed(
    kinds: dict[str, tuple[str, list[int]]], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    beginning, entries = safetensors_header.compose(kinds)
    end = max((entry.stop for entry in entries.values()), default=len(beginning))
    data = bytes(number % 2 for number in range(end - len(beginning)))
    path.write_bytes(beginning + data)
    assert safetensors_header.read_header(path) == (beginning, entries)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(kinds)
        for name, entry in entries.items():
            tensor = file.get_tensor(name)
            assert tensor.dtype is safetensors_header.DTYPES[entry.dtype]
            assert tuple(tensor.shape) == entry.shape
            stored = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert stored == data[entry.start - len(beginning) : entry.stop - len(beginning)]


@given(kinds=tensors)
def test_reads_what_the_package_writes(kinds: dict[str, tuple[str, list[int]]], tmp_path: Path) -> None:
    path = tmp_path / "file"
    values = {
        name: torch.zeros(shape, dtype=safetensors_header.DTYPES[dtype]) for name, (dtype, shape) in kinds.items()
    }
    save_file(values, path, metadata={"format": "pt"})
    found = safetensors_header.read_header(path)[1]
    assert {name: (entry.dtype, list(entry.shape)) for name, entry in found.items()} == kinds


def written(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"", "damaged"),
        (b"[]", "not a JSON object"),
        (b"{" * 100_000, "damaged"),
        (b'{"a": {}, "a": {}}', "appears twice"),
        (b'{"' + b"n" * 5000 + b'": 1}', "a name of 5,000 characters"),
        (b'{"a": NaN}', "NaN is not valid JSON"),
        (b'{"a": 3}', "'a' is damaged"),
        (b"\xff\xfe", "damaged"),
        (json.dumps({"a": {**GOOD, "dtype": "F31"}}).encode(), "F31"),
        (json.dumps({"a": {**GOOD, "shape": [-2]}}).encode(), "-2"),
        (json.dumps({"a": {**GOOD, "shape": [2**40, 2**40]}}).encode(), "does not fit bytes"),
        (json.dumps({"a": {**GOOD, "shape": [10**30]}}).encode(), "not a valid number"),
        (json.dumps({"a": {**GOOD, "shape": [True]}}).encode(), "True"),
        (json.dumps({"a": {**GOOD, "data_offsets": [4, 12]}}).encode(), "starts at byte"),
        (json.dumps({"a": GOOD, "b": GOOD}).encode(), "starts at byte"),
        (json.dumps({"a": {**GOOD, "data_offsets": [8, 0]}}).encode(), "does not fit bytes"),
        (json.dumps({}).encode(), "longer than its header says"),
    ],
)
def test_damaged_headers_are_refused_by_name(header: bytes, problem: str, tmp_path: Path) -> None:
    path = written(tmp_path / "model-00001-of-00001.safetensors", header, bytes(8))
    with pytest.raises(zi.CheckpointError, match=problem) as caught:
        safetensors_header.read_header(path)
    assert str(path) in str(caught.value)


def test_lengths_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"", b"1234567", (1 << 60).to_bytes(8, "little"), (200_000_000).to_bytes(8, "little") + bytes(10)):
        path.write_bytes(data)
        with pytest.raises(zi.CheckpointError, match="its header would take"):
            safetensors_header.read_header(path)
    with pytest.raises(zi.CheckpointError, match="is missing"):
        safetensors_header.read_header(tmp_path / "other")


@given(noise=st.binary(max_size=200), place=st.integers(0, 300), byte=st.integers(0, 255))
def test_any_bytes_are_read_or_refused(noise: bytes, place: int, byte: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(noise)
    good = bytearray(safetensors_header.compose({"a": ("F32", [2]), "b": ("U8", [3])})[0] + bytes(11))
    good[place] = byte
    for data in (noise, bytes(good)):
        path.write_bytes(data)
        try:
            safetensors_header.read_header(path)
        except zi.CheckpointError as error:
            assert str(path) in str(error)
