"""The scripts in examples/ run, as their first lines say that they are started."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support import forkserver
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


@pytest.fixture(params=["forked", pytest.param("as told", marks=pytest.mark.long)])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., str]:
    """Starts a script on some ranks (0: without a launcher), and returns what it prints.

    As its first lines say: by torchrun, accelerate or Python. Or in processes that have most of its imports already,
    with what the launcher puts into their environment.
    """
    return functools.partial(run_forked, tmp_path) if request.param == "forked" else run_as_told


def run_as_told(num_ranks: int, script: str, *options: str | Path, launcher: Sequence[str] = ()) -> str:
    python = [BIN / "torchrun", "--nproc-per-node", str(num_ranks), "--master-port", str(free_port())]
    command = [*(python if num_ranks else [BIN / launcher[0], *launcher[1:]] if launcher else [sys.executable])]
    result = subprocess.run(
        [*map(str, command), str(EXAMPLES / script), *map(str, options)],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_forked(folder: Path, num_ranks: int, script: str, *options: str | Path, launcher: Sequence[str] = ()) -> str:
    outputs = [folder / f"printed{rank}" for rank in range(max(1, num_ranks))]
    port = free_port()
    processes = [
        forkserver.context().Process(
            target=run_script, args=(rank, num_ranks, port, printed, [str(EXAMPLES / script), *map(str, options)])
        )
        for rank, printed in enumerate(outputs)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    printed = "".join(path.read_text() for path in outputs)
    assert codes == [0] * len(processes), printed
    return printed


def run_script(rank: int, num_ranks: int, port: int, printed: Path, argv: list[str]) -> None:
    if num_ranks:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_PORT": str(port)}
    sys.argv = argv
    with printed.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(argv[0], run_name="__main__")
    atexit._run_exitfuncs()  # as at the end of an interpreter, which a forked process does not get to


def test_trainer(start: Callable[..., str], model: Path, text: Path, tmp_path: Path) -> None:
    options = ["--memory", "1MiB", "--nvme", tmp_path, "--output", tmp_path / "tuned", "--steps", "2", "--length", "16"]
    start(2, "trainer.py", model, text, *options)
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, tmp_path / "tuned"))
    assert not before.lm_head.weight.equal(after.lm_head.weight)
    assert (tmp_path / "tuned" / "checkpoint-2" / "zero_infinity" / "latest").exists()


def test_accelerate_loop(start: Callable[..., str], model: Path, text: Path, tmp_path: Path) -> None:
    options = ["--memory", "1MiB", "--nvme", tmp_path, "--output", tmp_path / "tuned", "--length", "64"]
    launcher = ["accelerate", "launch", "--cpu", "--num_processes", "1"]
    printed = start(0, "accelerate_loop.py", model, text, *options, launcher=launcher)
    assert printed.count("loss ") == 400 // 64
    assert (tmp_path / "tuned" / "model.safetensors").exists()


def test_lightning_module(start: Callable[..., str], tmp_path: Path) -> None:
    options = ["--memory", "1MiB", "--nvme", tmp_path, "--output", tmp_path / "runs", "--width", "64"]
    start(0, "lightning_module.py", *options)
    assert list((tmp_path / "runs").rglob("*.ckpt/zero_infinity/latest"))


def test_from_deepspeed(start: Callable[..., str], model: Path, text: Path, tmp_path: Path) -> None:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
    }
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps(settings))
    options = ["--memory", "1MiB", "--output", tmp_path / "saved", "--length", "50"]
    printed = start(2, "from_deepspeed.py", model, text, config, *options)
    assert printed.count("loss ") == 400 // 50 // 2 // 2
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, tmp_path / "saved" / "weights"))
    assert not before.lm_head.weight.equal(after.lm_head.weight)


def test_from_fsdp(tmp_path: Path) -> None:
    options = ["--memory", "1MiB", "--nvme", tmp_path, "--output", tmp_path / "saved"]
    printed = run_as_told(2, "from_fsdp.py", *options)
    assert printed.count("loss ") == 4
    assert (tmp_path / "saved" / "latest").exists()


def test_generate(start: Callable[..., str], model: Path, tmp_path: Path) -> None:
    printed = start(0, "generate.py", model, "w5 w6 w7", "--memory", "200KiB", "--nvme", tmp_path)
    assert printed.startswith("w5 w6 w7")
    assert "log-probability of the prompt: -" in printed
    assert "MiB read" in printed


def test_sft_with_lora(start: Callable[..., str], model: Path, text: Path, tmp_path: Path) -> None:
    options = ["--memory", "1MiB", "--nvme", tmp_path, "--output", tmp_path / "adapters", "--steps", "2"]
    start(0, "sft_with_lora.py", model, text, *options)
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
