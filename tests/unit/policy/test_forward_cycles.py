"""A cycle of inference ends where a module is called again."""

from __future__ import annotations

import pytest

from zero_infinity.policy.forward_cycles import ForwardCycles


@pytest.mark.parametrize(
    ("calls", "begin"),
    [
        ("mmmm", [1, 2, 3]),  # generate: one forward for each token
        ("edddd", [2, 3, 4]),  # an encoder once, then a decoder for each token
        ("eddedd", [2, 4, 5]),  # and again: the encoder joins the cycle of the last token
        ("abcabcabc", [3, 6]),  # a model whose layers are called one by one
        ("abc", []),
    ],
)
def test_where_cycles_begin(calls: str, begin: list[int]) -> None:
    cycles = ForwardCycles()
    assert [at for at, module in enumerate(calls) if cycles.begins(module)] == begin


def test_a_cycle_that_ended_for_another_reason_is_forgotten() -> None:
    cycles = ForwardCycles()
    assert not cycles.begins("m")
    cycles.forget()
    assert not cycles.begins("m")
    assert cycles.begins("m")
