"""kill -9 at many moments of training and of saving: what is there afterwards is whole, and training goes on from it."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import pytest
from support import forkserver, kills
from support.patience import SECONDS

from zero_infinity.checkpoint.checkpoint_directory import find, has_checkpoint
from zero_infinity.checkpoint.manifest import read
from zero_infinity.checkpoint.rank_parts import MODEL

# A step with its save makes about as many calls of the file system: one kill before each of them.
NUM_CALLS = 38
NUM_TIMES = 6


def run(
    directory: Path, call: int | None = None, seconds: float | None = None, *, background: bool = False
) -> int | None:
    process = forkserver.context().Process(target=kills.train, args=(directory, call, seconds, background))
    process.start()
    process.join(SECONDS)
    return process.exitcode


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in find(folder).iterdir() if path.suffix == ".safetensors"}


@pytest.mark.parametrize("background", [False, True])
def test_killed_at_many_moments(background: bool, tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for directory in (undisturbed, disturbed):
        directory.mkdir()
    assert run(undisturbed) == 0
    choice = random.Random(0)
    moments: list[int | float] = [*range(1, NUM_CALLS + 1), *(choice.uniform(0.0, 0.08) for _ in range(NUM_TIMES))]
    choice.shuffle(moments)
    moments = moments[::2] if background else moments
    num_killed, num_ended, steps = 0, 0, []
    for moment in moments:
        how = {"call": moment} if isinstance(moment, int) else {"seconds": moment}
        code = run(disturbed, **how, background=background)  # type: ignore[arg-type]
        steps.append(_step(disturbed))
        assert sorted(steps) == steps, "a checkpoint was lost"
        if code == 0:
            # It got to the end: the same bits, and the next ones begin anew.
            assert tensor_files(disturbed / "saved") == tensor_files(undisturbed / "saved")
            num_ended += 1
            disturbed = tmp_path / f"disturbed{num_ended}"
            disturbed.mkdir()
            steps = []
            continue
        assert code == -signal.SIGKILL
        num_killed += 1
    assert num_killed >= (15 if background else 30)
    assert run(disturbed) == 0
    assert tensor_files(disturbed / "saved") == tensor_files(undisturbed / "saved")
    names = sorted(path.name for path in (disturbed / "saved").iterdir())
    latest, *kept = [name for name in names if not name.startswith(".latest")]
    # A kill between a checkpoint's name and `latest` makes the next run take the step again, under a name of its own.
    assert [latest, *(re.sub(r"-\d$", "", name) for name in kept)] == ["latest", "step-00000007", "step-00000008"]
    assert not any((disturbed / "swap").iterdir())


def _step(directory: Path) -> int:
    """Of the latest checkpoint, which has to be whole; 0 if there is none yet."""
    if not has_checkpoint(directory / "saved"):
        return 0
    folder = find(directory / "saved")
    manifest = read(folder)
    assert manifest.tensors[MODEL]
    assert {path.name for path in folder.iterdir()} == {*manifest.files, "manifest.json"}
    return manifest.step
