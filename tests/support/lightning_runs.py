"""A tiny LightningModule, trained with and without our strategy."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

from torch.utils.data import DataLoader

import zero_infinity as zi
from support.trainers import Tokens, Trained, tiny_llama
from zero_infinity.integrations.lightning import FiguresCallback, ZeroInfinityStrategy


class Module(pl.LightningModule):
    """Automatic optimization, or the same by hand."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        self.model = tiny_llama()
        self.automatic_optimization = not by_hand
        self.losses: list[dict[str, Any]] = []

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append({"loss": loss.item()})
        self.log("train_loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
        loss = self.model(**batch).loss
        self.losses.append({"validation": loss.item()})
        self.log("val_loss", loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fit(
    folder: Path,
    config: zi.Config | None,
    *,
    by_hand: bool = False,
    resume: Path | None = None,
    epochs: int = 2,
    figures: bool = False,
    devices: int = 1,
    **settings: Any,
) -> tuple[Trained, pl.Trainer, Module]:
    pl.seed_everything(0, verbose=False)
    plain = "ddp" if devices > 1 else "auto"
    module = Module(by_hand=by_hand)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=ZeroInfinityStrategy(config) if config is not None else plain,
            default_root_dir=folder,
            max_epochs=epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ModelCheckpoint(folder, save_top_k=-1), *([FiguresCallback()] if figures else [])],
            **settings,
        )
        loader = DataLoader(Tokens(), batch_size=2)
        trainer.fit(module, loader, DataLoader(Tokens(2)), ckpt_path=str(resume) if resume else None)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return Trained(module.losses, weights), trainer, module


def fit_on_a_rank(rank: int, port: int, folder: Path) -> tuple[Trained, Trained, Trained]:
    """With Lightning's own DDP, ours, and ours from its first checkpoint."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
    )
    several: dict[str, Any] = {"devices": 2, "epochs": 2, "gradient_clip_val": 1e-2, "accumulate_grad_batches": 2}
    plain, _, _ = fit(folder / "plain", None, **several)
    config = zi.Config(memory="1MiB", nvme=folder)
    ours, _, _ = fit(folder / "ours", config, **several)
    first = min((folder / "ours").glob("*.ckpt"))
    resumed, _, _ = fit(folder / "resumed", config, resume=first, **several)
    return plain, ours, resumed
