"""`zi.accumulate` gives the bits of a loop of backwards in plain PyTorch, and reads the states once for all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import FITS, HALF, MINIMAL, Run, Script, Setting, adamw, compare
from support.device import DEVICE
from support.models import CASES, gpt2, llama, mean_square, of_labels, placed, tokens, vectors
from support.prompt import let_nothing_lag
from torch import nn

import zero_infinity as zi
from zero_infinity.api import engine_of
from zero_infinity.policy import chunk_size

NUM_STEPS = 4


def accumulating(
    batch: Callable[[int], Any],
    loss: Callable[[nn.Module, Any], torch.Tensor],
    counts: list[int],
    *,
    max_norm: float = 0,
) -> Script:
    """Steps over so many micro-batches."""

    def script(run: Run) -> None:
        number = 0
        for count in counts:
            batches = [batch(number + part) for part in range(count)]
            number += count
            if run.prepared:
                run.log(*zi.accumulate(run.model, batches, loss))
            else:
                for each in batches:
                    value = loss(run.model, each) / count
                    value.backward()
                    run.log(value.detach())
                if max_norm:
                    nn.utils.clip_grad_norm_(run.model.parameters(), max_norm)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.log(torch.rand(1))  # the random state goes on from where the loop leaves it
        if run.prepared:
            assert engine_of(run.model).accumulation.is_layer_major, engine_of(run.model).accumulation.reason

    return script


def checkpointed_llama() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable()
    return model.train()


class WithStatistics(nn.Module):
    """Blocks with buffers that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class LongSkips(nn.Module):
    """What enters the first block is added after each of them, past their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = x = self.stem(x)
        for block in self.blocks:
            x = block(x) + stem
        return x


def test_skips(tmp_path: Path) -> None:
    compare(placed(LongSkips), accumulating(vectors(), mean_square, [3] * 3), adamw, MINIMAL, tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])
def test_models(name: str, tmp_path: Path) -> None:
    """A tied head and dropout; an encoder and its decoder; experts with a loss of their own, recorded by hooks."""
    case = CASES[name]
    compare(case.make, accumulating(case.batch, case.loss, [3] * NUM_STEPS), adamw, MINIMAL, tmp_path)


@pytest.mark.parametrize("setting", [FITS, HALF], ids=str)
def test_saved_inputs_in_blocks_and_other_numbers_of_micro_batches(setting: Setting, tmp_path: Path) -> None:
    script = accumulating(tokens(), of_labels, [3, 3, 2, 4, 1, 3])
    compare(llama, script, adamw, setting, tmp_path, checkpoint_activations=True, offload_activations="all")


def test_recomputation_of_the_model_itself(tmp_path: Path) -> None:
    compare(checkpointed_llama, accumulating(tokens(), of_labels, [2] * 3), adamw, MINIMAL, tmp_path)


def test_clipping_and_steps_by_config(tmp_path: Path) -> None:
    script = accumulating(tokens(), of_labels, [3] * 3, max_norm=0.1)
    compare(gpt2, script, adamw, HALF, tmp_path, max_grad_norm=0.1, gradient_accumulation_steps=3)


@pytest.mark.parametrize("recomputes", [False, True])
def test_statistics(recomputes: bool, tmp_path: Path) -> None:
    script = accumulating(vectors(), mean_square, [3] * 3)
    compare(placed(WithStatistics), script, adamw, MINIMAL, tmp_path, checkpoint_activations=recomputes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gives_the_bits_of_its_loop(dtype: str, tmp_path: Path) -> None:
    def weights(*, by_layer: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = gpt2()
        model, optimizer = zi.prepare(model, adamw(model), zi.Config(nvme=tmp_path, compute_dtype=dtype))
        for step in range(3):
            batches = [tokens()(3 * step + part) for part in range(3)]
            if by_layer:
                zi.accumulate(model, batches, of_labels)
            else:
                for batch in batches:
                    (of_labels(model, batch) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert by_layer == engine_of(model).accumulation.is_layer_major
        return [value.clone() for value in model.state_dict().values()]

    assert all(torch.equal(a, b) for a, b in zip(weights(by_layer=True), weights(by_layer=False), strict=True))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)) for _ in range(12)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_states_are_read_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1/8 of the states in memory, 8 micro-batches read at most 1.15 of the bytes of one."""
    monkeypatch.setattr(chunk_size, "MIN_CHUNK_BYTES", 16 * 1024)

    def bytes_of_a_step(num_micro_batches: int) -> float:
        torch.manual_seed(0)
        model = Deep()
        states = sum(p.numel() for p in model.parameters()) * 12
        config = zi.Config(memory=states // 8, nvme=tmp_path, checkpoint_activations=True)
        model, optimizer = zi.prepare(model, adamw(model), config)
        let_nothing_lag(model)
        engine = engine_of(model)
        read = []
        for _ in range(9):
            before = zi.stats(model).bytes_read
            batches = [torch.randn(4, 128, device=DEVICE) for _ in range(num_micro_batches)]
            zi.accumulate(model, batches, mean_square)
            optimizer.step()
            optimizer.zero_grad()
            engine.settle()
            read.append(zi.stats(model).bytes_read - before)
        return sum(read[5:]) / len(read[5:])

    assert bytes_of_a_step(8) <= 1.15 * bytes_of_a_step(1)
