from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.prepared import Prepared

import zero_infinity as zi
from zero_infinity.checkpoint.export import WeightExport, export_checkpoint
from zero_infinity.checkpoint.manifest import PIECE_BYTES


def test_a_checkpoint_and_a_model_give_the_same_file(prepared: Prepared, tmp_path: Path) -> None:
    model, optimizer, view = prepared
    saved = zi.save(tmp_path / "saved", model, optimizer)
    num_bytes = export_checkpoint(saved, tmp_path / "a", dtype=torch.bfloat16)
    WeightExport(model, view).write(tmp_path / "b", torch.bfloat16)
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == (tmp_path / "a" / "model.safetensors").read_bytes()
    assert num_bytes == sum(tensor.nbytes for tensor in found.values())
    assert found["0.weight"].dtype is torch.bfloat16
    assert found["1.num_batches_tracked"].dtype is torch.int64
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "saved"]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zi.ConfigError, match="dtype torch.int8 is not supported for weights"):
        export_checkpoint(tmp_path, tmp_path / "a", dtype=torch.int8)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(zi.UsageError, match="full exists and is not empty"):
        export_checkpoint(tmp_path, tmp_path / "full")


def test_a_tensor_of_several_pieces_is_whole(tmp_path: Path) -> None:
    linear = torch.nn.Linear(1000, 1300, bias=False)
    expected = linear.weight.detach().clone()
    assert expected.nbytes > 2 * PIECE_BYTES
    model, optimizer = zi.prepare(linear, torch.optim.SGD(linear.parameters()), zi.Config(memory="64MiB"))
    export_checkpoint(zi.save(tmp_path / "saved", model, optimizer), tmp_path / "a")
    assert torch.equal(load_file(tmp_path / "a" / "model.safetensors")["weight"], expected)
