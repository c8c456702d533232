from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_infinity.errors import ConfigError
from zero_infinity.plan.model import OUTSIDE, transformer
from zero_infinity.plan.modules import describe, outline
from zero_infinity.plan.program import step
from zero_infinity.workload.model import ByteGPT
from zero_infinity.workload.presets import VOCABULARY, Shape


def byte_gpt(**changes: object) -> nn.Module:
    with torch.device("meta"):
        return ByteGPT(Shape(**{"layers": 4, "hidden": 128, "heads": 4, "seq": 64, **changes}))


def test_a_gpt_counts_as_its_numbers_say() -> None:
    tokens = torch.zeros(2, 64, dtype=torch.long, device="meta")
    model = describe(byte_gpt(), {"tokens": tokens, "targets": tokens}, batch=2, seq=64, name="gpt", dtype_bytes=4)
    numbers = transformer(4, 128, 4, 64, vocabulary=VOCABULARY, tied=False)
    assert model.num_parameters == Shape(4, 128, 4, 64).num_parameters
    assert model.forward_flops(1) == numbers.forward_flops(1)
    assert (model.num_blocks, model.hidden, model.seq) == (4, 128, 64)
    assert model.working_elements(2, 1, checkpointed=True) == pytest.approx(
        numbers.working_elements(2, 1, checkpointed=True), rel=0.3
    )
    assert len(step(model, 1)) > len(step(model, 0))


def test_tied_weights_are_one_unit() -> None:
    tokens = torch.zeros(1, 64, dtype=torch.long, device="meta")
    model = describe(byte_gpt(tied=True), {"tokens": tokens}, batch=1, seq=64, name="gpt")
    assert model.num_parameters == Shape(4, 128, 4, 64, tied=True).num_parameters
    assert {o.name: o.unit for o in model.operators}["head"] == "tokens"


def test_any_module() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv1d(8, 16, 3), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).mean(-1))

    with torch.device("meta"):
        odd = Odd()
        x = torch.zeros(2, 8, 10)
    model = describe(odd, {"x": x}, batch=2, seq=1, name="odd", dtype_bytes=4)
    assert [o.name for o in model.operators if o.num_parameters] == ["first", "second"]
    assert all(o.block == OUTSIDE for o in model.operators)
    assert model.forward_flops(2) == 2 * (2 * 8 * 16 * 8 * 3) + 2 * (2 * 16 * 4)
    assert not odd._forward_hooks


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameters"):
        describe(nn.ReLU(), {"input": torch.zeros(1, device="meta")}, batch=1, seq=1, name="relu")


def test_an_outline_needs_no_run() -> None:
    model = outline(byte_gpt(), seq=64, name="gpt")
    numbers = transformer(4, 128, 4, 64, vocabulary=VOCABULARY, tied=False)
    assert model.num_parameters == Shape(4, 128, 4, 64).num_parameters
    assert (model.num_blocks, model.hidden) == (4, 128)
    attention = 4 * 4 * 64 * 128
    assert model.forward_flops(1) == numbers.forward_flops(1) - attention
