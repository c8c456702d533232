"""Options of `plan` and `simulate` on how a model is trained: method, optimizer, accumulation, a DeepSpeed file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from zero_infinity.cli.number_options import integer
from zero_infinity.config import read_settings
from zero_infinity.deepspeed_config import Verdict, convert
from zero_infinity.errors import ConfigError
from zero_infinity.planner.methods import quantisation_names, updated_by, with_adapters
from zero_infinity.planner.model_shapes import ModelShape
from zero_infinity.planner.unit_states import OptimizerStates, StateBytes, optimizer_named, optimizer_names

_MAX_ACCUMULATION = 10**6
_MAX_RANK = 10**4
_HALF_BYTES, _SINGLE_BYTES = 2, 4
# DeepSpeed's names of optimizers.
_SAME = {"adam": "adamw", "onebitadam": "adamw", "cpuadam": "adamw", "fusedadam": "adamw"}


def add_options(parser: argparse.ArgumentParser) -> None:
    method = parser.add_argument_group("method")
    method.add_argument(
        "--optimizer", metavar="NAME", help=f"{', '.join(optimizer_names())} (default: adamw; its states in float32)"
    )
    method.add_argument(
        "--accumulation",
        type=partial(integer, most=_MAX_ACCUMULATION),
        metavar="N",
        help="backward passes for each step, each of --batch sequences (default 1)",
    )
    method.add_argument(
        "--chunked-loss", action="store_true", help="the loss makes the logits of a few tokens at a time (fused losses)"
    )
    method.add_argument("--clip", action="store_true", help="clip the gradient norm: updates wait for backward's end")
    method.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage over ranks (default 3)")
    method.add_argument(
        "--lora", type=partial(integer, most=_MAX_RANK), metavar="RANK",
        help="freeze the model, and train adapters of this rank beside each linear layer in its blocks",
    )  # fmt: skip
    method.add_argument(
        "--quantised", choices=quantisation_names(), help="the frozen weights are stored so; with --lora"
    )
    method.add_argument(
        "--deepspeed", type=Path, metavar="FILE", help="take what is not given here from a DeepSpeed config"
    )


def take_deepspeed(args: argparse.Namespace) -> None:
    """Fill in options that were not given from the DeepSpeed file, and say what became of its other fields."""
    if args.deepspeed is None:
        return
    given = read_settings(args.deepspeed)
    converted = convert(given)
    settings = converted.settings
    _default(args, "stage", settings.get("stage"))
    _default(args, "accumulation", settings.get("gradient_accumulation_steps"))
    batch = given.get("train_micro_batch_size_per_gpu")
    _default(args, "batch", float(batch) if isinstance(batch, int) else None)
    _default(args, "dtype", "mixed" if "param_dtype" in settings else "float32")
    args.clip = args.clip or settings.get("max_grad_norm") is not None
    args.offload_activations = args.offload_activations or bool(settings.get("offload_activations"))
    if args.optimizer is None:
        args.optimizer = _optimizer(given)
    for note in converted.notes:
        if note.verdict in (Verdict.NOT_SUPPORTED, Verdict.UNKNOWN):
            print(f"note: {args.deepspeed}: {note.field} is not planned: {note.text}", file=sys.stderr)


def _default(args: argparse.Namespace, name: str, value: object) -> None:
    if getattr(args, name) is None and value is not None and value != "auto":
        setattr(args, name, value)


def _optimizer(given: Mapping[str, object]) -> str | None:
    table = given.get("optimizer")
    if not isinstance(table, dict) or not isinstance(table.get("type"), str):
        return None
    name = str(table["type"]).lower()
    momentum = isinstance(table.get("params"), dict) and table["params"].get("momentum")
    return "sgd-momentum" if name == "sgd" and momentum else _SAME.get(name, name)


def optimizer_of(args: argparse.Namespace) -> OptimizerStates:
    return optimizer_named(args.optimizer or "adamw")


def states_of(args: argparse.Namespace, *, half: bool) -> StateBytes:
    """Bytes for each parameter that is updated in slices."""
    optimizer = optimizer_of(args)
    elementwise = optimizer_named("adamw") if optimizer.passes else optimizer
    return elementwise.widths(_HALF_BYTES if half else _SINGLE_BYTES)


def with_method(args: argparse.Namespace, model: ModelShape, *, half: bool) -> ModelShape:
    """The model as it is trained."""
    parameter_bytes = _HALF_BYTES if half else _SINGLE_BYTES
    if args.chunked_loss:
        model = model.with_chunked_loss()
    if args.lora is not None:
        model = with_adapters(model, args.lora, parameter_bytes=parameter_bytes, quantised=args.quantised)
    elif args.quantised is not None:
        raise ConfigError(
            f"--quantised {args.quantised} weights are frozen, so something else must be trained\n"
            "  fix:   --lora 16 beside it"
        )
    return updated_by(model, optimizer_of(args), parameter_bytes)
