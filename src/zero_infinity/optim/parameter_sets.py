"""Sets of parameters as the numbers that ranks tell each other: a bit for each parameter."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zero_infinity.params.unit import ManagedParameter

_BITS = 62  # per number in an agreement


class ParameterSets:
    """Packs sets of these parameters, which are in the same order on every rank."""

    def __init__(self, parameters: Sequence[ManagedParameter]) -> None:
        self._parameters = parameters
        self.num_words = -(-len(parameters) // _BITS)

    def pack(self, members: Collection[ManagedParameter]) -> list[int]:
        words = [0] * self.num_words
        for number, parameter in enumerate(self._parameters):
            words[number // _BITS] |= (parameter in members) << (number % _BITS)
        return words

    def unpack(self, said: Sequence[Sequence[int]], number: int) -> dict[ManagedParameter, None]:
        """Return the parameters, in their order, that are in the set with this number of any rank."""
        every = [words[number * self.num_words : (number + 1) * self.num_words] for words in said]
        return {
            parameter: None
            for index, parameter in enumerate(self._parameters)
            if any(words[index // _BITS] >> (index % _BITS) & 1 for words in every)
        }
