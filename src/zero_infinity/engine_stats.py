"""What a prepared model has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot; subtract two to see what happened between them."""

    num_steps: int
    num_parameters: int
    state_bytes: int  # parameters, optimizer states and master copies: what has to live somewhere
    memory_budget: int
    memory_held: int
    memory_peak: int
    swap_bytes: int  # reserved on NVMe
    bytes_read: int  # from NVMe
    bytes_written: int  # to NVMe: what wears the drive
    read_requests: int
    write_requests: int
    waited_seconds: float  # time that the training thread stood still for a block or for the worker
    io_busy_seconds: float  # time with at least one request at a drive
    num_deviations: int  # accesses that came in another order than recorded
    pending_updates: int  # updates that the worker has not finished yet
    # What this rank has at home, by kind, and what it sets aside for exchanges.
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    bucket_bytes: int
    copy_bytes: int  # room for copies of parameters where they are computed
    activation_bytes: int  # blocks for saved tensors, in use or free
    # What this rank has sent to others, and in how many exchanges, by kind. Empty on one rank.
    sent_bytes: dict[str, int]
    num_exchanges: dict[str, int]
