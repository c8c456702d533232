"""Fine-tune a Hugging Face model with the Trainer of transformers, within a memory budget.

python examples/trainer.py MODEL_FOLDER notes.txt --memory 4GiB --nvme /mnt/nvme
torchrun --nproc-per-node 2 examples/trainer.py ...
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments, set_seed

import zero_infinity as zi
from zero_infinity.integrations.transformers import ZeroInfinityTrainer

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("text")
parser.add_argument("--memory", default="4GiB")
parser.add_argument("--nvme")
parser.add_argument("--output", default="tuned")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--length", type=int, default=512)
options = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(options.model)
with open(options.text) as file:
    tokens = torch.tensor(tokenizer(file.read())["input_ids"])
rows = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)

# First the arguments: under torchrun they connect the ranks, which then build one model together.
arguments = TrainingArguments(
    options.output,
    max_steps=options.steps,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    learning_rate=1e-5,
    logging_steps=1,
    save_steps=options.steps,
    report_to="none",
    use_cpu=not torch.accelerator.is_available(),
)
set_seed(arguments.seed)  # every rank draws the same for what is not in the files, such as a new head
config = zi.Config(memory=options.memory, nvme=options.nvme)
with zi.init(config):  # only for a model that does not fit in memory
    model = AutoModelForCausalLM.from_pretrained(options.model)

trainer = ZeroInfinityTrainer(
    model,
    arguments,
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    processing_class=tokenizer,
    zero_infinity=config,
)
trainer.train()
trainer.save_model()  # AutoModelForCausalLM.from_pretrained("tuned")
