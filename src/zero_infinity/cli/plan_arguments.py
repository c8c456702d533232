"""Options that `plan` and `simulate` share: model, hardware, job. Only a config.json imports torch."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from zero_infinity.byte_sizes import parse_bytes
from zero_infinity.cli import plan_methods
from zero_infinity.cli.number_options import above_zero, integer
from zero_infinity.errors import ConfigError
from zero_infinity.planner import decoders
from zero_infinity.planner import hardware as profiles
from zero_infinity.planner import model_shapes as models
from zero_infinity.planner.calibration import calibrated
from zero_infinity.planner.hardware import Hardware, TierKind
from zero_infinity.planner.model_shapes import ModelShape
from zero_infinity.planner.training_job import HomeRule, TrainingJob, Workload

_DTYPES = ("float32", "mixed")
_MAX_COUNT = 10**7  # of anything; more is a typing error
_MAX_LAYERS = 10**4

_count = partial(integer, most=_MAX_COUNT)


def add_options(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", metavar="NAME", help=f"{', '.join(decoders.all_names())}; or the path of a Hugging Face config.json"
    )
    model.add_argument(
        "--layers", type=partial(integer, most=_MAX_LAYERS), metavar="N", help="number of blocks, instead of --model"
    )
    for name, text in (("hidden", "width"), ("heads", "attention heads")):
        model.add_argument(f"--{name}", type=_count, metavar="N", help=f"{text}, instead of --model")
    model.add_argument(
        "--vocabulary", type=_count, metavar="N", help="vocabulary size, with --layers (default: no embeddings)"
    )
    model.add_argument("--seq", type=_count, metavar="N", help="tokens per sequence (default: the model's own)")
    machine = parser.add_argument_group("hardware")
    machine.add_argument("--hardware", metavar="PROFILE", help=f"{', '.join(profiles.names())}; or a "
                         ".toml file, such as zero-infinity bench hardware writes")  # fmt: skip
    machine.add_argument("--nodes", type=_count, default=1, metavar="N", help="number of nodes (default 1)")
    machine.add_argument("--gpus", type=_count, metavar="N", help="devices per node that take part (default: all)")
    machine.add_argument("--memory", metavar="SIZE", help="host memory per node for the engine (default: 70%% of "
                         "what activations leave)")  # fmt: skip
    machine.add_argument("--device-memory", metavar="SIZE", help="memory per device for parameters (default: what "
                         "activations and states leave)")  # fmt: skip
    machine.add_argument(
        "--nvme", metavar="DIR", help='directory for nvme= in the printed Config; "none": plan without storage'
    )
    machine.add_argument("--calibrate", action="store_true", help="time one block of the model on this machine, which "
                         "is the one that is planned (with --model config.json)")  # fmt: skip
    training = parser.add_argument_group("training")
    training.add_argument(
        "--batch",
        type=partial(above_zero, most=_MAX_COUNT),
        metavar="N",
        help="sequences per device and backward pass (default 1)",
    )
    training.add_argument("--dtype", choices=_DTYPES, help="float32 (12 bytes per parameter with AdamW) or mixed: "
                          "16-bit with float32 master copies (14) (default: mixed; float32 on a CPU)")  # fmt: skip
    training.add_argument("--interval", type=int, default=1, metavar="N", help="blocks per activation checkpoint; "
                          "0: no recomputation (default 1)")  # fmt: skip
    training.add_argument("--offload-activations", action="store_true", help="put activation checkpoints on the "
                          "slowest tier in use (default: where they fit)")  # fmt: skip
    plan_methods.add_options(parser)
    training.add_argument("--after-backward", action="store_true", help="update after backward instead of during it")
    training.add_argument("--no-overlap", action="store_true", help="overlap nothing: the worst case")
    training.add_argument("--placement", choices=list(HomeRule), default=HomeRule.ENGINE.value, help="engine: "
                          "all on the slowest tier in use; paper: ZeRO-Infinity's rule (default: engine)")  # fmt: skip
    for option, what in (("parameters", "parameters"), ("optimizer", "optimizer states")):
        training.add_argument(f"--{option}-on", metavar="TIER", help=f"tier for {what}, instead of the placement's")


def hardware_of(args: argparse.Namespace) -> Hardware:
    hardware = profiles.load(args.hardware)
    if args.gpus is not None and args.gpus > hardware.devices_per_node:
        print(
            f"note: a node of {hardware.name} has {hardware.devices_per_node} in its profile; {args.gpus} are planned "
            "with a host link each, on the same memory, cores and drives",
            file=sys.stderr,
        )
        hardware = hardware.with_devices(args.gpus)
    if args.nvme == "none":
        hardware = replace(hardware, tiers=tuple(t for t in hardware.tiers if t.kind is not TierKind.STORAGE))
    return hardware


def job_of(args: argparse.Namespace, hardware: Hardware) -> TrainingJob:
    if args.interval > 1 and args.placement == HomeRule.ENGINE:
        raise ConfigError(
            f"--interval {args.interval} needs --placement paper: the engine checkpoints every block, not every "
            f"{args.interval} blocks\n"
            "  fix:   --interval 1 (checkpoint_activations=True) or 0, or --placement paper"
        )
    if args.offload_activations and not args.interval:
        raise ConfigError(
            "--offload-activations needs activation checkpoints, but --interval is 0\n"
            "  fix:   --interval 1, or leave out --offload-activations"
        )
    return TrainingJob(
        batch=args.batch if args.batch is not None else 1.0,
        accumulation=args.accumulation or 1,
        clips=args.clip,
        stage=3 if args.stage is None else args.stage,
        num_nodes=args.nodes,
        devices_per_node=args.gpus,
        states=plan_methods.states_of(args, half=is_half(args, hardware)),
        memory=_size("--memory", args.memory),
        device_memory=_size("--device-memory", args.device_memory),
        offload_checkpoints=True if args.offload_activations else None,
        interval=args.interval,
        overlap=not args.no_overlap,
        early_update=not args.after_backward,
        placement=HomeRule(args.placement),
        parameters_on=args.parameters_on,
        optimizer_on=args.optimizer_on,
    )


def is_half(args: argparse.Namespace, hardware: Hardware) -> bool:
    """True if values are stored in 16 bits."""
    return args.dtype == "mixed" if args.dtype is not None else hardware.device is not None


def model_of(args: argparse.Namespace, hardware: Hardware, seq: int | None = None) -> ModelShape:
    """The model as it is trained; `seq` in place of the sequence length given."""
    half = is_half(args, hardware)
    return plan_methods.with_method(args, _model_of(args, seq or args.seq, half=half), half=half)


def calibrated_model(args: argparse.Namespace, model: ModelShape, hardware: Hardware, job: TrainingJob) -> ModelShape:
    """With --calibrate the times of the model's operators are those of this machine."""
    if not args.calibrate:
        return model
    if args.model is None or not (args.model.endswith(".json") or Path(args.model).is_dir()):
        raise ConfigError(
            "--calibrate runs one block of a real model, and only a config.json says how to build one\n"
            "  fix:   --model config.json, or leave out --calibrate"
        )
    if hardware.device is not None:
        raise ConfigError(
            f"--calibrate times this machine's CPU, but a device of {hardware.name} computes\n"
            "  fix:   a profile of this machine (zero-infinity bench hardware DIR -o mine.toml), or leave it out"
        )
    from zero_infinity.cli.hugging_face_shape import time_a_block

    times = time_a_block(Path(args.model), args.seq, max(1, math.ceil(job.batch)))
    return calibrated(Workload(model, hardware, job), times.forward, times.backward)


