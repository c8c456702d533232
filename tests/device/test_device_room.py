"""Device memory that is learnt, and a device that runs out of it in the middle."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.device import DEVICE, EXTENSION, WHY_NOT
from torch import nn

import zero_infinity as zi
from zero_infinity.tiers.torch_accelerator import TorchAccelerator

if EXTENSION is None:
    pytest.skip(str(WHY_NOT), allow_module_level=True)

MIB = 1 << 20
WIDTH = 256
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
NUM_LAYERS = 8


@pytest.fixture(autouse=True)
def _all_of_the_device() -> Iterator[None]:
    """Every test begins with an empty device, and leaves it as large as it was."""
    gc.collect()
    torch.accelerator.synchronize(DEVICE)
    torch.accelerator.memory.empty_cache()
    yield
    EXTENSION.set_limit(DEVICE.index, 4 << 30)


def leave(num_bytes: int) -> None:
    """Let the device have this much more than what is in use now."""
    gc.collect()
    torch.accelerator.synchronize(DEVICE)
    torch.accelerator.memory.empty_cache()
    used = torch.accelerator.memory.memory_reserved(DEVICE)
    EXTENSION.set_limit(DEVICE.index, used + num_bytes)


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers, nn.BatchNorm1d(WIDTH)).to(DEVICE)


def batch(number: int, size: int) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(number)).to(DEVICE)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # Not the device's default, foreach, which rounds differently from the host's updates.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Train with batches of these sizes; returns the losses, weights and buffers."""
    losses = []
    for number, size in enumerate(sizes):
        torch.manual_seed(number)
        loss = model(batch(number, size)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
        del loss
    return [*losses, *(value.detach().cpu().clone() for value in (*model.parameters(), *model.buffers()))]


def prepared(**config: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return zi.prepare(model, adamw(model), zi.Config(memory="32MiB", **config))


def peak_of(sizes: Sequence[int], **config: Any) -> int:
    """The most device memory that this training takes, beside what is there now."""
    leave(4 << 30)
    before = torch.accelerator.memory.memory_allocated(DEVICE)
    model, optimizer = prepared(**config)
    torch.accelerator.memory.reset_peak_memory_stats(DEVICE)
    train(model, optimizer, sizes)
    return torch.accelerator.memory.max_memory_allocated(DEVICE) - before


# ---------------------------------------------------------------------- what is learnt


def test_the_budget_is_what_is_free_at_the_peak() -> None:
    leave(16 * MIB)
    model, optimizer = prepared()
    assert 2 * MIB < zi.stats(model).device_budget <= 4 * MIB  # careful at first
    train(model, optimizer, [256] * 3)
    stats = zi.stats(model)
    assert stats.device_others > NUM_LAYERS * 256 * WIDTH * 4  # activations that backward needs
    assert 8 * MIB < stats.device_budget < 16 * MIB - stats.device_others


def test_larger_activations_leave_less_to_the_cache() -> None:
    found = []
    for size in (64, 512):
        leave(24 * MIB)
        model, optimizer = prepared()
        train(model, optimizer, [size] * 3)
        found.append(zi.stats(model))
        del model, optimizer
    more = found[1].device_others - found[0].device_others
    assert more > NUM_LAYERS * 448 * WIDTH * 4
    assert found[0].device_budget - found[1].device_budget >= more


def test_a_model_that_is_not_trained_learns_in_its_forwards() -> None:
    leave(16 * MIB)
    model = zi.prepare(net().eval(), config=zi.Config(memory="16MiB"))
    before = zi.stats(model).device_budget
    with torch.no_grad():
        for number in range(2):
            model(batch(number, 256))
    stats = zi.stats(model)
    assert before < 16 * MIB - stats.device_others - 4 * MIB < stats.device_budget


def test_a_budget_that_is_given_stays() -> None:
    model, optimizer = prepared(device_memory="2MiB")
    train(model, optimizer, [64] * 4)
    assert zi.stats(model).device_budget == 2 * MIB


# ---------------------------------------------------------------------- a device that runs out

LARGE = [64, 64, 64, 256, 64, 64]
ALL = "2100KiB"  # for a copy of every layer, and no more: states that live on the device do not shrink
LEAST = 2 * LAYER
IN_FORWARD = "out of memory in the model's forward.*shrinks from .*\n  fix: "


@pytest.fixture(scope="module")
def tight() -> int:
    """Device memory in which the large batch fits beside a few layers, but not beside all."""
    return peak_of(LARGE, device_memory=LEAST) + LAYER


@pytest.mark.parametrize("how", [{"device_memory": ALL}, {}], ids=["given", "learnt"])
def test_a_forward_that_runs_out_of_memory_runs_again(how: dict[str, Any], tight: int) -> None:
    """Dropout and batch norm are as if it had run once."""
    plain = net()
    expected = train(plain, adamw(plain), LARGE)
    del plain
    leave(4 << 30)
    model, optimizer = prepared(**how)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    leave(tight)
    with pytest.warns(zi.ConfigWarning, match=IN_FORWARD) as said:
        found = train(model, optimizer, LARGE)
    assert len(said) == 1
    assert len(calls) > len(LARGE)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_the_cache_is_as_large_as_the_next_steps_allow(tight: int) -> None:
    """What one large batch needed stays free; a budget that was given is never exceeded."""
    leave(4 << 30)
    model, optimizer = prepared(device_memory=ALL)
    whole = zi.stats(model).device_budget
    leave(tight)
    with pytest.warns(zi.ConfigWarning, match="out of memory"):
        train(model, optimizer, LARGE)
    assert LAYER <= zi.stats(model).device_budget < 2 * LAYER  # the largest layer alone
    del model, optimizer
    leave(4 << 30)
    model, optimizer = prepared(device_memory=ALL)
    leave(tight)
    with pytest.warns(zi.ConfigWarning, match="out of memory"):
        model(batch(0, 256)).sum().backward()
    leave(64 * MIB)
    optimizer.step()
    assert zi.stats(model).device_budget == whole


def test_a_backward_that_runs_out_of_memory_leaves_room_for_the_next_attempt(tight: int) -> None:
    model, optimizer = prepared(device_memory=ALL, update="after_backward")
    train(model, optimizer, [64, 64])
    loss = model(batch(0, 256)).square().mean()
    leave(0)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    del loss
    optimizer.zero_grad()
    leave(4 * LAYER)
    with pytest.warns(zi.ConfigWarning, match="out of memory in a step before this one"):
        train(model, optimizer, [64, 64])


class Sum(nn.Module):
    """Adds what it is given, and its layers' outputs, in place if it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, how: object) -> torch.Tensor:
        if how == "in place":
            x.add_(1)
        outputs = [layer(x) for layer in self.layers]
        raise torch.OutOfMemoryError(f"after {len(outputs)} layers")


@pytest.mark.parametrize("how", ["in place", object()], ids=["changed in place", "an object"])
def test_a_forward_that_may_have_left_traces_runs_once(how: object) -> None:
    model = Sum().to(DEVICE)
    model, _ = zi.prepare(model, adamw(model), zi.Config(memory="32MiB", device_memory=ALL))
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(torch.OutOfMemoryError, match="after 4 layers"):
        model(batch(0, 8), how)
    assert len(calls) == 1


def test_copies_make_room_for_the_next_ones() -> None:
    """A device with room for three layers of eight, and a cache that counts on all."""
    plain = net().eval()
    data = batch(0, 8)
    with torch.no_grad():
        expected = plain(data).cpu()
    del plain
    model, _ = prepared(device_memory=ALL)
    model.eval()
    leave(3 * LAYER)
    with torch.no_grad(), pytest.warns(zi.ConfigWarning, match="out of memory when a layer was to be copied"):
        found = model(data).cpu()
    assert torch.equal(expected, found)


def test_free_memory_in_pieces_is_given_back_for_one_large_piece() -> None:
    leave(2 * MIB)
    device = TorchAccelerator(DEVICE, 2 * MIB)
    pieces = [device.allocate(64 << 10) for _ in range(24)]
    for piece in pieces:
        piece.release()
    assert device.allocate(MIB).tensor().numel() == MIB
