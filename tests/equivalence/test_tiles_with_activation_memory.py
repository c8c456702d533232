"""Tiles, recomputed blocks and activations kept elsewhere, all together: each changes nothing for the others.

Against plain PyTorch in float64, where rounding cannot hide a mistake: bit-identical without tiles and without
clipping, to 1e-11 with them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import Outcome, Run, asked_of_place, assert_identical, least_budget, run_plain, seeded, sgd
from support.device import on_device
from support.matrix import thinned
from support.models import VOCABULARY
from test_tiling import assert_close, run_prepared, tiled
from torch import nn
from transformers.pytorch_utils import Conv1D

import zero_infinity as zi
from zero_infinity.activations import offload

CLOSE = 1e-11
MAX_NORM = 0.05
ABOVE = 4 << 10  # of weights of 8 and 24 KiB with their gradients
OFFLOADS: list[bool | str] = [False, True, "all", "arena"]


class Block(nn.Module):
    """A linear layer, a Conv1D and dropout, given the same second tensor as all others."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = Conv1D(width, 2 * width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return x + scale * self.drop(self.down(self.up(self.norm(x)).tanh()))


class Net(nn.Module):
    """A decoder in small: embedding, blocks, and the embedding once more as its head."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x)
        scale = hidden.mean(-1, keepdim=True).sigmoid()
        for block in self.blocks:
            hidden = block(hidden, scale=scale)
        return self.head(hidden)


@dataclass(frozen=True)
class Loop:
    """How it is trained."""

    num_parts: int = 1
    clips: bool = False
    between: tuple[str, ...] = ()  # after each step

    def __call__(self, run: Run) -> None:
        for step in range(3):
            for part in range(self.num_parts):
                loss = self.loss(run.model, 10 * step + part)
                loss.backward()
                run.log(loss)
            del loss
            if self.clips and not run.prepared:
                nn.utils.clip_grad_norm_(run.model.parameters(), MAX_NORM)
            run.optimizer.step()
            run.optimizer.zero_grad()
            for action in self.between:
                getattr(self, action)(run, step)

    def loss(self, model: nn.Module, number: int) -> torch.Tensor:
        torch.manual_seed(number)
        batch = on_device(torch.randint(0, VOCABULARY, (2, 5 + number % 3), generator=seeded(number)))
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    def evaluate(self, run: Run, step: int) -> None:
        run.model.eval()
        with torch.no_grad():
            run.log(self.loss(run.model, 100 + step))
        run.model.train()

    def abandon(self, run: Run, step: int) -> None:
        run.log(self.loss(run.model, 200 + step))

    def fail(self, run: Run, step: int) -> None:
        handle = run.model.blocks[step].down.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            self.loss(run.model, 300 + step)
        handle.remove()

    def look(self, run: Run, step: int) -> None:
        weight = run.model.blocks[step].up.weight
        run.log(*torch.autograd.grad(self.loss(run.model, 400 + step), [weight]))

    def edit(self, run: Run, step: int) -> None:
        with torch.no_grad():
            run.model.blocks[step].up.weight.mul_(0.9)


def compare(
    loop: Loop, directory: Path, *, tied: bool = True, nvme: bool = True, room: int = 0, **config: Any
) -> zi.Stats:
    """Train plain and prepared, with the least memory that is accepted and `room` bytes more."""
    make = lambda: Net(tied=tied)
    memory = least_budget(asked_of_place(make, sgd, **config), nvme=nvme) + room
    if loop.clips:
        config["max_grad_norm"] = MAX_NORM
    if loop.num_parts > 1:
        config["gradient_accumulation_steps"] = loop.num_parts
    cut: dict[str, int] = {}

    def script(run: Run) -> None:
        cut.update(tiled(run.model))
        loop(run)

    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        patched.setattr(offload, "_SMALL_BYTES", 256)
        warnings.simplefilter("ignore", zi.ConfigWarning)  # that there is no room for some
        found = run_prepared(make, script, sgd, zi.Config(memory=memory, nvme=directory if nvme else None, **config))
    plain = run_plain(make, loop, sgd)
    assert bool(cut) == ("tile_above" in config)
    if cut or loop.clips:
        assert_close(plain, found, CLOSE)
    else:
        weights = {name: value.detach() for name, value in plain.weights.items()}  # those of a state_dict
        assert_identical(Outcome(plain.logged, weights, {}, plain.optimizer), found)
    assert found.stats is not None
    return found.stats


INTERVALS = {"kept": False, "recomputed": True, "every second": 2}


@pytest.mark.parametrize(
    ("offload", "how"), thinned(OFFLOADS, [f"{i} {h}" for h in ("nvme", "ram") for i in INTERVALS])
)
def test_tiles_with_every_home_of_activations(offload: bool | str, how: str, tmp_path: Path) -> None:
    """With accumulation, then with clipping; with room for offload, then with none."""
    name, home = how.rsplit(" ", 1)
    interval, nvme = INTERVALS[name], home == "nvme"
    if offload in (True, "arena") and not interval:
        with pytest.raises(zi.ConfigError, match="checkpoint_activations=True"):
            zi.Config(offload_activations=offload)
        return
    how = {"tile_above": ABOVE, "checkpoint_activations": interval, "offload_activations": offload, "nvme": nvme}
    stats = compare(Loop(num_parts=2), tmp_path, room=64 << 10, **how)
    assert (stats.activation_bytes > 0) == bool(offload)
    compare(Loop(clips=True, between=("evaluate",)), tmp_path, update="after_backward", **how)


@settings(max_examples=25)
@given(
    interval=st.sampled_from([False, True, 2, 3]),
    offload=st.sampled_from(OFFLOADS),
    above=st.none() | st.sampled_from([512, 1 << 10, ABOVE, 10 << 10]),
    loop=st.builds(
        Loop,
        num_parts=st.integers(1, 3),
        clips=st.booleans(),
        between=st.lists(st.sampled_from(["evaluate", "abandon", "fail", "look", "edit"]), max_size=2).map(tuple),
    ),
    tied=st.booleans(),
    nvme=st.booleans(),
    room=st.sampled_from([0, 4 << 10, 64 << 10, 1 << 20]),
    update=st.sampled_from(["auto", "after_backward"]),
)
def test_any_combination(
    interval: bool | int,
    offload: bool | str,
    above: int | None,
    loop: Loop,
    tied: bool,
    nvme: bool,
    room: int,
    update: str,
    tmp_path: Path,
) -> None:
    if offload in (True, "arena") and not interval:
        interval = True
    how: dict[str, Any] = {} if above is None else {"tile_above": above}
    if "look" in loop.between or "edit" in loop.between:
        room = max(room, 16 << 10)  # for a gradient, or a weight, that somebody wants whole
    compare(
        loop,
        tmp_path,
        tied=tied,
        nvme=nvme,
        room=room,
        checkpoint_activations=interval,
        offload_activations=offload,
        update=update,
        **how,
    )
