"""Generate text and score it with a model larger than memory.

python examples/generate.py MODEL_FOLDER "Once upon a time" --memory 4GiB --nvme /mnt/nvme
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextGenerationPipeline

import zero_infinity as zi

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("prompt")
parser.add_argument("--memory", default="4GiB")
parser.add_argument("--nvme")
options = parser.parse_args()

config = zi.Config(memory=options.memory, nvme=options.nvme)
tokenizer = AutoTokenizer.from_pretrained(options.model)
with zi.init(config):
    model = AutoModelForCausalLM.from_pretrained(options.model)
model = zi.prepare(model, config=config)  # no optimizer: for inference

pipeline = TextGenerationPipeline(model=model, tokenizer=tokenizer)
print(pipeline(options.prompt, max_new_tokens=20, do_sample=False)[0]["generated_text"])

tokens = tokenizer(options.prompt, return_tensors="pt")["input_ids"]
with torch.no_grad():
    scores = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
print(f"log-probability of the prompt: {scores.sum().item():.3f}")

stats = zi.stats(model)
print(f"{stats.bytes_read / 2**20:.1f} MiB read, {stats.memory_peak / 2**20:.1f} MiB of memory at most")
