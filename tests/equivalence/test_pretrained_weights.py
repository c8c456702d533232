"""Weights of Hugging Face models in and out, against transformers' own `from_pretrained` and `save_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support.compare import adamw, assert_same, copied
from support.models import CASES, mlp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import zero_infinity as zi
from zero_infinity.checkpoint import export
from zero_infinity.checkpoint.export import export_checkpoint

MODELS = ["gpt2", "llama", "t5", "mixtral"]


def auto(name: str) -> Any:
    return AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM


def made(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return CASES[name].make()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: copied(value.detach()) for name, value in model.state_dict().items()}


def config(directory: Path, **changes: Any) -> zi.Config:
    return zi.Config(**{"memory": "1MiB", "nvme": directory, **changes})


@pytest.mark.parametrize("name", MODELS)
def test_in_and_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder of transformers into blocks, trained, and to a folder that transformers reads: nothing changes."""
    plain = made(name, seed=1)
    plain.save_pretrained(tmp_path / "in", max_shard_size="30KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").exists()
    reference = auto(name).from_pretrained(tmp_path / "in")
    expected = values(reference)
    chosen = config(tmp_path, memory="2MiB")
    with zi.init(chosen):
        model = type(plain)(plain.config)
        zi.load_pretrained(model, tmp_path / "in")
    assert_same("inside zi.init", expected, values(model))
    model, optimizer = zi.prepare(model, adamw(model), chosen)
    assert_same("prepared", expected, values(model))
    zi.load_pretrained(model, tmp_path / "in" / "model.safetensors.index.json")
    assert_same("loaded again", expected, values(model))

    # One step of training, the same in plain PyTorch.
    for trained, its_optimizer in ((model, optimizer), (reference, adamw(reference))):
        trained.train()
        torch.manual_seed(3)
        CASES[name].loss(trained, CASES[name].batch(0)).backward()
        its_optimizer.step()
    expected = values(reference)
    monkeypatch.setattr(export, "SHARD_BYTES", 30_000)
    zi.export(tmp_path / "out", model)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert_same("exported", expected, values(auto(name).from_pretrained(tmp_path / "out")))
    # The same names and shapes as transformers itself writes, tied and fused weights included.
    reference.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = {n: t for file in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(file).items()}
    assert_same("files", dict(sorted(theirs.items())), dict(sorted(ours.items())))

    # From a checkpoint, without the model: also in another dtype.
    zi.save(tmp_path / "saved", model, optimizer)
    export_checkpoint(tmp_path / "saved", tmp_path / "again")
    assert_same("from a checkpoint", expected, values(auto(name).from_pretrained(tmp_path / "again")))
    export_checkpoint(tmp_path / "saved", tmp_path / "half", dtype=torch.bfloat16)
    half = auto(name).from_pretrained(tmp_path / "half")
    assert half.dtype is torch.bfloat16
    assert_same("half", {n: t.bfloat16() for n, t in expected.items()}, values(half))


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_progress_is_told(name: str, tmp_path: Path) -> None:
    """Every byte that goes into a block counts once, also where transformers puts a weight together."""
    made(name, seed=1).save_pretrained(tmp_path / "in")
    told: list[tuple[int, int]] = []

    def total(model: nn.Module) -> int:
        zi.load_pretrained(model, tmp_path / "in", progress=lambda *seen: told.append(seen))
        assert told == sorted(told)
        assert told[0][0] < told[0][1]
        assert told[-1][0] == told[-1][1]
        return told.pop()[1]

    chosen = config(tmp_path, memory="2MiB")
    with zi.init(chosen):
        model = made(name, seed=2)
        num_elements = sum(parameter.numel() for parameter in model.parameters())
        assert total(model) == 4 * num_elements
    told.clear()
    model, _ = zi.prepare(model, adamw(model), chosen)
    assert total(model) == 4 * num_elements
    told.clear()
    model = made(name, seed=2)
    model, _ = zi.prepare(model, adamw(model), config(tmp_path, memory="2MiB", param_dtype="bfloat16"))
    assert total(model) == (2 + 4) * num_elements  # what is stored, and its master copy


