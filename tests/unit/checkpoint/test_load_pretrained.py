from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.prepared import Prepared

import zero_infinity as zi
from zero_infinity.checkpoint.load_pretrained import PretrainedLoad


def test_weights_are_loaded_under_any_name_and_the_rest_stays(prepared: Prepared, tmp_path: Path) -> None:
    model, _, view = prepared
    path = tmp_path / "a.safetensors"
    save_file({"2.weight": torch.ones(4, 4, dtype=torch.bfloat16), "zz": torch.ones(1)}, path)
    with pytest.raises(zi.CheckpointError, match="only in the files .1.: zz"):
        PretrainedLoad(model, view, strict=True).read(path)
    bias = model.state_dict()["0.bias"].clone()
    PretrainedLoad(model, view, strict=False).read(path)
    assert torch.equal(model.state_dict()["0.weight"], torch.ones(4, 4))
    assert torch.equal(model.state_dict()["0.bias"], bias)
    assert view.num_steps == 1
