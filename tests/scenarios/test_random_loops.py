"""Loops whose steps are drawn: each does what it does in plain PyTorch, or is refused with a sentence that helps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.behaviours import ACCUMULATES, OF_VALUES, OPTIMIZERS, STEPS, Loop
from support.compare import assert_same
from support.multirank import Prepared, plain_part, prepared_part, run_plain
from support.scenarios import ROUNDED, Scenario

import zero_infinity as zi
from zero_infinity.api import close

MODELS = ["chain", "tied", "half frozen", "recomputed", "lstm", "weights stacked", "many ways"]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    loop = Loop(tuple(draw(st.lists(st.sampled_from([*STEPS]), min_size=3, max_size=8))))
    late: dict[str, Any] = {"update": "after_backward"} if draw(st.booleans()) else {}
    rounded = ROUNDED if not {*loop.steps} & OF_VALUES and draw(st.booleans()) else {}
    return Scenario(
        f"small {draw(st.sampled_from(MODELS))}",
        loop,
        draw(st.sampled_from(["adamw", "sgd", *OPTIMIZERS])),
        {**late, **rounded},
        accumulates=bool({*loop.steps} & ACCUMULATES),
    )


@settings(max_examples=30)
@given(scenarios(), st.booleans())
def test_a_loop(scenario: Scenario, on_nvme: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        job = scenario.job({"memory": "1MiB", "nvme": Path(directory)} if on_nvme else {"memory": "4MiB"})
        expected = run_plain(job, 1)
        run = Prepared(job, 0, 1)
        try:
            scenario.script(run)
            result = run.result()
        except zi.UsageError as error:
            if not (isinstance(scenario.script, Loop) and scenario.script.may_be_refused):
                raise
            assert "\n  fix:   " in str(error)
            return
        finally:
            close(run.model)
        assert_same(str(scenario), plain_part(expected, 0), prepared_part(result))
