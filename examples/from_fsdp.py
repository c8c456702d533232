"""A script that was written for FSDP2: commented-out lines are what it had before.

torchrun --nproc-per-node 2 examples/from_fsdp.py --memory 4GiB --nvme /mnt/nvme
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_infinity as zi

parser = argparse.ArgumentParser()
parser.add_argument("--memory", default="4GiB")
parser.add_argument("--nvme")
parser.add_argument("--output", default="checkpoints")
parser.add_argument("--steps", type=int, default=4)
options = parser.parse_args()

dist.init_process_group("gloo")  # "cpu:gloo,cuda:nccl" with GPUs
mesh = init_device_mesh("cpu", (dist.get_world_size(),))

# policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32); CPUOffloadPolicy()
config = zi.Config(memory=options.memory, nvme=options.nvme, max_grad_norm=1.0)  # param_dtype="bfloat16"

# with torch.device("meta"):
torch.manual_seed(0)
with zi.init(config, group=mesh):
    layers = [nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(100, 64), *layers, nn.Linear(64, 100))

# for layer in layers: fully_shard(layer, mesh=mesh, mp_policy=policy)
# fully_shard(model, mesh=mesh); model.to_empty(device="cuda"); init_weights(model)
model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config, group=mesh)

generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(options.steps):
    batch = torch.randint(100, (4, 16), generator=generator)
    loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    loss.backward()
    # torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0): max_grad_norm above
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}, norm {float(optimizer.grad_norm):.3f}")

# dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=options.output)
zi.save(options.output, model, optimizer)
zi.synchronize(model)
dist.destroy_process_group()
