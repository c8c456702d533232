"""Optimizers of other packages: the bits of plain PyTorch, or a refusal with the true reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import lion_pytorch
import optimi
import pytest
import schedulefree
import torch
from support.compare import FITS_RAM, MINIMAL, Run, Setting, compare, training
from support.models import mean_square, mlp, vectors
from torch import nn
from torch.optim import Optimizer

import zero_infinity as zi

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    import pytorch_optimizer

Make = Callable[[nn.Module], Optimizer]


def of(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), lr=1e-2, **options)


def with_settings_of_its_own(model: nn.Module) -> Optimizer:
    optimizer: Optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    bitsandbytes.optim.GlobalOptimManager.get_instance().register_module_override(
        model[0], "weight", {"optim_bits": 32}
    )
    return optimizer


WORKING: dict[str, Make] = {
    "lion": of(lion_pytorch.Lion),
    "lion-decoupled": of(lion_pytorch.Lion, weight_decay=0.1, decoupled_weight_decay=True),
    "optimi.AdamW": of(optimi.AdamW),  # counts steps in its group
    "optimi.Adan": of(optimi.Adan),
    "ADOPT": of(pytorch_optimizer.ADOPT),
    "AdEMAMix": of(pytorch_optimizer.AdEMAMix),
    "Lion": of(pytorch_optimizer.Lion),
    "SOAP": of(pytorch_optimizer.SOAP),  # lists of factors in its states
    "Shampoo": of(pytorch_optimizer.Shampoo),
    "StableAdamW": of(optimi.StableAdamW),
    "LAMB": of(pytorch_optimizer.Lamb),
    "LARS": of(pytorch_optimizer.LARS),
    "CAME": of(pytorch_optimizer.CAME),
}
REFUSED: dict[str, tuple[Make, str]] = {
    "ScalableShampoo": (of(pytorch_optimizer.ScalableShampoo), "state 'pre_conditioner' is a PreConditioner"),
    "Prodigy": (of(pytorch_optimizer.Prodigy), "in its parameter group from all gradients"),
    "Lookahead": (
        lambda model: pytorch_optimizer.Lookahead(torch.optim.AdamW(model.parameters()), params=model.parameters()),
        "it wraps AdamW, .*\n.*prepare with AdamW",
    ),
    "SAM": (of(pytorch_optimizer.SAM, base_optimizer=torch.optim.SGD), "first step moves all weights .* of SGD"),
    "combined": (
        lambda model: zi.combine_optimizers(
            schedulefree.AdamWScheduleFree([model[0].weight]), torch.optim.AdamW([model[0].bias])
        ),
        "combined optimizers have no such methods",
    ),
    "overridden": (with_settings_of_its_own, "GlobalOptimManager has settings for single parameters"),
}


@pytest.mark.half
@pytest.mark.parametrize("setting", [FITS_RAM, MINIMAL], ids=str)
@pytest.mark.parametrize("name", sorted(WORKING))
def test_the_same_bits(name: str, setting: Setting, tmp_path: Path) -> None:
    script = training(vectors(), mean_square, num_steps=8)
    compare(lambda: mlp(depth=2), script, WORKING[name], setting, tmp_path)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_with_the_reason(name: str) -> None:
    make, reason = REFUSED[name]
    model = mlp(depth=1)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(zi.UsageError, match=reason):
        zi.prepare(model, make(model), zi.Config(memory="8MiB"))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("setting", [FITS_RAM, MINIMAL], ids=str)
def test_the_two_steps_of_sharpness_aware_minimisation(setting: Setting, tmp_path: Path) -> None:
    """As docs/howto/optimizers.md has them, by hand."""

    def script(run: Run) -> None:
        for number in range(4):
            batch = vectors()(number)
            mean_square(run.model, batch).backward()
            gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            moved = {}
            for p in run.model.parameters():
                with torch.no_grad(), zi.gathered(p):
                    moved[p] = p.grad * (0.05 / (norm + 1e-12))  # type: ignore[operator]
                    p.add_(moved[p])
            run.optimizer.zero_grad()
            mean_square(run.model, batch).backward()
            for p in run.model.parameters():
                with torch.no_grad(), zi.gathered(p):
                    p.sub_(moved[p])
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.log(norm)

    make = lambda: mlp(depth=2).eval()
    compare(make, script, of(torch.optim.SGD, momentum=0.9), setting, tmp_path, update="after_backward")
