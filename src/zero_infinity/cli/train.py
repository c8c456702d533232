"""`zero-infinity train`: its options and their checks. The training loop is `train_loop.py`.

torch is imported only when the command runs, so that --help and invalid options answer at once.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from zero_infinity.cli import signals
from zero_infinity.cli.number_options import above_zero, integer
from zero_infinity.cli.progress_display import Progress, choose
from zero_infinity.cli.ranks import Ranks, joined, speaks
from zero_infinity.cli.swap_space import with_swap_space
from zero_infinity.config import Config
from zero_infinity.errors import ConfigError
from zero_infinity.models.presets import PRESETS, Shape, preset

if TYPE_CHECKING:
    from zero_infinity.cli.train_checkpoints import SaveOptions
    from zero_infinity.cli.train_loop import TrainJob

DEFAULT_PRESET = "25M"
DTYPES = ("float32", "bfloat16", "float16")
# Element-wise optimizers and their default learning rates.
OPTIMIZERS = {
    "adamw": 1e-3,
    "adam": 1e-3,
    "sgd": 0.1,
    "adagrad": 1e-2,
    "rmsprop": 3e-4,
    "adamax": 2e-3,
    "nadam": 1e-3,
    "radam": 1e-3,
    "adadelta": 1.0,
}
# Weights that are trained already move less in a step, adapters more: --lr is by default this part of the optimizer's.
_PART_OF_LR = {"full": 0.02, "lora": 0.2}
# Options and settings that may differ between ranks. Each rank's cache has its own memory budget; sizes on which ranks
# must agree (buffers, gathered units, tiles) follow from the smallest one.
_OF_ONE_RANK = {
    "data",
    "memory",
    "device_memory",
    "nvme",
    "config",
    "hf",
    "pretrained",
    "model",
    "output",
    "json",
    "log_every",
    "run",
}

EPILOG = """\
examples:
  zero-infinity train --preset 125M --memory 256MiB --steps 20
  zero-infinity train --layers 4 --hidden 256 --heads 4 --seq 128 --data src docs/guide.md --nvme /mnt/nvme
  zero-infinity train --preset 25M --memory 64MiB --steps 5 --trace run.json && zero-infinity report run.json
  zero-infinity train --hf config.json --memory 4GiB --nvme /mnt/a /mnt/b --optimizer sgd --json
  torchrun --nproc-per-node 2 -m zero_infinity train --preset 5M --memory 9MiB --stage 3
  zero-infinity train --preset 25M --memory 64MiB --save checkpoints --save-every 50 --keep 2 --resume
  zero-infinity train --model ~/models/llama --data chats.jsonl --lora 8 --memory 2GiB --output adapters
  zero-infinity train --model ~/models/llama --data notes.txt --memory 2GiB --nvme /mnt/nvme --output tuned

