"""Training methods as changes of a model's shape: low-rank adapters, quantised weights, optimizers by name. Pure.

For plans of a described model. A plan of a real one (`zi.plan`) reads the engine's own records instead.
"""

from __future__ import annotations

from dataclasses import replace

from zero_infinity.errors import ConfigError
from zero_infinity.planner.model_shapes import OUTSIDE, ModelShape, OperatorShape
from zero_infinity.planner.unit_states import OptimizerStates, frozen

# Bits of a stored weight, with its scales. NF4 has a scale in 8 bits for each block of 64, and a float32 for each 256
# of these (arXiv 2305.14314, double quantisation); int8 has one scale for each row, which is left out.
_QUANTISED = {"nf4": 4 + 8 / 64 + 32 / (64 * 256), "int8": 8.0}


def quantisation_names() -> list[str]:
    return list(_QUANTISED)


def with_adapters(model: ModelShape, rank: int, *, parameter_bytes: int, quantised: str | None = None) -> ModelShape:
    """The same with every weight frozen, and two trained ones of low rank beside each linear layer in a block."""
    operators: list[OperatorShape] = []
    for operator in model.operators:
        rows = operator.num_rows if operator.block != OUTSIDE else 0
        base = _frozen(operator, parameter_bytes)
        if not rows:
            operators.append(base)
            continue
        columns = max(1, operator.num_parameters // rows)
        operators.append(base if quantised is None else _quantised(base, _QUANTISED[quantised]))
        name, block, flops = operator.name, operator.block, 2.0 * rank
        operators += [
            OperatorShape(f"{name}.lora_a", rank * columns, flops * columns, 0.0, block, num_rows=rank),
            OperatorShape(f"{name}.lora_b", rank * rows, flops * rows, rank, block, num_rows=rows),
        ]
    if len(operators) == len(model.operators):
        raise ConfigError(f"{model.name} has no linear layers in its blocks: adapters have nothing to be beside")
    return replace(model, operators=tuple(operators), num_weights=model.num_parameters)


def _frozen(operator: OperatorShape, parameter_bytes: int) -> OperatorShape:
    """Backward computes the gradient of the input only, and nothing at all before the first trained weight."""
    if not operator.num_parameters:
        return operator
    passes = 1.0 if operator.weight_in_backward else 0.0
    return replace(operator, states=frozen(parameter_bytes), num_backward=passes)


def _quantised(operator: OperatorShape, bits: float) -> OperatorShape:
    """Its weight is stored packed in bytes, and is used whole."""
    return replace(operator, num_parameters=-(-int(operator.num_parameters * bits) // 8), states=frozen(1), num_rows=0)


def updated_by(model: ModelShape, optimizer: OptimizerStates, parameter_bytes: int) -> ModelShape:
    """The same, where an optimizer that must see matrices whole updates those in blocks; AdamW has the others."""
    if not optimizer.is_whole:
        return model
    operators = []
    for operator in model.operators:
        rows = operator.num_rows or (1 if operator.num_parameters else 0)
        inside = operator.block != OUTSIDE and rows > 1
        if operator.states is not None or not (inside or (rows and optimizer.passes == 0)):
            operators.append(operator)
            continue
        columns = operator.num_parameters // rows
        # A matrix that is updated whole is never cut into tiles.
        operators.append(replace(operator, states=optimizer.of_matrix(rows, columns, parameter_bytes), num_rows=0))
    return replace(model, operators=tuple(operators))
