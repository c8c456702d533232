from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zero_infinity as zi
from zero_infinity.checkpoint.weight_files import INDEX, SINGLE, open_weights, write_index


def test_one_file_or_several_with_an_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, 20)
    assert json.loads((tmp_path / INDEX).read_text())["metadata"] == {"total_size": 20}
    for path in (tmp_path, tmp_path / INDEX):
        with ExitStack() as stack:
            assert {name: tensor.shape for name, tensor in open_weights(path, stack).items()} == {"a": (2,), "b": (3,)}
    (tmp_path / INDEX).unlink()
    write_index(tmp_path, {"a": "one.safetensors"}, 8)
    for path in (tmp_path, tmp_path / SINGLE):
        with ExitStack() as stack:
            assert list(open_weights(path, stack)) == ["a"]


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("../one.safetensors", "not a valid file name"),
        (3, "not a valid file name"),
        ("one.safetensors", "has no tensor"),
    ],
)
def test_an_index_that_is_wrong(file: object, problem: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"c": file}}))
    with ExitStack() as stack, pytest.raises(zi.CheckpointError, match=problem):
        open_weights(tmp_path, stack)
