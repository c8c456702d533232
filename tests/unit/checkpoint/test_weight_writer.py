"""Folders of safetensors files from tensors that come one at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from zero_infinity.checkpoint import weight_writer
from zero_infinity.checkpoint.weight_writer import check_folder, kind_of, write_weights
from zero_infinity.errors import ConfigError, UsageError

VALUES = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(4, dtype=torch.bfloat16), "n": torch.tensor([7])}


def kinds(dtype: torch.dtype | None = None) -> dict[str, weight_writer.TensorKind]:
    return {name: kind_of(value.dtype, value.shape, dtype) for name, value in VALUES.items()}


def test_one_file_has_every_tensor(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    written = write_weights(folder, kinds(), VALUES.items(), {"config.json": b"{}"})
    assert written == sum(value.nbytes for value in VALUES.values())
    read = safetensors.torch.load_file(folder / "model.safetensors")
    assert read.keys() == VALUES.keys()
    assert all(torch.equal(value, read[name]) for name, value in VALUES.items())
    assert (folder / "config.json").read_bytes() == b"{}"


def test_several_files_have_an_index_and_numbers_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_writer, "SHARD_BYTES", 20)
    folder = tmp_path / "out"
    write_weights(folder, kinds(torch.float16), reversed(VALUES.items()))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    for name, file in index.items():
        value = safetensors.torch.load_file(folder / file)[name]
        assert torch.equal(value, VALUES[name].half() if VALUES[name].is_floating_point() else VALUES[name])


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2 tensors have no value, 'a' among them"):
        write_weights(tmp_path / "out", kinds(), [("b", VALUES["b"])])
    with pytest.raises(UsageError, match=r"'b' has the shape \(3, 2\), not \(2, 3\)"):
        write_weights(tmp_path / "out", kinds(), [("b", VALUES["b"].view(3, 2))])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(UsageError, match="not empty"):
        write_weights(tmp_path, kinds(), VALUES.items())
    with pytest.raises(ConfigError, match="not supported"):
        check_folder(tmp_path / "new", torch.int8)
