"""The plugin of Axolotl, over stand-ins for the three things of Axolotl that it uses: Axolotl itself needs a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from support.trainers import Tokens, assert_same, make_trainer, outcome, tiny_llama

import zero_infinity as zi

OURS = "zero_infinity.integrations.axolotl"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As Axolotl makes it: by its path. `BasePlugin` has no behaviour, and its trainer is one of transformers."""
    names = ("axolotl", "axolotl.integrations", "axolotl.integrations.base", "axolotl.core", "axolotl.core.trainers")
    for name in (*names, "axolotl.core.trainers.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    class BasePlugin:
        pass

    class AxolotlTrainer(transformers.Trainer):
        pass

    sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin  # type: ignore[attr-defined]
    sys.modules["axolotl.core.trainers.base"].AxolotlTrainer = AxolotlTrainer  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    yield import_module(OURS).ZeroInfinityPlugin()
    del sys.modules[OURS]


def test_its_trainer_trains_the_same_within_the_budget(plugin: Any, tmp_path: Path) -> None:
    settings = {"zero_infinity": {"memory": "256KiB", "nvme": str(tmp_path)}}
    plugin.register(settings)
    kind = plugin.get_trainer_cls(settings)
    plain = make_trainer(tmp_path, None, max_steps=4)
    args = plain.args
    ours = kind(model=tiny_llama(), args=args, train_dataset=Tokens(), callbacks=plain.callback_handler.callbacks[-1:])
    plain.train()
    expected = outcome(plain)
    expected_logs = list(expected.logs)
    expected.logs.clear()
    ours.train()
    assert expected_logs == outcome(ours).logs
    assert_same(type(expected)(expected_logs, expected.weights), outcome(ours))
    assert zi.stats(ours.model).memory_budget == 256 << 10


def test_without_its_table_it_changes_nothing(plugin: Any) -> None:
    plugin.register({"deepspeed": "x.json"})
    assert plugin.get_trainer_cls({}) is None


def test_its_settings_are_declared(plugin: Any) -> None:
    module, _, name = plugin.get_input_args().rpartition(".")
    declared = getattr(sys.modules[module], name)
    assert declared(zero_infinity={"memory": "1MiB"}).zero_infinity == {"memory": "1MiB"}
    assert declared().zero_infinity is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deepspeed": "x.json"}, "fix:   leave out deepspeed:"),
        ({"rl": "dpo"}, "fix:   TRL's trainer with"),
        ({"zero_infinity": {"memroy": 1}}, "zero_infinity: in Axolotl's settings"),
    ],
)
def test_what_does_not_go_together_is_told(changes: dict[str, Any], message: str, plugin: Any) -> None:
    with pytest.raises(zi.ConfigError, match=message):
        plugin.register({"zero_infinity": {}} | changes)
