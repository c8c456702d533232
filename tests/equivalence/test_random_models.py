"""Random models, budgets, chunk sizes, optimizers and loops: bit-identical to plain PyTorch, every time.

`HYPOTHESIS_PROFILE=thorough` runs many more; `--hypothesis-seed=N` repeats a run.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, note, settings
from hypothesis import strategies as st
from support.compare import (
    FITS,
    MINIMAL,
    MakeOptimizer,
    Outcome,
    Run,
    Setting,
    assert_identical,
    budget_bytes,
    copied,
    nothing_left,
    run_plain,
    run_prepared,
)
from support.models import vectors
from support.programs import Model, Program, loss_of, programs
from torch import nn

import zero_infinity as zi
from zero_infinity.activations import offload

# The profiles of tests/conftest.py are for examples that take milliseconds.
NUM_EXAMPLES = 40 if settings.default.max_examples <= 50 else settings.default.max_examples

NUM_STEPS = 5

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, weight_decay=0.1),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5, centered=True),
}


def read(run: Run, layer: nn.Module) -> None:
    for parameter in layer.parameters():
        run.log(parameter.norm())


def edit(run: Run, layer: nn.Module) -> None:
    for parameter in layer.parameters():
        parameter.data.mul_(0.9)


def edit_in_place(run: Run, layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.01)


def edit_gathered(run: Run, layer: nn.Module) -> None:
    for parameter in layer.parameters():
        with zi.gathered(parameter), torch.no_grad():
            parameter.copy_(parameter * 0.8)


def change_lr(run: Run, _: nn.Module) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.7


def freeze(run: Run, layer: nn.Module) -> None:
    for parameter in layer.parameters():
        parameter.requires_grad_(not parameter.requires_grad)


def reload(run: Run, _: nn.Module) -> None:
    run.model.load_state_dict({name: value * 0.99 for name, value in run.model.state_dict().items()})
    run.optimizer.load_state_dict(copied(run.optimizer.state_dict()))


def evaluate(run: Run, _: nn.Module) -> None:
    with torch.no_grad():
        run.log(run.model(vectors(run.model.program.width, 3)(77)))


def abandon(run: Run, _: nn.Module) -> None:
    """A graph that is never backwarded."""
    run.log(loss_of(run.model, vectors(run.model.program.width, 3)(78)))


BETWEEN_STEPS = (read, edit, edit_in_place, edit_gathered, change_lr, freeze, reload, evaluate, abandon)
BEFORE_STEP = (read, evaluate, edit_in_place, change_lr)


@dataclass(frozen=True)
class Loop:
    """How a program is trained."""

    optimizer: str
    num_parts: int  # backwards a step
    by: str  # how the engine is told of them
    update: str
    max_grad_norm: float | None
    between: tuple[tuple[int, Callable[[Run, nn.Module], None], int], ...]  # after which step, what, with which layer
    before: tuple[tuple[int, Callable[[Run, nn.Module], None], int], ...]  # likewise, between backward and step

    def __call__(self, run: Run) -> None:
        batch = vectors(run.model.program.width, 4)
        for step in range(NUM_STEPS):
            for part in range(self.num_parts):
                is_last = part == self.num_parts - 1
                quiet = run.prepared and self.by == "no_sync" and not is_last
                with run.optimizer.no_sync() if quiet else contextlib.nullcontext():
                    loss = loss_of(run.model, batch(10 * step + part))
                    loss.backward()
                run.log(loss)
            del loss
            self._act(run, step, self.before)
            if self.max_grad_norm is not None and not run.prepared:
                nn.utils.clip_grad_norm_(run.model.parameters(), self.max_grad_norm)
            run.optimizer.step()
            run.optimizer.zero_grad()
            self._act(run, step, self.between)

    def _act(self, run: Run, step: int, actions: tuple[tuple[int, Callable[..., None], int], ...]) -> None:
        for when, action, index in actions:
            if when == step:
                action(run, run.model.layers[index % len(run.model.layers)])


def actions(kinds: tuple[Callable[..., None], ...], most: int) -> st.SearchStrategy[Any]:
    one = st.tuples(st.integers(0, NUM_STEPS - 2), st.sampled_from(kinds), st.integers(0, 5))
    return st.lists(one, max_size=most).map(tuple)


@dataclass(frozen=True)
class Room:
    """Where a program's states live: between the least memory that is accepted (0) and plenty (1)."""

    fraction: float
    nvme: bool
    constants: tuple[tuple[str, float], ...]  # of `zero_infinity.policy`
    saved: int | None = None  # bytes of the smallest saved tensor that is kept in blocks


