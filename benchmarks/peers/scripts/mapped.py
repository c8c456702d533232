"""By hand: parameters and optimizer states in memory-mapped files; the kernel's page cache decides what stays."""

from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from benchmarks.peers.script_turns import Turns
from zero_infinity.models.byte_gpt import ByteGPT

turns = Turns()
numbers = count()


def mapped(like: Tensor) -> Tensor:
    file = Path(turns.directory, str(next(numbers)))
    return torch.from_file(str(file), shared=True, size=like.numel(), dtype=like.dtype).view_as(like)


hook = lambda _, __, p: torch.nn.Parameter(mapped(p))  # noqa: E731
register_module_parameter_registration_hook(hook)  # type: ignore[arg-type]
torch.manual_seed(turns.seed)
model = ByteGPT(turns.shape)
optimizer = torch.optim.AdamW(model.parameters(), lr=turns.lr, fused=True)
for p in model.parameters():
    optimizer.state[p] = {"step": torch.tensor(0.0), "exp_avg": mapped(p), "exp_avg_sq": mapped(p)}

for inputs, targets in turns.batches():
    loss = model(inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    turns.stepped(loss)
