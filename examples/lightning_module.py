"""Train a LightningModule within a memory budget.

python examples/lightning_module.py --memory 4GiB --nvme /mnt/nvme
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zero_infinity as zi
from zero_infinity.integrations.lightning import FiguresCallback, ZeroInfinityStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--memory", default="4GiB")
parser.add_argument("--nvme")
parser.add_argument("--output", default="runs")
parser.add_argument("--width", type=int, default=1024)
options = parser.parse_args()


class Regression(pl.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[0])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = pl.Trainer(
    strategy=ZeroInfinityStrategy(zi.Config(memory=options.memory, nvme=options.nvme)),  # the only line that is ours
    accelerator="auto",
    devices=1,
    max_epochs=2,
    gradient_clip_val=1.0,
    default_root_dir=options.output,
    callbacks=[FiguresCallback()],
)
trainer.fit(Regression(options.width), DataLoader(TensorDataset(torch.randn(64, options.width)), batch_size=8))
