"""The other ranks of a contender that has several: processes of its group that take each step when it does.

The contender's own process is rank 0 and the only one that talks to the benchmark. The others are stopped, continued
and ended with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

from benchmarks.free_port import free_port
from benchmarks.turns.child_process import end_with
from benchmarks.turns.messages import Race, Setting


def launch_others(race: Race, setting: Setting) -> None:
    """StartReport ranks 1 and up, and make the group; this process is rank 0."""
    port = free_port()
    order = {"race": asdict(race), "setting": asdict(setting), "parent": os.getpid(), "port": port}
    for rank in range(1, setting.ranks):
        command = [sys.executable, "-m", "benchmarks.turns.other_ranks", json.dumps({**order, "rank": rank})]
        subprocess.Popen(command, stdin=subprocess.DEVNULL)
    _join(0, setting.ranks, port)


def _join(rank: int, num_ranks: int, port: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)


def _follow() -> None:
    # Before it joins: rank 0, which builds its model then, has imported all of this, too.
    from benchmarks.turns.worker import Trainer

    order = json.loads(sys.argv[1])
    end_with(order["parent"])
    race, setting = Race(**order["race"]), Setting(**order["setting"])
    _join(order["rank"], setting.ranks, order["port"])
    trainer = Trainer(race, setting, order["rank"])
    for _ in range(race.num_steps):
        trainer.step(drain=False)
    trainer.finish()


if __name__ == "__main__":
    _follow()
