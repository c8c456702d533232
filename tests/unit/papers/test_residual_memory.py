from __future__ import annotations

import pytest

from zero_infinity.papers import zero_equations


def test_gpt2_activations_are_about_60_gigabytes_and_8_with_checkpoints() -> None:
    # ZeRO, section 3.2: 1.5B parameters (48 x 1600), sequences of 1K, batch 32.
    assert zero_equations.activation_bytes(1600, 32, 1024, 48) == pytest.approx(60.4e9, rel=0.01)
    assert zero_equations.checkpointed_activation_bytes(1600, 32, 1024, 48) == pytest.approx(8e9, rel=0.25)


def test_fused_buffer() -> None:
    assert (zero_equations.fused_buffer_bytes(1.5e9), zero_equations.fused_buffer_bytes(3e9)) == (6e9, 12e9)


def test_partitioned_activations() -> None:
    # Section 6.1 prints 33 GB and 2 GB for this; 16-bit checkpoints are twice as much, which its section 3.2 agrees with.
    whole = zero_equations.block_checkpoint_bytes(8192, 32, 1024, 125)
    assert whole == pytest.approx(67e9, rel=0.01)
    split = zero_equations.PartitionedActivations(whole, 16)
    assert split.shard_bytes == whole / 16
    assert split.host_traffic_bytes == whole / 8
    assert split.communication_overhead < 0.1
