"""Tokens a second of a model of which half is in memory, beside accelerate's offloading to disk.

One process, one Llama with random weights in float32 and three copies of it: ours, accelerate's `disk_offload`, and
accelerate's `dispatch_model` with half of the layers in memory. They take turns; before each token the page cache is
emptied of accelerate's files, since ours are read past it. The tokens have to be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import zero_infinity as zi
from benchmarks.provenance import keep, provenance
from zero_infinity.byte_sizes import format_bytes

_EPILOG = """\
examples:
  python -m benchmarks generate /mnt/nvme
  python -m benchmarks generate /mnt/nvme --layers 24 --hidden 1024 --rounds 5 --out bench-out
"""
_WARM_UP = 3  # tokens of each turn that are not measured: the prompt, and the order that is learnt


@dataclass(slots=True)
class Contender:
    """One copy of the model, and what it took for each measured token."""

    name: str
    model: Any
    drop_cache: Callable[[], None]
    bytes_read: Callable[[], int]
    seconds: list[float] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Figures:
    """As they go into the JSON file."""

    name: str
    tokens_per_second: float
    bytes_per_token: int  # of ours only; accelerate does not count
    same_tokens: bool


class _Clock:
    """Called by transformers with each token."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._count = 0
        self._begin()

    def _begin(self) -> None:
        self._contender.drop_cache()
        self._read = self._contender.bytes_read()
        self._start = time.perf_counter()

    def put(self, _: torch.Tensor) -> None:
        self._count += 1
        if self._count > 1 + _WARM_UP:  # the first call has the prompt
            self._contender.seconds.append(time.perf_counter() - self._start)
            self._contender.read.append(self._contender.bytes_read() - self._read)
        self._begin()

    def end(self) -> None:
        pass


def measure(folder: Path, *, layers: int, hidden: int, tokens: int, rounds: int) -> tuple[list[Figures], int]:
    """Let the contenders take turns; return their figures and the model's bytes."""
    contenders, model_bytes = _contenders(folder, layers, hidden)
    prompt = torch.arange(1, 9)[None]
    for _ in range(rounds):
        for contender in contenders:
            output = contender.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0,
                min_new_tokens=tokens + _WARM_UP, max_new_tokens=tokens + _WARM_UP, streamer=_Clock(contender),
            )  # fmt: skip
            contender.tokens = output[0].tolist()
    figures = [
        Figures(c.name, 1 / median(c.seconds), int(median(c.read)), c.tokens == contenders[0].tokens)
        for c in contenders
    ]
    return figures, model_bytes


def _contenders(folder: Path, layers: int, hidden: int) -> tuple[list[Contender], int]:
    from accelerate import disk_offload, dispatch_model

    swap, all_files, half_files = (folder / name for name in ("swap", "all", "half"))
    swap.mkdir()
    ours, whole, half = (_llama(layers, hidden) for _ in range(3))
    model_bytes = sum(p.nbytes for p in ours.parameters())
    ours = zi.prepare(ours, config=zi.Config(memory=model_bytes // 2, nvme=swap))
    disk_offload(whole, all_files, torch.device("cpu"))
    device_map: dict[str, Any] = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    device_map |= {f"model.layers.{n}": "cpu" if n < layers // 2 else "disk" for n in range(layers)}
    half = dispatch_model(half, device_map | {"lm_head": "disk"}, main_device="cpu", offload_dir=half_files)
    nothing: Callable[[], int] = lambda: 0  # noqa: E731
    return [
        Contender("zero-infinity, half in memory", ours, lambda: None, lambda: zi.stats(ours).bytes_read),
        Contender("accelerate, disk_offload", whole, lambda: _drop(all_files), nothing),
        Contender("accelerate, half in memory", half, lambda: _drop(half_files), nothing),
    ], model_bytes


def _llama(layers: int, hidden: int) -> Any:
    import transformers

    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 16 * 16, num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64), max_position_embeddings=512, eos_token_id=None,
    )  # fmt: skip
    kind: Any = transformers.LlamaForCausalLM
    return kind(settings).eval()


def _drop(folder: Path) -> None:
    """Empty the page cache of a folder's files."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="tokens a second with half of the model in memory, against accelerate",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="on the drive to measure")
    for name, default in {"layers": 16, "hidden": 768, "tokens": 5, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default {default}")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the figures there, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    source = provenance(args.directory)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        sizes = {name: getattr(args, name) for name in ("layers", "hidden", "tokens", "rounds")}
        figures, model_bytes = measure(Path(folder), **sizes)
    print(f"Llama of {args.layers} x {args.hidden}, {format_bytes(model_bytes)} in float32; {source.in_words()}\n")
    print("| | tokens/s | read a token / model | same tokens |\n|---|---:|---:|---|")
    for row in figures:
        share = f"{row.bytes_per_token / model_bytes:.2f}" if row.bytes_per_token else ""
        print(f"| {row.name} | {row.tokens_per_second:.2f} | {share} | {'yes' if row.same_tokens else 'NO'} |")
    told = {"provenance": asdict(source), "model_bytes": model_bytes, "rows": [asdict(row) for row in figures]}
    keep(json.dumps(told, indent=2), "generate", args.out)
    return 0 if all(row.same_tokens for row in figures) else 1
