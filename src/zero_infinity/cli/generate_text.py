"""Generates text with the model and the tokenizer of a Hugging Face folder, and counts what that moves."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from zero_infinity import api
from zero_infinity.config import Config
from zero_infinity.errors import ConfigError
from zero_infinity.models.hugging_face_config import reason
from zero_infinity.models.hugging_face_tokenizer import ADAPTER_CONFIG, read_tokenizer


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """What to generate."""

    folder: Path
    prompt: list[str]
    chat: bool
    max_new_tokens: int
    temperature: float | None  # None: the likeliest token
    seed: int
    device: str | None
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Generated:
    """What was generated, and what it took."""

    texts: list[str]  # without the prompts
    num_tokens: int  # of each prompt's text
    seconds: float  # of generating
    first_seconds: float  # until the first token
    bytes_read: int  # from NVMe, after the first token
    model_bytes: int
    memory_peak: int

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_read / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


@dataclass(slots=True)
class _Tokens:
    """Called by transformers with the prompt and then with each token of every sequence: counts, and shows progress."""

    model: Any
    tokenizer: Any
    shown: bool
    num_tokens: int = -1  # the prompt comes first
    start: float = field(default_factory=time.perf_counter)
    first_seconds: float = 0.0
    read_at_first: int = 0
    _tokens: list[int] = field(default_factory=list)  # of a single sequence
    _printed: str = ""

    def put(self, value: torch.Tensor) -> None:
        self.num_tokens += 1
        if self.num_tokens == 0:
            return
        if self.num_tokens == 1:
            self.first_seconds = time.perf_counter() - self.start
            self.read_at_first = api.stats(self.model).bytes_read
        if self.shown and value.numel() == 1:
            self._tokens.append(int(value))
            text = self.tokenizer.decode(self._tokens, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # part of a character
                print(text[len(self._printed) :], end="", flush=True)
                self._printed = text
        elif self.shown and sys.stderr.isatty():
            seconds = time.perf_counter() - self.start
            print(f"\r{self.num_tokens} tokens, {seconds:.1f} s ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.shown and self._tokens:
            print(flush=True)
        elif self.shown and sys.stderr.isatty():
            print(file=sys.stderr)


def generate(job: GenerateJob, config: Config, *, shown: bool) -> Generated:
    """Load the model within the budget of `config`, and generate; `shown`: print texts (one: as it grows)."""
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise ConfigError(
            "zero-infinity generate needs transformers\n  fix:   pip install 'zero-infinity[hf]'"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer, inputs = _inputs(job, transformers)
    model = _model(job, config, transformers)
    inputs = {name: value.to(next(model.parameters()).device) for name, value in inputs.items()}
    asked: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if job.temperature is not None:
        torch.manual_seed(job.seed)
        asked = {"do_sample": True, "temperature": job.temperature}
    tokens = _Tokens(model, tokenizer, shown)
    output = model.generate(
        **inputs,
        **asked,
        max_new_tokens=job.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        streamer=tokens,
    )
    seconds = time.perf_counter() - tokens.start
    skipped = 0 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    texts = [tokenizer.decode(row[skipped:], skip_special_tokens=True) for row in output]
    if shown and len(texts) > 1:
        for prompt, text in zip(job.prompt, texts, strict=True):
            print(f"--- {prompt}\n{text}")
    stats = api.stats(model)
    generated = Generated(
        texts,
        tokens.num_tokens,
        seconds,
        tokens.first_seconds,
        stats.bytes_read - tokens.read_at_first,
        stats.parameter_bytes,
        stats.memory_peak,
    )
    api.close(model)
    return generated


def _inputs(job: GenerateJob, transformers: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    if (job.folder / "config.json").is_file():
        _settings(job.folder, transformers)  # before the tokenizer, which would read it, too
    tokenizer = read_tokenizer(job.folder)
    prompts: list[str] = job.prompt
    if job.chat:
        if not tokenizer.chat_template:
            raise ConfigError(f"the tokenizer of {job.folder} has no chat template\n  fix:   leave out --chat")
        messages = ([{"role": "user", "content": prompt}] for prompt in prompts)
        prompts = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages]
    tokenizer.padding_side = "left"
    encoded = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=not job.chat)
    names = ("input_ids", "attention_mask")
    return tokenizer, {name: encoded[name] for name in names if name in encoded}


def _settings(folder: Path, transformers: Any) -> Any:
    """The model's config. Code that comes with it ("auto_map") is not run, and nobody is asked whether it should be."""
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - each model's config validates its values differently
        raise ConfigError(
            f"{folder} has no config.json that can be read ({reason(error)})\n"
            "  fix:   a model that transformers has; code that comes with a model is not run"
        ) from None


def _base_of(folder: Path) -> Path:
    """The folder of the weights: for adapters that of their base."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return folder
    name = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not isinstance(name, str) or not (Path(name) / "config.json").is_file():
        raise ConfigError(
            f"{folder} has adapters for {name!r}, which is no folder with a config.json\n"
            f'  fix:   the folder of that model as "base_model_name_or_path" in {folder / ADAPTER_CONFIG}'
        )
    return Path(name)


def _model(job: GenerateJob, config: Config, transformers: Any) -> Any:
    base = _base_of(job.folder)
    seq2seq = _settings(base, transformers).is_encoder_decoder
    kind = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    with api.init(config):
        model = kind.from_pretrained(base, dtype=job.dtype or "auto", local_files_only=True, trust_remote_code=False)
    if base != job.folder:
        model = import_module("peft").PeftModel.from_pretrained(model, job.folder)
    return api.prepare(model.eval(), config=config, device=job.device)
