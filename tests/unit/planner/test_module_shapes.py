from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from zero_infinity.errors import ConfigError
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import VOCABULARY, Shape
from zero_infinity.planner.model_shapes import OUTSIDE, transformer
from zero_infinity.planner.module_shapes import describe, outline
from zero_infinity.planner.step_program import step


def byte_gpt(**changes: object) -> nn.Module:
    with torch.device("meta"):
        return ByteGPT(Shape(**{"layers": 4, "hidden": 128, "heads": 4, "seq": 64, **changes}))


def test_a_gpt_counts_as_its_numbers_say() -> None:
    tokens = torch.zeros(2, 64, dtype=torch.long, device="meta")
    gpt = byte_gpt()
    inputs = {"tokens": tokens, "targets": tokens}
    model = describe(gpt, inputs, batch=2, seq=64, name="gpt", dtype_bytes=4, blocks=list(gpt.blocks))
    numbers = transformer(4, 128, 4, 64, vocabulary=VOCABULARY, tied=False)
    assert model.num_parameters == Shape(4, 128, 4, 64).num_parameters
    assert model.forward_flops(1) == numbers.forward_flops(1)
    assert (model.num_blocks, model.hidden, model.seq) == (4, 128, 64)
    assert model.working_bytes(2, 1, checkpointed=True, element_bytes=4) == pytest.approx(
        numbers.working_bytes(2, 1, checkpointed=True, element_bytes=4), rel=0.3
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


class Tied(nn.Module):
    """A head that shares its weight and has a bias of its own, a scale that is used without a call, and one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.scale, self.unused = nn.Embedding(32, 8), nn.Linear(8, 8, bias=False), nn.LayerNorm(8)
        self.head = nn.Linear(8, 32)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(x) @ self.scale.weight)


def test_every_parameter_counts_once_however_it_is_used() -> None:
    with torch.device("meta"):
        tied, x = Tied(), torch.zeros(1, 4, dtype=torch.long)
    expected = {"tokens": 32 * 8, "scale": 64, "unused": 16, "head": 32}
    described, outlined = describe(tied, {"x": x}, batch=1, seq=4, name="tied"), outline(tied, seq=4, name="tied")
    assert described.units == outlined.units == expected
    assert described.num_parameters == sum(p.numel() for p in tied.parameters())
    head = next(o for o in described.operators if o.name == "head")
    assert (head.unit, head.flops_per_token) == ("tokens", 2 * 32 * 8)


def test_attention_of_the_cpu_and_experts_count() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.zeros(4, 32, 16, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.scaled_dot_product_attention(x, x[..., :16, :], x[..., :16, :])
            ends = torch.zeros(4, dtype=torch.int32)
            return torch._grouped_mm(y.reshape(-1, 32), self.experts, offs=ends)

    with FakeTensorMode():
        x = torch.zeros(1, 2, 64, 32, dtype=torch.bfloat16)
        model = describe(Mixture(), {"x": x}, batch=1, seq=64, name="mixture")
    assert model.forward_flops(64) == 2 * 64 * 2 * 2 * 16 * 32 + 2 * 2 * 64 * 32 * 16


def test_blocks_of_different_widths_are_averaged() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))
            self.second = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.first:
                x = block(x)
            x = x[:, :2]
            for block in self.second:
                x = block(input=x)
            return x

    with torch.device("meta"):
        halves, x = Halves(), torch.zeros(1, 6, 8)
    model = describe(halves, {"x": x}, batch=1, seq=2, name="halves", blocks=[*halves.first, *halves.second])
    assert (model.num_blocks, model.hidden) == (4, (6 * 8 + 2 * 8) // 2 // 2)
    assert model.checkpoint_elements(1, 1) == 2 * 6 * 8 + 2 * 2 * 8


def test_a_token_goes_through_a_part_of_the_experts() -> None:
    experts = nn.Module()
    experts.weight = nn.Parameter(torch.zeros(4, 8, 16, device="meta"))
    assert outline(experts, seq=1, name="experts", part_of_experts=0.5).forward_flops(1) == 2 * 2 * 8 * 16


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameters"):
        describe(nn.ReLU(), {"input": torch.zeros(1, device="meta")}, batch=1, seq=1, name="relu")


def test_an_outline_needs_no_run() -> None:
    gpt = byte_gpt()
    model = outline(gpt, seq=64, name="gpt", blocks=list(gpt.blocks))
    numbers = transformer(4, 128, 4, 64, vocabulary=VOCABULARY, tied=False)
    assert model.num_parameters == Shape(4, 128, 4, 64).num_parameters
    assert (model.num_blocks, model.hidden) == (4, 128)
    attention = 4 * 4 * 64 * 128
    assert model.forward_flops(1) == numbers.forward_flops(1) - attention
