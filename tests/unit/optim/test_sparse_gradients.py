"""Sparse gradients become dense, and one warning says so."""

from __future__ import annotations

import warnings

import pytest
import torch

import zero_infinity as zi
from zero_infinity.optim.sparse_gradients import DenseGradients


def test_it_is_said_once() -> None:
    dense = DenseGradients()
    plain = torch.ones(2)
    assert dense.of("head", plain) is plain
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([[2.0], [3.0]]), (3, 1), check_invariants=True
    )
    with pytest.warns(zi.ConfigWarning, match="'embedding' and perhaps others get sparse gradients"):
        assert dense.of("embedding", sparse).tolist() == [[0.0], [5.0], [0.0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dense.of("other", sparse)