def _model_of(args: argparse.Namespace, seq: int | None, *, half: bool) -> ModelShape:
    numbers = [name for name in ("layers", "hidden", "heads") if getattr(args, name)]
    if args.model is not None:
        if numbers or args.vocabulary:
            raise ConfigError(
                "--model has its own shape\n  fix:   leave out --layers, --hidden, --heads and --vocabulary"
            )
        if args.model.endswith(".json") or Path(args.model).is_dir():
            from zero_infinity.cli.hugging_face_shape import from_config

            return from_config(Path(args.model), seq, half=half)
        if "/" in args.model:
            raise ConfigError(_no_such_folder(args.model))
        return decoders.named(args.model, seq)
    if len(numbers) < 3:
        raise ConfigError(
            "which model?\n  fix:   --model gpt3-13b, --model config.json, or --layers, --hidden and --heads"
        )
    if args.hidden % args.heads:
        raise ConfigError(
            f"--heads {args.heads} do not divide --hidden {args.hidden}: each head has hidden / heads elements\n"
            f"  fix:   --heads {_nearest_divisor(args.hidden, args.heads)}, or "
            f"--hidden {max(1, round(args.hidden / args.heads)) * args.heads}"
        )
    return models.transformer(
        args.layers, args.hidden, args.heads, seq or 1024, vocabulary=args.vocabulary or 0, keeps_scores=False
    )


def check_drive(args: argparse.Namespace) -> None:
    """Refuse what is no directory. One that is not here may be on the machine that is planned: say so."""
    if args.nvme in (None, "none"):
        return
    path = Path(args.nvme)
    if not args.nvme or (path.exists() and not path.is_dir()):
        raise ConfigError(
            f"--nvme {args.nvme!r} is not a directory\n"
            "  fix:   a directory on the drive; none to plan without storage; or leave it out"
        )
    if not path.exists():
        print(
            f"note: --nvme {args.nvme} does not exist on this machine; it is only copied into the printed Config, and "
            "the drive that is planned is the profile's",
            file=sys.stderr,
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, min(number, 2 * wanted) + 1) if number % d == 0), key=lambda d: abs(d - wanted))


def _no_such_folder(name: str) -> str:
    """A path that is not there, or a repository's name on the hub."""
    own_name = name.rpartition("/")[2]
    known = f"--model {own_name.lower()}; or " if own_name.lower() in decoders.all_names() else ""
    return (
        f"--model {name}: there is no such folder, and nothing is downloaded\n"
        f"  fix:   {known}hf download {name} config.json --local-dir {own_name}, then --model {own_name}"
    )


def _size(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        num_bytes = parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not num_bytes:
        raise ConfigError(f"{option} is 0; accepted: a size above zero")
    return num_bytes
