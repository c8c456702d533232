"""GRPO of TRL on several ranks, with and without zero_infinity."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import zero_infinity as zi
from support.trainers import _as_torchrun, arguments
from zero_infinity.integrations.transformers import Mixin


class OurGRPO(Mixin, GRPOTrainer):
    pass


def short_words(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(len(word) == 2 for word in completion.split())) for completion in completions]


def words(start: int, count: int = 6) -> str:
    return " ".join(f"w{(start * 7 + number * number) % 62}" for number in range(count))


def grpo_on_a_rank(rank: int, port: int, folder: Path) -> list[list[dict[str, float]]]:
    """The logs of a plain run and of ours, of the model in `folder`; completions of ranks end at different lengths."""
    warnings.simplefilter("ignore")
    _as_torchrun(rank, port)
    runs = []
    rows = {"prompt": [words(number) for number in range(8)]}
    for config in (None, zi.Config(memory="256KiB", nvme=folder)):
        torch.manual_seed(0)
        changes: dict[str, Any] = {"max_steps": 3, "per_device_train_batch_size": 2, "max_grad_norm": 1e-2}
        settings = GRPOConfig(
            **arguments(folder / "out", **changes), num_generations=2, max_completion_length=12, temperature=3.0
        )
        model: Any = LlamaForCausalLM.from_pretrained(folder / "model")
        with torch.no_grad():
            model.lm_head.weight[0] *= 40  # so that some texts end early
        trainer: Any = (GRPOTrainer if config is None else OurGRPO)(
            model,
            args=settings,
            train_dataset=datasets.Dataset.from_dict(rows),
            processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model"),
            reward_funcs=short_words,
            **({} if config is None else {"zero_infinity": config}),
        )
        trainer.train()
        shown = ("loss", "grad_norm", "reward", "completions/mean_length", "completions/min_length")
        logged = [line for line in trainer.state.log_history if "loss" in line]
        runs.append([{name: line[name] for name in shown} for line in logged])
    return runs