With --model the data goes through the model's own tokenizer: .jsonl files with a row on each line, {"messages": [...]},
{"prompt": "...", "completion": "..."} or {"text": "..."}, or text. Without it, data is bytes.
--batch, --memory and --nvme are per rank.
Ctrl-C (or SIGTERM) finishes the step, saves a checkpoint (with --save), prints the summary, removes the swap space and
exits with code 130 (or 143); a second one stops at once. If a rank is lost, nothing is saved: restart with --resume.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a byte-level GPT on text, or a Hugging Face model on text or conversations, within a memory budget."
    )
    parser.epilog = EPILOG
    model = parser.add_argument_group("model")
    model.add_argument("--preset", metavar="NAME", help=f"one of {', '.join(PRESETS)} (default {DEFAULT_PRESET})")
    sizes = {"layers": "blocks", "hidden": "width", "heads": "attention heads", "seq": "sequence length"}
    for name, text in sizes.items():
        model.add_argument(f"--{name}", type=integer, metavar="N", help=f"{text}, instead of the preset's")
    model.add_argument("--tied", action="store_true", help="share the embedding's weight with the output head")
    model.add_argument(
        "--hf", type=Path, metavar="CONFIG_JSON", help="Hugging Face config of a causal model, random weights"
    )
    model.add_argument(
        "--pretrained", type=Path, metavar="DIR", help="Hugging Face folder of a causal model, its weights; on bytes"
    )
    model.add_argument(
        "--model", type=Path, metavar="DIR", help="Hugging Face folder of a causal model, its weights and its tokenizer"
    )
    model.add_argument("--lora", type=integer, metavar="RANK", help="train adapters of this rank; --model stays as it "
                       "is")  # fmt: skip
    model.add_argument("--lora-targets", nargs="+", default=[], metavar="NAME", help="modules that get adapters "
                       "(default: all linear layers but the head)")  # fmt: skip

    training = parser.add_argument_group("training")
    training.add_argument("--data", type=Path, nargs="+", default=[], metavar="PATH", help="text files or folders "
                          "(default: the source of Python's standard library)")  # fmt: skip
    training.add_argument("--learn", choices=("answers", "everything"), default="answers", help="of .jsonl rows: "
                          "answers and completions, or prompts, too (default answers)")  # fmt: skip
    training.add_argument("--batch", type=integer, default=4, metavar="N", help="sequences per batch (default 4)")
    training.add_argument("--accumulate", type=integer, metavar="N", help="batches per step (default 1)")
    training.add_argument("--steps", type=integer, default=100, metavar="N", help="total number of steps (default 100)")
    training.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer (default adamw)")
    training.add_argument("--lr", type=above_zero, metavar="RATE", help="learning rate (default: by optimizer)")
    training.add_argument(
        "--warmup", type=partial(integer, least=0), default=10, metavar="N", help="warm-up steps of --lr (default 10)"
    )
    training.add_argument("--max-grad-norm", type=above_zero, metavar="NORM", help="clip gradients to this global norm")
    training.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and batches (default 0)")

    places = parser.add_argument_group("memory and storage")
    places.add_argument(
        "--memory", metavar="SIZE", help='host memory for the engine, "256MiB" (default: 70%% of what is available)'
    )
    places.add_argument("--nvme", nargs="+", metavar="DIR", help='directories for swap space; "none": host memory '
                        "only (default: a temporary directory in the current one)")  # fmt: skip
    places.add_argument("--param-dtype", choices=DTYPES, help="dtype of stored parameters (default: the model's)")
    places.add_argument(
        "--verify", action="store_true", default=None, help="check checksums of blocks read from the drive"
    )
    places.add_argument("--config", type=Path, metavar="FILE", help="zi.Config as .json or .toml; options override it")

    ranks = parser.add_argument_group("multiple ranks (with torchrun)")
    ranks.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage: shard 0 nothing, 1 optimizer "
                       "states, 2 also gradients, 3 also parameters (default 3)")  # fmt: skip
    ranks.add_argument("--timeout", type=above_zero, default=1800, metavar="SECONDS", help="how long to wait for other "
                       "ranks (default 1800)")  # fmt: skip

    saving = parser.add_argument_group("checkpoints")
    saving.add_argument("--save", type=Path, metavar="DIR", help="save here at the end and when a signal stops the run")
    saving.add_argument("--save-every", type=integer, metavar="N", help="also save every N steps")
    saving.add_argument("--keep", type=integer, metavar="N", help="keep the newest N checkpoints (default: all)")
    saving.add_argument("--save-in-background", action="store_true", help="continue training while --save-every writes")
    saving.add_argument("--resume", action="store_true", help="continue from the latest checkpoint, if there is one")

    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON lines: each step, then the summary")
    output.add_argument(
        "--log-every", type=integer, metavar="N", help="steps between two lines (default: 20 lines in all)"
    )
    output.add_argument("--output", type=Path, metavar="DIR", help="at the end write what was trained to this new "
                        "folder, as transformers (or PEFT, for adapters) reads it")  # fmt: skip
    output.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace, for zero-infinity report or "
                        "ui.perfetto.dev")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with signals.watched() as watch, joined(args.timeout) as ranks:
        with ExitStack() as stack:
            with ranks.agreed("the settings"):
                model = _model(args)
                from zero_infinity.cli.train_checkpoints import options_of

                save = options_of(args, is_first=ranks.rank == 0)
                _check_output(args, is_first=ranks.rank == 0)
                config = stack.enter_context(with_swap_space(_config(args), args.nvme))
            ranks.all_same("the command's options or settings", _alike(args, config), "the same ones on every rank")
            from zero_infinity.cli.train_loop import train

            summary = train(_job(args, model, save), config, watch, _progress(args, ranks), ranks)
        if ranks.rank == 0:
            if args.json:
                summary.print_json()
            else:
                summary.print(Console())
            if config.trace is not None:
                print(f"written: {config.trace}", file=sys.stderr)
            if watch.requested:
                print(f"stopped by {watch.name} after step {summary.last_step} of {args.steps}", file=sys.stderr)
        return watch.exit_code


