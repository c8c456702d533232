"""A training loop with accelerate, within a memory budget.

accelerate launch --cpu examples/accelerate_loop.py MODEL_FOLDER notes.txt --memory 4GiB --nvme /mnt/nvme
"""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import zero_infinity as zi
from zero_infinity.integrations.accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("text")
parser.add_argument("--memory", default="4GiB")
parser.add_argument("--nvme")
parser.add_argument("--output", default="tuned")
parser.add_argument("--length", type=int, default=512)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
with open(options.text) as file:
    tokens = torch.tensor(tokenizer(file.read())["input_ids"])
rows = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)

accelerator = Accelerator(
    gradient_accumulation_steps=2,
    zero_infinity=zi.Config(memory=options.memory, nvme=options.nvme),  # the only line that is not accelerate's
)
model = AutoModelForCausalLM.from_pretrained(options.model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows))

for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.4f}")

accelerator.save_state(f"{options.output}/state")
accelerator.save_model(model, options.output)
