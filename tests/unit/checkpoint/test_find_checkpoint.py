from __future__ import annotations

from pathlib import Path

import pytest

import zero_infinity as zi
from zero_infinity.checkpoint.find_checkpoint import checkpoints_in, find, has_checkpoint, next_name


def make(directory: Path, name: str) -> None:
    (directory / name).mkdir()
    (directory / name / "manifest.json").write_text("{}")


def test_names_are_sorted_by_step_and_then_by_number(tmp_path: Path) -> None:
    for name in ("step-00000010", "step-00000009-11", "step-00000009-2", "step-00000009", "other", "step-9"):
        make(tmp_path, name)
    found = [path.name for path, _ in checkpoints_in(tmp_path)]
    assert found == ["step-00000009", "step-00000009-2", "step-00000009-11", "step-00000010"]
    assert next_name(tmp_path, 9) == "step-00000009-12"
    assert next_name(tmp_path, 3) == "step-00000003"
    assert find(tmp_path).name == "step-00000010"
    (tmp_path / "latest").symlink_to("step-00000009")
    assert find(tmp_path) == tmp_path / "step-00000009"


def test_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    assert not has_checkpoint(tmp_path)
    assert not has_checkpoint(tmp_path / "nothing")
    with pytest.raises(zi.CheckpointError, match="has no checkpoint: neither manifest.json"):
        find(tmp_path)
    with pytest.raises(zi.CheckpointError, match="is not a checkpoint: it does not exist\n  fix:   pass the directory"):
        find(tmp_path / "nothing")
