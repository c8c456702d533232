from __future__ import annotations

from torch import nn

from zero_infinity.checkpoint.hf_names import hugging_face_files, is_hugging_face, plan_export, plan_loading


def test_names_of_other_models_stay_as_they_are() -> None:
    model = nn.Linear(2, 2)
    assert not is_hugging_face(model)
    plan = plan_loading(model, ["weight", "other"], ["weight", "bias"])
    assert (plan.direct, plan.conversions, plan.unknown) == ({"weight": "weight"}, [], ["other"])
    assert plan_export(model, ["weight"]).direct == {"weight": "weight"}
    assert plan_export(None, ["weight"]).direct == {"weight": "weight"}
    assert hugging_face_files(model) is None


def test_names_of_a_hugging_face_model() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    model = GPT2LMHeadModel(config)
    names = list(model.state_dict())
    without_prefix = [name.removeprefix("transformer.") for name in names]
    plan = plan_loading(model, without_prefix, names)
    assert plan.direct["transformer.wte.weight"] == "wte.weight"
    assert plan.unknown == []
    files = hugging_face_files(model)
    assert files is not None
    assert files["config.json"]["architectures"] == ["GPT2LMHeadModel"]
