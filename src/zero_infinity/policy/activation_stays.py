"""Which saved tensors stay on the device, within a number of bytes: the last ones of a forward.

Backward uses them first, so that what is saved early has the longest time to go to the host and come back. How long a
forward is, is known from the longest one of the last step. If all of them fit, nothing moves.
"""

from __future__ import annotations

# Of a forward that nothing is known about yet.
_NONE = 1 << 60


class ActivationStays:
    """Decides for one model; told of every saved tensor in order."""

    def __init__(self) -> None:
        self.room = 0  # bytes that may stay
        self.held_bytes = 0  # that stay now
        self.peak_bytes = 0
        self._forward: list[int] = []  # sizes, until the first of them is used
        self._longest: list[int] = []  # forward of this step
        self._first = _NONE  # this one of a forward, and the later ones, stay
        self._is_backward = False

    def stays(self, num_bytes: int) -> bool:
        """A tensor of this size is saved: True if it stays, until `left`."""
        if self._is_backward:
            self._end_forward()
        self._forward.append(num_bytes)
        if len(self._forward) <= self._first or self.held_bytes + num_bytes > self.room:
            return False
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return True

    def used(self) -> None:
        """A saved tensor is used, or will never be."""
        self._is_backward = True

    def left(self, num_bytes: int) -> None:
        """A tensor that stayed is no longer needed."""
        self.held_bytes -= num_bytes

    def end_step(self) -> None:
        """Decide which stay in the next step."""
        self._end_forward()
        self._first = len(self._longest)
        missing = self.room
        for size in reversed(self._longest):
            missing -= size
            if missing < 0:
                break
            self._first -= 1
        if not self._longest:
            self._first = _NONE
        self._longest = []

    def _end_forward(self) -> None:
        self._is_backward = False
        self._longest = max(self._longest, self._forward, key=sum)
        self._forward = []
