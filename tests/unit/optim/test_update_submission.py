"""The blocks of an update are accessed in the order of their use, and are free again when it is done."""

from __future__ import annotations

import torch
from support.prepared import prepare_small

from zero_infinity.optim.chunk_update import WholeGradients
from zero_infinity.optim.flat_gradient import FlatGradient
from zero_infinity.optim.update_submission import UpdateSubmission


def test_an_update_and_a_retained_gradient() -> None:
    model, optimizer, engine = prepare_small()
    unit = engine.units[0]
    record = engine.records[unit]
    done: list[str] = []
    submission = UpdateSubmission(
        engine.host_cache,
        engine.parameter_store.update_worker,
        engine.parameter_store.sources,
        engine.user_optimizer,
        engine.records,
        is_shared=True,
    )
    before = model[0].weight.detach().clone()
    parameters = list(record.state_names)
    weight = parameters[0]
    ones = FlatGradient(torch.ones(weight.num_elements), torch.float32)
    submission.retain(unit, WholeGradients({weight: ones}), frozenset(), None, lambda: done.append("retained"))
    submission.update(
        unit,
        WholeGradients({}),
        [weight],
        [weight],
        (),
        lambda: done.append("updated"),
        keeps_gradients=False,
    )
    engine.settle()
    assert done == ["retained", "updated"]
    blocks = [unit.the_block(), *(b for chunk in record.chunks for b in (chunk.gradient, chunk.record) if b)]
    assert not any(block.uses for block in blocks)
    assert not record.chunks[0].gradient.has_content
    assert (model[0].weight.detach() < before).all()
    assert weight.state.num_changes > 0
    optimizer.zero_grad()
