from __future__ import annotations

from zero_infinity.policy.zero_stage import ZeroStage


def test_each_stage_shards_one_more_kind_of_state() -> None:
    sharded = {
        int(stage): (stage.shards_optimizer, stage.shards_gradients, stage.shards_parameters) for stage in ZeroStage
    }
    assert sharded == {
        0: (False, False, False),
        1: (True, False, False),
        2: (True, True, False),
        3: (True, True, True),
    }
