"""Saved tensors that go to the host and come back while the device computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.compare import adamw, assert_identical, let_engines_end, run_plain, run_prepared, sgd, training
from support.device import DEVICE, EXTENSION, WHY_NOT, on_device
from support.models import mean_square
from torch import nn
from torch.optim import optimizer as optimizer_module

import zero_infinity as zi
from zero_infinity.activations import offload
from zero_infinity.activations.activation_mover import ActivationMover
from zero_infinity.activations.device_activation_storage import _Transfers
from zero_infinity.api import engine_of
from zero_infinity.storage.block import Block
from zero_infinity.tiers.torch_accelerator import TorchAccelerator

if EXTENSION is None:
    pytest.skip(str(WHY_NOT), allow_module_level=True)

WIDTH, DEPTH, ROWS = 64, 6, 32
ONE = 4 * WIDTH * ROWS  # bytes of one saved tensor
TIGHT = "64KiB"  # for a few layers: no tensor stays
BOTH: list[dict[str, Any]] = [
    {"checkpoint_activations": True, "offload_activations": True},
    {"offload_activations": "all"},
]
NAMES = ["checkpoints", "all"]


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(offload, "_SMALL_BYTES", 512)
    # Plain optimizers on the device would use foreach kernels, which round differently from the host's updates.
    monkeypatch.setattr(optimizer_module, "_get_foreach_kernels_supported_devices", list)
    yield
    torch.accelerator.synchronize(DEVICE)
    EXTENSION.set_delays(probability=0.1, max_seconds=2e-4)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch(number: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def config(tmp_path: Path | None, how: dict[str, Any], **changes: Any) -> zi.Config:
    settings: dict[str, Any] = {"memory": "2MiB", "device_memory": TIGHT, "nvme": tmp_path, **how, **changes}
    return zi.Config(**settings)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("nvme", [False, True], ids=["ram", "nvme"])
@pytest.mark.parametrize("how", BOTH, ids=NAMES)
def test_same_bits_with_random_delays(how: dict[str, Any], nvme: bool, seed: int, tmp_path: Path) -> None:
    EXTENSION.set_delays(seed=seed, probability=0.3, max_seconds=3e-4, bytes_per_second=50e6 if seed == 2 else 0.0)
    script = training(batch, mean_square, num_steps=4)
    outcome = run_prepared(Layers, script, adamw, config(tmp_path if nvme else None, how))
    assert_identical(run_plain(Layers, script, adamw), outcome)
    assert outcome.stats is not None
    assert outcome.stats.activation_bytes >= DEPTH * ONE


def steady(how: dict[str, Any], watch: Callable[[], None] = lambda: None, **changes: Any) -> dict[str, int]:
    """Counts of one step, after those that still learn."""
    torch.manual_seed(0)
    model = Layers().to(DEVICE)
    model, optimizer = zi.prepare(model, sgd(model), config(None, how, **changes))
    data = [on_device(batch(number)) for number in range(6)]
    for number in range(6):
        if number == 5:
            zi.synchronize(model)
            torch.accelerator.synchronize(DEVICE)
            EXTENSION.reset_counts(DEVICE.index)
        mean_square(model, data[number]).backward()
        if number == 5:
            watch()
        optimizer.step()
        optimizer.zero_grad()
    zi.synchronize(model)
    torch.accelerator.synchronize(DEVICE)
    found: dict[str, int] = EXTENSION.counts(DEVICE.index)
    return found


@pytest.mark.parametrize("how", BOTH, ids=NAMES)
def test_threads_that_compute_never_wait_for_the_device(how: dict[str, Any]) -> None:
    let_engines_end()  # an engine that closes waits, too
    others: list[int] = []

    def watch() -> None:
        ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith("zero-infinity")}
        others.extend(set(EXTENSION.host_waits_by_thread()) - ours)

    assert steady(how, watch)["unpinned"] == 0
    assert not others


def test_what_crosses_the_link() -> None:
    """Beside parameters and gradients: each input of a block down, and up again unless it was used on its way down."""
    without = steady({"checkpoint_activations": True})
    found = steady(BOTH[0])
    assert found["downloaded"] - without["downloaded"] <= DEPTH * ONE
    assert (DEPTH - 4) * ONE <= found["uploaded"] - without["uploaded"] <= DEPTH * ONE


@pytest.mark.parametrize("how", BOTH, ids=NAMES)
def test_where_all_fits_on_the_device_no_saved_tensor_moves(how: dict[str, Any]) -> None:
    without = steady({k: v for k, v in how.items() if k != "offload_activations"}, device_memory="16MiB")
    found = steady(how, device_memory="16MiB")
    assert all(found[link] == without[link] for link in ("uploaded", "downloaded", "copied"))


def test_the_last_ones_stay_where_some_fit() -> None:
    model = Layers().to(DEVICE)
    model, _ = zi.prepare(model, sgd(model), config(None, {}))
    cache = engine_of(model).cache
    assert cache is not None
    some = cache.total_bytes + 3 * ONE
    without = steady({"checkpoint_activations": True}, device_memory=some)
    found = steady(BOTH[0], device_memory=some)
    assert 0 < found["downloaded"] - without["downloaded"] <= (DEPTH - 3) * ONE


@pytest.mark.parametrize("device_memory", [TIGHT, "16MiB"], ids=["moved", "staying"])
def test_a_tensor_that_is_changed_in_place_is_an_error_or_right(device_memory: str) -> None:
    model = Layers().to(DEVICE)
    expected = on_device(batch(1)).requires_grad_()
    Layers().to(DEVICE)(expected * 2).sum().backward()
    model, optimizer = zi.prepare(model, sgd(model), config(None, BOTH[1], device_memory=device_memory))
    mean_square(model, on_device(batch(0))).backward()
    optimizer.zero_grad()
    EXTENSION.set_delays(bytes_per_second=1e6)  # 8 ms
    leaf = on_device(batch(1)).requires_grad_()
    x = leaf * 2
    loss = model(x).sum()
    x.add_(1)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert torch.equal(leaf.grad, expected.grad)


def test_graphs_that_die_leave_nothing(tmp_path: Path) -> None:
    model = Layers().to(DEVICE)
    model, optimizer = zi.prepare(model, sgd(model), config(tmp_path, BOTH[1]))
    for number in range(3):
        mean_square(model, on_device(batch(number)))
        mean_square(model, on_device(batch(number))).backward()
        optimizer.step()
    zi.synchronize(model)
    activations = engine_of(model).activations
    assert activations is not None
    assert activations.storage.held_bytes == 0


# ---------------------------------------------------------------------- one transfer


SIZE = 4096


def pinned(value: int) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8).pin_memory()


def test_a_download_waits_for_the_kernel_that_computes_it() -> None:
    device = TorchAccelerator(DEVICE, 1 << 20)
    EXTENSION.set_delays(kernel_seconds=0.02)
    source = torch.zeros(SIZE, dtype=torch.uint8, device=DEVICE) + 1
    target = pinned(0)
    device.link().download(source, target, device.computed())
    assert target.eq(1).all()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_download_is_there_when_it_returns(is_pinned: bool) -> None:
    device = TorchAccelerator(DEVICE, 1 << 20)
    source = torch.full((200_000,), 3, dtype=torch.uint8, device=DEVICE)
    target = torch.zeros(200_000, dtype=torch.uint8)
    target = target.pin_memory() if is_pinned else target
    EXTENSION.set_delays(bytes_per_second=20e6)
    EXTENSION.reset_counts(DEVICE.index)
    device.link().download(source, target, device.computed())
    assert target.eq(3).all()
    assert EXTENSION.counts(DEVICE.index)["unpinned"] == 0


@pytest.mark.parametrize("is_pinned", [True, False])
def test_an_upload_is_ordered_before_its_use(is_pinned: bool) -> None:
    device = TorchAccelerator(DEVICE, 1 << 20)
    source = pinned(5) if is_pinned else torch.full((SIZE,), 5, dtype=torch.uint8)
    EXTENSION.set_delays(bytes_per_second=200e3)
    found, transfer = device.link().upload(source)
    transfer.order()
    assert (found + 0).eq(5).all()


def test_a_block_is_released_after_it_is_up() -> None:
    """It may become another block's memory then, which the host writes to."""
    order: list[str] = []

    @contextmanager
    def reading(_: Block) -> Iterator[torch.Tensor]:
        yield torch.zeros(ONE, dtype=torch.uint8)
        order.append("released")

    up = mock.Mock(wait=lambda: order.append("waited"))
    link = mock.Mock(upload=lambda source: (source, up))
    mover = ActivationMover()
    slot = mock.Mock(error=None, uploaded=None)
    _Transfers(mock.Mock(reading=reading), link, mover).upload(slot)
    mover.close()
    assert order == ["waited", "released"]
    assert slot.uploaded is not None
