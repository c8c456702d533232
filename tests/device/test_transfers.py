"""What crosses the link of the device: bytes, pinned memory, waits of the host; and training with random delays."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.compare import FITS_RAM, HALF, MINIMAL, Setting, adamw, compare, let_engines_end, sgd, training
from support.device import DEVICE, EXTENSION, WHY_NOT
from support.homes import living_on_device
from support.matrix import thinned
from support.models import CASES, gpt2, llama, mean_square, mlp, of_labels, tokens, vectors
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_infinity as zi
from zero_infinity.api import engine_of
from zero_infinity.tiers.copier import copy_size
from zero_infinity.tiers.torch_accelerator import StreamMemory

if EXTENSION is None:
    pytest.skip(str(WHY_NOT), allow_module_level=True)


def counts() -> dict[str, int]:
    torch.accelerator.synchronize(DEVICE)
    found: dict[str, int] = EXTENSION.counts(DEVICE.index)
    return found


@pytest.fixture(params=range(3))
def delays(request: pytest.FixtureRequest) -> object:
    """Long delays, drawn from a seed."""
    EXTENSION.set_delays(seed=request.param, probability=0.3, max_seconds=3e-4)
    yield
    torch.accelerator.synchronize(DEVICE)
    EXTENSION.set_delays(probability=0.1, max_seconds=2e-4)


@pytest.mark.parametrize(("case", "setting"), thinned(["mlp", "gpt2", "llama", "tied"], [FITS_RAM, HALF, MINIMAL]))
def test_training_with_random_delays(case: str, setting: Setting, delays: object, tmp_path: Path) -> None:
    chosen = CASES[case]
    compare(chosen.make, training(chosen.batch, chosen.loss), adamw, setting, tmp_path)


def test_training_where_the_host_runs_ahead(tmp_path: Path) -> None:
    """Kernels are slow and copies are not: whatever is reused too early is overwritten before it is read."""
    EXTENSION.set_delays(kernel_seconds=2e-3)
    config = {"device_memory": 4 * 4 * 64 * 65}  # for four layers of eight
    try:
        compare(
            net, training(vectors(64), mean_square, num_steps=3), sgd, FITS_RAM, tmp_path, at_home=nowhere, **config
        )
    finally:
        torch.accelerator.synchronize(DEVICE)
        EXTENSION.set_delays(probability=0.1, max_seconds=2e-4)


class UsesWholeWeights(nn.Module):
    """Its weights are cut into tiles, and needed whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (x @ layer.weight.t()).tanh()
        return x


def test_weights_that_are_made_whole_note_who_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is reused, later, by uploads."""
    noted: list[int] = []
    used = StreamMemory.used

    def note(memory: StreamMemory) -> None:
        noted.append(memory.tensor().numel())
        used(memory)

    monkeypatch.setattr(StreamMemory, "used", note)
    x = vectors(64)(0)
    plain = UsesWholeWeights().to(DEVICE)
    config = zi.Config(memory="8MiB", device_memory="1MiB", tile_above="4KiB")
    with living_on_device(nowhere):
        model, _ = zi.prepare(model := UsesWholeWeights(), sgd(model), config, device=DEVICE)
    with torch.no_grad():
        assert torch.equal(model(x).cpu(), plain(x).cpu())
    assert noted.count(4 * 64 * 64) == 6


def nowhere(_: int) -> bool:
    return False


def net() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))


def test_a_user_on_a_stream_of_his_own(delays: object, tmp_path: Path) -> None:
    with torch.Stream(DEVICE):
        compare(mlp, training(vectors(), mean_square), adamw, MINIMAL, tmp_path)


def steady(make: object, config: zi.Config, batch: object, loss: object) -> tuple[dict[str, int], nn.Module]:
    """Counts of one step, after those that still learn."""
    torch.manual_seed(0)
    model = make()
    model, optimizer = zi.prepare(model, sgd(model), config)
    for number in range(6):
        data = batch(number)
        if number == 5:
            zi.synchronize(model)
            torch.accelerator.synchronize(DEVICE)
            EXTENSION.reset_counts(DEVICE.index)
        loss(model, data).backward()
        optimizer.step()
        optimizer.zero_grad()
    zi.synchronize(model)
    return counts(), model


def prepared(make: object, **config: Any) -> nn.Module:
    model = make()
    return zi.prepare(model, sgd(model), zi.Config(memory="8MiB", **config))[0]


HALVES: list[dict[str, Any]] = [
    {},
    {"compute_dtype": "bfloat16"},
    {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"},
]


@pytest.mark.parametrize("precision", HALVES, ids=str)
def test_bytes_with_parameters_resident_are_once_up_and_once_down(precision: dict[str, Any]) -> None:
    """With 16 bits 2P bytes each way, also where the host has 32."""
    copies = sum(copy_size(unit) for unit in engine_of(prepared(mlp, **precision)).units)
    found, model = steady(mlp, zi.Config(memory="8MiB", device_memory=copies, **precision), vectors(), mean_square)
    units = engine_of(model).units
    assert found["uploaded"] == sum(u.num_elements * u.compute_dtype.itemsize for u in units)  # with their padding
    assert found["downloaded"] == sum(p.num_elements * u.compute_dtype.itemsize for u in units for p in u.parameters)
    assert found["unpinned"] == 0


class Recomputed(nn.Module):
    """Layers that backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("precision", HALVES, ids=str)
