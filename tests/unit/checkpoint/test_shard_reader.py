from __future__ import annotations

import torch
from support.prepared import Prepared

from zero_infinity.checkpoint.io_thread_pool import IOThreadPool, ProgressMeter
from zero_infinity.checkpoint.rank_parts import contents_of
from zero_infinity.checkpoint.shard_reader import ShardReader


def test_blocks_are_filled_and_what_has_no_source_stays(prepared: Prepared) -> None:
    model, _, view = prepared
    contents = contents_of(model, view)
    before = model.state_dict()["2.bias"].clone()
    seen: list[tuple[int, int]] = []
    sources = {("model", "0.weight"): torch.full((4, 4), 3.0), ("model", "0.bias"): torch.arange(4)}
    view.rest()
    with view.staging() as num_bytes, IOThreadPool(num_bytes) as threads, view.replacing():
        meter = ProgressMeter(lambda *moved: seen.append(moved), 1000)
        reader = ShardReader(contents, view, threads, meter, replaces_records=False)
        reader.run([task for unit in contents.units for task in reader.tasks(unit, sources, {})])
    state = model.state_dict()
    assert torch.equal(state["0.weight"], torch.full((4, 4), 3.0))
    assert state["0.bias"].tolist() == [0, 1, 2, 3]
    assert torch.equal(state["2.bias"], before)
    assert seen[-1][0] == 16 * 4 + 4 * 4
