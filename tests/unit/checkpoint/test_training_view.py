from __future__ import annotations

import ast
from pathlib import Path

import torch
from support.prepared import Prepared
from torch import nn

import zero_infinity as zi
from zero_infinity import checkpoint
from zero_infinity.api import _unsharders
from zero_infinity.checkpoint.training_view import UnpreparedModel


def test_the_engine_lends_staging_memory_within_its_budget(prepared: Prepared) -> None:
    _, _, view = prepared
    with view.staging() as num_bytes:
        assert 0 <= num_bytes <= view.store.pool.budget
    assert view.spare_bytes >= 0
    assert not view.verify


def test_a_model_that_is_not_prepared_lends_what_it_gives_back() -> None:
    config = zi.Config(memory="8MiB")
    with zi.init(config):
        model = nn.Linear(8, 8)
    (unsharder,) = _unsharders(model)
    view = UnpreparedModel(model, unsharder)
    before = view.host_cache.policy.budget, view.store.pool.held_bytes
    with view.staging() as num_bytes:
        assert num_bytes == (8 << 20) // 16
        assert view.host_cache.policy.budget == before[0] - num_bytes
        assert view.store.pool.held_bytes == before[1] + num_bytes
    assert (view.host_cache.policy.budget, view.store.pool.held_bytes) == before
    with view.replacing():
        pass
    assert torch.isfinite(model.weight).all()


def test_nothing_in_the_package_reaches_through_two_attributes_of_a_view() -> None:
    """`view.store.x` is the seam; `view.store.pool.x` would look behind it."""
    found = []
    for path in Path(checkpoint.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            inner: ast.AST = node
            while isinstance(inner, ast.Attribute):
                names.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                chain = [inner.id, *reversed(names)]
                chain = chain[1:] if chain[0] == "self" else chain
                if len(chain) > 3 and chain[0] in ("view", "_view") and chain[1] != "user_optimizer":
                    found.append(f"{path.name}: {'.'.join(chain)}")
    assert found == []
