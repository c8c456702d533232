"""Schedule-free optimizers: train() and eval() exchange all weights, streamed; the bits of plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from support.compare import FITS_RAM, MINIMAL, Run, Setting, assert_same, compare, copied
from support.device import cpu_only
from support.models import mean_square, mlp, vectors
from torch import nn
from torch.optim import Optimizer

import zero_infinity as zi

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    import pytorch_optimizer

pytestmark = cpu_only("they are compared on the CPU")
batch = vectors()


def make() -> nn.Module:
    return mlp(depth=2)


def of(kind: Any, **options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: kind(model.parameters(), lr=1e-2, **options)


OPTIMIZERS = {
    "AdamW": of(schedulefree.AdamWScheduleFree, weight_decay=0.1, warmup_steps=2),
    "SGD": of(schedulefree.SGDScheduleFree, foreach=False),
    "of pytorch_optimizer": of(pytorch_optimizer.ScheduleFreeAdamW),
}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: copied(p.detach()) for name, p in model.named_parameters()}


def evaluate_now_and_then(run: Run) -> None:
    optimizer: Any = run.optimizer
    optimizer.train()
    for number in range(5):
        run.step(mean_square(run.model, batch(number)))
        if number in (1, 2):
            optimizer.eval()
            optimizer.eval()  # is done
            with torch.no_grad():
                run.log(mean_square(run.model.eval(), batch(100)))
            run.log(weights(run.model))
            optimizer.train()
            run.model.train()
    optimizer.eval()


@pytest.mark.parametrize("setting", [FITS_RAM, MINIMAL], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_and_evaluating_in_turn(name: str, setting: Setting, tmp_path: Path) -> None:
    compare(make, evaluate_now_and_then, OPTIMIZERS[name], setting, tmp_path)


def test_a_checkpoint_of_the_averaged_weights_goes_on_exactly(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        evaluate_now_and_then(run)
        if run.prepared:
            zi.save(tmp_path / "saved", run.model, run.optimizer)  # type: ignore[arg-type]
            model = make()
            run.model, run.optimizer = zi.prepare(model, OPTIMIZERS["AdamW"](model), zi.Config(memory="8MiB"))
            zi.load(tmp_path / "saved", run.model, run.optimizer)
        evaluate_now_and_then(run)

    compare(make, script, OPTIMIZERS["AdamW"], MINIMAL, tmp_path)


def test_rounded_weights_are_exchanged_the_same_everywhere(tmp_path: Path) -> None:
    found = []
    for home in (None, tmp_path):
        torch.manual_seed(0)
        model = make()
        for dropout in [module for module in model.modules() if isinstance(module, nn.Dropout)]:
            dropout.p = 0.0
        settings = {"param_dtype": "bfloat16", "compute_dtype": "float32", "master": "none", "optim_dtype": "bfloat16"}
        config = zi.Config(memory="8MiB" if home is None else "96KiB", nvme=home, **settings)
        model, optimizer = zi.prepare(model, OPTIMIZERS["AdamW"](model), config)
        run = Run(model, optimizer, prepared=True)
        evaluate_now_and_then(run)
        found.append((run.logged, weights(model)))
    assert_same("outcome", *found)


def test_between_backward_and_step_it_is_refused() -> None:
    model = make()
    model, optimizer = zi.prepare(model, OPTIMIZERS["AdamW"](model), zi.Config(memory="8MiB"))
    optimizer.train()  # type: ignore[attr-defined]
    mean_square(model, batch(0)).backward()
    with pytest.raises(zi.UsageError, match=r"has a gradient that waits for step\(\)"):
        optimizer.eval()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.eval()  # type: ignore[attr-defined]


def test_other_optimizers_have_no_such_methods() -> None:
    model = make()
    model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters()), zi.Config(memory="8MiB"))
    assert not hasattr(optimizer, "train")
    assert not hasattr(optimizer, "eval")
