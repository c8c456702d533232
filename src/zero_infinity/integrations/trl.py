"""Hands weights of a trained model to vLLM for TRL's trainers that generate with it (GRPO, RLOO), within the budget.

TRL reads `param.data` of each parameter, which a prepared model does not have in memory. Here its own sender gets the
values one at a time, with adapters merged in, and the base is not changed for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zero_infinity.errors import UsageError
from zero_infinity.integrations.peft import stream_merged_weights
from zero_infinity.integrations.pretrained_folder import has_adapters
from zero_infinity.params.stream_weights import stream_weights


def hand_over_weights(trainer: Any) -> None:
    """Let a trainer's connection to vLLM, if it has one, read the prepared model by this module."""
    connection = getattr(trainer, "vllm_generation", None)
    if connection is None:
        return
    if not callable(getattr(connection, "_iter_named_params", None)):
        raise UsageError(
            f"{type(trainer).__name__} has a connection to vLLM that this version does not know: it would send weights "
            "that are not in memory\n  fix:   use_vllm=False, or a version of trl that zero_infinity is tested with"
        )
    connection._iter_named_params = lambda: _named_values(trainer.model, connection)


def _named_values(model: Any, connection: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names as vLLM knows them, with their values."""
    values = stream_merged_weights(model) if has_adapters(model) else stream_weights(model, buffers=False)
    for name, value in values:
        yield connection._fix_param_name_to_vllm(name), value