def _progress(args: argparse.Namespace, ranks: Ranks) -> Progress:
    if ranks.rank:
        return Progress()
    return choose(as_json=args.json, every=args.log_every or max(1, args.steps // 20))


def _alike(args: argparse.Namespace, config: Config) -> str:
    """Options and settings that every rank must share, as text; paths may differ between machines."""
    options = {name: value for name, value in vars(args).items() if name not in _OF_ONE_RANK and value is not None}
    settings = {name: value for name, value in config.to_dict().items() if name not in _OF_ONE_RANK}
    return ", ".join(f"{name}={value}" for name, value in sorted({**options, **settings}.items()))


def _check_output(args: argparse.Namespace, *, is_first: bool) -> None:
    from zero_infinity.cli.train_output import check_output

    if args.output is not None and is_first:
        check_output(args.output)


def _job(args: argparse.Namespace, model: Shape | Path, save: SaveOptions | None) -> TrainJob:
    from zero_infinity.cli.train_loop import TrainJob
    from zero_infinity.cli.train_workload import DataJob, FineTune

    names = ("steps", "optimizer", "warmup", "pretrained", "output")
    same = {name: getattr(args, name) for name in names}
    lr = OPTIMIZERS[args.optimizer]
    source: Shape | Path | FineTune = model
    if args.model is not None:
        lr *= _PART_OF_LR["full" if args.lora is None else "lora"]
        source = FineTune(args.model, args.lora, tuple(args.lora_targets), everything=args.learn == "everything")
    data = DataJob(tuple(args.data), args.seq, args.batch, args.seed)
    return TrainJob(model=source, lr=lr if args.lr is None else args.lr, data=data, save=save, **same)


def _model(args: argparse.Namespace) -> Shape | Path:
    """The model, or where it is; a mistake in the combination of options is told."""
    if args.model is None:
        for name, given in (("lora", args.lora), ("lora-targets", args.lora_targets)):
            if given:
                raise ConfigError(f"--{name} needs --model DIR\n  fix:   the folder of the model to adapt")
    elif args.lora_targets and args.lora is None:
        raise ConfigError("--lora-targets needs --lora RANK\n  fix:   --lora 8")
    source = args.model or args.pretrained or args.hf
    if source is None:
        shape = {name: value for name in ("layers", "hidden", "heads", "seq") if (value := getattr(args, name))}
        return replace(preset(args.preset or DEFAULT_PRESET), **shape, tied=args.tied)
    option = next(name for name in ("model", "pretrained", "hf") if getattr(args, name))
    others = {"model": ("pretrained", "hf"), "pretrained": ("hf",), "hf": ()}[option]
    given = [name for name in ("preset", "layers", "hidden", "heads", "tied", *others) if getattr(args, name)]
    if given:
        raise ConfigError(f"--{option} takes the model's shape from {source}; leave out --{', --'.join(given)}")
    config: Path = source
    return config


def _config(args: argparse.Namespace) -> Config:
    """The settings of --config, overridden by the options."""
    names = ("memory", "param_dtype", "max_grad_norm", "stage", "verify", "trace")
    options = {"gradient_accumulation_steps": args.accumulate, **{name: getattr(args, name) for name in names}}
    changes: dict[str, object] = {name: value for name, value in options.items() if value is not None}
    if args.nvme is not None:
        changes["nvme"] = None if args.nvme == ["none"] else args.nvme
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = (Config.from_file(args.config) if args.config else Config()).replace(**changes)
    for warning in caught if speaks() else []:
        print(f"warning: {warning.message}", file=sys.stderr)
    return config
