"""Twenty configurations drawn at random: every prediction is written before the first run, then each is trained.

Owns what is drawn and the comparison. One rank on the CPU. The machine's profile is measured first, as a user would by
`zero-infinity bench hardware`.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import zero_infinity as zi
from zero_infinity.byte_sizes import format_bytes, format_seconds
from zero_infinity.cli.bench_hardware import profile_text, take_figures
from zero_infinity.planner import hardware
from zero_infinity.planner.hardware import Hardware

_NUM_STEPS = 3  # that are timed, after those in which the order is learned
_WARM_UP_STEPS = 6
_DRIVE_BYTES = 128 << 20
_KINDS = ("llama", "qwen3", "gpt2", "mistral")
_ADAM_BYTES = 12


@dataclass(frozen=True, slots=True)
class RandomRun:
    """One configuration."""

    kind: str
    layers: int
    hidden: int
    vocabulary: int
    batch: int
    seq: int
    accumulation: int
    recompute: bool
    lora: int  # 0: everything is trained
    part: float  # of the states, that `memory` is
    optimizer: str

    @property
    def label(self) -> str:
        extra = [f"x{self.accumulation}"] if self.accumulation > 1 else []
        extra += ["recomputed"] if self.recompute else []
        extra += [f"LoRA {self.lora}"] if self.lora else []
        name = f"{self.kind} {self.layers} x {self.hidden}, {self.batch} x {self.seq}, {self.optimizer}"
        return ", ".join([name, f"1/{1 / self.part:.0f}", *extra])


@dataclass(frozen=True, slots=True)
class Prediction:
    seconds: float
    calibrated_seconds: float
    read: int
    written: int


@dataclass(frozen=True, slots=True)
class Measurement:
    seconds: float
    read: int
    written: int


def draw(seed: int, number: int) -> list[RandomRun]:
    chance = random.Random(seed)
    runs = []
    for _ in range(number):
        lora = chance.choice((0, 0, 8, 16))
        runs.append(
            RandomRun(
                kind=chance.choice(_KINDS),
                layers=chance.randint(3, 8),
                hidden=64 * chance.randint(4, 10),
                vocabulary=chance.choice((1000, 5000, 16000)),
                batch=chance.randint(1, 4),
                seq=chance.choice((64, 128, 256)),
                accumulation=chance.choice((1, 1, 2, 3)),
                recompute=chance.random() < 0.4,
                lora=lora,
                part=1 / chance.choice((2, 4, 8)),
                optimizer="adamw" if lora else chance.choice(("adamw", "adamw", "sgd", "muon")),
            )
        )
    return runs


class _Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def build(run: RandomRun) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    heads = run.hidden // 64
    settings: dict[str, Any] = {
        "num_hidden_layers": run.layers,
        "hidden_size": run.hidden,
        "num_attention_heads": heads,
        "vocab_size": run.vocabulary,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    if run.kind != "gpt2":
        settings |= {"num_key_value_heads": heads, "intermediate_size": 64 * round(run.hidden / 24), "head_dim": 64}
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(run.kind, **settings))
    if run.lora:
        model.requires_grad_(False)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and "lm_head" not in name:
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, _Adapted(module, run.lora))
    return model


def optimizer_of(run: RandomRun, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if run.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=1e-4)
    if run.optimizer == "muon":
        inside = [p for name, p in model.named_parameters() if (p.dim() == 2 and ".layers." in name) or ".h." in name]
        inside = [p for p in inside if p.dim() == 2]
        rest = [p for p in trained if not any(p is other for other in inside)]
        return zi.combine_optimizers(torch.optim.Muon(inside, lr=1e-4), torch.optim.AdamW(rest, lr=1e-4, fused=True))
    return torch.optim.AdamW(trained, lr=1e-4, fused=True)


def config_of(run: RandomRun, model: nn.Module, directory: Path) -> zi.Config:
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    largest = max(p.numel() for p in model.parameters())
    # The largest layer with its states has to fit.
    memory = max(int(run.part * (4 * frozen + _ADAM_BYTES * trained)), 20 * largest + (8 << 20))
    return zi.Config(
        memory=memory,
        nvme=directory,
        gradient_accumulation_steps=run.accumulation,
        checkpoint_activations=run.recompute,
    )


def predict(run: RandomRun, machine: Hardware, directory: Path) -> Prediction:
    torch.manual_seed(0)
    model = build(run)
    tokens = torch.zeros(run.batch, run.seq, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    plain, timed = (
        zi.plan(
            model,
            optimizer_of(run, model),
            config_of(run, model, directory),
            hardware=machine,
            inputs=inputs,
            calibrate=calibrate,
        ).outcome
        for calibrate in (False, True)
    )
    return Prediction(plain.seconds, timed.seconds, plain.read_bytes, plain.written_bytes)


def measure(run: RandomRun, directory: Path) -> Measurement:
    torch.manual_seed(0)
    model = build(run)
    optimizer = optimizer_of(run, model)
    model, optimizer = zi.prepare(model, optimizer, config_of(run, model, directory))
    tokens = torch.randint(0, run.vocabulary, (run.batch, run.seq))
    seconds = []
    before = after = zi.stats(model)
    for _ in range(_WARM_UP_STEPS + _NUM_STEPS):
        before = after
        start = time.perf_counter()
        for _ in range(run.accumulation):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        zi.synchronize(model)
        seconds.append(time.perf_counter() - start)
        after = zi.stats(model)
    del model, optimizer
    gc.collect()
    moved = after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written
    return Measurement(statistics.median(seconds[_WARM_UP_STEPS:]), *moved)


def compare(directory: Path, seed: int, number: int, *, as_json: bool) -> str:
    """Draw, predict all, then run all; returns the JSON."""
    console = Console(stderr=True)
    runs = draw(seed, number)
    machine = hardware.parse(profile_text(take_figures([str(directory)], _DRIVE_BYTES), "this machine", "now"), "here")
    with tempfile.TemporaryDirectory(dir=directory) as swap:
        predictions = []
        for run in runs:
            predictions.append(predict(run, machine, Path(swap)))
            console.print(f"predicted: {run.label}: {format_seconds(predictions[-1].calibrated_seconds)}", style="dim")
        measurements = []
        for run in runs:
            measurements.append(measure(run, Path(swap)))
            console.print(f"measured: {run.label}: {format_seconds(measurements[-1].seconds)}", style="dim")
    if not as_json:
        _print(Console(), runs, predictions, measurements)
    rows = [
        {"label": run.label, **asdict(run), "predicted": asdict(prediction), "measured": asdict(measured)}
        for run, prediction, measured in zip(runs, predictions, measurements, strict=True)
    ]
    return json.dumps({"seed": seed, "random_runs": rows}, indent=1)


def _print(console: Console, runs: list[RandomRun], predictions: list[Prediction], found: list[Measurement]) -> None:
    table = Table("configuration", title="random configurations: one step", title_justify="left")
    for heading in ("read", "written", "bytes", "planned", "calibrated", "measured", "error", "calibrated"):
        table.add_column(heading, justify="right")
    errors: dict[str, list[float]] = {"rates": [], "calibrated": []}
    num_exact = 0
    for run, planned, measured in zip(runs, predictions, found, strict=True):
        off = planned.read + planned.written - measured.read - measured.written
        exact = (planned.read, planned.written) == (measured.read, measured.written)
        num_exact += exact
        errors["rates"].append(planned.seconds / measured.seconds - 1)
        errors["calibrated"].append(planned.calibrated_seconds / measured.seconds - 1)
        table.add_row(
            run.label,
            format_bytes(measured.read),
            format_bytes(measured.written),
            "exact" if exact else f"{off / max(1, measured.read + measured.written):+.2%}",
            format_seconds(planned.seconds),
            format_seconds(planned.calibrated_seconds),
            format_seconds(measured.seconds),
            *(f"{values[-1]:+.0%}" for values in errors.values()),
        )
    console.print(table)
    for name, values in errors.items():
        sizes = [abs(value) for value in values]
        console.print(f"{name}: time off by {statistics.median(sizes):.0%} (median), {max(sizes):.0%} at most")
    console.print(f"bytes exact in {num_exact} of {len(runs)}")
