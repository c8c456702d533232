"""TRL's trainers behind the mixin: the same losses and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
from support.trainers import arguments, save_pretrained_folder, tiny_llama
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import zero_infinity as zi
from zero_infinity.integrations.transformers import Mixin

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's: of features that are experimental
FORCED = {"max_grad_norm": 1e-2, "gradient_accumulation_steps": 2}


class OurSFT(Mixin, SFTTrainer):
    pass


class OurDPO(Mixin, DPOTrainer):
    pass


def words(start: int, count: int = 6) -> str:
    return " ".join(f"w{(start * 7 + number * number) % 62}" for number in range(count))


TEXTS = {"text": [words(number, 10) for number in range(8)]}
PAIRS = {
    "prompt": [words(number) for number in range(8)],
    "chosen": [" " + words(number + 1) for number in range(8)],
    "rejected": [" " + words(number + 2) for number in range(8)],
}


def losses(kind: type, settings: Any, rows: dict[str, list[str]], folder: Path, **extra: Any) -> list[dict[str, Any]]:
    save_pretrained_folder(folder / "model")
    torch.manual_seed(0)
    trainer = kind(
        tiny_llama(),
        args=settings,
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model"),
        **extra,
    )
    trainer.train()
    shown = ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "entropy")
    logged = [line for line in trainer.state.log_history if "loss" in line]
    return [{name: line[name] for name in shown if name in line} for line in logged]


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_supervised_fine_tuning_is_the_same(adapters: bool, tmp_path: Path) -> None:
    extra = {"peft_config": lora()} if adapters else {}
    config = zi.Config(memory="400KiB", nvme=tmp_path)
    settings = SFTConfig(**arguments(tmp_path, max_steps=4, **FORCED))
    plain = losses(SFTTrainer, settings, TEXTS, tmp_path, **extra)
    assert plain
    assert losses(OurSFT, settings, TEXTS, tmp_path, zero_infinity=config, **extra) == plain


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_preferences_with_a_frozen_reference_are_the_same(adapters: bool, tmp_path: Path) -> None:
    """With adapters the reference is the base; otherwise it is a model of its own."""
    config = zi.Config(memory="400KiB", nvme=tmp_path)
    settings = DPOConfig(**arguments(tmp_path, max_steps=4, **FORCED))
    runs = []
    for kind, ours in ((DPOTrainer, {}), (OurDPO, {"zero_infinity": config})):
        extra = {"peft_config": lora()} if adapters else {"ref_model": tiny_llama(seed=5)}
        runs.append(losses(kind, settings, PAIRS, tmp_path, **extra, **ours))
    assert runs[0]
    assert runs[1] == runs[0]


def test_weights_are_handed_over_within_the_budget(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
    model = tiny_llama(num_hidden_layers=4, **shape)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    model, _ = zi.prepare(model, torch.optim.AdamW(model.parameters()), zi.Config(memory="300KiB", nvme=tmp_path))
    before = zi.stats(model)
    target = tiny_llama(seed=1, num_hidden_layers=4, **shape)
    names = []
    with torch.no_grad():
        for name, value in zi.stream_weights(model):
            names.append(name)
            if name in expected:
                target.get_parameter(name).copy_(value)
    assert all(torch.equal(p, expected[name]) for name, p in target.named_parameters())
    assert names == [*expected, *(name for name, _ in model.named_buffers())]
    zi.synchronize(model)
    after = zi.stats(model)
    assert after.memory_peak <= after.memory_budget
    assert after.bytes_read > before.bytes_read
    with pytest.raises(zi.UsageError, match="not prepared"):
        next(zi.stream_weights(target))
