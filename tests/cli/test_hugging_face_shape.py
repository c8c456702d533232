"""Plans for Hugging Face configs of every kind: right, or one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_infinity.cli.hugging_face_shape import from_config
from zero_infinity.cli.main import main
from zero_infinity.errors import ConfigError
from zero_infinity.models.hugging_face_config import read_any_config

pytest.importorskip("transformers")

BLOCK = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
LLAMA = {"model_type": "llama", **BLOCK, "num_key_value_heads": 2, "vocab_size": 300}
PAIR = {
    f"{part}_{name}": number
    for part in ("encoder", "decoder")
    for name, number in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
}
PICTURE = {**BLOCK, "image_size": 32, "patch_size": 8}
T5 = {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 300}
EXPERTS = {**BLOCK, "num_key_value_heads": 2, "vocab_size": 300, "num_experts_per_tok": 2}
CLIP_TEXT = {**BLOCK, "vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2}

KINDS: list[tuple[dict[str, Any], str, int]] = [  # config, the model that it stands for, blocks
    ({**LLAMA, "tie_word_embeddings": True}, "LlamaForCausalLM", 2),
    ({**LLAMA, "tie_word_embeddings": False}, "LlamaForCausalLM", 2),
    ({**LLAMA, "vocab_size": 32}, "LlamaForCausalLM", 2),
    ({"model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "vocab_size": 300,
      "tie_word_embeddings": True}, "GPTJForCausalLM", 2),
    ({"model_type": "gpt_neox", **BLOCK, "vocab_size": 300}, "GPTNeoXForCausalLM", 2),
    ({"model_type": "bert", **BLOCK, "vocab_size": 300, "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM", 2),
    ({"model_type": "bert", **BLOCK, "vocab_size": 300, "architectures": ["BertForSequenceClassification"]},
     "BertForSequenceClassification", 2),
    ({"model_type": "mixtral", **EXPERTS, "num_local_experts": 4}, "MixtralForCausalLM", 2),
    ({"model_type": "qwen2_moe", **EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
      "num_experts": 8}, "Qwen2MoeForCausalLM", 2),
    ({"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300}, "MambaForCausalLM", 2),
    (T5, "T5ForConditionalGeneration", 4),
    ({"model_type": "whisper", "d_model": 64, **PAIR, "vocab_size": 51865}, "WhisperForConditionalGeneration", 4),
    ({"model_type": "vit", **PICTURE, "architectures": ["ViTForImageClassification"]}, "ViTForImageClassification", 2),
    ({"model_type": "clip", "text_config": CLIP_TEXT, "vision_config": PICTURE}, "CLIPModel", 4),
]  # fmt: skip


def write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize(("config", "name", "num_blocks"), KINDS, ids=[f"{c['model_type']}-{n}" for c, n, _ in KINDS])
def test_every_parameter_of_every_kind(
    config: dict[str, Any], name: str, num_blocks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, config)
    known = read_any_config(path)
    assert known.model_class.__name__ == name
    with torch.device("meta"):
        parameters = list(known.build().parameters())
        num_parameters = sum(parameter.numel() for parameter in parameters)
        num_trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    model = from_config(path, None)
    assert (model.num_parameters, model.num_blocks) == (num_parameters, num_blocks)
    assert model.forward_flops(1) > 0
    assert capfd.readouterr().err == ""  # it ran, and torch has nothing to say
    assert main(["plan", "--model", str(tmp_path), "--hardware", "rtx4090", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    ram = next(tier["bytes"] for tier in plan["tiers"] if tier["name"] == "RAM")
    assert (ram["parameters"], ram["optimizer states"]) == (2 * num_parameters, 12 * num_trained)
    assert main(["simulate", "--model", str(path), "--hardware", "laptop", "--json"]) == 0


def test_operations_are_those_of_the_parameters_in_use(tmp_path: Path) -> None:
    """A real size: Mixtral's 46.7B parameters, of which 12.9B are active."""
    mixtral = {"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
               "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
               "num_experts_per_tok": 2}  # fmt: skip
    model = from_config(write(tmp_path, mixtral), 1024)
    assert model.num_parameters == 46_702_792_704
    attention = 32 * 4 * 1024 * 4096
    inactive = 32 * 6 * 3 * 4096 * 14336
    embedding, norms = 32000 * 4096, 65 * 4096
    assert model.forward_flops(1) == 2 * (model.num_parameters - inactive - embedding - norms) + attention


def test_without_attention_the_length_does_not_matter(tmp_path: Path) -> None:
    path = write(tmp_path, {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300})
    short, long = from_config(path, 32), from_config(path, 100_000)
    assert long.seq == 100_000
    assert short.forward_flops(1) == long.forward_flops(1)


def test_a_forward_that_cannot_be_run_is_counted_by_parameters(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    audio = {"model_type": "wav2vec2", **BLOCK}
    assert from_config(write(tmp_path, audio), None).num_parameters > 0
    assert "wav2vec2 cannot run without values" in capfd.readouterr().err


def test_a_picture_has_no_length(tmp_path: Path) -> None:
    path = write(tmp_path, {"model_type": "vit", **PICTURE})
    assert from_config(path, None).seq == 16
    with pytest.raises(ConfigError, match="16 patches"):
        from_config(path, 512)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "is not JSON"),
        ('{"model_type": "llama",}', "is not JSON"),
        ("[1]", "names no model_type"),
        ({"architectures": ["LlamaForCausalLM"]}, "names no model_type"),
        ({"model_type": "lama"}, "did you mean 'llama'?"),
        ({"model_type": "frobnicator"}, "--layers, --hidden and --heads"),
        ({**LLAMA, "hidden_size": 65}, "The hidden size (65) is not a multiple"),
        ({**LLAMA, "hidden_size": -64}, '"hidden_size" is -64'),
        ({**LLAMA, "hidden_size": "64"}, "expected int, got str"),
        ({**LLAMA, "hidden_size": None}, "expected int, got NoneType"),
        ({**LLAMA, "hidden_size": 10**15}, "between 1 and 10,000,000"),
        ({**LLAMA, "num_hidden_layers": 10**9}, '"num_hidden_layers" is 1000000000'),
        ({**LLAMA, "num_hidden_layers": 0}, '"num_hidden_layers" is 0'),
        ({**LLAMA, "num_key_value_heads": 3}, "LlamaForCausalLM does not work with these values"),
        ({**LLAMA, "hidden_act": "nonsense"}, "KeyError: 'nonsense'"),
        ({"model_type": "gpt2", "n_layer": -2}, '"n_layer" is -2'),
        ({"model_type": "clip", "text_config": {**CLIP_TEXT, "num_hidden_layers": 0}}, '"num_hidden_layers" is 0'),
    ],
)
def test_mistakes(config: object, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, config)
    assert main(["plan", "--model", str(path), "--hardware", "laptop"]) == 2
    error = capfd.readouterr().err
    assert message in error
    assert "fix:" in error
    assert len(error.splitlines()) == 2


def test_no_file_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(tmp_path), "--hardware", "laptop"]) == 2
    assert "config.json cannot be read: No such file" in capsys.readouterr().err


def test_a_model_without_blocks_is_not_told_to_compute_them_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, {**LLAMA, "num_hidden_layers": 1})
    assert main(["plan", "--model", str(path), "--hardware", "laptop", "--json"]) == 0
    assert "checkpoint_activations" not in json.loads(capsys.readouterr().out)["config"]
