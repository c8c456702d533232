"""A loop written for accelerate with and without us: the same losses, norms and weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from support.ranks import run_ranks
from support.trainers import Tokens, Trained, assert_same, loop_on_a_rank, loop_with_accelerate, tiny_llama
from torch import nn
from torch.optim import AdamW

import zero_infinity as zi
from zero_infinity.integrations.accelerate import Accelerator


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """accelerate keeps its settings for the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def tight(tmp_path: Path) -> zi.Config:
    swap = tmp_path / "swap"
    swap.mkdir()
    return zi.Config(memory="384KiB", nvme=swap)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_norm": 1e-2},
        {"max_norm": None, "accumulate": 4},
        {"max_norm": 1e-2, "accumulate": 4},
        {"max_norm": 1.0, "mixed_precision": "bf16"},
    ],
    ids=str,
)
def test_a_loop_is_the_same(changes: dict[str, Any], tight: zi.Config) -> None:
    plain = loop_with_accelerate(None, **changes)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert_same(plain, loop_with_accelerate(tight, **changes))


def test_states_are_saved_and_loaded(tight: zi.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = loop_with_accelerate(tight, max_norm=1e-2, save_after=3, folder=tmp_path / "state")
    assert (tmp_path / "state" / "zero_infinity_0" / "latest").exists()
    assert not list((tmp_path / "state").glob("model*"))
    resumed = loop_with_accelerate(tight, max_norm=1e-2, load_before=3, folder=tmp_path / "state")
    assert_same(Trained(whole.logs[3:], whole.weights), resumed)


def test_saving_never_asks_for_whole_states(tight: zi.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True, zero_infinity=tight)
    model = tiny_llama()
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the whole model is asked for")

    monkeypatch.setattr(nn.Module, "state_dict", refuse)
    monkeypatch.setattr(type(optimizer.optimizer), "state_dict", refuse)
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.load_state(str(tmp_path / "state"))
    accelerator.save_model(model, tmp_path / "weights")
    assert (tmp_path / "weights" / "model.safetensors").exists()
    assert accelerator.unwrap_model(model) is model
    assert accelerator._models == [model]


def test_what_is_prepared_already_is_taken(tight: zi.Config) -> None:
    accelerator = Accelerator(cpu=True, zero_infinity=tight)
    model = tiny_llama()
    model, streamed = zi.prepare(model, AdamW(model.parameters()), tight)
    same, optimizer = accelerator.prepare(model, streamed)
    assert same is model
    assert optimizer.optimizer is streamed
    assert accelerator.prepare(model, optimizer) == (model, optimizer)


def test_the_plain_accelerator_trains_a_prepared_model(tight: zi.Config) -> None:
    weights = []
    for config in (None, tight):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = tiny_llama()
        optimizer: Any = AdamW(model.parameters(), lr=1e-2)
        if config is not None:
            model, optimizer = zi.prepare(model, optimizer, config.replace(gradient_accumulation_steps=2))
        model, optimizer = accelerator.prepare(model, optimizer)
        for number in range(6):
            with accelerator.accumulate(model):
                row = Tokens()[number]["input_ids"][None]
                accelerator.backward(model(input_ids=row, labels=row).loss)
                optimizer.step()
                optimizer.zero_grad()
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


class Kept(GeneralTracker):
    """A tracker as TensorBoard's and others' are."""

    name = "kept"
    requires_logging_directory = False
    tracker: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.lines.append(values)


def test_trackers_get_what_was_moved(tight: zi.Config) -> None:
    kept = Kept()
    accelerator = Accelerator(cpu=True, log_with=[kept], zero_infinity=tight)
    accelerator.init_trackers("project")
    model: Any = tiny_llama()
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
    for number in range(2):
        row = Tokens()[number]["input_ids"][None]
        accelerator.backward(model(input_ids=row, labels=row).loss)
        optimizer.step()
        accelerator.log({"loss": number}, step=number)
    assert [line["loss"] for line in kept.lines] == [0, 1]
    assert all(line["zi_memory_bytes"] <= line["zi_memory_budget_bytes"] == 384 << 10 for line in kept.lines)
    assert 0 < sum(line["zi_read_bytes"] for line in kept.lines) <= zi.stats(model).bytes_read


def test_an_optimizer_without_its_model_is_refused() -> None:
    model = tiny_llama()
    with pytest.raises(zi.UsageError, match="without its model"):
        Accelerator(cpu=True).prepare(AdamW(model.parameters()))


def test_accumulation_set_twice_is_refused() -> None:
    with pytest.raises(zi.UsageError, match="set it in the Accelerator only"):
        Accelerator(cpu=True, gradient_accumulation_steps=4, zero_infinity=zi.Config(gradient_accumulation_steps=2))


def test_two_ranks_train_as_with_ddp_and_resume(tmp_path: Path) -> None:
    for plain, ours, resumed in run_ranks(2, loop_on_a_rank, 29741, tmp_path):
        assert len(plain.logs) == len(ours.logs) == 5
        assert_same(Trained(ours.logs[2:], ours.weights), resumed)
        for theirs, mine in zip(plain.logs, ours.logs, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
        for name, value in plain.weights.items():
            torch.testing.assert_close(ours.weights[name], value, rtol=1e-4, atol=1e-6)
