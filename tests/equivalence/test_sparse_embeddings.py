"""`nn.Embedding(sparse=True)`: rows that no batch touches stay, and the others get the bits of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import FITS_RAM, Run, Setting, assert_same, compare, seeded
from support.device import cpu_only
from support.multirank import Job, run_jobs, steps
from torch import nn
from torch.optim import Optimizer

import zero_infinity as zi

pytestmark = [
    cpu_only("the test device has no sparse tensors"),
    pytest.mark.filterwarnings("ignore:.*get sparse gradients:zero_infinity.config.ConfigWarning"),
]
ROWS = 96


class Words(nn.Module):
    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 32, sparse=sparse)
        self.head = nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens))


def of(kind: Any, **options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: kind(model.parameters(), lr=1e-2, **options)


OPTIMIZERS = {
    "sgd": of(torch.optim.SGD),
}


def train(run: Run) -> None:
    """Each token once in a batch: plain PyTorch adds up rows that come twice in another order."""
    for number in range(4):
        tokens = torch.randperm(ROWS // 2, generator=seeded(number))[:12].view(2, 6)
        run.step(run.model(tokens).square().mean())


@pytest.mark.parametrize("setting", [FITS_RAM], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_of_sparse_gradients(name: str, setting: Setting, tmp_path: Path) -> None:
    compare(Words, train, OPTIMIZERS[name], setting, tmp_path)


def test_untouched_rows_stay() -> None:
    model = Words()
    before = model.words.weight.detach().clone()
    model, optimizer = zi.prepare(model, torch.optim.Adagrad(model.parameters()), zi.Config(memory="8MiB"))
    tokens = torch.tensor([[3, 3, 7]])
    for number in range(3):
        loss = model(tokens).square().mean()
        said = r"'words\.weight' and perhaps others get sparse gradients"
        with pytest.warns(zi.ConfigWarning, match=said) if number == 0 else nullcontext():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = (model.words.weight.detach() != before).any(1).nonzero().view(-1)
    assert changed.tolist() == [3, 7]


def test_two_ranks_have_the_bits_of_dense_gradients(tmp_path: Path) -> None:
    """Also of tokens that come twice, on one rank and on both."""
    nvme = {"memory": "least", "nvme": tmp_path}
    jobs = [
        Job(steps, model, "adagrad", settings={**home, "stage": stage})
        for stage, home in ((3, nvme), (1, {"memory": "4MiB"}))
        for model in ("words", "sparse words")
    ]
    dense_3, sparse_3, dense_1, sparse_1 = run_jobs(jobs, 2)
    for dense, sparse in ((dense_3, sparse_3), (dense_1, sparse_1)):
        for one, other in zip(dense, sparse, strict=True):
            assert_same("losses", one.losses, other.losses)
            assert_same("weights", one.weights, other.weights)
            assert_same("optimizer", one.optimizer, other.optimizer)
