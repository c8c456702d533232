from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zero_infinity import Config
from zero_infinity.cli.main import main


def plan(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_real_invocation() -> None:
    command = [
        sys.executable,
        "-m",
        "zero_infinity",
        "plan",
        "--model",
        "gpt3-1.3b",
        "--hardware",
        "laptop",
        "--seq",
        "512",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "zi.Config(memory=" in result.stdout
    assert "drives last" in result.stdout


def test_json_has_bytes_bandwidth_time_and_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(
        "--model", "gpt3-13b", "--hardware", "rtx4090", "--batch", "4", "--nvme", str(tmp_path), capsys=capsys
    )
    nvme = next(tier for tier in result["tiers"] if tier["name"] == "NVMe")
    assert nvme["bytes"]["optimizer states"] == 12 * result["num_parameters"]
    assert nvme["bytes"]["parameters"] == 2 * result["num_parameters"]
    for tier in result["tiers"]:
        assert sum(tier["bytes"].values()) <= tier["capacity"]
    assert {row["data"] for row in result["bandwidth"]} >= {"optimizer states"}
    step = result["step"]
    assert step["seconds"] >= step["compute_seconds"] > 0
    assert step["bottleneck"] == "NVMe"
    assert result["drive_life_seconds"] > 0
    assert result["largest_model"] > result["num_parameters"]
    with pytest.warns(match="memory is") if result["config"]["memory"] else pytest.raises(AssertionError):
        assert Config(**result["config"]).nvme == (tmp_path,)


def test_what_fits_needs_no_drive(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(
        "--layers", "2", "--hidden", "256", "--heads", "4", "--hardware", "laptop", "--nvme", "none", capsys=capsys
    )
    assert "nvme" not in result["config"]
    assert (result["written_per_node"], result["drive_life_seconds"]) == (0, None)


def test_the_paper_s_placement(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "zi-10b", "--hardware", "dgx2", "--batch", "8")
    assert plan(*arguments, capsys=capsys)["homes"]["optimizer"] == "CPU"
    assert plan(*arguments, "--interval", "4", "--placement", "paper", capsys=capsys)["homes"] == {
        "parameters": "GPU", "optimizer": "GPU", "checkpoints": "GPU",
    }  # fmt: skip


def test_a_hugging_face_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 300, "n_positions": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = plan("--model", str(tmp_path / "config.json"), "--hardware", "laptop", "--seq", "64", capsys=capsys)
    norm, block = 128, 12 * 64**2 + 13 * 64
    assert result["num_parameters"] == (300 + 128) * 64 + 2 * block + norm
    assert main(["plan", "--model", str(tmp_path), "--hardware", "laptop", "--seq", "999"]) == 2
    assert "positions for 128" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "zi-1t", "--hardware", "rtx4090"], 1, "works: --nodes 8"),
        (["--model", "gpt3-13b", "--hardware", "rtx4090", "--interval", "4"], 2, "--placement paper"),
        (["--model", "gpt3-13b", "--hardware", "rtx4090", "--device-memory", "1TiB"], 2, "GPU of RTX 4090"),
        (["--model", "gpt3-13b", "--hardware", "rtx4090", "--memory", "0"], 2, "--memory is 0"),
        (["--model", "gpt3-13b", "--hardware", "rtx4090", "--batch", "64"], 1, "works: --batch"),
        (["--model", "gpt3-1.3b", "--hardware", "laptop", "--memory", "500KiB"], 1, "works: no --memory"),
        (["--model", "gpt3-1.3b", "--hardware", "rtx4090", "--seq", "100000"], 1, "works: --seq 32768"),
        (["--model", "gpt3-13b", "--hardware", "rtx4090", "--seq", "1000000"], 1, "works: --seq 32768"),
        (
            ["--layers", "3", "--hidden", "1000", "--heads", "7", "--hardware", "laptop"],
            2,
            "--heads 8, or --hidden 1001",
        ),
        (["--model", "gpt3-13b", "--hardware", "laptop", "--memory", "8Gb"], 2, "stands for bits; write 8GB"),
        (["--model", "gpt3-13b", "--hardware", "laptop", "--nvme", __file__], 2, "is not a directory"),
        (
            ["--model", "meta-llama/Llama-3.1-8B", "--hardware", "laptop"],
            2,
            "hf download meta-llama/Llama-3.1-8B config",
        ),
        (["--model", "gpt3-13b", "--hardware", "laptop", "--gpus", "4"], 2, "gpus is 4, but Laptop"),
        (
            ["--layers", "1", "--hidden", "600", "--heads", "4", "--hardware", "rtx4090", "--device-memory", "1KiB"],
            1,
            "works: no --device-memory",
        ),
        (["--model", "gpt3-13b", "--hardware", "laptop", "--nvme", "none"], 1, "works: --nvme DIR"),
        (["--model", "gpt5", "--hardware", "laptop"], 2, "there is no model 'gpt5'"),
        (["--model", "gpt3-13b", "--hardware", "labtop"], 2, "did you mean 'laptop'?"),
        (["--model", "gpt3-13b", "--layers", "3", "--hardware", "laptop"], 2, "--model has its own shape"),
        (["--layers", "3", "--hardware", "laptop"], 2, "which model?"),
        (["--model", "gpt3-13b", "--hardware", "laptop", "--memory", "2G"], 2, "write 2GiB (1024s)"),
        (["--model", "gpt3-13b", "--hardware", "laptop", "--memory", "1TB"], 2, "memory is 931.3 GiB, but RAM of"),
        (["--model", "gpt3-13b", "--hardware", "laptop", "--batch", "0"], 2, "'0' is not a number above zero"),
        (["--model", "gpt3-13b", "--hardware", "laptop", "--nodes", "-1"], 2, "is not an integer between 1 and"),
        (["--model", "no.json", "--hardware", "laptop"], 2, "no.json cannot be read"),
        (["--model", "gpt3-13b"], 2, "--hardware"),
    ],
)
def test_mistakes(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_drive_that_is_not_here_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt3-1.3b", "--hardware", "laptop", "--nvme", "/does/not/exist"]) == 0
    assert "note: --nvme /does/not/exist does not exist on this machine" in capsys.readouterr().err


def test_more_gpus_than_the_profile_has(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "gpt3-1.3b", "--hardware", "rtx4090", "--batch", "8", "--gpus")
    assert main(["plan", *arguments, "4", "--json"]) == 0
    output = capsys.readouterr()
    assert "4 are planned with a host link each" in output.err
    four = json.loads(output.out)
    one = plan(*arguments, "1", capsys=capsys)
    assert four["devices_per_node"] == 4
    assert 1 < four["step"]["tokens_per_second"] / one["step"]["tokens_per_second"] < 4


def test_what_must_not_be_overlooked_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that mostly waits and wears its drive out in days."""
    assert main(["plan", "--model", "gpt3-13b", "--hardware", "rtx4090", "--batch", "4"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "warning: the drives wear out after" in text
    assert "of a step is waiting for NVMe" in text
    assert "needed: what a link would have to carry" in text
