"""What the forkserver imports before it forks the first rank."""
# ruff: noqa: F401

from __future__ import annotations

import gc

import torch
import torch._dynamo
import torch.distributed

import zero_infinity.api
import zero_infinity.cli.train
import zero_infinity.cli.train_loop

# No collection in a child looks at what is here: that would copy every page of it.
gc.collect()
gc.freeze()
