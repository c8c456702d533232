"""Fine-tune with LoRA by TRL's SFTTrainer, the base streamed from a drive.

python examples/sft_with_lora.py MODEL_FOLDER lines.txt --memory 2GiB --nvme /mnt/nvme
"""

import argparse

import datasets
import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import zero_infinity as zi
from zero_infinity.integrations.transformers import Mixin

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("lines")
parser.add_argument("--memory", default="2GiB")
parser.add_argument("--nvme")
parser.add_argument("--output", default="adapters")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()


class StreamedSFTTrainer(Mixin, SFTTrainer):
    pass


with open(options.lines) as file:
    rows = [line.strip() for line in file if line.strip()]

config = zi.Config(memory=options.memory, nvme=options.nvme)
with zi.init(config):  # only for a model that does not fit in memory
    model = AutoModelForCausalLM.from_pretrained(options.model)

trainer = StreamedSFTTrainer(
    model,
    args=SFTConfig(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=1,
        logging_steps=1,
        report_to="none",
        use_cpu=not torch.accelerator.is_available(),
    ),
    train_dataset=datasets.Dataset.from_dict({"text": rows}),
    processing_class=AutoTokenizer.from_pretrained(options.model),
    peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"),
    zero_infinity=config,
)
trainer.train()
trainer.save_model()  # adapter_model.safetensors
