"""Layers with quantised weights as libraries make them: integers and scales in parameters, buffers and attributes."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 320  # scales of a row take more than 1 KiB


class _Multiply(torch.autograd.Function):
    """Keeps the weight for backward in an object that no saved-tensor hook sees, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        ctx.kept = weight.view(-1, WIDTH), scales
        return x @ (weight.to(x.dtype) * scales).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weight, scales = ctx.kept
        return gradient @ (weight.to(gradient.dtype) * scales), None, None


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = values.abs().amax(dim=1, keepdim=True) / 127
    return (values / scales).round().to(torch.int8), scales


def random_weight() -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH) / WIDTH**0.5


class IntegerParameter(nn.Parameter):
    """Copies its attributes, as those of libraries do."""

    state: SimpleNamespace

    def __deepcopy__(self, memo: dict[int, Any]) -> IntegerParameter:
        copied = IntegerParameter(self.data.clone(), requires_grad=False)
        copied.state = copy.deepcopy(self.state, memo)
        return copied


class WithScalesInAState(nn.Linear):
    """A parameter of integers, whose scales are an attribute of an attribute."""

    def __init__(self) -> None:
        super().__init__(1, WIDTH)
        weight, scales = quantise(random_weight())
        self.weight = IntegerParameter(weight, requires_grad=False)
        self.weight.state = SimpleNamespace(scales=scales, table=torch.arange(16), owner=self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Multiply.apply(x, self.weight, self.weight.state.scales) + self.bias


class WithBuffers(nn.Module):
    """Integers and scales in buffers."""

    def __init__(self) -> None:
        super().__init__()
        weight, scales = quantise(random_weight())
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scales)


class Int8Tensor(torch.Tensor):
    """A tensor subclass that is made of two others, as torchao's are."""

    ints: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, ints: torch.Tensor, scales: torch.Tensor) -> Int8Tensor:
        made: Int8Tensor = torch.Tensor._make_wrapper_subclass(cls, ints.shape, dtype=torch.float32)
        return made

    def __init__(self, ints: torch.Tensor, scales: torch.Tensor) -> None:
        self.ints, self.scales = ints, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["ints", "scales"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: Any) -> Int8Tensor:
        return Int8Tensor(parts["ints"], parts["scales"])

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.ints.to(x.dtype) * weight.scales, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].ints, args[0].scales)
        raise NotImplementedError(func)


class WithASubclass(nn.Linear):
    """A weight of a tensor subclass."""

    def __init__(self) -> None:
        super().__init__(1, WIDTH)
        self.weight = nn.Parameter(Int8Tensor(*quantise(random_weight())), requires_grad=False)


KINDS = {"state": WithScalesInAState, "buffers": WithBuffers, "subclass": WithASubclass}


class Adapted(nn.Module):
    """A quantised layer and a small trained one beside it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.base = KINDS[kind]()
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted(kind: str, num_layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(kind) for _ in range(num_layers)))


def base_bytes(model: nn.Sequential) -> int:
    """Integers and scales, as stored."""
    return len(model) * (WIDTH * WIDTH + 4 * WIDTH)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 5) -> list[float]:
    losses = []
    for number in range(num_steps):
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
