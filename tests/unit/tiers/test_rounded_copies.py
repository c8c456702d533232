from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zero_infinity as zi
from zero_infinity.tiers import device_cache
from zero_infinity.tiers.rounded_copies import round_to, take_edits


def test_only_what_was_edited_in_the_copy_changes() -> None:
    value = torch.tensor([0.1, -0.0, 1e-30, 3.3, float("nan"), -1e-45])
    copy = value.bfloat16()
    before = value.clone()
    take_edits(value, copy)
    assert torch.equal(value.view(torch.int32), before.view(torch.int32))
    copy[1], copy[3] = 0.0, 5.0
    take_edits(value, copy)
    assert value.tolist()[:4] == [before[0].item(), 0.0, before[2].item(), 5.0]
    assert not value[1].signbit()


def test_a_copy_with_all_bits_is_the_value() -> None:
    value, copy = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    take_edits(value, copy)
    assert torch.equal(value, copy)


def test_extra_bits_are_rounded_away() -> None:
    copy = torch.tensor([0.1, 1.0])
    round_to(torch.bfloat16, copy)
    assert torch.equal(copy, torch.tensor([0.1, 1.0]).bfloat16().float())


def trained(look: str, folder: Path) -> dict[str, torch.Tensor]:
    """Train a model that is stored in float32 and computed in 16 bits; between steps do something with its parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = zi.prepare(model, optimizer, zi.Config(memory="4MiB", compute_dtype="bfloat16"))
    for number in range(4):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).bfloat16()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if look == "detach":
            assert all(p.detach().isfinite().all() for p in model.parameters())
        elif look:
            with zi.gathered(model), torch.no_grad():
                assert all(p.isfinite().all() for p in model.parameters())
                if look == "edit" and number == 3:
                    model[0].weight[0, 0] = 0.5
    zi.export(folder / look, model)
    return load_file(folder / look / "model.safetensors")


def test_looking_at_parameters_does_not_round_what_is_stored(tmp_path: Path) -> None:
    expected = trained("", tmp_path / "undisturbed")
    for look in ("detach", "gathered"):
        for name, value in trained(look, tmp_path).items():
            assert torch.equal(value, expected[name]), (look, name)
    expected["0.weight"][0, 0] = 0.5
    for name, value in trained("edit", tmp_path).items():
        assert torch.equal(value, expected[name]), name


def test_tensors_that_are_kept_from_before_an_update_are_named_instead_of_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_cache, "STUCK_SECONDS", 0.05)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zi.prepare(model, optimizer, zi.Config(memory="4MiB", compute_dtype="bfloat16"))
    kept = [p.detach() for p in model.parameters()]
    model(torch.ones(2, 64).bfloat16()).sum().backward()
    optimizer.step()
    with pytest.raises(
        zi.CapacityError, match=r"'0' needs 12.0 KiB .* that were kept from before an update\n  fix:   drop"
    ):
        model(torch.ones(2, 64).bfloat16())
    kept.clear()
    model(torch.ones(2, 64).bfloat16())
