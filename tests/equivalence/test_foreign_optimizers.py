"""Optimizers of other packages: the bits of plain PyTorch, or a refusal with the true reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lion_pytorch
import optimi
import pytest
import torch
from support.compare import FITS_RAM, MINIMAL, Setting, compare, training
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
}
REFUSED: dict[str, tuple[Make, str]] = {
    "ScalableShampoo": (of(pytorch_optimizer.ScalableShampoo), "state 'pre_conditioner' is a PreConditioner"),
    "Prodigy": (of(pytorch_optimizer.Prodigy), "in its parameter group from all gradients"),
    "ScheduleFreeAdamW": (of(pytorch_optimizer.ScheduleFreeAdamW), r"train\(\) and eval\(\)"),
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
