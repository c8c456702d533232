"""PyTorch FSDP2 with states offloaded to the CPU, on one rank."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from benchmarks.peers.script_turns import Turns
from zero_infinity.models.byte_gpt import ByteGPT

turns = Turns()
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1,))
torch.manual_seed(turns.seed)
model = ByteGPT(turns.shape)
for block in model.blocks:
    fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=turns.lr, fused=True)

for inputs, targets in turns.batches():
    loss = model(inputs, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    turns.stepped(loss)
dist.destroy_process_group()
