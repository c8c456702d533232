from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zero_infinity as zi
from zero_infinity.checkpoint import manifest as manifests
from zero_infinity.checkpoint.manifest import (
    FileEntry,
    GroupEntry,
    Manifest,
    OptimizerEntry,
    StateEntry,
    TensorEntry,
)

FILE = "model-00001-of-00001.safetensors"


def example() -> Manifest:
    return Manifest(
        step=7,
        num_ranks=2,
        model_class="Model",
        model_config=None,
        tensors={"model": {"a.weight": TensorEntry(FILE, "F32", (3, 2), (123,), (1, 0))}, "optimizer": {}},
        tied={"b.weight": "a.weight"},
        optimizer=OptimizerEntry(
            "AdamW",
            (GroupEntry({"lr": 0.1, "betas": (0.9, 0.99)}, ("a.weight",)),),
            {"a.weight": StateEntry(("step", "exp_avg"), {"step": 3.0})},
        ),
        loss_scale={"scale": 4.0, "num_skipped": 0, "num_good": 1},
        files={FILE: FileEntry(4120, 5), "rank-00000.json": FileEntry(10, 6)},
    )


def signed(values: dict[str, Any]) -> bytes:
    """As if the writer had meant it."""
    rest = json.dumps({name: value for name, value in values.items() if name != "sha256"}, indent=1).encode()
    rest = rest.removeprefix(b"{\n") + b"\n"
    return b'{"sha256": "%s",\n' % hashlib.sha256(rest).hexdigest().encode() + rest


def changed(path: tuple[Any, ...], value: Any) -> bytes:
    values = json.loads(example().to_bytes())
    target = values
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = value
    return signed(values)


def read(folder: Path, data: bytes) -> Manifest:
    (folder / "manifest.json").write_bytes(data)
    return manifests.read(folder)


def test_round_trip(tmp_path: Path) -> None:
    assert read(tmp_path, example().to_bytes()) == example()
    json.loads(example().to_bytes())  # it is JSON, for everybody


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "x", "a/b.safetensors", "", ".", "model-1-of-1.safetensors", "N" * 9999]
)
def test_odd_names_of_files(name: str, tmp_path: Path) -> None:
    with pytest.raises(zi.CheckpointError, match="is not the name of a checkpoint file|characters"):
        read(tmp_path, changed(("files", name), {"bytes": 1, "crc32": 1}))
    with pytest.raises(zi.CheckpointError, match="is damaged"):
        read(tmp_path, changed(("tensors", "model", "a.weight", "file"), name))


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("version",), 2, "has version 2 of the format; this library reads version 1"),
        (("version",), None, "has version None"),
        (("version",), True, "has version True"),
        (("format",), "other", "is not the manifest of a zero_infinity checkpoint"),
        (("step",), -1, "not a valid number"),
        (("step",), "7", "'step' is '7', not int"),
        (("step",), 10**40, "not a valid number"),
        (("piece_bytes",), 7, "pieces of 7 bytes"),
        (("tensors",), [], "'tensors' is"),
        (("tensors", "model", "a.weight", "shape"), [2**61, 2], "damaged"),
        (("tensors", "model", "a.weight", "dtype"), "F33", "F33"),
        (("tensors", "model", "a.weight", "order"), [0, 0], "is not an order"),
        (("tensors", "model", "a.weight", "crc32"), [1, 2], "2 checksums for 1 pieces"),
        (("tied", "c"), "nobody", "is tied to"),
        (("tied", "a.weight"), "a.weight", "is tied to"),
        (("optimizer", "groups"), {}, "'groups'"),
        (("optimizer", "groups", 0, "settings", "params"), ["a.weight"], "its settings have 'params'"),
        (("optimizer", "states", "a.weight", "scalars"), {"$": "code"}, "is not a known type"),
        (("optimizer", "groups", 0, "parameters"), [1], "items that are not strings"),
    ],
)
def test_fields_that_cannot_be(path: tuple[Any, ...], value: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(zi.CheckpointError, match=problem) as caught:
        read(tmp_path, changed(path, value))
    assert str(tmp_path / "manifest.json") in str(caught.value)


def test_every_byte_counts(tmp_path: Path) -> None:
    good = example().to_bytes()
    for place in range(len(good)):
        data = bytearray(good)
        data[place] ^= 1 << (place % 8)
        with pytest.raises(zi.CheckpointError):
            read(tmp_path, bytes(data))
    for length in range(0, len(good), 7):
        with pytest.raises(zi.CheckpointError):
            read(tmp_path, good[:length])


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inner for found in [(*path, key), *_paths(item, (*path, key))]]


@given(path=st.sampled_from(_paths(json.loads(example().to_bytes()))), value=values)
def test_any_value_anywhere_is_read_or_refused(path: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    try:
        read(tmp_path, changed(path, value))
    except zi.CheckpointError as error:
        assert str(tmp_path / "manifest.json") in str(error)
