"""Checkpoints when something goes wrong: damaged files, full drives, models that do not fit."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mounts import image, mounted
from support.compare import adamw, assert_same, copied
from support.models import mean_square, mlp, vectors
from support.resources import all_given_back
from torch import nn
from torch.optim import Optimizer

import zero_infinity as zi
from zero_infinity.checkpoint import copy_into_block, file_io
from zero_infinity.checkpoint.file_io import OpenFile
from zero_infinity.checkpoint.shard_writer import ShardWriter
from zero_infinity.policy import chunk_size, homes

Pair = tuple[nn.Module, Any]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "_SMALL_BYTES", 0)
    monkeypatch.setattr(chunk_size, "MIN_CHUNK_BYTES", 4096)


def prepared(directory: Path, model: nn.Module | None = None, **changes: Any) -> Pair:
    torch.manual_seed(0)
    model = model or mlp()
    return zi.prepare(model, adamw(model), zi.Config(memory="1MiB", nvme=directory, **changes))


def train(pair: Pair, first: int, last: int) -> None:
    for number in range(first, last):
        torch.manual_seed(number)
        mean_square(pair[0], vectors()(number)).backward()
        pair[1].step()
        pair[1].zero_grad()


def states(pair: Pair) -> Any:
    return copied(pair[0].state_dict()), copied(pair[1].state_dict())


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Pair, Path, Any]:
    pair = prepared(tmp_path)
    train(pair, 0, 2)
    folder = zi.save(tmp_path / "saved", *pair, extra={"epoch": 3})
    return pair, folder, states(pair)


# ---------------------------------------------------------------------- damaged files


def test_a_flipped_byte_anywhere_is_found_and_named(saved: tuple[Pair, Path, Any]) -> None:
    pair, folder, expected = saved
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        for number in range(24):
            place = number * (len(good) - 1) // 23
            damaged = bytearray(good)
            damaged[place] ^= 1 << (number % 8)
            path.write_bytes(damaged)
            with pytest.raises(zi.CheckpointError) as caught:
                zi.load(folder, *pair)
            assert str(path) in str(caught.value), place
        path.write_bytes(good)
    zi.load(folder, *pair)
    assert_same("states", expected, states(pair))


def test_a_flipped_byte_of_what_is_read_straight_into_its_place(tmp_path: Path) -> None:
    made = nn.Linear(512, 512)  # whole pages, and enough of them
    model, optimizer = zi.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1), zi.Config(memory="8MiB"))
    path = zi.save(tmp_path, model, optimizer) / "model-00001-of-00001.safetensors"
    straight, by_torch = [], []
    with pytest.MonkeyPatch.context() as patch:
        real, elements = OpenFile.read_into, copy_into_block._elements
        patch.setattr(OpenFile, "read_into", lambda *args: straight.append(real(*args)) or straight[-1])
        patch.setattr(
            copy_into_block, "_elements", lambda part, *rest: by_torch.append(part.key) or elements(part, *rest)
        )
        zi.load(tmp_path, model, optimizer)
        assert by_torch == [("model", "bias")]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(zi.CheckpointError, match=r"model-00001-of-00001.safetensors is damaged: bytes"):
            zi.load(tmp_path, model, optimizer)
    assert straight.count(True) == 2


def test_what_is_read_straight_lands_in_its_own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = nn.Linear(512, 512, bias=False)  # two states of whole pages side by side in one block
    pair = zi.prepare(made, torch.optim.AdamW(made.parameters(), lr=0.1), zi.Config(memory="16MiB"))

    def step(seed: int) -> None:
        torch.manual_seed(seed)
        pair[0](torch.randn(4, 512)).square().sum().backward()
        pair[1].step()
        pair[1].zero_grad()

    step(0)
    zi.save(tmp_path, *pair)
    expected = states(pair)
    step(1)
    straight = []
    real = OpenFile.read_into
    monkeypatch.setattr(OpenFile, "read_into", lambda *args: straight.append(real(*args)) or straight[-1])
    zi.load(tmp_path, *pair)
    assert straight.count(True) == 3  # the weight and both of its states
    assert_same("states", expected, states(pair))


def test_files_that_are_cut_or_missing_are_named(saved: tuple[Pair, Path, Any]) -> None:
    pair, folder, expected = saved
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        for damaged in (b"", good[:4], good[: len(good) // 2], good[:-1], good + b"\0"):
            path.write_bytes(damaged)
            with pytest.raises(zi.CheckpointError) as caught:
                zi.load(folder, *pair)
            assert str(path) in str(caught.value), len(damaged)
        path.unlink()
        with pytest.raises(zi.CheckpointError) as caught:
            zi.load(folder, *pair)
        assert str(path if path.name != "manifest.json" else folder) in str(caught.value)
        path.write_bytes(good)
    assert_same("states", expected, states(pair))  # all of that was found before anything was replaced


def test_a_load_that_fails_half_way_leaves_nothing_to_train_on(saved: tuple[Pair, Path, Any]) -> None:
    pair, folder, expected = saved
    path = next(folder.glob("optimizer*"))
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(zi.CheckpointError, match="is damaged: bytes .* have the checksum"):
        zi.load(folder, *pair)
    for attempt in (lambda: train(pair, 2, 3), lambda: zi.save(folder.parent, *pair)):
        with pytest.raises(zi.TornStepError, match="loading a checkpoint failed half-way"):
            attempt()
    path.write_bytes(good)
    zi.load(folder, *pair)
    assert_same("states", expected, states(pair))
    train(pair, 2, 3)


def test_a_checkpoint_of_another_kind_of_file(saved: tuple[Pair, Path, Any], tmp_path: Path) -> None:
    """Rank files that were exchanged, and a file of tensors from another checkpoint."""
    pair, folder, _ = saved
    train(pair, 2, 3)
    other = zi.save(tmp_path / "other", *pair)
    shutil.copy(other / "model-00001-of-00001.safetensors", folder)
    with pytest.raises(zi.CheckpointError, match="model-00001-of-00001.safetensors is damaged"):
        zi.load(folder, *pair)
    shutil.copy(other / "rank-00000.json", folder)
    with pytest.raises(zi.CheckpointError, match="rank-00000.json is damaged"):
        zi.load(folder, *pair)


# ---------------------------------------------------------------------- models that do not fit


def test_everything_that_does_not_fit_is_told_at_once(saved: tuple[Pair, Path, Any], tmp_path: Path) -> None:
    _, folder, _ = saved
    model = mlp(depth=5)
    model[0] = nn.Linear(32, 32, bias=False)
    model[3] = nn.Linear(32, 31)
    model[6] = nn.Linear(31, 32)
    pair = prepared(tmp_path, model)
    before = states(pair)
    with pytest.raises(zi.CheckpointError) as caught:
        zi.load(folder, *pair)
    message = str(caught.value)
    for line in (
        "does not fit the model",
        "only in the checkpoint (1): 0.bias",
        "only in the model (2): 15.bias; 15.weight",
        "3.weight [32, 32], in the model [31, 32]",
        "6.weight [32, 32], in the model [32, 31]",
        "the optimizer (1): had groups of",
    ):
        assert line in message
    assert_same("states", before, states(pair))
    train(pair, 0, 1)


def test_not_strict_leaves_alone_what_one_of_them_lacks(saved: tuple[Pair, Path, Any], tmp_path: Path) -> None:
    (model, _), folder, _ = saved
    larger = mlp(depth=5)
    other, _ = prepared(tmp_path, larger)
    before = copied(other.state_dict())
    zi.load(folder, other, strict=False)
    known = dict(model.named_parameters())
    for name, value in other.state_dict().items():
        assert_same(name, copied(known[name].detach()) if name in known else before[name], copied(value))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "the optimizer (1): was AdamW and now is SGD"),
        (lambda m: torch.optim.AdamW(list(m.parameters())[1:]), "the optimizer (1): had groups of"),
        (
            lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
            "different states (10): 0.bias ['exp_avg', 'exp_avg_sq']",
        ),
    ],
)
def test_another_optimizer(make: Any, problem: str, saved: tuple[Pair, Path, Any]) -> None:
    _, folder, _ = saved
    model = mlp()
    pair = zi.prepare(model, make(model), zi.Config(memory="4MiB"))
    with pytest.raises(zi.CheckpointError) as caught:
        zi.load(folder, *pair)
    assert problem in str(caught.value)


class Tied(nn.Module):
    def __init__(self, *, tied: bool, first: str = "a") -> None:
        super().__init__()
        for name in sorted("ab", reverse=first == "b"):
            self.add_module(name, nn.Linear(32, 32, bias=False))
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


def test_ties(tmp_path: Path) -> None:
    tied = prepared(tmp_path, Tied(tied=True))
    train(tied, 0, 2)
    folder = zi.save(tmp_path / "tied", *tied)
    # The same tie, with its names in another order.
    other = prepared(tmp_path, Tied(tied=True, first="b"))
    zi.load(folder, *other)
    assert_same("tied", copied(tied[0].a.weight), copied(other[0].b.weight))
    assert_same("state", states(tied)[1], states(other)[1])
    # Values of a tie serve two; its one state does not.
    apart = prepared(tmp_path, Tied(tied=False))
    zi.load(folder, apart[0])
    assert_same("apart", copied(tied[0].a.weight), copied(apart[0].b.weight))
    with pytest.raises(zi.CheckpointError, match="had groups of"):
        zi.load(folder, *apart)
    folder = zi.save(tmp_path / "apart", *apart)
    with pytest.raises(
        zi.CheckpointError, match=r"tied in the model, separate in the checkpoint \(1\): a.weight = b.weight"
    ):
        zi.load(folder, tied[0])


def test_mistakes(saved: tuple[Pair, Path, Any], tmp_path: Path) -> None:
    (model, optimizer), folder, _ = saved
    other = prepared(tmp_path)
    with pytest.raises(zi.UsageError, match="is not the optimizer of this model"):
        zi.save(tmp_path / "x", model, other[1])
    with pytest.raises(zi.UsageError, match="is not the optimizer of this model"):
        zi.save(tmp_path / "x", model, torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(zi.UsageError, match="this model is not prepared"):
        zi.load(folder, mlp())
    with pytest.raises(zi.UsageError, match="not a part of it"):
        zi.save(tmp_path / "x", model[0])  # type: ignore[index]
    with pytest.raises(zi.UsageError, match="keep=0 would keep no checkpoint"):
        zi.save(tmp_path / "x", model, optimizer, keep=0)
    with pytest.raises(zi.UsageError, match=r"extra\['f'\] is a builtins.function"):
        zi.save(tmp_path / "x", model, optimizer, extra={"f": lambda: 0})
    with pytest.raises(zi.UsageError, match="extra is a list, not a dict"):
        zi.save(tmp_path / "x", model, optimizer, extra=[1])  # type: ignore[arg-type]
    with pytest.raises(zi.CheckpointError, match="has no extra 'scheduler'; it has 'epoch'"):
        zi.load(folder, model, optimizer, extra={"scheduler": 1})
    assert not (tmp_path / "x").exists()


# ---------------------------------------------------------------------- drives that fail


def test_a_full_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old checkpoint is whole, the new one gone, and training goes on: found before, and in the middle."""
    pair, plain = prepared(tmp_path), prepared(tmp_path)
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=160k", "tmpfs") as small:
        folder = zi.save(small, *pair)
        train(pair, 0, 1)
        with pytest.raises(zi.TransferError, match="No space left on device") as caught:
            zi.save(small, *pair)
        assert caught.value.errno == errno.ENOSPC
        assert "fix:   free some space there" in str(caught.value)
        # Where room cannot be reserved, it is a write that fails.
        monkeypatch.setattr(file_io, "fallocate", lambda *_: False)
        with pytest.raises(zi.TransferError, match="No space left on device"):
            zi.save(small, *pair)
        monkeypatch.undo()
        assert sorted(path.name for path in small.iterdir()) == ["latest", folder.name]
        train(pair, 1, 3)
        train(plain, 0, 3)
        assert_same("training goes on", states(plain), states(pair))
        zi.load(small, *pair)
        train(pair, 0, 3)
        assert_same("the old one is whole", states(plain)[0], states(pair)[0])


