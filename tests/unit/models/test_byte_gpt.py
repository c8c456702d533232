from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from zero_infinity import UsageError
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import Shape

SHAPE = Shape(layers=2, hidden=32, heads=4, seq=16)


@pytest.fixture
def model() -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(SHAPE)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


def test_logits_without_targets_and_their_loss_with_them(model: ByteGPT) -> None:
    inputs, targets = tokens(3, 16), tokens(3, 16)
    logits = model(inputs)
    assert logits.shape == (3, 16, 256)
    expected = F.cross_entropy(logits.reshape(-1, 256), targets.reshape(-1))
    torch.testing.assert_close(model(inputs, targets), expected)


def test_an_untrained_model_knows_next_to_nothing(model: ByteGPT) -> None:
    assert model(tokens(8, 16), tokens(8, 16)).item() == pytest.approx(math.log(256), rel=0.1)


def test_a_prediction_does_not_see_what_follows(model: ByteGPT) -> None:
    one = tokens(1, 16)
    other = one.clone()
    other[0, 10:] = (other[0, 10:] + 1) % 256
    before, after = model(one), model(other)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_positions_matter(model: ByteGPT) -> None:
    logits = model(torch.full((1, 4), 65))
    assert not torch.allclose(logits[0, 0], logits[0, 3])


def test_shorter_inputs_are_fine_and_longer_ones_an_error(model: ByteGPT) -> None:
    assert model(tokens(2, 5)).shape == (2, 5, 256)
    with pytest.raises(UsageError, match="got 17 tokens, but the model has positions for 16"):
        model(tokens(1, 17))


def test_every_parameter_gets_a_gradient(model: ByteGPT) -> None:
    model(tokens(2, 16), tokens(2, 16)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_tied_head_is_the_embedding() -> None:
    model = ByteGPT(Shape(layers=1, hidden=32, heads=4, seq=16, tied=True))
    assert model.head.weight is model.tokens.weight
    assert model(tokens(2, 16), tokens(2, 16)).item() == pytest.approx(math.log(256), rel=0.1)


def test_it_learns(model: ByteGPT) -> None:
    inputs = torch.arange(17).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        loss = model(inputs[:, :-1], inputs[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 1
