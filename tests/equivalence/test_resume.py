"""A training that is saved, forgotten and loaded again is the same, in every bit, as one that nobody interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import (
    FITS_RAM,
    HALF,
    MINIMAL,
    Outcome,
    Run,
    Setting,
    _outcome,
    adamw,
    assert_identical,
    assert_same,
    assert_sound,
    budget_bytes,
    copied,
    seeded,
    sgd,
)
from support.device import DEVICE, cpu_only, on_device, random_states, set_random_states
from support.models import CASES, Case, mean_square, mlp, vectors
from torch import nn
from torch.optim import Optimizer

import zero_infinity as zi
from zero_infinity.api import engine_of
from zero_infinity.checkpoint import file_io, io_thread_pool, manifest
from zero_infinity.params.offloaded_param import managed

MakeOptimizer = Callable[[nn.Module], Optimizer]


class Mixed(nn.Module):
    """Trained, frozen, complex, empty and tied parameters; buffers that are saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.norm = nn.BatchNorm1d(32)
        self.spectrum = nn.Parameter(torch.randn(17, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.outer = nn.Linear(32, 32, bias=False)
        self.outer.weight = self.inner.weight
        self.unused = nn.Linear(32, 2)
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.norm(self.frozen(self.inner(x)).tanh())
        x = torch.fft.irfft(torch.fft.rfft(x) * self.spectrum)
        return self.outer(torch.nn.functional.dropout(x, 0.1)) + self.nothing.sum()


MODELS = {**CASES, "mixed": Case(Mixed, vectors(), mean_square)}
STEPS, HALT = 5, 3


def loop(run: Run, case: Case, first: int, last: int) -> None:
    """Nothing is seeded in here: the random numbers, too, go on from where they were."""
    for number in range(first, last):
        run.step(case.loss(run.model, case.batch(number)))


def uninterrupted(case: Case, optimizer: MakeOptimizer) -> Outcome:
    torch.manual_seed(0)
    model = case.make()
    run = Run(model, optimizer(model), prepared=False)
    torch.manual_seed(1)
    loop(run, case, 0, STEPS)
    return _outcome(run)


def interrupted(
    case: Case, optimizer: MakeOptimizer, first: dict[str, Any], second: dict[str, Any], path: Path
) -> Outcome:
    """Train with one config, save; load into another model with another config, and train on."""
    torch.manual_seed(0)
    model = case.make()
    run = Run(*zi.prepare(model, optimizer(model), zi.Config(**first)), prepared=True)
    torch.manual_seed(1)
    loop(run, case, 0, HALT)
    zi.synchronize(model)  # else it is updates under way that hold more or less
    held, read = zi.stats(model).memory_held, zi.stats(model).num_deviations
    zi.save(path, run.model, run.optimizer, extra={"logged": run.logged})
    assert (zi.stats(model).memory_held, zi.stats(model).num_deviations) == (held, read), "saving moved blocks"
    assert_sound(model)
    torch.manual_seed(2)
    other = case.make()
    again = Run(*zi.prepare(other, optimizer(other), zi.Config(**second)), prepared=True)
    extra = zi.load(path, again.model, again.optimizer)
    again.logged = [tensor.requires_grad_() for tensor in extra["logged"]]
    assert_sound(other)
    loop(again, case, HALT, STEPS)
    assert_sound(other)
    return _outcome(again, zi.stats(other))


def config(case: Case, optimizer: MakeOptimizer, setting: Setting, directory: Path) -> dict[str, Any]:
    memory = budget_bytes(case.make, optimizer, setting)
    return {"memory": memory, "nvme": directory if setting.nvme else None}


@pytest.mark.parametrize("name", ["mlp", "conv_channels_last", "gpt2", "t5", "mixtral", "mixed"])
def test_models(name: str, tmp_path: Path) -> None:
    case = MODELS[name]
    first, second = (config(case, adamw, setting, tmp_path) for setting in (MINIMAL, FITS_RAM))
    plain = uninterrupted(case, adamw)
    assert_identical(plain, interrupted(case, adamw, first, second, tmp_path / "a"))
    assert_identical(plain, interrupted(case, adamw, second, {**first, "verify": True}, tmp_path / "b"))


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": sgd,
    "no state": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True),
    "tensor lr": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2)),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-2),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=1e-2),
    "groups": lambda model: torch.optim.AdamW(
        [{"params": [p], "lr": 1e-2 / (n + 1)} for n, p in enumerate(model.parameters())], weight_decay=0.1
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, tmp_path: Path) -> None:
    case = MODELS["mlp"]
    settings = config(case, OPTIMIZERS[name], HALF, tmp_path)
    plain = uninterrupted(case, OPTIMIZERS[name])
    assert_identical(plain, interrupted(case, OPTIMIZERS[name], settings, settings, tmp_path / "saved"))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("stored", "computed"), [("bfloat16", "float32"), ("float16", "float16")])
