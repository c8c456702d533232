from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_infinity as zi
from zero_infinity.checkpoint.regular_files import open_regular


def test_what_could_block_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for name, kind in (("fifo", "a FIFO"), ("socket", "a socket"), ("/dev/zero", "a device")):
        with pytest.raises(zi.CheckpointError, match=f"{name} is {kind}, not a regular file\n  fix:   remove it"):
            open_regular(tmp_path / name, os.O_RDONLY)


def test_a_checkpoint_with_a_fifo_and_one_with_a_link(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters()), zi.Config(memory="1MiB"))
    folder = zi.save(tmp_path / "saved", model, optimizer)
    for path in sorted(folder.iterdir()):
        elsewhere = path.rename(tmp_path / path.name)
        os.mkfifo(path)
        with pytest.raises(zi.CheckpointError, match="FIFO|has no checkpoint|is not a checkpoint"):
            zi.load(folder, model, optimizer)
        path.unlink()
        path.symlink_to(elsewhere)  # its content is checked as any other
    zi.load(folder, model, optimizer)
