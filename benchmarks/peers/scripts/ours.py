"""This library: states on NVMe, a budget in memory."""

import torch

import zero_infinity as zi
from benchmarks.peers.script_turns import Turns
from zero_infinity.models.byte_gpt import ByteGPT

turns = Turns()
torch.manual_seed(turns.seed)
config = zi.Config(memory=turns.memory, nvme=turns.directory or None)
with zi.init(config):
    model = ByteGPT(turns.shape)
model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters(), lr=turns.lr, fused=True), config)

for inputs, targets in turns.batches():
    loss = model(inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    turns.stepped(loss)