def test_sixteen_bits_with_masters_and_loss_scale(stored: str, computed: str, verify: bool, tmp_path: Path) -> None:
    """Plain PyTorch has no such run: the prepared one that nobody interrupts is what it has to equal."""
    chosen = zi.Config(memory="1MiB", nvme=tmp_path, param_dtype=stored, compute_dtype=computed, verify=verify)
    case = MODELS["mlp"]

    def made() -> Run:
        model = case.make()
        return Run(*zi.prepare(model, adamw(model), chosen), prepared=True)

    torch.manual_seed(0)
    run = made()
    loop(run, case, 0, HALT)
    with torch.no_grad():
        next(run.model.parameters()).data[0] = 0.3  # not known to the master copy before the next update
    zi.save(tmp_path / "saved", run.model, run.optimizer)
    again = made()
    zi.load(tmp_path / "saved", again.model, again.optimizer)
    scales = [engine_of(r.model).loss_scale for r in (run, again)]
    assert (scales[0] is None) == (computed == "float32")
    if scales[0] is not None and scales[1] is not None:
        assert scales[0].state_dict() == scales[1].state_dict()
    state = random_states()
    loop(run, case, HALT, STEPS)
    expected = _outcome(run)
    set_random_states(state)
    again.logged = copied(run.logged[:HALT])
    loop(again, case, HALT, STEPS)
    assert_identical(expected, _outcome(again))


def test_other_dtypes(tmp_path: Path) -> None:
    """A checkpoint has values of full precision, whatever was stored: they are rounded where they are loaded."""
    torch.manual_seed(0)
    model, optimizer = zi.prepare(*_with_adamw(mlp()), zi.Config(memory="4MiB"))
    zi.save(tmp_path, model, optimizer)
    for stored in ("bfloat16", "float32"):
        chosen = zi.Config(memory="4MiB", param_dtype=stored, compute_dtype="float32")
        other, its_optimizer = zi.prepare(*_with_adamw(mlp()), chosen)
        zi.load(tmp_path, other, its_optimizer)
        rounded = [p.detach().to(getattr(torch, stored)).float() for p in model.parameters()]
        assert_same("rounded", rounded, [copied(p.detach()).float() for p in other.parameters()])
        # ... and lose nothing on the way through 16 bits, as the master copy has them.
        zi.save(tmp_path / stored, other, its_optimizer)
        assert _tensor_bytes(tmp_path) == _tensor_bytes(tmp_path / stored)


