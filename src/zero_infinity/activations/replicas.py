"""Partitions activations that ranks replicate: each keeps a part, backward all-gathers (ZeRO-R's P_a).

Tensor parallelism replicates activations: the inputs of a block are the same on every rank of the group. That is
checked each time: ranks compare a checksum of all bits before they drop the rest.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.comm.channel import Channel
from zero_infinity.comm.topics import Topic
from zero_infinity.errors import DivergenceError
from zero_infinity.policy.partition import Span

_NUMBER = -30  # the topic number of all exchanges here
_ROW = 1024  # words
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that a difference in one sum changes the product


class Replicas:
    """The ranks of one group, for the compute thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def part(self, num_bytes: int) -> Span:
        """Return the part of a tensor that this rank keeps."""
        return self._spans(num_bytes)[self._channel.rank]

    def check_same(self, whole: torch.Tensor) -> None:
        """Raise if another rank has different bytes."""
        topic = Topic("activations", _NUMBER, "the input of a recomputed block")
        said = self._channel.agree(topic, [whole.nbytes, fingerprint(whole)])
        for rank, (num_bytes, sums) in enumerate(said):
            if (num_bytes, sums) != tuple(said[0]):
                how = (
                    f"{format_bytes(num_bytes)} and {format_bytes(said[0][0])}"
                    if num_bytes != said[0][0]
                    else f"different values ({format_bytes(num_bytes)})"
                )
                raise DivergenceError(
                    f"ranks {rank} and 0 of activation_group have different inputs of a recomputed block: {how}\n"
                    "  fix:   activation_group= is for ranks that compute the same (tensor parallel): give them the "
                    "same batch and the same dropout seed, or leave it out"
                )

    def gather(self, whole: torch.Tensor) -> None:
        """Fill `whole`, of which each rank has its part."""
        topic = Topic("activations", _NUMBER, "the input of a recomputed block")
        self._channel.agree(topic, [whole.nbytes])
        self._channel.gather(topic, [(whole, self._spans(whole.nbytes))])

    def _spans(self, num_bytes: int) -> list[Span]:
        ends = [num_bytes * rank // self._channel.num_ranks for rank in range(self._channel.num_ranks + 1)]
        return [Span(start, stop) for start, stop in pairwise(ends)]


def fingerprint(data: torch.Tensor) -> int:
    """Return a checksum that, except by chance, differs for different bytes or a different order.

    Sums over rows and over columns, each weighted by position. Needs no extra memory on any device. The weights of rows
    are odd and those of columns even, so the factor of each word is odd: a change in one word always shows.
    """
    num_words = len(data) // 8
    words = data[: num_words * 8].view(torch.int64)
    total = data[num_words * 8 :].to(torch.int64).sum()
    rows = words[: num_words // _ROW * _ROW].view(-1, _ROW)
    for sums, parity in ((rows.sum(1), 1), (rows.sum(0), 0), (words[rows.numel() :], 1)):
        weights = torch.arange(1, len(sums) + 1, device=data.device) * _FACTOR
        weights = ((weights ^ (weights >> 32)) << 1) | parity
        total = total * _FACTOR + (sums * weights).sum()
    return int(total.item())
