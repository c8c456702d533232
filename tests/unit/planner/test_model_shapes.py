from __future__ import annotations

import pytest

from zero_infinity.errors import ConfigError
from zero_infinity.papers.infinity_equations import Transformer
from zero_infinity.planner.model_shapes import known, known_names, transformer


def test_counts_follow_the_paper_s_equations() -> None:
    model, equations = transformer(6, 512, 8, 256), Transformer(6, 512, 8, seq=256)
    assert model.num_parameters == equations.num_parameters
    attention = 6 * 4 * 256 * 512
    assert model.forward_flops(1) == 2 * equations.num_parameters + attention
    assert 2 * model.checkpoint_elements(4, 1) == equations.checkpoint_bytes(4)
    # In 16-bit elements, which is how figure 2a's activations come out with 2 sequences a GPU.
    assert model.working_bytes(2, 1, checkpointed=True, element_bytes=2) == 2 * equations.activation_working_bytes(2)


def test_tied_embeddings_count_once() -> None:
    plain, tied, untied = (
        transformer(2, 64, 4, 32, **kwargs) for kwargs in ({}, {"vocabulary": 100}, {"vocabulary": 100, "tied": False})
    )
    assert tied.num_parameters - plain.num_parameters == 6400
    assert untied.num_parameters - plain.num_parameters == 12800
    assert tied.forward_flops(1) == untied.forward_flops(1)


def test_tiles_keep_the_sum() -> None:
    model = transformer(3, 64, 4, 32)
    tiled = model.tiled(1000)
    assert max(tiled.units.values()) <= 1000
    assert tiled.num_parameters == model.num_parameters
    assert tiled.forward_flops(1) == pytest.approx(model.forward_flops(1))
    assert tiled.working_bytes(1, 1, checkpointed=True, element_bytes=1) == pytest.approx(
        model.working_bytes(1, 1, checkpointed=True, element_bytes=1), abs=9
    )


def test_a_slice_is_a_part_of_everything() -> None:
    model = transformer(8, 64, 4, 32, vocabulary=1000)
    part = model.sliced(2)
    assert part.num_blocks == 2
    assert part.num_parameters * 4 == model.num_parameters
    assert part.forward_flops(1) * 4 == pytest.approx(model.forward_flops(1))


def test_known_models_have_the_size_of_their_name() -> None:
    scale = {"m": 1e6, "b": 1e9, "t": 1e12}
    for name in known_names():
        text = name.split("-")[1]
        assert known(name).num_parameters == pytest.approx(float(text[:-1]) * scale[text[-1]], rel=0.05), name


def test_unknown_and_impossible() -> None:
    with pytest.raises(ConfigError, match=r"no model 'gpt3-13'; did you mean 'gpt3-13b'\?"):
        known("gpt3-13")
    with pytest.raises(ConfigError, match="layers is 0"):
        transformer(0, 64, 4, 32)
    with pytest.raises(ConfigError, match="vocabulary is -1"):
        transformer(1, 64, 4, 32, vocabulary=-1)