def test_random_states_and_schedulers_go_on(tmp_path: Path) -> None:
    model, optimizer = zi.prepare(*_with_adamw(mlp()), zi.Config(memory="4MiB"))
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ]
    sequential = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.LinearLR(optimizer)], [2]
    )
    every = {str(number): scheduler for number, scheduler in enumerate([*schedulers, sequential])}
    for _ in range(3):
        optimizer.step()
        for scheduler in (*schedulers[:2], sequential):
            scheduler.step()
        schedulers[2].step(1.0)
    zi.save(tmp_path, model, optimizer, extra={**every, "epoch": 7})
    saved = {name: repr(scheduler.state_dict()) for name, scheduler in every.items()}
    drawn = [torch.rand(3), random.random(), np.random.rand(3).tolist()]
    for scheduler in (*schedulers[:2], sequential):
        scheduler.step()
    lr = optimizer.param_groups[0]["lr"]
    extra = zi.load(tmp_path, model, optimizer, extra=every)
    assert extra["epoch"] == 7
    assert {name: repr(scheduler.state_dict()) for name, scheduler in every.items()} == saved
    assert_same("drawn", drawn, [torch.rand(3), random.random(), np.random.rand(3).tolist()])
    for scheduler in (*schedulers[:2], sequential):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == lr


def test_values_alone(tmp_path: Path) -> None:
    """Without the optimizer: parameters and buffers; the optimizer's states, steps and random numbers stay."""
    case = MODELS["mixed"]
    runs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = case.make()
        runs.append(Run(*zi.prepare(model, adamw(model), zi.Config(memory="1MiB", nvme=tmp_path)), prepared=True))
        loop(runs[-1], case, seed, 2 + seed)
    zi.save(tmp_path / "values", runs[0].model)
    assert not list((tmp_path / "values" / "latest").glob("optimizer*"))
    before, state = copied(runs[1].optimizer.state_dict()), random_states()
    zi.load(tmp_path / "values", runs[1].model)
    assert_same("random state", state, random_states())
    assert_same("optimizer", before, copied(runs[1].optimizer.state_dict()))
    assert_same("model", copied(runs[0].model.state_dict()), copied(runs[1].model.state_dict()))
    assert zi.stats(runs[1].model).num_steps == 2
    with pytest.raises(zi.CheckpointError, match="was not saved; zi.load"):
        zi.load(tmp_path / "values", runs[1].model, runs[1].optimizer)


@cpu_only("the accelerator is emulated on the CPU")
def test_user_edits_are_saved(tmp_path: Path) -> None:
    """Also those on an accelerator that no update has seen yet."""
    model = mlp()
    place = zi.EmulatedAccelerator(1 << 20)
    model, optimizer = zi.prepare(*_with_adamw(model), zi.Config(memory="1MiB", nvme=tmp_path), device=place)
    first = next(model.parameters())
    first.data[0, 0] = 42.0
    zi.save(tmp_path / "saved", model, optimizer)
    first.data[0, 0] = 1.0
    view = first.data
    zi.load(tmp_path / "saved", model, optimizer)
    assert first[0, 0].item() == 42.0
    del view


def test_a_torn_step_is_mended_by_loading(tmp_path: Path) -> None:
    case = MODELS["mlp"]
    model = case.make()
    run = Run(*zi.prepare(model, adamw(model), zi.Config(memory="4MiB")), prepared=True)
    loop(run, case, 0, 3)
    zi.save(tmp_path, model, run.optimizer)
    case.loss(model, case.batch(3)).backward()
    with pytest.raises(zi.UsageError, match="waits for optimizer.step"):
        zi.save(tmp_path, model, run.optimizer)
    with pytest.raises(zi.TornStepError):
        run.optimizer.zero_grad()
    with pytest.raises(zi.TornStepError):
        zi.save(tmp_path, model, run.optimizer)
    zi.load(tmp_path, model, run.optimizer)
    loop(run, case, 3, 5)
    assert zi.stats(model).num_steps == 5


