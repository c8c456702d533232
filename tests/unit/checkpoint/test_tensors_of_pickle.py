"""Files of torch.save: their tensors are read, and nothing in them runs."""

from __future__ import annotations

import os
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_infinity.checkpoint.tensors_of_pickle import Ignored, read_tensors, read_value
from zero_infinity.errors import CheckpointError


class Stage(IntEnum):
    THREE = 3


class Scaler:
    def __init__(self) -> None:
        self.scale = 2.0


class Entries(dict[str, int]):
    pass


class Runs:
    """What a crafted file would have: a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_tensors_are_read_and_objects_are_not_made(tmp_path: Path) -> None:
    saved = {
        "w": torch.arange(4.0),
        "names": ["a", 1, 2.5, None, True],
        "shapes": OrderedDict(w=torch.Size([2, 2])),
        "stage": Stage.THREE,
        "scaler": Scaler(),
    }
    torch.save(saved, tmp_path / "x.pt")
    read = read_tensors(tmp_path / "x.pt")
    assert torch.equal(read["w"], saved["w"])
    assert read["names"] == saved["names"]
    assert read["shapes"] == {"w": (2, 2)}
    assert isinstance(read["stage"], Ignored)
    assert read["stage"].arguments == (3,)
    assert isinstance(read["scaler"], Ignored)
    assert not hasattr(read["scaler"], "scale")
    torch.save(saved | {"entries": Entries(a=1)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="as tensors only: Can only SETITEM for dict"):
        read_tensors(tmp_path / "x.pt")


@pytest.mark.parametrize("function", [os.system, os.mkdir, eval, exec, __import__, open, Path.touch, print])
def test_no_function_is_called(function: Any, tmp_path: Path) -> None:
    target = tmp_path / "ran"
    argument = {os.mkdir: str(target), Path.touch: target, open: str(target)}.get(
        function, f"open({str(target)!r}, 'w')"
    )
    torch.save({"w": torch.ones(1), "x": Runs(function, argument)}, tmp_path / "x.pt")
    try:
        read = read_tensors(tmp_path / "x.pt")
    except CheckpointError as error:
        assert "cannot be read as tensors only" in str(error)
    else:
        assert isinstance(read["x"], Ignored)
    assert not target.exists()


def test_what_is_no_such_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_tensors(tmp_path / "none.pt")
    (tmp_path / "bad.pt").write_bytes(b"no zip")
    with pytest.raises(CheckpointError, match="cannot be read as tensors only"):
        read_tensors(tmp_path / "bad.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="has a list, not a mapping"):
        read_tensors(tmp_path / "list.pt")
    assert torch.equal(read_value(tmp_path / "list.pt")[0], torch.ones(1))