def test_a_file_system_that_cannot_reserve_room(tmp_path: Path) -> None:
    """ext2, as network file systems: without fallocate. Saved, exported and loaded all the same; full is full."""
    pair = prepared(tmp_path)
    train(pair, 0, 1)
    expected = states(pair)
    with image(tmp_path, "ext2", 1 << 20) as small:
        folder = zi.save(small / "saved", *pair)
        zi.export(small / "out", pair[0])
        shutil.rmtree(small / "out")
        train(pair, 1, 2)
        (small / "fill").write_bytes(bytes(shutil.disk_usage(small).free - 60_000))
        for background in (False, True):
            with pytest.raises(zi.TransferError, match="No space left on device"):
                zi.save(small / "saved", *pair, background=background)
                zi.synchronize(pair[0])
        assert sorted(path.name for path in (small / "saved").iterdir()) == ["latest", folder.name]
        zi.load(small / "saved", *pair)
        assert_same("states", expected, states(pair))


@pytest.mark.parametrize("call", ["pwrite", "fsync", "open", "rename", "preadv"])
def test_any_call_may_fail(call: str, saved: tuple[Pair, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pair, folder, expected = saved
    real = getattr(os, call)
    for number in (1, 2, 6):
        calls = 0

        def failing(*args: Any, number: int = number, **kwargs: Any) -> Any:
            nonlocal calls
            is_ours = call != "preadv" or isinstance(args[1], list)  # and not the swap file's
            calls += is_ours
            if is_ours and calls == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO), args[0] if isinstance(args[0], str) else None)
            return real(*args, **kwargs)

        with all_given_back(), monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                if call == "preadv":
                    zi.load(folder, *pair)
                else:
                    zi.save(folder.parent, *pair)
            except zi.StorageError as error:
                assert error.errno == errno.EIO
                assert str(folder.parent) in str(error)
            else:
                assert calls < number
        assert not [path for path in folder.parent.iterdir() if path.name.startswith(".s")]
        zi.load(folder.parent, *pair)
        assert_same("states", expected, states(pair))


