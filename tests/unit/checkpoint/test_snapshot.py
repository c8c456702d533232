from __future__ import annotations

import json

from support.prepared import Prepared

from zero_infinity.checkpoint.snapshot import Snapshot, Which


def test_kinds_blocks_and_manifest(prepared: Prepared) -> None:
    model, optimizer, view = prepared
    view.rest()
    snapshot = Snapshot(model, view, 1, with_optimizer=True, which=Which.ALL)
    assert snapshot.kinds["model", "0.weight"].shape == (4, 4)
    assert ("model", "2.weight") not in snapshot.kinds  # tied
    assert ("optimizer", "exp_avg/0.weight") in snapshot.kinds
    assert set(snapshot.values) == {("model", f"1.{n}") for n in ("running_mean", "running_var", "num_batches_tracked")}
    in_blocks = {p.key for c in (*snapshot.parameter_blocks(), *snapshot.state_blocks()) for p in c.parts}
    assert in_blocks | set(snapshot.values) == set(snapshot.kinds)
    assert json.loads(snapshot.describe())[0] == 1
    optimizer.param_groups[0]["lr"] = 7.0  # what is changed later is not saved
    manifest = snapshot.manifest({}, {}, {})
    assert manifest.step == 1
    assert manifest.optimizer is not None
    assert manifest.optimizer.kind == "AdamW"
    assert manifest.optimizer.groups[0].settings["lr"] == 1e-3


def test_without_the_optimizer(prepared: Prepared) -> None:
    model, _, view = prepared
    view.rest()
    snapshot = Snapshot(model, view, 1, with_optimizer=False, which=Which.ALL)
    assert {section for section, _ in snapshot.kinds} == {"model"}
    assert snapshot.manifest({}, {}, {}).optimizer is None
