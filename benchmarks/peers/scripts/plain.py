"""Plain PyTorch: everything in memory."""

import torch

from benchmarks.peers.script_turns import Turns
from zero_infinity.models.byte_gpt import ByteGPT

turns = Turns()
torch.manual_seed(turns.seed)
model = ByteGPT(turns.shape)
optimizer = torch.optim.AdamW(model.parameters(), lr=turns.lr, fused=True)

for inputs, targets in turns.batches():
    loss = model(inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    turns.stepped(loss)