def test_a_base_model_and_another_dtype(tmp_path: Path) -> None:
    """Files of the model without its head lack a prefix; 16-bit files fill float32 masters."""
    plain = made("gpt2", seed=1)
    plain.transformer.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    other = made("gpt2", seed=2)
    model, _ = zi.prepare(other, adamw(other), config(tmp_path, param_dtype="bfloat16", compute_dtype="float32"))
    zi.load_pretrained(model, tmp_path / "base")
    expected = {name: value.float() for name, value in plain.state_dict().items()}
    assert_same("values", expected, values(model))


def test_a_plain_module_and_a_single_file(tmp_path: Path) -> None:
    torch.manual_seed(1)
    save_file(mlp().state_dict(), tmp_path / "weights.safetensors")
    expected = load_file(tmp_path / "weights.safetensors")
    chosen = config(tmp_path)
    with zi.init(chosen):
        model = mlp()
    zi.load_pretrained(model, tmp_path / "weights.safetensors")
    assert_same("values", expected, {n: t.detach() for n, t in values(model).items()})
    model, _ = zi.prepare(model, adamw(model), chosen)
    told: list[tuple[int, int]] = []
    zi.export(tmp_path / "out", model, progress=lambda *seen: told.append(seen))
    num_bytes = sum(tensor.nbytes for tensor in expected.values())
    assert told.count((num_bytes, num_bytes)) == 2  # put aside, and put in order
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors"]
    assert_same("exported", expected, load_file(tmp_path / "out" / "model.safetensors"))
    with pytest.raises(zi.UsageError, match="exists and is not empty"):
        zi.export(tmp_path / "out", model)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".export")]


