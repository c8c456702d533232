"""How long an operator computes on a machine: matrix products at the rate of their size, and memory-bound work. Pure.

A machine whose profile has only one rate of computation (`flops`) takes operations divided by it, as before: that rate
then includes everything else that training does.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from zero_infinity.planner.hardware import Hardware
from zero_infinity.planner.model_shapes import OperatorShape
from zero_infinity.planner.step_program import OperatorRun, StepPhase
from zero_infinity.planner.training_job import Workload


def compute_seconds(use: OperatorRun, workload: Workload) -> float:
    """Of one run of an operator over the batch of a device; as measured, if it was."""
    if use.seconds is not None:
        return use.seconds
    if use.phase is StepPhase.REACH:
        return 0.0
    operator, hardware = use.operator, workload.hardware
    num_tokens = workload.job.batch * workload.model.seq
    products = _products(operator, num_tokens, hardware)
    memory_bound = _memory_bound(operator, num_tokens, workload.activation_bytes, hardware)
    if use.phase is not StepPhase.BACKWARD:
        return products + memory_bound
    # What was saved is read, and a gradient of each value is written.
    return operator.num_backward * (products + memory_bound)


def _products(operator: OperatorShape, num_tokens: float, hardware: Hardware) -> float:
    flops = operator.flops_per_token * num_tokens
    if not flops:
        return 0.0
    if not operator.num_parameters:
        return flops / (hardware.attention_flops or hardware.flops)
    # The side of a cube with as many operations.
    return flops / _rate(hardware, (flops / 2) ** (1 / 3))


def _rate(hardware: Hardware, side: float) -> float:
    """Between two measured sizes by the logarithm of the size; the nearest one beyond them."""
    sizes = hardware.matmul_flops
    if not sizes:
        return hardware.flops
    sides = [known for known, _ in sizes]
    index = bisect_left(sides, side)
    if index in (0, len(sides)):
        return sizes[min(index, len(sizes) - 1)][1]
    (small, slow), (large, fast) = sizes[index - 1], sizes[index]
    part = math.log(side / small) / math.log(large / small)
    return slow + part * (fast - slow)


def _memory_bound(operator: OperatorShape, num_tokens: float, activation_bytes: int, hardware: Hardware) -> float:
    """Everything that is saved was written by some operator that is bound by memory."""
    if hardware.saved_rate is None:
        return 0.0
    saved = activation_bytes * operator.saved_elements_per_token + operator.saved_bytes_per_token
    return saved * num_tokens / hardware.saved_rate
