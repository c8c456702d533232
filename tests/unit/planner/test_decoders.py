from __future__ import annotations

import pytest

from zero_infinity.errors import ConfigError
from zero_infinity.planner.decoders import all_names, named

# As published with the models: all parameters, and those that a token uses (with embeddings), in billions.
_PUBLISHED = {
    "llama3-8b": 8.030,
    "llama3-70b": 70.554,
    "llama3-405b": 405.853,
    "llama3.2-1b": 1.236,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-30b-a3b": 30.532,
    "qwen3-235b-a22b": 235.094,
    "mistral-7b": 7.248,
    "mixtral-8x7b": 46.703,
    "gemma2-9b": 9.242,
    "deepseek-v3": 671.026,
    "gpt-oss-20b": 20.915,
    "gpt-oss-120b": 116.829,
}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_models_have_their_published_size(name: str) -> None:
    assert named(name).num_parameters / 1e9 == pytest.approx(_PUBLISHED[name], abs=6e-4)


def test_a_token_uses_some_experts() -> None:
    model = named("qwen3-30b-a3b", seq=1)
    assert model.forward_flops(1) / 2e9 == pytest.approx(3.3 - 0.31, rel=0.03)  # active, less the embedding's table
    assert {operator.block for operator in model.operators} == {-1, *range(48)}


def test_a_config_of_the_same_numbers_is_the_same_model(tmp_path) -> None:
    """A small one, counted module by module."""
    pytest.importorskip("transformers")
    import json

    from zero_infinity.cli.hugging_face_shape import from_config
    from zero_infinity.planner.decoders import Decoder, shape_of

    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4,
                "num_key_value_heads": 2, "intermediate_size": 320, "vocab_size": 1000, "head_dim": 32,
                "max_position_embeddings": 4096, "tie_word_embeddings": False,
            }
        )
    )  # fmt: skip
    counted = from_config(tmp_path, 256, half=True)
    ours = shape_of(Decoder(2, 128, 4, 2, 320, 1000, head=32), "small", 256)
    assert ours.num_parameters == counted.num_parameters
    matrices = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 320 + 500 * 128)
    assert ours.forward_flops(1) == 2 * matrices + 2 * 256 * 4 * 64
    saved = [m.working_bytes(1, 1, checkpointed=True, element_bytes=2) for m in (ours, counted)]
    assert saved[0] == pytest.approx(saved[1], rel=0.25)


def test_names_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'llama3-8b'\?"):
        named("llama3-8")
    assert "gpt3-13b" in all_names()
