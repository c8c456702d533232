"""What the forkserver imports before it forks the first child."""
# ruff: noqa: F401

from __future__ import annotations

import gc

import torch
import torch._dynamo
import torch.distributed

import support.kills
import support.multirank
import support.rank_command
import support.rank_faults
import support.survivors
import support.tensor_parallel
import zero_infinity.api
import zero_infinity.cli.train_loop
from support.cpu_seeds import seed_the_cpu_only
from support.device import IS_CPU

if IS_CPU:
    import support.trainers

seed_the_cpu_only()

# No collection in a child looks at what is here: that would copy every page of it.
gc.collect()
gc.freeze()
