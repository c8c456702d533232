"""One process of the benchmark `finetune`: trains, resumes or generates as its argument says, and prints JSON.

Started as `python -m benchmarks.finetune.trial JOB`, inside of a control group. What it does is what the how-to guides
on the Trainer, PEFT and inference say.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch.utils.data import Dataset

import zero_infinity as zi
from zero_infinity.integrations.transformers import ZeroInfinityTrainer

hf: Any = transformers  # its types do not know what its functions accept
# Hidden size, layers, heads, key-value heads, size of the feed-forward, words.
SHAPES = {"1.1b": (2048, 22, 32, 4, 5632, 32000), "tiny": (64, 4, 4, 2, 160, 256)}


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does."""

    method: str  # "make", "lora", "qlora", "full" or "generate"
    model: str  # a folder
    work: str  # swap files and checkpoints go there
    shape: str
    memory: int  # of the engine
    steps: int
    save_at: int  # the step
    length: int
    resumes: bool = False  # from the checkpoint of that step


@dataclass(slots=True)
class Done:
    """What it took. Bytes are those of the last step, or of a token."""

    num_parameters: int = 0
    model_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    bytes_read: int = 0
    bytes_written: int = 0
    engine_peak: int = 0
    resident_peak: int = 0
    start_seconds: float = 0.0


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random words, the same in every process."""

    def __init__(self, length: int, words: int) -> None:
        self._length, self._words = length, words

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, self._words, (self._length,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": row, "labels": row}


class Watch(hf.TrainerCallback):  # type: ignore[misc]
    """Counts what each step moves."""

    def __init__(self, done: Done, start: float) -> None:
        self._done, self._start = done, start
        self._last = (0, 0)

    def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
        zi.synchronize(model)
        stats = zi.stats(model)
        self._last = stats.bytes_read, stats.bytes_written
        self._began = time.perf_counter()
        self._done.start_seconds = self._done.start_seconds or self._began - self._start

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        zi.synchronize(model)
        stats = zi.stats(model)
        self._done.seconds.append(time.perf_counter() - self._began)
        self._done.bytes_read = stats.bytes_read - self._last[0]
        self._done.bytes_written = stats.bytes_written - self._last[1]
        self._done.engine_peak = stats.memory_peak

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self._done.losses.append(logs["loss"])
            print(logs, file=sys.stderr, flush=True)


def make(job: Job) -> Done:
    """A folder with random weights in bfloat16."""
    hidden, layers, heads, kv_heads, feed_forward, words = SHAPES[job.shape]
    config = hf.LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = hf.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(job.model)
    return Done(num_parameters=model.num_parameters())


def train(job: Job) -> Done:
    start = time.perf_counter()
    config = zi.Config(memory=job.memory, nvme=job.work, param_dtype="bfloat16" if job.method == "full" else None)
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if job.method == "qlora":
        options["quantization_config"] = hf.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    with zi.init(config):
        model = hf.AutoModelForCausalLM.from_pretrained(job.model, **options)
    done = Done(num_parameters=model.num_parameters())
    if job.method != "full":
        torch.manual_seed(1)
        model = peft.get_peft_model(
            model, peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj", "down_proj"])
        )
        model.enable_input_require_grads()
    folder = Path(job.work) / "runs"
    trainer = ZeroInfinityTrainer(
        model,
        hf.TrainingArguments(
            str(folder),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
            per_device_train_batch_size=1,
            gradient_checkpointing=True,
            max_steps=job.steps,
            save_strategy="steps",
            save_steps=10**6 if job.resumes else job.save_at,
            learning_rate=1e-4,
            seed=3,
        ),
        train_dataset=Rows(job.length, model.config.vocab_size),
        callbacks=[Watch(done, start)],
        zero_infinity=config,
    )
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{job.save_at}") if job.resumes else None)
    done.model_bytes = zi.stats(trainer.model).parameter_bytes
    done.engine_peak = zi.stats(trainer.model).memory_peak
    return done


def generate(job: Job) -> Done:
    start = time.perf_counter()
    config = zi.Config(memory=job.memory, nvme=job.work)
    with zi.init(config):
        model = hf.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16)
    model = zi.prepare(model.eval(), config=config)
    stats = zi.stats(model)
    done = Done(num_parameters=model.num_parameters(), model_bytes=stats.parameter_bytes)
    done.start_seconds = time.perf_counter() - start
    read: list[int] = []

    class Tokens:
        """Called with the prompt, and then with each token."""

        def put(self, _: torch.Tensor) -> None:
            read.append(zi.stats(model).bytes_read)
            done.seconds.append(time.perf_counter() - start)

        def end(self) -> None:
            """Nothing to do."""

    prompt = torch.arange(2, 10)[None]
    model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=job.steps,
                   max_new_tokens=job.steps, pad_token_id=0, streamer=Tokens())  # fmt: skip
    done.seconds = [after - before for before, after in zip(done.seconds[:-1], done.seconds[1:], strict=True)]
    done.bytes_read = (read[-1] - read[2]) // (len(read) - 3)  # a token, after the first two
    done.engine_peak = zi.stats(model).memory_peak
    return done


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    hf.logging.set_verbosity_error()
    act = {"make": make, "generate": generate}.get(job.method, train)
    done = act(job)
    done.resident_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(asdict(done)), flush=True)


if __name__ == "__main__":
    main()