def test_channels_last_is_exported_row_by_row(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = CASES["conv_channels_last"].make()
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    model, _ = zi.prepare(plain, adamw(plain), config(tmp_path))
    zi.export(tmp_path / "out", model)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert_same("values", dict(sorted(expected.items())), dict(sorted(found.items())))
    zi.save(tmp_path / "saved", model)
    for name in ("conv", "conv_channels_last"):
        other = CASES[name].make()
        model, _ = zi.prepare(other, adamw(other), config(tmp_path))
        zi.load_pretrained(model, tmp_path / "out")
        assert_same("values", expected, values(model))
        other = CASES[name].make()
        model, _ = zi.prepare(other, adamw(other), config(tmp_path))
        zi.load(tmp_path / "saved", model)
        assert_same("values", expected, values(model))


def test_what_does_not_fit(tmp_path: Path) -> None:
    plain = made("llama", seed=1)
    plain.save_pretrained(tmp_path / "in")
    weights = load_file(tmp_path / "in" / "model.safetensors")
    name = next(iter(weights))
    changed = {**weights, "extra.weight": torch.zeros(3)}
    changed[name] = torch.zeros(7)
    del changed["model.norm.weight"]
    save_file(changed, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    model, optimizer = zi.prepare(plain, adamw(plain), config(tmp_path))
    before = values(model)
    with pytest.raises(zi.CheckpointError) as caught:
        zi.load_pretrained(model, tmp_path / "in")
    for line in (
        "only in the files (1): extra.weight",
        "only in the model (1): model.norm.weight",
        f"{name} [7], in the",
    ):
        assert line in str(caught.value)
    assert_same("nothing moved", before, values(model))
    changed[name] = weights[name] + 1
    save_file(changed, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    zi.load_pretrained(model, tmp_path / "in", strict=False)
    assert_same(name, weights[name] + 1, values(model)[name])
    assert_same("norm", before["model.norm.weight"], values(model)["model.norm.weight"])
    optimizer.step()


def test_quantized_weights_are_no_fractions(tmp_path: Path) -> None:
    """Without their scales they would be other values; a buffer that counts is a whole number, too."""
    made_of = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    weights = dict(made_of.state_dict())
    chosen = config(tmp_path)
    model, _ = zi.prepare(made_of, adamw(made_of), chosen)
    save_file({**weights, "0.weight": torch.ones(8, 8, dtype=torch.int8)}, tmp_path / "weights.safetensors")
    with pytest.raises(
        zi.CheckpointError,
        match=r"integers for floating-point numbers, or the reverse \(1\): 0.weight torch.int8, in the model torch.float32\n",
    ):
        zi.load_pretrained(model, tmp_path / "weights.safetensors")
    save_file({**weights, "0.weight": torch.ones(8, 8, dtype=torch.float64)}, tmp_path / "weights.safetensors")
    zi.load_pretrained(model, tmp_path / "weights.safetensors")
    assert_same("values", torch.ones(8, 8), values(model)["0.weight"])


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "", 3, "x.bin"])
def test_odd_names_in_an_index(file: Any, tmp_path: Path) -> None:
    index = {"weight_map": {"0.weight": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model, _ = zi.prepare(*(lambda m: (m, adamw(m)))(mlp()), config(tmp_path))
    with pytest.raises(zi.CheckpointError, match="index.json is damaged: '0.weight' is in"):
        zi.load_pretrained(model, tmp_path)


def test_files_that_are_none(tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(zi.UsageError, match="neither prepared nor built inside of zi.init"):
        zi.load_pretrained(model, tmp_path)
    model, _ = zi.prepare(model, adamw(model), config(tmp_path))
    with pytest.raises(zi.CheckpointError, match="does not exist"):
        zi.load_pretrained(model, tmp_path / "nothing")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(zi.CheckpointError, match="pickled weights can run code and are not read"):
        zi.load_pretrained(model, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint(tmp_path: Path) -> None:
    """Its checkpoints hold ordinary state dicts: what a prepared model gives, and takes."""
    plain = made("gpt2", seed=1)
    model, optimizer = zi.prepare(plain, adamw(plain), config(tmp_path))
    CASES["gpt2"].loss(model, CASES["gpt2"].batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    expected = values(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other = made("gpt2", seed=2)
    other, _ = zi.prepare(other, adamw(other), config(tmp_path))
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other.load_state_dict(state["model"])
    assert_same("values", expected, values(other))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_safetensors_of_torch_distributed_checkpoint(tmp_path: Path) -> None:
    """What it writes as safetensors is read without a pickle; it reads what is saved here."""
    plain = made("gpt2", seed=1)
    state = plain.state_dict()
    whole = {name: value for name, value in state.items() if name != "lm_head.weight"}
    dcp.save(dict(whole), storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "hf")), no_dist=True)
    model = made("gpt2", seed=2)
    model, optimizer = zi.prepare(model, adamw(model), config(tmp_path))
    zi.load_pretrained(model, tmp_path / "hf")
    assert_same("values", state, values(model))
    folder = zi.save(tmp_path / "saved", model, optimizer)
    read = {name: torch.zeros_like(value) for name, value in whole.items()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert_same("read", whole, read)
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "parts"), save_distributed=True)
    dcp.save(dict(whole), storage_writer=writer, no_dist=True)
    with pytest.raises(zi.CheckpointError, match="each rank's parts of tensors"):
        zi.load_pretrained(model, tmp_path / "parts")
    dcp.save(dict(whole), checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(zi.CheckpointError, match=r"\.metadata is a pickle"):
        zi.load_pretrained(model, tmp_path / "dcp")
    with pytest.raises(zi.CheckpointError, match="is one of torch.distributed.checkpoint"):
        zi.load(tmp_path / "dcp", model)


def test_state_dicts_of_torch_distributed_checkpoint(tmp_path: Path) -> None:
    """Asking for the states changes none of them: torch takes a step with zeros when it finds an optimizer empty."""

    def trained(seed: int, num_steps: int) -> tuple[Any, Any]:
        model = made("gpt2", seed=seed)
        model, optimizer = zi.prepare(model, adamw(model), config(tmp_path))
        for number in range(num_steps):
            CASES["gpt2"].loss(model, CASES["gpt2"].batch(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(1, 2)
    before = values(model), copied(optimizer.state_dict())
    states = get_state_dict(model, optimizer)
    assert_same("states", before, (values(model), copied(optimizer.state_dict())))
    other, its_optimizer = trained(2, 1)
    set_state_dict(other, its_optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    assert_same("taken in", before[0], values(other))
    assert_same("taken in", before[1]["state"], copied(its_optimizer.state_dict())["state"])
    first = next(iter(optimizer.state))
    assert_same("one state", before[1]["state"][0], optimizer.state[first])
    assert first in optimizer.state
    assert len(optimizer.state) == len(before[1]["state"])
