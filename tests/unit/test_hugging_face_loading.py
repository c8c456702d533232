"""The switch of transformers is as it was afterwards."""

from __future__ import annotations

import os

import pytest
from transformers.utils import is_env_variable_true

from zero_infinity.hugging_face_loading import one_tensor_at_a_time

SWITCH = "HF_DEACTIVATE_ASYNC_LOAD"


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_the_switch_is_set_inside_only(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if before is None:
        monkeypatch.delenv(SWITCH, raising=False)
    else:
        monkeypatch.setenv(SWITCH, before)
    with one_tensor_at_a_time():
        assert is_env_variable_true(SWITCH)
    assert os.environ.get(SWITCH) == before
