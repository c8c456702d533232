"""`zero-infinity convert-config`: the file that `Config.from_file` reads, and a line for each field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zero_infinity.cli.exit_codes import EXIT_MISTAKE
from zero_infinity.cli.main import main
from zero_infinity.config import Config

DEEPSPEED = {
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "amp": {"enabled": True},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(DEEPSPEED))
    return path


def test_the_config_is_printed_and_written_and_each_field_explained(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "zi.json"
    assert main(["convert-config", str(file), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == json.loads(out.read_text())
    config = Config.from_file(out)
    assert (config.stage, config.param_dtype, config.max_grad_norm) == (2, "bfloat16", 1.0)
    lines = dict(line.split(maxsplit=1) for line in shown.err.splitlines() if ":" in line)
    assert lines["zero_optimization.overlap_comm"].startswith("not needed:")
    assert lines["amp"].startswith("not supported:")
    assert lines["zero_optimization.stage"] == "converted: stage=2"
    assert lines["memory"].startswith("add:")


def test_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert-config", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["stage"] == 2
    assert {field["field"]: field["verdict"] for field in found["fields"]}["amp"] == "not supported"


def test_an_existing_file_is_not_overwritten(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert-config", str(file), "--out", str(file)]) == EXIT_MISTAKE
    assert "cannot be written" in capsys.readouterr().err
    assert json.loads(file.read_text()) == DEEPSPEED
