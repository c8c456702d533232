from __future__ import annotations

import json
from pathlib import Path

import pytest

from zero_infinity.cli.main import main


def plan(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_qlora_of_8b_fits_on_one_card(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(
        *("--model", "llama3-8b", "--hardware", "rtx4090", "--lora", "16", "--quantised", "nf4", "--seq", "512"),
        capsys=capsys,
    )
    assert result["num_parameters"] == 8_030_261_248
    assert result["step"]["written_bytes"] == 0
    states = sum(
        sum(tier["bytes"].get(kind, 0) for kind in ("parameters", "optimizer states")) for tier in result["tiers"]
    )
    assert 5e9 < states < 7e9


def test_accumulation_multiplies_tokens_and_not_updates(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "qwen3-4b", "--hardware", "rtx4090", "--batch", "4")
    one = plan(*arguments, capsys=capsys)["step"]
    four = plan(*arguments, "--accumulation", "4", capsys=capsys)["step"]
    assert four["compute_seconds"] == pytest.approx(4 * one["compute_seconds"])
    assert one["seconds"] < four["seconds"] < 4 * one["seconds"]
    assert four["tokens_per_second"] > one["tokens_per_second"]


def test_a_deepspeed_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0,
                "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
                "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}, "sparse_attention": {"mode": "fixed"},
            }
        )
    )  # fmt: skip
    assert main(["plan", "--model", "gpt3-1.3b", "--hardware", "dgx-a100", "--json", "--deepspeed", str(file)]) == 0
    captured = capsys.readouterr()
    assert "sparse_attention is not planned" in captured.err
    result = json.loads(captured.out)
    alike = plan(
        *("--model", "gpt3-1.3b", "--hardware", "dgx-a100", "--batch", "2", "--accumulation", "4", "--clip"),
        *("--dtype", "mixed", "--stage", "2", "--optimizer", "sgd"),
        capsys=capsys,
    )
    assert result == alike


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--quantised", "nf4"), "--lora 16"),
        (("--optimizer", "adamwww"), "did you mean 'adamw'"),
        (("--accumulation", "0"), "--accumulation"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["plan", "--model", "llama3-8b", "--hardware", "rtx4090", *arguments])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert says in capsys.readouterr().err


def test_calibrated_by_one_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 300, "n_positions": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("--model", str(tmp_path), "--hardware", "laptop", "--seq", "64", "--batch", "2")
    plain, timed = plan(*arguments, capsys=capsys), plan(*arguments, "--calibrate", capsys=capsys)
    assert plain["step"]["compute_seconds"] < timed["step"]["compute_seconds"]  # tiny layers are far from the rate
    assert plain["step"]["read_bytes"] == timed["step"]["read_bytes"]
    assert timed["rests_on"].startswith("one block")
    low, high = timed["seconds_range"]
    assert low < timed["step"]["seconds"] < high
    assert main(["plan", "--model", "gpt3-1.3b", "--hardware", "laptop", "--calibrate"]) == 2
    assert "only a config.json" in capsys.readouterr().err