def test_bytes_of_streamed_layers_with_recomputation_are_twice_up_and_once_down(precision: dict[str, Any]) -> None:
    """Every layer goes up for forward and again for backward, but for those that are there when backward begins: with
    16 bits 4P up and 2P down."""
    one, there = 64 * 64 * (2 if precision else 4), 3
    batch = lambda number: torch.randn(4, 64, generator=torch.Generator().manual_seed(number)).to(DEVICE)
    config = zi.Config(memory="8MiB", device_memory=there * one, **precision)
    found, _ = steady(lambda: Recomputed().to(DEVICE), config, batch, mean_square)
    assert found["uploaded"] == (8 + 8 - there) * one
    assert found["downloaded"] == 8 * one


def test_no_asynchronous_copy_from_unpinned_memory(tmp_path: Path) -> None:
    with living_on_device(lambda number: number % 3 == 0):
        found, _ = steady(gpt2, zi.Config(memory="8MiB", device_memory="8MiB"), tokens(), of_labels)
    assert found["unpinned"] == 0


def test_the_computing_threads_never_wait_for_the_device() -> None:
    """Other threads wait for copies; those that launch kernels do not."""
    let_engines_end()  # an engine that closes waits, too
    waits: list[str] = []
    torch.manual_seed(0)
    model = llama()
    with living_on_device(lambda number: number % 2 == 0):
        model, optimizer = zi.prepare(model, sgd(model), zi.Config(memory="8MiB", device_memory="8MiB"))
    batches = [tokens()(number) for number in range(6)]
    for number, data in enumerate(batches):
        if number == 5:
            zi.synchronize(model)
            EXTENSION.reset_counts(DEVICE.index)
        loss = of_labels(model, data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    by_thread = EXTENSION.host_waits_by_thread()
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith("zero-infinity")}
    waits += [str(ident) for ident in by_thread if ident not in ours]
    zi.synchronize(model)
    assert not waits, (by_thread, threading.enumerate())
    assert loss.item() > 0


class Counting(torch.optim.SGD):
    """Notes on which thread it runs, and on how many cores."""

    seen: ClassVar[set[tuple[str, int]]] = set()

    def step(self, closure: None = None) -> None:
        self.seen.add((threading.current_thread().name, torch.get_num_threads()))
        super().step(closure)


def test_updates_on_the_host_use_all_cores() -> None:
    model = mlp()
    model, optimizer = zi.prepare(model, Counting(model.parameters(), lr=0.1), zi.Config(memory="8MiB"), device=DEVICE)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        Counting.seen.clear()
        mean_square(model, vectors()(0).to(DEVICE)).backward()
        optimizer.step()
        zi.synchronize(model)
    finally:
        torch.set_num_threads(before)
    assert Counting.seen == {("zero-infinity-update", 2)}


@pytest.mark.skipif(
    os.environ.get("TEST_DEVICE_PINS") == "0", reason="the device's runtime cannot register memory here"
)
def test_the_host_cache_is_pinned() -> None:
    model = prepared(mlp)
    engine = engine_of(model)
    block = engine.units[0].the_block()
    engine.host_cache.bring(block)
    assert engine.store.lease(block).is_pinned()
