"""What becomes of each field of a DeepSpeed config."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.config import Config, ConfigWarning
from zero_infinity.deepspeed_config import Verdict, convert, documented_fields
from zero_infinity.errors import ConfigError


def verdicts(settings: dict[str, Any]) -> dict[str, Verdict]:
    return {note.field: note.verdict for note in convert(settings).notes}


@pytest.mark.parametrize(
    ("given_settings", "expected"),
    [
        ({}, {"stage": 0}),
        ({"zero_optimization": {"stage": 3}}, {"stage": 3}),
        ({"gradient_accumulation_steps": 4, "gradient_clipping": 0.5},
         {"stage": 0, "gradient_accumulation_steps": 4, "max_grad_norm": 0.5}),
        ({"gradient_clipping": 0.0, "gradient_accumulation_steps": "auto"}, {"stage": 0}),
        ({"bf16": {"enabled": True}}, {"stage": 0, "param_dtype": "bfloat16", "compute_dtype": "bfloat16"}),
        ({"fp16": {"enabled": True, "loss_scale": 0}},
         {"stage": 0, "param_dtype": "float16", "compute_dtype": "float16"}),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": False}}, {"stage": 0}),
        ({"communication_data_type": "bfp16"}, {"stage": 0, "reduce_dtype": "bfloat16"}),
        ({"activation_checkpointing": {"cpu_checkpointing": True}},
         {"stage": 0, "offload_activations": True, "checkpoint_activations": True}),
    ],
)  # fmt: skip
def test_settings(given_settings: dict[str, Any], expected: dict[str, Any]) -> None:
    assert convert(given_settings).settings == expected
    assert Config.from_deepspeed(given_settings) == Config(**expected)


def test_directories_of_parameters_and_optimizer_states_are_striped(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    zero = {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "a"), "buffer_count": 5},
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "b")},
    }
    config = Config.from_deepspeed({"zero_optimization": zero})
    assert config.nvme == (tmp_path / "a", tmp_path / "b")
    found = verdicts({"zero_optimization": {"offload_optimizer": {"device": "cpu", "nvme_path": "/x"}}})
    assert set(found.values()) == {Verdict.NOT_NEEDED}
    found = verdicts({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}})
    assert found["zero_optimization.offload_optimizer.device"] is Verdict.IN_SCRIPT


def test_every_documented_field_has_a_verdict_and_a_reason() -> None:
    fields = list(documented_fields())
    assert len(fields) > 90
    for field in fields:
        table: Any = 1
        for name in reversed(field.split(".")):
            table = {name: table}
        (note,) = [note for note in convert(table).notes if note.field == field]
        assert note.verdict is not Verdict.UNKNOWN
        assert note.text


def test_what_changes_training_and_has_no_equivalent_warns(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"sparse_gradients": True, "fp16": {"enabled": True, "loss_scale": 128}}))
    with pytest.warns(ConfigWarning) as caught:
        Config.from_deepspeed(path)
    assert [str(w.message).split()[1] for w in caught] == ["sparse_gradients", "fp16.loss_scale"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.from_deepspeed({"sparse_gradients": False, "zero_optimization": {"overlap_comm": True}})


def test_a_misspelt_field_is_unknown_with_a_suggestion() -> None:
    (note,) = convert({"zero_optimization": {"overlap_com": True}}).notes
    assert note.verdict is Verdict.UNKNOWN
    assert "'overlap_comm'" in note.text


def test_optimizers_are_written_down_for_the_script() -> None:
    (note,) = convert({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}).notes
    assert note.verdict is Verdict.IN_SCRIPT
    assert "torch.optim.AdamW" in note.text
    assert "lr=1e-05" in note.text
    (note,) = convert({"optimizer": {"type": "OneBitAdam"}}).notes
    assert note.verdict is Verdict.NOT_SUPPORTED


def test_a_value_in_the_place_of_a_table_is_an_error() -> None:
    with pytest.raises(ConfigError, match="zero_optimization of the DeepSpeed config is 3"):
        convert({"zero_optimization": 3})


@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=4))
def test_every_field_leaves_one_note(settings: dict[str, Any]) -> None:
    tables = ("zero_optimization", "fp16", "bf16", "bfloat16", "activation_checkpointing", "optimizer")
    plain = {name: value for name, value in settings.items() if name not in tables}
    assert [note.field for note in convert(plain).notes] == list(plain)
