"""Measures how fast this machine computes: matrix products by size, attention, and operators that memory bounds.

Owns what `bench hardware` writes for the planner's roofline (`planner/roofline.py`). Each figure is the best of a few
short runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

_NUM_ROUNDS = 4
_SIDES = (64, 128, 256, 512, 1024, 1536)  # the largest takes 7 GFLOP: 70 ms at 100 GFLOP/s
_HEADS, _SEQ, _HEAD = 8, 512, 64
_ROWS, _WIDTH = 1024, 2048


@dataclass(frozen=True, slots=True)
class ComputeFigures:
    """Operations and bytes a second."""

    matmul_flops: tuple[tuple[float, float], ...]  # by the side of a cube
    attention_flops: float
    saved_rate: float


def measure_compute() -> ComputeFigures:
    return ComputeFigures(
        tuple((float(side), _matmul_flops(side)) for side in _SIDES), _attention_flops(), _saved_rate()
    )


def best_seconds(action: Callable[[], object]) -> float:
    """The shortest of a few runs."""
    action()  # the first call sets up threads and memory
    times = []
    for _ in range(_NUM_ROUNDS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def _matmul_flops(side: int) -> float:
    matrix = torch.ones(side, side)
    out = torch.empty_like(matrix)
    repeats = max(1, (256 // side) ** 3)  # what takes microseconds is repeated

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(matrix, matrix, out=out)

    return repeats * 2 * float(side**3) / best_seconds(multiply)


def _attention_flops() -> float:
    """Queries by keys and weights by values, masked ones included, as plans count them."""
    query = torch.randn(1, _HEADS, _SEQ, _HEAD)
    flops = 4.0 * _HEADS * _SEQ**2 * _HEAD
    return flops / best_seconds(lambda: functional.scaled_dot_product_attention(query, query, query, is_causal=True))


def _saved_rate() -> float:
    """Bytes that a norm, a gate and a residual save for backward, by the seconds of their forward pass."""
    values, gate = (torch.randn(_ROWS, _WIDTH, requires_grad=True) for _ in range(2))
    scale = torch.ones(_WIDTH, requires_grad=True)
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    def forward() -> torch.Tensor:
        normed = scale * (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6))
        return values + functional.silu(gate) * normed

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = forward()
    num_bytes = sum(saved.values())
    del kept
    return num_bytes / best_seconds(forward)
