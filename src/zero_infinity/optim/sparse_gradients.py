"""Makes sparse gradients (`nn.Embedding(sparse=True)`) dense, and says so once.

Records and gradient blocks hold every element of a slice, so that nothing is gained by leaving rows out. Optimizers
that leave an element with a zero gradient as it is (SGD, Adagrad) leave untouched rows as they are, as in plain
PyTorch.
"""

from __future__ import annotations

import warnings

import torch

from zero_infinity.config import ConfigWarning


class DenseGradients:
    """The gradients of one model."""

    def __init__(self) -> None:
        self._has_told = False

    def of(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the parameter `name` as a dense tensor."""
        if gradient.layout is torch.strided:
            return gradient
        if not self._has_told:
            self._has_told = True
            warnings.warn(
                f"{name!r} and perhaps others get sparse gradients, which are made dense: the same as "
                "nn.Embedding(sparse=False)",
                ConfigWarning,
                stacklevel=2,
            )
        return gradient.to_dense()
