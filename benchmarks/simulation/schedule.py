"""What one seed stands for: a training, and what goes wrong in it. A pure function of the seed."""

from __future__ import annotations

import errno
import math
import random
from dataclasses import dataclass, replace
from enum import Enum

from benchmarks.simulation.device import DriveFaults
from benchmarks.simulation.wires import Links


class Fault(Enum):
    """What goes wrong; every schedule also has slow links and drives, short transfers and threads that overtake."""

    NOTHING = "nothing"
    KILL = "a rank is killed"
    SILENCE = "a message is lost"
    READ = "a read of swap space fails"
    WRITE = "a write to swap space fails"
    FULL = "there is no room for swap space"
    FSYNC = "an fsync fails"
    FILE = "a write to a checkpoint fails"


class Bug(Enum):
    """Bugs that are put in on purpose, to see that they are found."""

    LOST_WRITE_BACK = "lost-write-back"
    DROPPED_MESSAGE = "dropped-message"
    REORDERED_PAIR = "reordered-pair"
    IGNORED_FSYNC = "ignored-fsync"
    REUSED_BUFFER = "reused-buffer"


@dataclass(frozen=True, slots=True)
class Training:
    """The training of a schedule; few of them, because each is compared with a plain one."""

    num_ranks: int
    stage: int
    is_clipped: bool
    depth: int
    num_parts: int  # backward passes for each step
    is_loaded: bool  # the checkpoint is loaded after the last step, which is then taken again

    @property
    def needs(self) -> str:
        """A budget in which units move in and out."""
        return "128KiB" if self.num_ranks == 1 else "192KiB"


@dataclass(frozen=True, slots=True)
class Schedule:
    """One seed, in full."""

    seed: int
    training: Training
    fault: Fault
    victim: int  # the rank to which it happens
    kill_at: int  # turn
    links: Links
    drives: tuple[DriveFaults, ...]  # by rank
    drive_delay: float
    preemption: float
    in_background: bool
    store_in_first: bool
    bug: Bug | None

    def __str__(self) -> str:
        training = self.training
        saves = f"{'background' if self.in_background else 'foreground'} save{', load' if training.is_loaded else ''}"
        parts = f", {training.num_parts} backwards a step" if training.num_parts > 1 else ""
        return (
            f"seed {self.seed}: {training.num_ranks} ranks, stage {training.stage}{parts}, {saves}, {self.fault.value}"
            f"{f' (rank {self.victim})' if self.fault is not Fault.NOTHING else ''}"
        )


def draw(seed: int, bug: Bug | None = None) -> Schedule:
    """What this seed stands for."""
    choice = random.Random(f"schedule {seed}")
    num_ranks = choice.choice([1, 2, 2, 3])
    stage = choice.choice([0, 1, 2, 3]) if num_ranks > 1 else 3
    # Over several ranks a norm is a sum of the shards' sums, and its last bit is not plain PyTorch's.
    is_clipped = num_ranks == 1 and choice.random() < 0.25
    depth = choice.choice([3, 4])
    # From a generator of their own: the others draw for a seed what they did before.
    more = random.Random(f"training {seed}")
    training = Training(num_ranks, stage, is_clipped, depth, more.choice([1, 1, 2]), is_loaded=more.random() < 0.25)
    fault = choice.choice([Fault.NOTHING, *Fault])
    if fault is Fault.NOTHING and more.random() < 0.5:
        fault = Fault.KILL
    if num_ranks == 1 and fault in (Fault.KILL, Fault.SILENCE):
        fault = Fault.NOTHING
    if bug is Bug.IGNORED_FSYNC:
        fault = Fault.FSYNC
    elif bug is not None:
        fault = Fault.NOTHING  # no error hides the wrong bits
    victim = choice.randrange(num_ranks)
    links = Links(choice.choice([1e-4, 1e-3, 0.05, 1.0]))
    short_every = choice.choice([None, 2, 5])
    kill_at = _spread(choice, 20, 6000)
    lost, failing = _spread(choice, 1, 400), _spread(choice, 1, 60)
    drives = [DriveFaults(short_every=short_every) for _ in range(num_ranks)]
    match fault:
        case Fault.SILENCE:
            links.lost = lost
        case Fault.READ:
            drives[victim].read_fails = failing
        case Fault.WRITE:
            drives[victim].write_fails = failing
            drives[victim].write_error = choice.choice([errno.EIO, errno.ENOSPC])
        case Fault.FULL:
            drives[victim].is_full = True
        case Fault.FSYNC:
            drives[victim].fsync_fails = choice.randrange(4)
        case Fault.FILE:
            drives[victim].file_write_fails = choice.randrange(12)
            drives[victim].file_write_error = choice.choice([errno.EIO, errno.ENOSPC])
    match bug:
        case Bug.LOST_WRITE_BACK:
            drives[victim].loses_write = failing
        case Bug.DROPPED_MESSAGE:
            links.arrives_empty = lost
        case Bug.REORDERED_PAIR:
            links.overtakes = choice.randrange(100)
        case Bug.REUSED_BUFFER:
            links.is_reused = True
    return Schedule(
        seed=seed,
        training=training,
        fault=fault,
        victim=victim,
        kill_at=kill_at,
        links=links,
        drives=tuple(replace(drive) for drive in drives),
        drive_delay=choice.choice([1e-4, 1e-3, 0.02]),
        preemption=choice.choice([0.0, 0.02, 0.2]),
        in_background=choice.random() < 0.5,
        store_in_first=choice.random() < 0.5,
        bug=bug,
    )


def _spread(choice: random.Random, least: float, most: float) -> int:
    """A number whose magnitude is drawn evenly."""
    return int(math.exp(choice.uniform(math.log(least), math.log(most))))
