"""The Trainer of transformers with and without us: the same script gives the same logs and weights."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.ranks import run_ranks
from support.trainers import (
    Tokens,
    Trained,
    arguments,
    assert_same,
    both_on_a_rank,
    make_trainer,
    outcome,
    tiny_llama,
    train,
)
from torch import nn
from transformers import (
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

import zero_infinity as zi
from zero_infinity.integrations import transformers as zi_transformers
from zero_infinity.integrations.transformers import STATES, Mixin, ZeroInfinityTrainer

SAVING = {"save_strategy": "steps", "save_steps": 3}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 3}
CLIPS = {"max_grad_norm": 1e-2}


@pytest.fixture
def tight(tmp_path: Path) -> zi.Config:
    """Less than the states of the tiny model, with NVMe."""
    swap = tmp_path / "swap"
    swap.mkdir()
    return zi.Config(memory="256KiB", nvme=swap)


@pytest.mark.parametrize(
    "changes",
    [
        {},  # clips at 1.0, the trainer's default
        CLIPS,
        {"gradient_accumulation_steps": 4},  # the last group of an epoch has one batch
        {"gradient_accumulation_steps": 4} | CLIPS,
        {"bf16": True},
        {"gradient_checkpointing": True, "lr_scheduler_type": "cosine", "weight_decay": 0.1},
        EVALUATING,
        {"optim": "sgd", "optim_args": "momentum=0.9"},
    ],
    ids=str,
)
def test_a_run_is_the_same(changes: dict[str, Any], tight: zi.Config, tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", None, **changes)
    ours = train(tmp_path / "ours", tight, **changes)
    assert_same(plain, ours)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_without_clipping_updates_run_in_backward_and_no_norm_is_logged(
    accumulation: int, tight: zi.Config, tmp_path: Path
) -> None:
    changes = {"max_grad_norm": 0.0, "gradient_accumulation_steps": accumulation}
    plain = train(tmp_path / "plain", None, **changes)
    ours = train(tmp_path / "ours", tight, **changes)
    without = [{k: v for k, v in logged.items() if k != "grad_norm"} for logged in plain.logs]
    assert_same(Trained(without, plain.weights), ours)


def test_a_small_norm_really_clips(tight: zi.Config, tmp_path: Path) -> None:
    loose = train(tmp_path / "loose", tight, max_steps=3)
    clipped = train(tmp_path / "clipped", tight, max_steps=3, optim="sgd", **CLIPS)
    assert clipped.logs[0]["grad_norm"] == loose.logs[0]["grad_norm"] > CLIPS["max_grad_norm"]
    moved = sum(float((clipped.weights[n] - w).square().sum()) for n, w in tiny_llama().state_dict().items()) ** 0.5
    assert 0 < moved <= 3 * 1e-2 * CLIPS["max_grad_norm"] * 1.01


def test_checkpoints_resume_exactly_and_are_pruned(tight: zi.Config, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", tight, **SAVING, save_total_limit=2)
    assert sorted(p.name for p in (tmp_path / "whole").iterdir()) == ["checkpoint-10", "checkpoint-9"]
    train(tmp_path / "begun", tight, **SAVING)
    resumed = train(tmp_path / "resumed", tight, resume=tmp_path / "begun" / "checkpoint-6")
    assert resumed.logs[:-1] == whole.logs[6:-1]  # the last one sums up the run
    assert_same(Trained(resumed.logs, whole.weights), resumed)


def test_a_checkpoint_of_the_plain_trainer_is_gone_on_from(tight: zi.Config, tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", None, **SAVING)
    ours = train(tmp_path / "ours", tight, resume=tmp_path / "plain" / "checkpoint-6")
    assert_same(Trained(ours.logs, plain.weights), ours)


def test_a_checkpoint_folder_is_the_plain_one_with_states(tight: zi.Config, tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    train(tmp_path / "plain", None, **changes)
    train(tmp_path / "ours", tight, **changes)
    plain, ours = tmp_path / "plain" / "checkpoint-2", tmp_path / "ours" / "checkpoint-2"
    names = {path.name for path in plain.iterdir()}
    assert {path.name for path in ours.iterdir()} == names - {"optimizer.pt"} | {STATES}
    assert json.loads((ours / "config.json").read_text()) == json.loads((plain / "config.json").read_text())
    expected, loaded = LlamaForCausalLM.from_pretrained(plain), LlamaForCausalLM.from_pretrained(ours)
    assert all(torch.equal(p, q) for p, q in zip(expected.parameters(), loaded.parameters(), strict=True))


def test_saving_never_asks_for_whole_states(tight: zi.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path / "out", tight, max_steps=4, load_best_model_at_end=True, **SAVING, **EVALUATING)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the whole model is asked for")

    monkeypatch.setattr(nn.Module, "state_dict", refuse)
    monkeypatch.setattr(nn.Module, "load_state_dict", refuse)
    monkeypatch.setattr(type(trainer.create_optimizer()), "state_dict", refuse)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    assert zi.stats(trainer.model).memory_peak <= zi.stats(trainer.model).memory_budget
    assert (tmp_path / "final" / "model.safetensors").stat().st_size > 0
    assert not (tmp_path / "final" / STATES).exists()


@pytest.mark.parametrize("only_model", [False, True])
def test_the_best_model_is_loaded_at_the_end(only_model: bool, tight: zi.Config, tmp_path: Path) -> None:
    # The best one is the worst here, so that it is not the last one.
    changes = {"load_best_model_at_end": True, "greater_is_better": True, "save_only_model": only_model}
    plain = train(tmp_path / "plain", None, **changes, **SAVING, **EVALUATING)
    trainer = make_trainer(tmp_path / "ours", tight, **changes, **SAVING, **EVALUATING)
    trainer.train()
    ours = outcome(trainer)
    assert_same(plain, ours)
    assert trainer.state.best_global_step < trainer.state.global_step
    best = LlamaForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert all(torch.equal(value, ours.weights[name]) for name, value in best.state_dict().items())


def test_float16_scales_the_loss_and_skips_what_overflows(tmp_path: Path) -> None:
    class Overflowing(ZeroInfinityTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().compute_loss(*args, **kwargs)
            return loss * (1e6 if self.state.global_step == 1 else 1)

    trainer = make_trainer(tmp_path, zi.Config(compute_dtype="float16"), kind=Overflowing, fp16=True, max_steps=4)
    trainer.train()
    ours = outcome(trainer)
    assert trainer.accelerator.scaler is None
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float16}
    rates = [logged["learning_rate"] for logged in ours.logs[:-1]]
    assert rates[1] == rates[2]  # the scheduler waits for the step that was skipped
    exact = train(tmp_path / "exact", None, max_steps=1)
    assert ours.logs[0]["loss"] == pytest.approx(exact.logs[0]["loss"], rel=1e-2)
    assert ours.logs[0]["grad_norm"] == pytest.approx(exact.logs[0]["grad_norm"], rel=1e-2)


def test_a_model_built_on_the_tiers_is_trained(tight: zi.Config, tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", None)
    with zi.init(tight):
        model = tiny_llama()
    assert_same(plain, train(tmp_path / "ours", tight, model=model))


def test_the_optimizer_of_the_user_is_prepared(tight: zi.Config, tmp_path: Path) -> None:
    runs = []
    for config in (None, tight):
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        trainer = make_trainer(tmp_path, config, model=model)
        trainer.optimizer = optimizer
        trainer.train()
        runs.append(outcome(trainer))
    assert_same(*runs)


def test_a_second_train_goes_on_with_the_prepared_model(tight: zi.Config, tmp_path: Path) -> None:
    runs = []
    for config in (None, tight):
        trainer = make_trainer(tmp_path, config, max_steps=2)
        trainer.train()
        trainer.train()
        runs.append(outcome(trainer))
    assert_same(*runs)


def test_settings_come_from_a_file_named_in_the_arguments(tmp_path: Path) -> None:
    path = tmp_path / "zi.toml"
    path.write_text('memory = "3MiB"\nstage = 1\n')
    args = zi_transformers.TrainingArguments(**arguments(tmp_path, max_steps=1), zero_infinity=str(path))
    trainer = ZeroInfinityTrainer(tiny_llama(), args, train_dataset=Tokens())
    trainer.create_optimizer()
    assert zi.stats(trainer.model).memory_budget == 3 << 20
    parser = transformers.HfArgumentParser(zi_transformers.TrainingArguments)
    (parsed,) = parser.parse_args_into_dataclasses(["--output_dir", "x", "--use_cpu", "--zero_infinity", str(path)])
    assert parsed.zero_infinity == str(path)


@pytest.mark.parametrize("setting", [{"max_grad_norm": 0.5}, {"gradient_accumulation_steps": 2}])
def test_a_setting_that_is_made_twice_is_refused(setting: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(zi.ConfigError, match=r"in the trainer's arguments\n  fix: "):
        make_trainer(tmp_path, zi.Config(**setting))


def test_waits_and_bytes_are_logged(tight: zi.Config, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, tight, max_steps=3)
    trainer.train()
    lines = [logged for logged in trainer.state.log_history if "loss" in logged]
    assert all(line["zi_memory_bytes"] <= line["zi_memory_budget_bytes"] == 256 << 10 for line in lines)
    stats = zi.stats(trainer.model)
    assert 0 < sum(line["zi_read_bytes"] for line in lines) <= stats.bytes_read
    assert 0 < sum(line["zi_written_bytes"] for line in lines) <= stats.bytes_written


def test_generating_in_evaluation_is_the_same(tight: zi.Config, tmp_path: Path) -> None:
    class Ours(Mixin, Seq2SeqTrainer):
        pass

    def translate(kind: type, ours: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        config = T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        changes = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, **CLIPS}  # it goes on after generating
        settings = arguments(tmp_path, predict_with_generate=True, generation_max_length=6, **changes)
        args = Seq2SeqTrainingArguments(**settings)
        few = torch.utils.data.Subset(Tokens(), range(4))
        made = kind(T5ForConditionalGeneration(config), args, train_dataset=Tokens(), eval_dataset=few, **ours)
        made.train()
        lines = [line.get("loss", line.get("eval_loss")) for line in made.state.log_history]
        return lines, made.predict(few).predictions.tolist()

    expected = translate(Seq2SeqTrainer, {})
    assert len(expected[0]) == 9
    assert translate(Ours, {"zero_infinity": tight}) == expected


@pytest.mark.parametrize("changes", [{}, CLIPS, {"gradient_accumulation_steps": 4} | CLIPS], ids=str)
def test_the_plain_trainer_trains_a_prepared_model(changes: dict[str, Any], tight: zi.Config, tmp_path: Path) -> None:
    """Its own clipping, which is on by default, clips; a skip would not show in its log."""
    plain = train(tmp_path / "plain", None, **changes)
    model = tiny_llama()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    config = tight.replace(
        gradient_accumulation_steps=changes.get("gradient_accumulation_steps", 1), update="after_backward"
    )
    model, optimizer = zi.prepare(model, optimizer, config)
    ours = make_trainer(tmp_path / "ours", None, model=model, **changes)
    ours.optimizer = optimizer
    ours.train()
    assert_same(plain, outcome(ours))


def test_an_optimizer_that_the_plain_trainer_makes_is_refused(tight: zi.Config, tmp_path: Path) -> None:
    model = tiny_llama()
    model, _ = zi.prepare(model, torch.optim.AdamW(model.parameters()), tight)
    with pytest.raises(zi.UsageError, match=r"(?s)fix:.*zi.prepare has returned"):
        make_trainer(tmp_path, None, model=model).train()


def test_two_ranks_train_as_with_ddp(tmp_path: Path) -> None:
    forced = partial(both_on_a_rank, **CLIPS, gradient_accumulation_steps=2, num_train_epochs=3)
    by_rank = run_ranks(2, forced, 29731, tmp_path)
    for plain, ours, resumed in by_rank:
        assert len(ours.logs) == len(plain.logs)
        for theirs, mine in zip(plain.logs, ours.logs, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)  # the norm is summed in another order
        for name, value in plain.weights.items():
            torch.testing.assert_close(ours.weights[name], value, rtol=1e-4, atol=1e-6)
            assert torch.equal(resumed.weights[name], ours.weights[name])
    for name, value in by_rank[0][1].weights.items():
        assert torch.equal(by_rank[1][1].weights[name], value)
