"""The scripts in examples/ run, as their first lines say that they are started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import SECONDS
from support.ports import free_port
from support.trainers import VOCABULARY, save_pretrained_folder
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
BIN = Path(sys.executable).parent


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_pretrained_folder(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text(" ".join(f"w{number * number % (VOCABULARY - 2)}" for number in range(400)))
    return path


def run(*command: str | Path) -> str:
    result = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=SECONDS, check=False
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def torchrun(num_ranks: int) -> list[str | Path]:
    return [BIN / "torchrun", "--nproc-per-node", str(num_ranks), "--master-port", str(free_port())]


def test_trainer(model: Path, text: Path, tmp_path: Path) -> None:
    options = ["--memory", "1MiB", "--nvme", tmp_path, "--output", tmp_path / "tuned", "--steps", "2", "--length", "16"]
    run(*torchrun(2), EXAMPLES / "trainer.py", model, text, *options)
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, tmp_path / "tuned"))
    assert not before.lm_head.weight.equal(after.lm_head.weight)
    assert (tmp_path / "tuned" / "checkpoint-2" / "zero_infinity" / "latest").exists()


def test_accelerate_loop(model: Path, text: Path, tmp_path: Path) -> None:
    options = ["--memory", "1MiB", "--nvme", tmp_path, "--output", tmp_path / "tuned", "--length", "64"]
    printed = run(
        BIN / "accelerate",
        "launch",
        "--cpu",
        "--num_processes",
        "1",
        EXAMPLES / "accelerate_loop.py",
        model,
        text,
        *options,
    )
    assert printed.count("loss ") == 400 // 64
    assert (tmp_path / "tuned" / "model.safetensors").exists()


def test_lightning_module(tmp_path: Path) -> None:
    options = ["--memory", "1MiB", "--nvme", tmp_path, "--output", tmp_path / "runs", "--width", "64"]
    run(sys.executable, EXAMPLES / "lightning_module.py", *options)
    assert list((tmp_path / "runs").rglob("*.ckpt/zero_infinity/latest"))


def test_from_deepspeed(model: Path, text: Path, tmp_path: Path) -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
    }
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps(settings))
    options = ["--memory", "1MiB", "--output", tmp_path / "saved", "--length", "50"]
    printed = run(*torchrun(2), EXAMPLES / "from_deepspeed.py", model, text, config, *options)
    assert printed.count("loss ") == 400 // 50 // 2 // 2
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, tmp_path / "saved" / "weights"))
    assert not before.lm_head.weight.equal(after.lm_head.weight)


def test_from_fsdp(tmp_path: Path) -> None:
    printed = run(
        *torchrun(2), EXAMPLES / "from_fsdp.py", "--memory", "1MiB", "--nvme", tmp_path, "--output", tmp_path / "saved"
    )
    assert printed.count("loss ") == 4
    assert (tmp_path / "saved" / "latest").exists()


def test_generate(model: Path, tmp_path: Path) -> None:
    printed = run(sys.executable, EXAMPLES / "generate.py", model, "w5 w6 w7", "--memory", "200KiB", "--nvme", tmp_path)
    assert printed.startswith("w5 w6 w7")
    assert "log-probability of the prompt: -" in printed
    assert "MiB read" in printed


def test_sft_with_lora(model: Path, text: Path, tmp_path: Path) -> None:
    options = ["--memory", "1MiB", "--nvme", tmp_path, "--output", tmp_path / "adapters", "--steps", "2"]
    run(sys.executable, EXAMPLES / "sft_with_lora.py", model, text, *options)
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
