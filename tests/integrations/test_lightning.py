"""Lightning with and without our strategy: the same losses and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_runs import Module, fit, fit_on_a_rank, pl
from support.ranks import run_ranks
from support.trainers import Trained, assert_same

import zero_infinity as zi
from zero_infinity.integrations.lightning import ZeroInfinityStrategy

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's: of few workers, of torch's functions that it uses


@pytest.fixture
def tight(tmp_path: Path) -> zi.Config:
    swap = tmp_path / "swap"
    swap.mkdir()
    return zi.Config(memory="256KiB", nvme=swap)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_clip_val": 1e-2},
        {"accumulate_grad_batches": 4},  # the last group of an epoch has one batch
        {"accumulate_grad_batches": 4, "gradient_clip_val": 1e-2, "precision": "bf16-mixed"},
        {"by_hand": True},
    ],
    ids=str,
)
def test_a_run_is_the_same(changes: dict[str, Any], tight: zi.Config, tmp_path: Path) -> None:
    plain, _, _ = fit(tmp_path / "plain", None, **changes)
    ours, _, _ = fit(tmp_path / "ours", tight, **changes)
    assert_same(plain, ours)


def test_checkpoints_resume_exactly_and_can_be_validated(tight: zi.Config, tmp_path: Path) -> None:
    whole, trainer, module = fit(tmp_path / "whole", tight, figures=True, gradient_clip_val=1e-2)
    assert trainer.callback_metrics["zi_memory_budget_bytes"] == 256 << 10
    assert trainer.callback_metrics["grad_norm"] > 1e-2
    first, last = sorted((tmp_path / "whole").glob("*.ckpt"))
    resumed, _, _ = fit(tmp_path / "resumed", tight, resume=first, gradient_clip_val=1e-2)
    # Lightning checks the validation before it goes on.
    assert resumed.logs[-len(whole.logs) // 2 :] == whole.logs[-len(whole.logs) // 2 :]
    assert_same(Trained(resumed.logs, whole.weights), resumed)
    module.losses.clear()
    trainer.validate(module, trainer.val_dataloaders, ckpt_path=str(first), verbose=False)
    assert module.losses == whole.logs[len(whole.logs) // 2 - 1 : len(whole.logs) // 2 + 1]
    assert last.is_dir()


def test_it_is_known_by_name() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="zero_infinity", logger=False)
    assert isinstance(trainer.strategy, ZeroInfinityStrategy)


def test_what_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    class Two(Module):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=1e-2) for _ in range(2)]

    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="zero_infinity", logger=False, max_epochs=1)
    with pytest.raises(zi.UsageError, match="returns 2 optimizers"):
        trainer.fit(Two(by_hand=True), [], [])
    with pytest.raises(zi.UsageError, match="gradient_clip_algorithm"):
        fit(tmp_path, zi.Config(), gradient_clip_val=1.0, gradient_clip_algorithm="value")


def test_two_ranks_train_as_with_ddp_and_resume(tmp_path: Path) -> None:
    for plain, ours, resumed in run_ranks(2, fit_on_a_rank, 29751, tmp_path):
        assert len(plain.logs) == len(ours.logs)
        assert_same(Trained(ours.logs[-len(resumed.logs) :], ours.weights), resumed)
        for theirs, mine in zip(plain.logs, ours.logs, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
        for name, value in plain.weights.items():
            torch.testing.assert_close(ours.weights[name], value, rtol=1e-4, atol=1e-6)
