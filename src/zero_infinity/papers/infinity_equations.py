"""ZeRO-Infinity's memory equations (arXiv 2104.07857, section 3). Pure.

A Transformer of `layers` blocks of width `hidden`: four linear layers of (h,3h), (h,h), (h,4h) and (4h,h), without
embeddings. Its figure 2a counts in powers of 1024.
"""

from __future__ import annotations

from dataclasses import dataclass

# 16-bit parameter and gradient, and in float32 momentum, variance, parameter and gradient. ZeRO's 16 bytes do without
# the float32 gradient.
STATE_BYTES = 20
HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class Transformer:
    """The numbers that the equations are about. `interval` is ci: blocks between two activation checkpoints."""

    layers: int
    hidden: int
    heads: int
    seq: int = 1024
    interval: int = 1

    @property
    def num_parameters(self) -> int:
        return 12 * self.layers * self.hidden**2

    @property
    def state_bytes(self) -> int:
        """240 x layers x hidden^2."""
        return STATE_BYTES * self.num_parameters

    def checkpoint_bytes(self, batch: float) -> float:
        """2 x batch x seq x hidden x layers / interval: one 16-bit tensor for each interval."""
        return HALF_BYTES * batch * self.seq * self.hidden * self.layers / self.interval

    def activation_bytes(self, batch: float) -> float:
        """All activations, when nothing is computed again: `layers` times the working memory of one block."""
        return self.layers * self._block_activation_bytes(batch)

    def activation_working_bytes(self, batch: float) -> float:
        """AWM: batch x seq x interval x (16 x hidden + 2 x heads x seq), many tensors."""
        return self.interval * self._block_activation_bytes(batch)

    @property
    def state_working_bytes(self) -> int:
        """MSWM: 16-bit parameter and gradient of the h -> 4h layer, each in one piece."""
        return 2 * HALF_BYTES * self.hidden * 4 * self.hidden

    def _block_activation_bytes(self, batch: float) -> float:
        return batch * self.seq * (16 * self.hidden + 2 * self.heads * self.seq)


def largest_hidden(chunk_bytes: int, tiles: int, *, with_gradient: bool) -> int:
    """The widest h -> 4h layer whose tiles fit in contiguous memory of `chunk_bytes` (figure 6b), a power of two.

    The text does not say whether weight and gradient share a chunk; both readings are possible.
    """
    tensor_bytes = HALF_BYTES * (2 if with_gradient else 1)
    hidden = 1
    while tensor_bytes * 4 * (2 * hidden) ** 2 <= chunk_bytes * tiles:
        hidden *= 2
    return hidden
