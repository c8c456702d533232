from __future__ import annotations

from pathlib import Path

import pytest
from support.prepared import Prepared

import zero_infinity as zi
from zero_infinity.checkpoint.checkpoint_directory import has_checkpoint
from zero_infinity.checkpoint.save import CheckpointSave


def test_a_save_publishes_a_folder_and_reports_progress(prepared: Prepared, tmp_path: Path) -> None:
    model, _, view = prepared
    seen: list[tuple[int, int]] = []
    save = CheckpointSave(model, view, with_optimizer=True)
    folder = save.write(tmp_path, {}, None, progress=lambda *moved: seen.append(moved))
    assert folder == tmp_path / "step-00000001"
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "model-00001-of-00001.safetensors",
        "optimizer-00001-of-00001.safetensors",
        "rank-00000.json",
    ]
    assert seen[-1][0] == seen[-1][1] > 0


def test_an_error_leaves_nothing(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, view = prepared

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("zero_infinity.checkpoint.save.CheckpointSave._write_manifest", fail)
    with pytest.raises(OSError, match="Input/output"):
        CheckpointSave(model, view, with_optimizer=True).write(tmp_path, {}, None)
    assert list(tmp_path.iterdir()) == []
    assert not has_checkpoint(tmp_path)


def test_settings_are_checked_first(prepared: Prepared, tmp_path: Path) -> None:
    model, _, view = prepared
    with pytest.raises(zi.UsageError, match="keep=0 would keep no checkpoint"):
        CheckpointSave(model, view, with_optimizer=True).write(tmp_path / "a", {}, 0)
    assert not (tmp_path / "a").exists()