def test_the_folder_is_removed_while_it_is_written(
    saved: tuple[Pair, Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By somebody else: what could not be written is told, not that there was nothing left to tidy up."""
    pair, folder, _ = saved
    real = ShardWriter.finish

    def finish(writing: ShardWriter) -> None:
        real(writing)
        shutil.rmtree(folder.parent)

    for background in (False, True):
        with all_given_back(), monkeypatch.context() as patch:
            patch.setattr(ShardWriter, "finish", finish)
            with pytest.raises((zi.TransferError, zi.CheckpointError), match=r"rank-00000.json is missing"):
                zi.save(folder.parent, *pair, background=background)
                zi.synchronize(pair[0])
    train(pair, 2, 3)
    zi.save(folder.parent, *pair)


def test_the_latest_of_a_folder_without_its_link(saved: tuple[Pair, Path, Any]) -> None:
    """What is whole is found, wherever a link leads, and also where there is none."""
    pair, folder, expected = saved
    elsewhere = folder.parent.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "latest").symlink_to(folder)
    train(pair, 2, 3)
    assert zi.load(elsewhere, *pair) == {"epoch": 3}
    assert_same("by a link from elsewhere", expected, states(pair))
    (folder.parent / "latest").unlink()
    train(pair, 2, 3)
    assert zi.load(folder.parent, *pair) == {"epoch": 3}
    assert_same("without a link", expected, states(pair))


def test_nothing_is_left_open(saved: tuple[Pair, Path, Any], tmp_path: Path) -> None:
    pair, _, _ = saved
    with all_given_back():
        for number in range(3):
            train(pair, number, number + 1)
            zi.save(tmp_path / "again", *pair, keep=1)
            zi.load(tmp_path / "again", *pair)


def test_only_optimizers_are_needed_for_states(tmp_path: Path) -> None:
    """A plain optimizer's class may be anybody's own."""

    class Mine(torch.optim.AdamW):
        pass

    model = mlp()
    optimizer: Optimizer = Mine(model.parameters())
    pair = zi.prepare(model, optimizer, zi.Config(memory="4MiB"))
    train(pair, 0, 1)
    zi.save(tmp_path, *pair)
    expected = states(pair)
    train(pair, 1, 2)
    zi.load(tmp_path, *pair)
    assert_same("states", expected, states(pair))