loops = st.builds(
    Loop,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    num_parts=st.integers(1, 3),
    by=st.sampled_from(["nothing", "config", "no_sync"]),
    update=st.sampled_from(["auto", "auto", "after_backward"]),
    max_grad_norm=st.none() | st.none() | st.just(0.05),
    between=actions(BETWEEN_STEPS, 4),
    before=st.just(()) | actions(BEFORE_STEP, 2),
)
rooms = st.builds(
    Room,
    fraction=st.just(0.0) | st.floats(0, 0.5) | st.floats(0, 1),
    nvme=st.sampled_from([True, True, True, False]),
    constants=st.tuples(
        st.tuples(st.just("homes._SMALL_BYTES"), st.sampled_from([0, 2048, 256 * 1024])),
        st.tuples(st.just("homes._SMALL_SHARE"), st.sampled_from([1 / 16, 1 / 4])),
        st.tuples(st.just("chunk_size.MIN_CHUNK_BYTES"), st.sampled_from([4096, 8192, 64 * 1024])),
        st.tuples(st.just("chunk_size.MAX_CHUNK_BYTES"), st.sampled_from([64 * 1024, 16 * 1024 * 1024])),
        st.tuples(st.just("lookahead._LOOKAHEAD_SHARE"), st.sampled_from([0.0, 1 / 3, 1.0])),
    ),
    saved=st.sampled_from([None, None, 64, 400]),
)


@pytest.mark.timeout(3600)
@settings(
    max_examples=NUM_EXAMPLES,
    suppress_health_check=list(HealthCheck),
    deadline=None,
    # Explaining takes hundreds of runs, and says less than the shrunk program does.
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(program=programs(), loop=loops, room=rooms)
def test_a_random_model(program: Program, loop: Loop, room: Room, tmp_path_factory: pytest.TempPathFactory) -> None:
    small = room.saved if room.saved is not None else offload._SMALL_BYTES
    with (
        nothing_left(),
        ExitStack() as patches,
        mock.patch.object(offload, "_SMALL_BYTES", small),
        warnings.catch_warnings(action="ignore", category=zi.ConfigWarning),  # no room for some saved tensors
    ):
        for name, value in room.constants:
            patches.enter_context(mock.patch(f"zero_infinity.policy.{name}", value))
        check(program, loop, room, tmp_path_factory.getbasetemp())


def check(program: Program, loop: Loop, room: Room, directory: Path) -> None:
    """One example. What a failure prints can be given to this."""
    make = lambda: Model(program)
    optimizer = OPTIMIZERS[loop.optimizer]
    least = budget_bytes(make, optimizer, Setting(MINIMAL.budget, nvme=room.nvme))
    plenty = budget_bytes(make, optimizer, Setting(FITS.budget, nvme=room.nvme))
    memory = int(least + room.fraction * (plenty - least))
    plain = run_plain(make, loop, optimizer)
    config = zi.Config(
        memory=memory,
        nvme=directory if room.nvme else None,
        update=loop.update,
        max_grad_norm=loop.max_grad_norm,
        gradient_accumulation_steps=loop.num_parts if loop.by == "config" else 1,
        offload_activations="all" if room.saved is not None else False,
    )
    prepared = run_or_refuse(program, loop, config)
    assert_identical(plain, prepared)
    assert prepared.stats is not None
    note(f"{memory=} {prepared.stats}")
    event("blocks moved" if prepared.stats.bytes_read else "all stayed in memory")
    event("saved tensors in blocks" if prepared.stats.activation_bytes else "no saved tensors in blocks")


def run_or_refuse(program: Program, loop: Loop, config: zi.Config) -> Outcome:
    """A program that changes from step to step may be refused, with what to do; then that has to work."""
    make = lambda: Model(program)
    try:
        return run_prepared(make, loop, OPTIMIZERS[loop.optimizer], config)
    except zi.TornStepError as refusal:
        if not program.may_be_refused and not loop.before:
            raise
        assert 'update="after_backward"' in str(refusal)
        event("refused")
    return run_prepared(make, loop, OPTIMIZERS[loop.optimizer], config.replace(update="after_backward"))