@settings(max_examples=15)
@given(
    widths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    piece=st.sampled_from([64, 1000, 4096, 1 << 20]),
    room=st.integers(4096, 1 << 16),
    direct=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_shapes_pieces_and_rooms(
    widths: list[int], piece: int, room: int, direct: bool, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tensors that end anywhere, in pieces of any size, through rooms of any size."""
    directory = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patch:
        for module in ("manifest", "file_layout", "shard_writer", "verify"):
            patch.setattr(f"zero_infinity.checkpoint.{module}.PIECE_BYTES", piece // 8 * 8)
        patch.setattr(file_io, "_LARGE", 1 if direct else 1 << 20)
        patch.setattr(io_thread_pool, "_MIN_ROOM", 3 * 4096)
        patch.setattr(io_thread_pool, "_MAX_ROOM", 2 * 4096 + room // 8 * 8)
        torch.manual_seed(seed)
        layers = [nn.Linear(a, b) for a, b in zip([3, *widths], [*widths, 2], strict=True)]
        model, optimizer = zi.prepare(*_with_adamw(nn.Sequential(*layers)), zi.Config(memory="4MiB", nvme=directory))
        for number in range(2):
            model(on_device(torch.randn(4, 3, generator=seeded(number)))).sum().backward()
            optimizer.step()
        zi.save(directory / "saved", model, optimizer)
        expected = copied(model.state_dict()), copied(optimizer.state_dict())
        model(torch.randn(4, 3, device=DEVICE)).sum().backward()
        optimizer.step()
        zi.load(directory / "saved", model, optimizer)
        assert_same("states", expected, (copied(model.state_dict()), copied(optimizer.state_dict())))
        assert manifest.read(directory / "saved" / "latest").step == 2


def _with_adamw(model: nn.Module) -> tuple[nn.Module, Optimizer]:
    return model, adamw(model)


def _tensor_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "latest").iterdir() if path.suffix == ".safetensors"}


# ---------------------------------------------------------------------- tiles


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_of_one_run_are_whole_in_the_next_and_other_tiles_in_the_one_after(dtype: str, tmp_path: Path) -> None:
    case = CASES["gpt2"]

    def started(name: str, **settings: Any) -> Run:
        torch.manual_seed(0)
        model = case.make()
        config = zi.Config(memory="4MiB", nvme=_made(tmp_path / name), param_dtype=dtype, **settings)
        return Run(*zi.prepare(model, adamw(model), config), prepared=True)

    def saved(run: Run, name: str, first: int) -> tuple[Any, Any]:
        loop(run, case, first, first + 2)
        zi.save(tmp_path / name, run.model, run.optimizer)
        return copied(run.model.state_dict()), copied(run.optimizer.state_dict())

    tiled = started("a", tile_above="4KiB")
    assert any(known.tiles for p in tiled.model.parameters() if (known := managed(p)) is not None)
    weight = next(iter(tiled.model.parameters()))
    with zi.gathered(weight), torch.no_grad():
        weight[0].mul_(2)
    expected = saved(tiled, "first", 0)
    for number, (name, tiling) in enumerate({"second": {}, "third": {"tile_above": "8KiB"}}.items()):
        run = started(name, **tiling)
        zi.load(tmp_path / ("first" if number == 0 else "second"), run.model, run.optimizer)
        assert_same("weights", expected[0], run.model.state_dict())
        assert_same("optimizer", expected[1], run.optimizer.state_dict())
        expected = saved(run, name, 2 + 2 * number)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def test_loading_after_training_reads_nothing_of_what_it_replaces(tmp_path: Path) -> None:
    """The order of a step is known then, and nobody wants the blocks that would come next in it."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    config = zi.Config(memory="7MiB", nvme=tmp_path)
    model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), config)
    for _ in range(3):
        model(torch.ones(1, 512, device=DEVICE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    zi.save(tmp_path / "saved", model, optimizer)
    zi.synchronize(model)
    before = zi.stats(model)
    zi.load(tmp_path / "saved", model, optimizer)
    zi.synchronize(model)
    after = zi.stats(model)
    assert after.bytes_read == before.bytes_read
    assert after.bytes_written - before.bytes_written == 8 * 512 * 512 * 12  # each block once
