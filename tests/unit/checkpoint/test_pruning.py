from __future__ import annotations

import os
from pathlib import Path

from zero_infinity.checkpoint.pruning import lock_directory, prune, remove_leftovers


def make(directory: Path, name: str, *files: str) -> None:
    (directory / name).mkdir()
    for file in files:
        (directory / name / file).write_text("{}")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_only_checkpoints_are_pruned(tmp_path: Path) -> None:
    for step in range(1, 5):
        make(tmp_path, f"step-0000000{step}", "manifest.json", "rank-00000.json")
    make(tmp_path, "step-00000000", "manifest.json", "mine.txt")
    prune(tmp_path, 2, "step-00000004")
    assert names(tmp_path) == ["step-00000000", "step-00000003", "step-00000004"]


def test_leftovers_are_removed_unless_somebody_writes_them_or_they_have_other_files(tmp_path: Path) -> None:
    dead, alive, other = (f".saving-{letter * 16}" for letter in "abc")
    make(tmp_path, dead, "parts-00001.json", "model-00001-of-00001.safetensors")
    make(tmp_path, alive, "manifest.json")
    make(tmp_path, other, "mine.txt")
    make(tmp_path, f".removing-{'d' * 16}", "manifest.json")
    lock = lock_directory(tmp_path / alive)
    assert lock is not None
    assert lock_directory(tmp_path / alive) is None
    remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted([alive, other])
    os.close(lock)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [other]
