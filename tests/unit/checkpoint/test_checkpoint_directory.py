from __future__ import annotations

import os
from pathlib import Path

import pytest

import zero_infinity as zi
from zero_infinity.checkpoint.checkpoint_directory import (
    CheckpointDraft,
    checkpoints_in,
    find,
    has_checkpoint,
    lock_directory,
    next_name,
    prune,
    remove_leftovers,
)


def make(directory: Path, name: str, *files: str) -> None:
    (directory / name).mkdir()
    for file in files:
        (directory / name / file).write_text("{}")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_names_are_sorted_by_step_and_then_by_number(tmp_path: Path) -> None:
    for name in ("step-00000010", "step-00000009-11", "step-00000009-2", "step-00000009", "other", "step-9"):
        make(tmp_path, name, "manifest.json")
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


def publish(directory: Path, step: int, keep: int | None = None) -> Path:
    aside = CheckpointDraft(directory)
    (aside.path / "manifest.json").write_text("{}")
    (aside.path / "model-00001-of-00001.safetensors").write_bytes(b"")
    return aside.publish(step, keep)


def test_latest_and_names(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    assert not has_checkpoint(directory)
    assert publish(directory, 5).name == "step-00000005"
    assert find(directory).name == "step-00000005"
    assert publish(directory, 5).name == "step-00000005-1"
    assert publish(directory, 123456789).name == "step-123456789"
    assert find(directory).name == "step-123456789"
    assert publish(directory, 2).name == "step-00000002"
    assert find(directory).name == "step-00000002"  # what was saved last, though an earlier step
    assert has_checkpoint(directory)
    assert find(directory / "latest") == directory / "latest"
    assert find(directory / "step-00000005").name == "step-00000005"


@pytest.mark.parametrize("keep", [1, 2, 3, 10])
def test_keep(keep: int, tmp_path: Path) -> None:
    for step in range(1, 8):
        publish(tmp_path, step, keep)
        kept = [f"step-{number:08}" for number in range(max(1, step - keep + 1), step + 1)]
        assert names(tmp_path) == ["latest", *kept]


def test_what_only_has_the_name_of_a_checkpoint_takes_no_place(tmp_path: Path) -> None:
    (tmp_path / "step-00000000").write_text("a file")
    (tmp_path / "step-00000008").mkdir()
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000009" / "notes.txt").write_text("mine")
    strays = names(tmp_path)
    for step in range(1, 5):
        publish(tmp_path, step, keep=2)
    assert names(tmp_path) == sorted(["latest", *strays, "step-00000003", "step-00000004"])


def test_without_its_link_the_highest_step_is_the_latest(tmp_path: Path) -> None:
    """It was killed before the link was made, the folder was copied without links, or what it points at was removed."""
    publish(tmp_path, 3)
    publish(tmp_path, 4)
    publish(tmp_path, 4)
    (tmp_path / "step-00000009").mkdir()  # nothing is in it
    (tmp_path / "latest").unlink()
    assert find(tmp_path) == tmp_path / "step-00000004-1"
    (tmp_path / "latest").symlink_to("step-00000123")
    assert has_checkpoint(tmp_path)
    assert find(tmp_path) == tmp_path / "step-00000004-1"


def test_the_link_may_lead_elsewhere(tmp_path: Path) -> None:
    there = publish(tmp_path / "there", 3)
    here = tmp_path / "here"
    here.mkdir()
    (here / "latest").symlink_to(there)
    assert find(here) == here / "latest"
    (tmp_path / "link").symlink_to(there.parent)
    assert find(tmp_path / "link") == tmp_path / "link" / "step-00000003"


def test_what_cannot_be_removed_hides_no_error(tmp_path: Path) -> None:
    aside = CheckpointDraft(tmp_path)
    aside.path.rmdir()
    aside.discard()
    aside.discard()


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    publish(tmp_path, 2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "step-00000000").symlink_to(elsewhere)
    (tmp_path / "step-1").mkdir()
    (tmp_path / ".saving-mine").mkdir()
    foreign = tmp_path / ".saving-0123456789abcdef"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    publish(tmp_path, 3, keep=1)
    assert names(tmp_path) == [
        ".saving-0123456789abcdef",
        ".saving-mine",
        "elsewhere",
        "latest",
        "step-00000000",
        "step-00000001",
        "step-00000003",
        "step-1",
    ]


def test_what_a_killed_run_has_left_goes_and_what_another_writes_stays(tmp_path: Path) -> None:
    writing = CheckpointDraft(tmp_path)
    child = os.fork()
    if not child:
        killed = CheckpointDraft(tmp_path)
        (killed.path / "rank-00000.json").write_text("{}")
        os._exit(0)
    os.waitpid(child, 0)
    assert len(names(tmp_path)) == 2
    assert publish(tmp_path, 1).exists()
    assert names(tmp_path) == [writing.path.name, "latest", "step-00000001"]
    writing.discard()
    writing.discard()
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(zi.CheckpointError, match="has no checkpoint: neither manifest.json nor latest"):
        find(tmp_path)
    with pytest.raises(zi.CheckpointError, match="it does not exist"):
        find(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(zi.CheckpointError, match="it is a file"):
        find(tmp_path / "file")
    with pytest.raises(zi.TransferError, match="cannot make a checkpoint in .*file"):
        CheckpointDraft(tmp_path / "file")


def test_an_existing_thing_under_the_name_is_not_replaced(tmp_path: Path) -> None:
    tmp_path.joinpath("latest").mkdir()
    with pytest.raises(zi.TransferError, match="cannot name a checkpoint in"):
        publish(tmp_path, 1)
    assert tmp_path.joinpath("latest").is_dir()


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
