"""Turns a Hugging Face config.json into the planner's model, built without memory and run once.

Owns what happens if that run fails: a model whose forward depends on values, or whose inputs are unknown, is counted by
its parameters; a config with inconsistent values is an error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from zero_infinity._torch import FAKE_TENSOR_LOGGER, NEEDS_VALUES, FakeTensorMode
from zero_infinity.activations.block_finder import repeated_blocks
from zero_infinity.block_timing import BlockCall, BlockTimes, find_call, time_block
from zero_infinity.errors import ConfigError
from zero_infinity.models import hugging_face_config
from zero_infinity.models.hugging_face_config import HuggingFaceConfig
from zero_infinity.planner import module_shapes
from zero_infinity.planner.model_shapes import HALF_BYTES, SINGLE_BYTES, ModelShape
from zero_infinity.planner.unit_states import frozen

_DEFAULT_SEQ = 1024
_SHORT_SEQ = 32
# Raised by a forward that reads values: these tensors have none.
_ASKS_FOR_VALUES = (*NEEDS_VALUES, GuardOnDataDependentSymNode)
# Raised if an input is missing. Any other error is the config's fault.
_INPUTS_UNKNOWN = (TypeError, ValueError, AttributeError)


def from_config(path: Path, seq: int | None, *, half: bool = False) -> ModelShape:
    """The model of a config file, or of the one in a directory; `seq` replaces its own sequence length.

    `half`: it computes in 16 bits, and what it saves in float32 all the same is counted so.
    """
    model = _counted(path, seq, half=half)
    stored = HALF_BYTES if half else SINGLE_BYTES
    kept = {name: frozen(stored) for name, states in model.unit_states.items() if states.is_frozen}
    return model.with_states(kept)


def _counted(path: Path, seq: int | None, *, half: bool) -> ModelShape:
    config = hugging_face_config.read_any_config(path)
    length = _length(config, seq)
    with _quiet(), FakeTensorMode():
        try:
            model = config.build(without_memory=True)
            if half and (described := _run_in_half(config, length)) is not None:
                return described
            return _run(config, model, repeated_blocks(model), length)
        except ConfigError:
            raise
        except (*_ASKS_FOR_VALUES, *_INPUTS_UNKNOWN) as error:
            reason = hugging_face_config.reason(error)
        except Exception as error:  # noqa: BLE001 - the model's own code, with numbers that nobody tried
            raise _does_not_work(config, error) from None
    try:
        with torch.device("meta"):
            model = config.build(without_memory=True)
    except Exception as error:  # noqa: BLE001 - the same
        raise _does_not_work(config, error) from None
    name = str(config.settings.model_type)
    print(f"warning: {name} cannot run without values ({reason}); counted by its parameters", file=sys.stderr)
    part = hugging_face_config.part_of_experts(config)
    return module_shapes.outline(model, seq=length, name=name, blocks=repeated_blocks(model), part_of_experts=part)


def _run_in_half(config: HuggingFaceConfig, length: int) -> ModelShape | None:
    """Run with 16-bit parameters; None for a model that does not work with them."""
    model = config.build(without_memory=True)
    halves: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_floating_point() and id(parameter) not in halves:
                values = torch.empty(parameter.shape, dtype=torch.bfloat16)
                halves[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            setattr(module, name, halves.get(id(parameter), parameter))
    try:
        return _run(config, model, repeated_blocks(model), length)
    except Exception:  # noqa: BLE001 - it is run once more as it is, which tells what is wrong
        return None


def check(config: HuggingFaceConfig) -> None:
    """Raise if a model cannot be built from this config, or cannot run, before any memory is allocated for it."""
    with _quiet(), FakeTensorMode():
        try:
            tokens = torch.zeros(1, min(_SHORT_SEQ, config.max_seq or _SHORT_SEQ), dtype=torch.long)
            hugging_face_config.loss_of(config.build(without_memory=True), tokens)
        except _ASKS_FOR_VALUES:
            pass  # may work with real values
        except Exception as error:  # noqa: BLE001 - the model's own code, with numbers that nobody tried
            raise _does_not_work(config, error) from None


def time_a_block(path: Path, seq: int | None, num_sequences: int) -> BlockTimes:
    """Time one block of the model of a config on this machine, with so many sequences at once."""
    config = hugging_face_config.read_any_config(path)
    length = _length(config, seq)
    with _quiet(), FakeTensorMode():
        model = config.build(without_memory=True)
        blocks = repeated_blocks(model)
        if not blocks:
            raise ConfigError(f"{path}: the model has no repeated blocks to time\n  fix:   leave out --calibrate")
        call = _find_call(config, model, blocks[0], length)
    return time_block(call, num_copies=num_sequences)


def _find_call(config: HuggingFaceConfig, model: nn.Module, block: nn.Module, length: int) -> BlockCall:
    for inputs in hugging_face_config.inputs_of(config, model, length):
        try:
            return find_call(model, block, inputs)
        except (*_ASKS_FOR_VALUES, *_INPUTS_UNKNOWN):
            continue
    raise ConfigError(f"{config.path}: the model cannot run without values, so no block of it is timed")


def _length(config: HuggingFaceConfig, seq: int | None) -> int:
    patches = hugging_face_config.num_patches(config)
    if patches is not None:
        if seq is not None:
            raise ConfigError(
                f"--seq is {seq}, but {config.path} reads pictures, of {patches} patches\n  fix:   leave out --seq"
            )
        return patches
    limit = config.max_seq
    length = seq or min(limit or _DEFAULT_SEQ, _DEFAULT_SEQ)
    if limit is not None and length > limit:
        raise ConfigError(f"--seq is {length}, but {config.path} has positions for {limit}\n  fix:   --seq {limit}")
    return length


def _run(config: HuggingFaceConfig, model: nn.Module, blocks: list[nn.Module], length: int) -> ModelShape:
    """Try each kind of inputs in training mode, then in evaluation mode (without randomly dropped layers)."""
    # Without attention a token costs the same in a sequence of any length, and such models run token by token.
    text = config.settings.get_text_config()
    has_attention = getattr(text, "num_attention_heads", None) is not None
    run_length = length if has_attention else min(length, getattr(text, "chunk_size", _SHORT_SEQ))
    failure: Exception = ValueError("what it takes is not known")
    for inputs in hugging_face_config.inputs_of(config, model, run_length):
        for training in (True, False):
            try:
                described = module_shapes.describe(
                    model.train(training),
                    inputs,
                    batch=1,
                    seq=run_length,
                    name=str(config.settings.model_type),
                    dtype_bytes=next(model.parameters()).element_size(),
                    blocks=blocks,
                )
                return replace(described, seq=length)
            except (*_ASKS_FOR_VALUES, *_INPUTS_UNKNOWN) as error:
                failure = error
    raise failure


def _does_not_work(config: HuggingFaceConfig, error: Exception) -> ConfigError:
    return ConfigError(
        f"hf: {config.path}: {config.model_class.__name__} does not work with these values: "
        f"{hugging_face_config.reason(error)}\n"
        "  fix:   values that go together, as in the config.json that a model was saved with"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of an error in a tensor without memory: it is reported in one line here."""
    log = logging.getLogger(FAKE_TENSOR_LOGGER)
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before
