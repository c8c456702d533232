"""`zero-infinity train --save --resume --pretrained` and `zero-infinity export`, run for real on tiny models."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.patience import SECONDS
from support.rank_command import Running
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import zero_infinity as zi
from zero_infinity.byte_sizes import format_bytes
from zero_infinity.cli import progress_display
from zero_infinity.cli.main import main
from zero_infinity.models import text
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import preset

TINY = ["--layers", "3", "--hidden", "64", "--heads", "2", "--seq", "32", "--warmup", "2", "--data", "text"]
TIGHT = ["--memory", "768KiB"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("to be or not to be, that is the question; " * 200)
    return tmp_path


def train(capsys: pytest.CaptureFixture[str], *options: str) -> list[float]:
    """The losses of a run that ends well."""
    assert main(["train", *TINY, *options, "--json"]) == 0
    *steps, _ = map(json.loads, capsys.readouterr().out.splitlines())
    return [step["loss"] for step in steps]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "latest").iterdir() if path.suffix == ".safetensors"}


def test_a_run_in_two_parts_is_the_same_as_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = train(capsys, *TIGHT, "--steps", "7", "--save", "whole", "--save-every", "3", "--keep", "2")
    assert names(here / "whole") == ["latest", "step-00000006", "step-00000007"]
    resumed = ["--save", "parts", "--resume"]
    first = train(capsys, *TIGHT, *resumed, "--steps", "4")  # there is nothing to go on from: from the beginning
    second = train(capsys, "--nvme", "none", *resumed, "--steps", "7")
    assert first + second == whole
    assert tensor_files(here / "whole") == tensor_files(here / "parts")
    assert train(capsys, "--nvme", "none", *resumed, "--steps", "7") == []
    assert names(here / "parts") == ["latest", "step-00000004", "step-00000007"]


def test_saving_while_training_goes_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [*TINY, *TIGHT, "--steps", "5", "--save-every", "2"]
    assert main(["train", *common, "--save", "whole"]) == 0
    assert "while training goes on" not in capsys.readouterr().out
    assert main(["train", *common, "--save", "beside", "--save-in-background"]) == 0
    said = capsys.readouterr().out
    assert names(here / "beside") == names(here / "whole")
    for name in ("step-00000002", "step-00000004", "step-00000005"):
        files = [
            {path.name: path.read_bytes() for path in (here / kind / name).iterdir()} for kind in ("whole", "beside")
        ]
        assert files[0] == files[1]
    for step in (2, 4):
        assert f"saving step {step} as beside/step-0000000{step} while training goes on" in said
        assert f"saved step {step} as beside/step-0000000{step}: " in said
    assert "saved step 5 as " in said


def test_how_far_it_is_is_shown(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_display, "_LINE_SECONDS", 0.0)
    assert main(["train", *TINY, "--nvme", "none", "--steps", "1", "--save", "saved"]) == 0
    assert main(["train", *TINY, "--nvme", "none", "--steps", "2", "--save", "saved", "--resume"]) == 0
    assert main(["export", "saved", "out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for act in ("saving", "loading", "exporting"):
        *_, last = [line for line in lines if line.startswith(f"{act}: ")]
        done = re.match(rf"{act}: (.+) of (.+?)  [\d,]+ MB/s  process memory [\d.,]+ .iB  left 0 s", last)
        assert done is not None, last
        assert done[1] == done[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step(
    number: signal.Signals, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(text.ByteBatches, "__next__", _raising(number, text.ByteBatches.__next__))
        assert main(["train", *TINY, *TIGHT, "--save", "saved", "--steps", "5", "--json"]) == 128 + number
    assert capsys.readouterr().err == f"stopped by {number.name} after step 3 of 5\n"
    assert names(here / "saved") == ["latest", "step-00000003"]
    train(capsys, *TIGHT, "--save", "saved", "--resume", "--steps", "5")
    train(capsys, *TIGHT, "--save", "whole", "--steps", "5")
    assert tensor_files(here / "saved") == tensor_files(here / "whole")


def _raising(number: signal.Signals, real: Any) -> Any:
    """A signal comes in the middle of the third step."""

    def take(self: text.ByteBatches) -> Any:
        if self.position == 2:
            signal.raise_signal(number)
        return real(self)

    return take


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", "2"], "--keep needs --save DIR"),
        (["--resume"], "--resume needs --save DIR"),
        (["--save-in-background"], "--save-in-background needs --save DIR"),
        (["--save", "new", "--save-in-background"], "--save-in-background needs --save-every N"),
        (["--save", "saved"], "saved has checkpoints of an earlier run\n  fix:   --resume"),
        (["--save", "saved", "--resume", "--lr", "0.5"], "--lr is 0.5, but the run in saved was begun with 0.001"),
        (["--pretrained", "x", "--hf", "y"], "--pretrained takes the model's shape from x; leave out --hf"),
        (["--pretrained", "nothing"], "nothing"),
    ],
)
def test_mistakes(options: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "saved" in options:
        train(capsys, "--nvme", "none", "--steps", "1", "--save", "saved")
    tiny = TINY if "--pretrained" not in options else ["--data", "text"]
    assert main(["train", *tiny, "--nvme", "none", "--steps", "2", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_when_the_latest_is_removed_by_hand_the_one_before_is_gone_on_from(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--nvme", "none", "--save", "saved", "--resume"]
    losses = train(capsys, *options, "--steps", "4", "--save-every", "2")
    shutil.rmtree(here / "saved" / "step-00000004")
    assert train(capsys, *options, "--steps", "4") == losses[2:]
    (here / "saved" / "latest").unlink()  # as a copy without links
    assert main(["train", *TINY, *options[:4], "--steps", "4"]) == 2
    assert "saved has checkpoints of an earlier run" in capsys.readouterr().err
    assert main(["export", "saved", "out"]) == 0


def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for save, reason in (("text", "File exists"), ("text/saved", "Not a directory"), ("/proc/saved", "No such file")):
        assert main(["train", *TINY, "--nvme", "none", "--steps", "2", "--save", save]) == 1
        output = capsys.readouterr()
        assert f"TransferError: cannot make a checkpoint in {save}: {reason}" in output.err
        assert "step" not in output.out


def test_a_checkpoint_of_a_script_is_no_run_to_go_on_with(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = dataclasses.replace(preset("5M"), layers=3, hidden=64, heads=2, seq=32)
    model = ByteGPT(shape)
    model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), zi.Config(memory="32MiB"))
    zi.save(here / "mine", model, optimizer, extra={"schedule": {"last_epoch": 3}})
    assert main(["train", *TINY, "--nvme", "none", "--steps", "2", "--save", "mine", "--resume"]) == 2
    error = capsys.readouterr().err
    assert "mine was not saved by zero-infinity train: it has no position, settings\n  fix:" in error


def test_a_damaged_checkpoint_is_told_without_a_traceback(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(capsys, "--nvme", "none", "--steps", "1", "--save", "saved")
    path = next((here / "saved" / "latest").glob("model*"))
    path.write_bytes(path.read_bytes()[:-1])
    options = ["--nvme", "none", "--steps", "2", "--save", "saved", "--resume"]
    for command in (["train", *TINY, *options], ["export", "saved", "out"]):
        assert main(command) == 1
        error = capsys.readouterr().err
        assert error.startswith("CheckpointError: ")
        assert "model-00001-of-00001.safetensors is shorter than its header says" in error
    assert main(["export", "nothing", "out"]) == 1
    assert "nothing is not a checkpoint: it does not exist" in capsys.readouterr().err
    assert sorted(os.listdir(here)) == ["saved", "text"]


def test_tuning_a_hugging_face_model(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(here / "gpt2")
    common = ["--data", "text", "--seq", "32", "--nvme", "none", "--json", "--save", "tuned", "--resume"]
    assert main(["train", "--pretrained", "gpt2", *common, "--steps", "2"]) == 0
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    batches = text.ByteBatches(text.collect([here / "text"]), 4, 32)
    tokens = next(batches)[0]
    assert steps[0]["loss"] == pytest.approx(model.eval()(input_ids=tokens, labels=tokens).loss.item(), abs=0.05)
    # A run that goes on does not start from the pretrained weights again.
    assert main(["train", "--pretrained", "gpt2", *common, "--steps", "4"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["step"] == 3
    assert main(["export", "tuned", "out", "--dtype", "bfloat16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["directory"] == "out"
    tuned = AutoModelForCausalLM.from_pretrained(here / "out")
    assert tuned.dtype is torch.bfloat16
    assert not torch.equal(tuned.transformer.wte.weight.float(), model.transformer.wte.weight)
    assert main(["export", "tuned", "out"]) == 2
    assert "out exists and is not empty" in capsys.readouterr().err
    # How far the weights have come in is shown.
    monkeypatch.setattr(progress_display, "_LINE_SECONDS", 0.0)
    assert main(["train", "--pretrained", "gpt2", *common[:6], "--steps", "1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("loading: ")]
    total = format_bytes(4 * sum(parameter.numel() for parameter in model.parameters()))
    assert lines[-1].startswith(f"loading: {total} of {total}  ")


# ---------------------------------------------------------------------- several ranks


def _die_at_four(rank: int) -> None:
    real = text.ByteBatches.__next__

    def die(self: text.ByteBatches) -> Any:
        if rank == 1 and self.position == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self)

    text.ByteBatches.__next__ = die  # type: ignore[method-assign]


def test_after_a_lost_rank_a_restart_goes_on_from_the_last_checkpoint(here: Path) -> None:
    options = [*TINY, "--memory", "8MiB", "--nvme", "none", "--steps", "6", "--json"]
    whole = Running(here, 2, *options, "--save", "whole").end()
    assert [ended.code for ended in whole] == [0, 0], whole
    saving = [*options, "--save", "saved", "--save-every", "2", "--resume"]
    first, second = Running(here, 2, *saving, change=_die_at_four).end()
    assert (first.code, second.code) == (1, -signal.SIGKILL)
    assert names(here / "saved") == ["latest", "step-00000002"], "nothing is saved without the lost rank"
    again = Running(here, 2, *saving).end()
    assert [ended.code for ended in again] == [0, 0], again
    assert [json.loads(line).get("step") for line in again[0].out.splitlines()][:-1] == [3, 4, 5, 6]
    assert tensor_files(here / "saved") == tensor_files(here / "whole")


_DYING = """
import os, signal, sys
from zero_infinity.cli.main import main
from zero_infinity.models import text
real = text.ByteBatches.__next__
def take(self):
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], self.position) == ("1", "0", 3):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self)
text.ByteBatches.__next__ = take
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
def test_torchrun_restarts_after_a_lost_rank(here: Path) -> None:
    """The command of docs/howto/checkpoints.md: all ranks are started again, by torchrun itself."""
    options = [*TINY, "--memory", "8MiB", "--nvme", "none", "--steps", "6"]
    whole = Running(here, 2, *options, "--json", "--save", "whole").end()
    assert [ended.code for ended in whole] == [0, 0], whole
    (here / "dying.py").write_text(_DYING)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [
            *launcher,
            "--max-restarts",
            "1",
            "dying.py",
            "train",
            *options,
            "--save",
            "saved",
            "--save-every",
            "2",
            "--resume",
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "goes on after step 2, from saved" in done.stdout
    assert tensor_files(here / "saved") == tensor_files(here / "whole")


@pytest.mark.long
def test_a_rank_is_lost_while_a_checkpoint_is_written_beside_training(here: Path) -> None:
    options = [*TINY, "--memory", "8MiB", "--nvme", "none", "--steps", "6", "--json"]
    whole = Running(here, 2, *options, "--save", "whole").end()
    assert [ended.code for ended in whole] == [0, 0], whole
    saving = [*options, "--save", "saved", "--save-every", "1", "--save-in-background", "--resume"]
    first, second = Running(here, 2, *saving, change=_die_at_four).end()
    assert (first.code, second.code) == (1, -signal.SIGKILL)
    again = Running(here, 2, *saving).end()
    assert [ended.code for ended in again] == [0, 0], again
    assert names(here / "saved")[0] == "latest", "something is left"
    assert tensor_files(here / "saved") == tensor_files(here / "whole")


def test_a_signal_to_one_rank_saves_on_all(here: Path) -> None:
    running = Running(here, 2, *TINY, "--nvme", "none", "--steps", "1000000", "--json", "--save", "saved")
    running.await_steps(2)
    os.kill(running.processes[1].pid or 0, signal.SIGTERM)
    first, second = running.end()
    assert first.code == second.code == 128 + signal.SIGTERM, (first, second)
    step = json.loads((here / "saved" / "latest" / "manifest.json").read_bytes())["step"]
    assert first.err == f"stopped by SIGTERM after step {step} of 1000000\n"
    assert names(here / "saved" / "latest").count("rank-00001.json") == 1
