"""TRL's trainers behind the mixin: the same losses and rewards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import peft
import pytest
import torch
from support.ranks import run_ranks
from support.trainers import arguments, make_trainer, save_pretrained_folder, tiny_llama
from support.trl_runs import OurGRPO, grpo_on_a_rank, short_words, words
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

import zero_infinity as zi
from zero_infinity.integrations.transformers import Mixin, ZeroInfinityTrainer

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's: of features that are experimental
FORCED = {"max_grad_norm": 1e-2, "gradient_accumulation_steps": 2}


class OurSFT(Mixin, SFTTrainer):
    pass


class OurDPO(Mixin, DPOTrainer):
    pass


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
        LlamaForCausalLM.from_pretrained(folder / "model"),
        args=settings,
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model"),
        **extra,
    )
    trainer.train()
    shown = ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "entropy", "reward", "kl")
    logged = [line for line in trainer.state.log_history if "loss" in line]
    return [{name: line[name] for name in shown if name in line} for line in logged]


FULL_AND_LORA = [pytest.param(False, id="full", marks=pytest.mark.long), pytest.param(True, id="lora")]


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])


@pytest.mark.parametrize("adapters", FULL_AND_LORA)
def test_supervised_fine_tuning_is_the_same(adapters: bool, tmp_path: Path) -> None:
    extra = {"peft_config": lora()} if adapters else {}
    config = zi.Config(memory="400KiB", nvme=tmp_path)
    settings = SFTConfig(**arguments(tmp_path, max_steps=4, **FORCED))
    plain = losses(SFTTrainer, settings, TEXTS, tmp_path, **extra)
    assert plain
    assert losses(OurSFT, settings, TEXTS, tmp_path, zero_infinity=config, **extra) == plain


@pytest.mark.parametrize("adapters", FULL_AND_LORA)
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


@pytest.mark.parametrize("adapters", FULL_AND_LORA)
def test_rewards_of_what_it_generates_are_the_same(adapters: bool, tmp_path: Path) -> None:
    """The model generates between two steps; the reference is a model of its own, or the base under the adapters."""
    changes: dict[str, Any] = {"max_steps": 4, "max_grad_norm": 1e-2, "per_device_train_batch_size": 4}
    settings = GRPOConfig(**arguments(tmp_path, **changes), num_generations=2, max_completion_length=6, beta=0.1)
    config = zi.Config(memory="400KiB", nvme=tmp_path)
    extra = {"peft_config": lora()} if adapters else {}
    extra["reward_funcs"] = short_words
    rows = {"prompt": PAIRS["prompt"]}
    plain = losses(GRPOTrainer, settings, rows, tmp_path, **extra)
    assert any(line["grad_norm"] > 1e-2 for line in plain)
    assert losses(OurGRPO, settings, rows, tmp_path, **extra, zero_infinity=config) == plain


@pytest.mark.parametrize("adapters", FULL_AND_LORA)
def test_the_sender_of_trl_gets_values_with_adapters_merged(adapters: bool, tmp_path: Path) -> None:
    received: list[dict[str, torch.Tensor]] = []
    for config in (None, zi.Config(memory="300KiB", nvme=tmp_path)):
        model: Any = tiny_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=4)
        if adapters:
            torch.manual_seed(1)
            model = peft.get_peft_model(model, lora())
        trainer = make_trainer(tmp_path, config, model=model, max_steps=2, kind=WithConnection)
        trainer.vllm_generation = connection_of(trainer.model, received)
        trainer.train()
        trainer.vllm_generation.sync_weights()
    assert received[0].keys() == received[1].keys()
    assert all(torch.equal(value, received[1][name]) for name, value in received[0].items())
    stats = zi.stats(trainer.model)
    assert stats.memory_peak <= stats.memory_budget


def test_two_ranks_generate_together(tmp_path: Path) -> None:
    """Completions of one rank are longer than those of the other, which still gives its share of the parameters."""
    save_pretrained_folder(tmp_path / "model")
    for plain, ours in run_ranks(2, grpo_on_a_rank, 29771, tmp_path):
        assert len(plain) == len(ours) == 3
        assert any(line["completions/min_length"] < line["completions/mean_length"] for line in plain)
        for theirs, mine in zip(plain, ours, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


class WithConnection(ZeroInfinityTrainer):
    vllm_generation: Any


def connection_of(model: Any, received: list[dict[str, torch.Tensor]]) -> Any:
    """TRL's own sender, to an engine that keeps what it gets."""
    values: dict[str, torch.Tensor] = {}
    received.append(values)

    class Engine:
        def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
            for name, value in pairs:
                assert name not in values
                values[name] = value.clone()

    sender = VLLMGeneration.__new__(VLLMGeneration)
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=Engine()))
    engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=runner))
    sender.llm = SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: None)
    no_plugin = SimpleNamespace(deepspeed_plugin=None)
    sender.mode, sender.model, sender.enable_sleep_mode = "colocate", model, False
    sender._dist = DistributedBackend(SimpleNamespace(state=no_plugin))
    sender.accelerator = SimpleNamespace(is_main_process=True)
    return sender


def test_a_connection_that_is_not_known_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, zi.Config(), kind=WithConnection)
    trainer.vllm_generation = object()
    with pytest.raises(zi.UsageError, match="use_vllm=False"):
        trainer.train()


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
