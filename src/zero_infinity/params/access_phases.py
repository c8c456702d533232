"""Tells the tiers whether accesses belong to training or to inference, and where a cycle of inference ends.

Inference is every forward of a model that is not trained, and a forward without gradients of one that is: evaluation
between steps has an order of its own, and leaves that of training alone.
"""

from __future__ import annotations

import torch
from torch import nn

from zero_infinity.policy.forward_cycles import ForwardCycles
from zero_infinity.tiers.device_cache import DeviceCache
from zero_infinity.tiers.host_cache import HostCache


class AccessPhases:
    """The phases of one model's accesses."""

    def __init__(self, host_cache: HostCache, cache: DeviceCache | None, *, trains: bool) -> None:
        self._host_cache = host_cache
        self._cache = cache
        self._trains = trains
        self._cycles = ForwardCycles()
        self._is_inference = False
        if not trains:
            self._follow(inference=True)

    def on_call(self, module: nn.Module) -> None:
        """A forward begins."""
        inference = not (self._trains and torch.is_grad_enabled())
        if inference != self._is_inference:
            self._follow(inference=inference)
        if inference and self._cycles.begins(id(module)):
            self._host_cache.end_cycle(same_order=True)
            if self._cache is not None:
                self._cache.end_cycle(same_order=True)

    def train(self) -> None:
        """A step of training begins."""
        if self._is_inference and self._trains:
            self._follow(inference=False)

    def _follow(self, *, inference: bool) -> None:
        self._is_inference = inference
        self._cycles.forget()
        self._host_cache.follow(inference=inference)
        if self._cache is not None:
            self._cache.follow(inference=inference)
