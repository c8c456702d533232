"""`zero-infinity train`, run for real on tiny models."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.patience import SECONDS

from zero_infinity import Config, StorageError
from zero_infinity.cli import train_loop, train_workload
from zero_infinity.cli.main import main
from zero_infinity.models.text import ByteBatches

TINY = ["--layers", "6", "--hidden", "64", "--heads", "2", "--seq", "32", "--batch", "8", "--warmup", "2"]
TIGHT = ["--memory", "768KiB"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory: what a run leaves in it shows."""
    directory = tmp_path / "here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def train_json(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The steps and the summary of a run that ends well."""
    assert main(["train", *options, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    *steps, summary = map(json.loads, captured.out.splitlines())
    assert {step["event"] for step in steps} == {"step"}
    assert summary["event"] == "summary"
    return steps, summary


def losses(steps: list[dict[str, Any]]) -> list[float]:
    return [step["loss"] for step in steps]


def test_in_ram_and_from_a_drive_the_losses_are_the_same_and_fall(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_ram, ram = train_json(capsys, *TINY, "--steps", "20", "--lr", "3e-3", "--nvme", "none")
    streamed, drive = train_json(capsys, *TINY, "--steps", "20", "--lr", "3e-3", *TIGHT)
    assert losses(in_ram) == losses(streamed)
    assert [step["step"] for step in streamed] == list(range(1, 21))
    assert streamed[0]["loss"] > 5
    assert streamed[-1]["loss"] < 4
    assert (drive["first_loss"], drive["last_loss"]) == (streamed[0]["loss"], streamed[-1]["loss"])
    assert ram["read_bytes"] == ram["write_bytes"] == ram["wear"] == 0
    assert ram["steps_of_endurance"] is None
    assert drive["state_ratio"] > 3
    assert drive["memory_peak"] <= drive["memory_budget"] == 768 << 10
    assert drive["read_bytes_per_step"] > 0
    assert drive["steps_of_endurance"] == int(600e12 / drive["write_bytes_per_step"])
    assert 0 <= drive["wait_seconds"] <= drive["seconds"]
    assert os.listdir(here) == []


def test_accumulation_clipping_and_another_seed(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        *TINY,
        "--steps",
        "4",
        "--seed",
        "7",
        "--accumulate",
        "2",
        "--max-grad-norm",
        "0.5",
        "--optimizer",
        "sgd",
    ]
    in_ram, _ = train_json(capsys, *options, "--nvme", "none")
    streamed, _ = train_json(capsys, *options, *TIGHT, "--verify")
    assert losses(in_ram) == losses(streamed)
    other, _ = train_json(capsys, *options, "--nvme", "none", "--seed", "8")
    assert losses(other)[0] != losses(in_ram)[0]


@pytest.mark.parametrize("name", ["adam", "adagrad", "rmsprop", "adamax", "nadam", "radam", "adadelta"])
def test_every_optimizer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    steps, _ = train_json(capsys, *TINY, "--steps", "3", "--optimizer", name, *TIGHT)
    assert losses(steps)[-1] < losses(steps)[0]


def test_plain_lines_and_a_summary_when_there_is_no_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY, *TIGHT, "--steps", "4", "--log-every", "3", "--tied"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == ["step 1/4", "step 3/4", "step 4/4"]
    summary = {line.split("  ")[0]: line for line in lines[-10:]}
    assert "x the memory budget" in summary["states"]
    assert "of 768.0 KiB" in summary["memory held"]
    assert "of the time" in summary["exposed wait"]
    assert "600 TBW" in summary["wear"]
    assert os.listdir(here) == []


def test_a_named_directory_is_used_and_left_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drives = [here / "a", here / "b"]
    for drive in drives:
        drive.mkdir()
        (drive / "mine").write_text("precious")
    _, summary = train_json(capsys, *TINY, *TIGHT, "--steps", "2", "--nvme", *map(str, drives))
    assert summary["read_bytes"] > 0
    assert [os.listdir(drive) for drive in drives] == [["mine"], ["mine"]]


def test_settings_from_a_file_and_options_over_them(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = here / "settings.toml"
    file.write_text(Config(memory="1100KiB", gradient_accumulation_steps=2, nvme=here).to_toml())
    _, summary = train_json(capsys, *TINY, "--steps", "2", "--config", str(file))
    assert summary["memory_budget"] == 1100 << 10
    _, summary = train_json(capsys, *TINY, "--steps", "2", "--config", str(file), "--memory", "1200KiB")
    assert summary["memory_budget"] == 1200 << 10
    assert os.listdir(here) == ["settings.toml"]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 256},
        {
            "model_type": "llama",
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "vocab_size": 300,
        },
    ],
    ids=["gpt2", "llama"],
)
def test_a_hugging_face_config(config: dict[str, object], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "config.json").write_text(json.dumps(config))
    (here / "text").write_text("to be or not to be, that is the question; " * 100)
    options = ["--hf", "config.json", "--data", "text", "--batch", "4", "--steps", "8", "--lr", "3e-3"]
    in_ram, _ = train_json(capsys, *options, "--nvme", "none")
    streamed, summary = train_json(capsys, *options, *TIGHT)
    assert losses(in_ram) == losses(streamed)
    assert losses(streamed)[-1] < losses(streamed)[0] - 1
    assert summary["read_bytes"] > 0
    assert sorted(os.listdir(here)) == ["config.json", "text"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden", "100", "--heads", "3"], "ConfigError: hidden is 100 and heads is 3"),
        (["--preset", "26M"], "there is no preset '26M'; did you mean 25M?"),
        (["--data", "missing"], "missing does not exist"),
        (["--data", "short.txt"], "the data is 5 B of text"),
        (["--memory", "0"], "ConfigError: memory='0' is not valid"),
        (["--memory", "12XB"], "ConfigError: memory: '12XB' is not a size"),
        (["--nvme", "missing"], "missing does not exist\n  fix:   mkdir -p"),
        (["--hf", "missing.json"], "hf: missing.json cannot be read"),
        (["--hf", "short.txt"], "hf: short.txt is not JSON"),
        (["--hf", "clip.json"], "'clip' has no causal language model"),
        (["--hf", "odd.json"], "transformers knows no model_type 'nothing'"),
        (["--hf", "heads.json"], "LlamaForCausalLM does not work with these values: "),
        (["--hf", "activation.json"], "GPT2LMHeadModel does not work with these values: "),
        (["--hf", "words.json"], "has a vocabulary of 100, but training data is bytes"),
        (["--hf", "gpt2.json", "--seq", "65"], "--seq is 65, but gpt2.json has positions for 64"),
        (["--hf", "gpt2.json", "--layers", "2"], "leave out --layers"),
        (["--config", "odd.json"], "odd.json: unknown setting 'model_type'"),
        (["--steps", "0"], "argument --steps: '0' is not an integer of at least 1"),
        (["--lr", "nan"], "argument --lr: 'nan' is not a number above zero"),
        (["--optimizer", "lbfgs"], "argument --optimizer: invalid choice: 'lbfgs'"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    options: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt2 = {"model_type": "gpt2", "n_positions": 64, "n_layer": 1, "n_embd": 16, "n_head": 1}
    llama = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    for name, content in {
        "short.txt": "short",
        "clip.json": json.dumps({"model_type": "clip"}),
        "odd.json": json.dumps({"model_type": "nothing"}),
        "words.json": json.dumps({**gpt2, "vocab_size": 100}),
        "gpt2.json": json.dumps(gpt2),
        "activation.json": json.dumps({**gpt2, "activation_function": "nonsense"}),
        "heads.json": json.dumps({**llama, "num_attention_heads": 4, "num_key_value_heads": 3}),
    }.items():
        (here / name).write_text(content)
    files = sorted(os.listdir(here))
    assert main(["train", "--steps", "1", *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert sorted(os.listdir(here)) == files


def test_too_small_a_budget_says_what_would_do(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY, "--steps", "1", "--memory", "8KiB"]) == 1
    assert "CapacityError: " in (error := capsys.readouterr().err)
    assert "fix:   --memory " in error
    assert main(["train", *TINY, "--steps", "1", "--memory", "768KiB", "--nvme", "none"]) == 1
    assert "there is no nvme to put the rest on" in capsys.readouterr().err
    assert os.listdir(here) == []


def test_a_directory_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    assert main(["train", *TINY, "--steps", "1"]) == 2
    assert "fix:   --nvme DIR on a drive, or --nvme none" in capsys.readouterr().err


def test_an_error_in_the_middle_leaves_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = ByteBatches.__next__

    def fail_at_three(self: ByteBatches) -> object:
        if self.position == 2:
            assert [name[:20] for name in os.listdir(here)] == [".zero-infinity-swap-"]
            raise StorageError(errno.EIO, "data: the drive has gone", "text")
        return real(self)

    monkeypatch.setattr(ByteBatches, "__next__", fail_at_three)
    assert main(["train", *TINY, *TIGHT, "--steps", "5"]) == 1
    assert capsys.readouterr().err == "StorageError: data: the drive has gone\n"
    assert os.listdir(here) == []


def test_a_loss_that_is_no_number_stops(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_workload.ByteGPT, "forward", _diverging(train_workload.ByteGPT.forward))
    assert main(["train", *TINY, "--steps", "5", "--nvme", "none"]) == 2
    assert "the loss is nan at step 1: training has diverged\n  fix:   --lr 0.0001" in capsys.readouterr().err


def _diverging(forward: Any) -> Any:
    return lambda *arguments: forward(*arguments) * float("nan")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_its_step(number: signal.Signals, code: int, here: Path) -> None:
    command = [sys.executable, "-m", "zero_infinity", "train", *TINY, *TIGHT, "--steps", "1000000", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["step"] == 1
        assert len(os.listdir(here)) == 1
        process.send_signal(number)
        output, error = process.communicate(timeout=SECONDS)
    summary = json.loads(output.splitlines()[-1])
    assert process.returncode == code
    assert summary["interrupted_by"] == number.name
    assert summary["steps"] == len(output.splitlines())  # the first line was read before; the summary is one more
    assert error == f"stopped by {number.name} after step {summary['steps']} of 1000000\n"
    assert os.listdir(here) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_first_step_ends_at_once(
    number: signal.Signals, code: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(config: Config) -> None:
        assert len(os.listdir(here)) == 1
        signal.raise_signal(number)

    monkeypatch.setattr(train_loop, "build_context", interrupted)
    if number == signal.SIGINT:
        assert main(["train", *TINY]) == code
    else:
        with pytest.raises(SystemExit) as stop:
            main(["train", *TINY])
        assert stop.value.code == code
    assert os.listdir(here) == []


def test_help_has_an_example_and_imports_no_torch() -> None:
    code = (
        "import sys; from zero_infinity.cli.main import main; main(['train', '--help']); "
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "zero-infinity train --preset 125M --memory 256MiB" in result.stdout


def test_a_trace_and_its_page(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = train_json(capsys, *TINY, *TIGHT, "--steps", "4")
    assert main(["train", *TINY, *TIGHT, "--steps", "4", "--json", "--trace", "run.json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"written: {here / 'run.json'}\n"
    *steps, summary = map(json.loads, captured.out.splitlines())
    assert losses(steps) == losses(plain)
    assert main(["report", "run.json", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["title"].startswith("ByteGPT: ")
    nvme = next(row for row in data["traffic"] if row["link"] == "NVMe")
    assert nvme["bytes"] >= summary["read_bytes"] + summary["write_bytes"] > 0
    assert {"phase", "compute", "wait", "fetch", "write-back", "update"} <= data["totals"].keys()
    assert main(["report", "run.json"]) == 0
    assert sorted(path.name for path in here.iterdir()) == ["run.html", "run.json"]


def test_a_trace_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY, "--trace", "no/run.json"]) == 2
    assert "trace" in capsys.readouterr().err
