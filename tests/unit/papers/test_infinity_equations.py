from __future__ import annotations

from zero_infinity.papers.infinity_equations import Transformer, largest_hidden


def test_states_are_20_bytes_a_parameter() -> None:
    model = Transformer(layers=128, hidden=25600, heads=256)
    assert model.num_parameters == 12 * 128 * 25600**2
    assert model.state_bytes == 240 * 128 * 25600**2


def test_checkpoints_thin_out_with_the_interval() -> None:
    dense, sparse = (Transformer(8, 64, 4, seq=16, interval=interval) for interval in (1, 4))
    assert dense.checkpoint_bytes(2) == 2 * 2 * 16 * 64 * 8 == 4 * sparse.checkpoint_bytes(2)
    assert sparse.activation_working_bytes(2) == 4 * dense.activation_working_bytes(2)
    assert dense.activation_bytes(2) == 8 * dense.activation_working_bytes(2)


def test_working_memory_of_a_trillion_at_longer_sequences() -> None:
    # ZeRO-Infinity, footnote 3: 3.56 GB at 1K, 11 GB at 2K.
    assert round(Transformer(128, 25600, 256, seq=1024).activation_working_bytes(4) / 2**30, 2) == 3.56
    assert round(Transformer(128, 25600, 256, seq=2048).activation_working_bytes(4) / 2**30) == 11


def test_tiles_allow_wider_layers() -> None:
    assert [largest_hidden(2 * 2**30, tiles, with_gradient=False) for tiles in (2, 4, 16)] == [16384, 32768, 65536]
    assert largest_hidden(2 * 2**30, 1, with_gradient=True) == 8192
