"""A script that was written for DeepSpeed: commented-out lines are what it had before.

torchrun --nproc-per-node 2 examples/from_deepspeed.py MODEL_FOLDER notes.txt ds_config.json --memory 4GiB
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import zero_infinity as zi

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("text")
parser.add_argument("config", help="the DeepSpeed config, as it is")
parser.add_argument("--memory", default="4GiB")
parser.add_argument("--output", default="checkpoints")
parser.add_argument("--length", type=int, default=512)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
with open(options.text) as file:
    tokens = torch.tensor(tokenizer(file.read())["input_ids"])
rows = tokens[: len(tokens) // options.length * options.length].view(-1, 1, options.length)

# deepspeed.init_distributed()
if "RANK" in os.environ:
    dist.init_process_group("gloo")  # "cpu:gloo,cuda:nccl" with GPUs
rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

# with deepspeed.zero.Init(config_dict_or_path=options.config):
config = zi.Config.from_deepspeed(options.config).replace(memory=options.memory)
torch.manual_seed(0)  # the same on every rank: each draws what is not in the files, such as a new head
with zi.init(config):
    model = AutoModelForCausalLM.from_pretrained(options.model)

# model, optimizer, _, _ = deepspeed.initialize(model=model, config=options.config)
model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), config)

for number, batch in enumerate(rows[rank::num_ranks], start=1):
    loss = model(input_ids=batch, labels=batch).loss / config.gradient_accumulation_steps
    loss.backward()  # model.backward(loss)
    if number % config.gradient_accumulation_steps == 0:
        optimizer.step()  # model.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"loss {loss.item() * config.gradient_accumulation_steps:.4f}")

zi.save(options.output, model, optimizer)  # model.save_checkpoint(options.output)
zi.export(f"{options.output}/weights", model)  # python zero_to_fp32.py
if dist.is_initialized():
    zi.synchronize(model)
    dist.destroy_process_group()
