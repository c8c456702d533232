from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_infinity as zi


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (lambda m: (m, zi.Config()), r"config in the place of the optimizer"),
        (lambda m: (m, torch.optim.SGD(m.parameters()), {"memory": "1MiB"}), r"zi.Config\(\*\*config\)"),
        (lambda m: (torch.optim.SGD(m.parameters()), m), r"got a SGD and a Linear"),
        (lambda m: (m, torch.optim.SGD(m.parameters()), "1GiB"), r"config= is a str"),
    ],
)
def test_mistaken_arguments_of_prepare(arguments: Any, text: str) -> None:
    with pytest.raises(zi.UsageError, match=text):
        zi.prepare(*arguments(nn.Linear(2, 2)))


def test_a_config_that_is_a_dict_is_refused_by_init() -> None:
    with pytest.raises(zi.UsageError, match=r"zi.Config\(\*\*config\)"), zi.init({"memory": "1MiB"}):  # type: ignore[arg-type]
        nn.Linear(2, 2)


@pytest.mark.parametrize("call", [zi.save, zi.load, zi.export])
def test_the_model_in_the_place_of_the_path(call: Any, tmp_path: Path) -> None:
    model = zi.prepare(nn.Linear(2, 2), config=zi.Config(memory="1MiB"))
    with pytest.raises(zi.UsageError, match=r"(?s)model= is a Posix.*zi.save\(path, model, optimizer\)"):
        call(model, tmp_path)
    with pytest.raises(zi.UsageError, match=r"(?s)model= is a Posix.*zi.load_pretrained\(model, path\)"):
        zi.load_pretrained(tmp_path, model)  # type: ignore[arg-type]
