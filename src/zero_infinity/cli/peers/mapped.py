"""By hand: parameters and optimizer states in memory-mapped files; the kernel's page cache decides what stays."""

from pathlib import Path

import torch
from torch import Tensor

from zero_infinity.cli.peers.turns import Turns
from zero_infinity.workload.model import ByteGPT

turns = Turns()
files = Path(turns.directory)


def mapped(name: str, like: Tensor) -> Tensor:
    return torch.from_file(str(files / name), shared=True, size=like.numel(), dtype=like.dtype).view_as(like)


torch.manual_seed(turns.seed)
model = ByteGPT(turns.shape)
for name, parameter in model.named_parameters():
    parameter.data = mapped(name, parameter).copy_(parameter.data)
optimizer = torch.optim.AdamW(model.parameters(), lr=turns.lr, fused=True)
for name, parameter in model.named_parameters():
    states = {key: mapped(f"{name}.{key}", parameter) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[parameter] = {"step": torch.tensor(0.0), **states}

for inputs, targets in turns.batches():
    loss = model(inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    turns.stepped(loss)
