"""Which device computes a prepared model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.compare import adamw, engine_threads, wait_for_end
from support.device import DEVICE, WHY_NOT
from torch import nn

import zero_infinity as zi

if WHY_NOT is not None:
    pytest.skip(WHY_NOT, allow_module_level=True)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> list[torch.Tensor]:
    for number in range(4):
        data = torch.randn(8, 32, generator=torch.Generator().manual_seed(number)).to(device)
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu().clone() for p in model.parameters()]


@pytest.mark.parametrize("before", ["cpu", "lag:1"])
def test_a_model_on_the_cpu_and_one_on_the_device_train_alike(before: str) -> None:
    plain = net().to(DEVICE)
    expected = trained(plain, adamw(plain), DEVICE)
    model = net().to(before)
    parameters = list(model.parameters())
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="8MiB"))
    assert {p.device for p in model.parameters()} == {b.device for b in model.buffers()} == {DEVICE}
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    for expect, found in zip(expected, trained(model, optimizer, DEVICE), strict=True):
        assert torch.equal(expect, found)


def test_the_device_of_the_model_and_not_the_current_one() -> None:
    model = net().to("lag:2")
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="8MiB"))
    trained(model, optimizer, torch.device("lag:2"))
    assert model[0].weight.device == torch.device("lag:2")


def test_a_checkpoint_has_the_random_numbers_of_the_models_device(tmp_path: Path) -> None:
    """Which is not the current one."""
    device = torch.device("lag:2")
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout()).to(device)
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="8MiB"))
    generator = torch.get_device_module(device).get_rng_state
    torch.rand(3, device=device)
    zi.save(tmp_path, model, optimizer)
    saved, current = generator(device), generator(DEVICE)
    torch.rand(3, device=device)
    zi.load(tmp_path, model, optimizer)
    assert torch.equal(generator(device), saved)
    assert torch.equal(generator(DEVICE), current)


class KeepsItsOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.layer(x)
        return self.kept


def test_a_model_that_keeps_its_output_can_go() -> None:
    """Its graph refers to its parameters, and they must not refer to the model."""
    before = engine_threads()

    def use() -> None:
        model, optimizer = zi.prepare(model := KeepsItsOutput(), adamw(model), zi.Config(memory="8MiB"), device=DEVICE)
        trained(model, optimizer, DEVICE)

    use()
    wait_for_end(before)


def test_a_device_by_name() -> None:
    model = net()
    model, _ = zi.prepare(model, adamw(model), zi.Config(memory="8MiB"), device="cpu")
    assert model[0].weight.device.type == "cpu"
    model = net()
    model, _ = zi.prepare(model, adamw(model), zi.Config(memory="8MiB"), device="lag:3")
    assert model[0].weight.device == torch.device("lag:3")


def test_two_models_on_two_devices() -> None:
    found = []
    for device in ("lag:0", "lag:3"):
        model = net().to(device)
        model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="8MiB"))
        found.append(trained(model, optimizer, torch.device(device)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_model_on_two_devices_is_refused() -> None:
    model = net()
    model[0].to("lag:0")
    model[2].to("lag:1")
    with pytest.raises(zi.UsageError, match="several devices: '0.bias' on lag:0, '2.bias' on lag:1"):
        zi.prepare(model, adamw(model), zi.Config(memory="8MiB"))


def test_too_little_device_memory_says_how_much() -> None:
    model = nn.Sequential(nn.BatchNorm1d(600_000), nn.Flatten()).to(DEVICE)
    with pytest.raises(
        zi.CapacityError, match=r"of device memory .* device_memory is 1\.0 MiB\n  fix: +device_memory=5MiB"
    ):
        zi.prepare(model, adamw(model), zi.Config(memory="64MiB", device_memory="1MiB"))
