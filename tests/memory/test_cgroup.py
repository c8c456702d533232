"""Within a real memory limit, by the kernel's own accounting.

The limit is what the process has when torch is imported and warm, plus the engine's budget, plus a stated slack: for
activations and gradients in flight, Python objects, what malloc keeps (TRAPS 32) and pages of files (TRAPS 33).
"""

from __future__ import annotations

import signal
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cgroup import Ended, Group, control_group, run_limited
from transformers import LlamaConfig, LlamaForCausalLM

MIB = 1 << 20
BUDGET = 8 * MIB
SLACK = 32 * MIB
HEADROOM = BUDGET + SLACK

DEPTH = 216

# Layers of 1 MiB, 3 MiB with their states.
_COMMON = """
import zlib
import torch
from torch import nn
import zero_infinity as zi

torch.set_num_threads(1)

def make(depth):
    torch.manual_seed(0)
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(512, 512), nn.Tanh()]
    return nn.Sequential(*layers)

def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)

def train(model, optimizer, num_steps=3):
    losses = []
    for number in range(num_steps):
        x = torch.randn(8, 512, generator=torch.Generator().manual_seed(number))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses

def checksums(model):
    return [zlib.crc32(p.detach().numpy()) for p in model.parameters()]

def warm_up(nvme):
    '''Load what is loaded at the first use: kernels, the backward thread, the optimizer, the engine.'''
    plain = make(1)
    train(plain, adamw(plain))
    config = zi.Config(memory="8MiB", nvme=nvme)
    with zi.init(config):
        model = make(1)
    train(*zi.prepare(model, adamw(model), config))
"""

_TRAIN = (
    _COMMON
    + f"""
warm_up(NVME)
used = limit({HEADROOM})
if STREAMED:
    config = zi.Config(memory={BUDGET}, nvme=NVME)
    with zi.init(config):
        model = make({DEPTH})
    model, optimizer = zi.prepare(model, adamw(model), config)
else:
    model = make({DEPTH})
    optimizer = adamw(model)
losses = train(model, optimizer)
states = zi.stats(model).state_bytes if STREAMED else None
report(losses=losses, checksums=checksums(model), used=used, peak=peak_bytes(), states=states)
"""
)

_BUILD = (
    _COMMON
    + f"""
warm_up(NVME)
used = limit({HEADROOM})
before = anonymous_bytes()
with zi.init(zi.Config(memory={BUDGET}, nvme=NVME)):
    model = make({10 * HEADROOM // MIB})
report(checksums=checksums(model), num_bytes=sum(p.nbytes for p in model.parameters()), used=used, peak=peak_bytes(),
       grown=anonymous_bytes() - before)
"""
)

_CHECKPOINT = (
    _COMMON
    + f"""
import zlib
config = zi.Config(memory={BUDGET}, nvme=NVME)
warm_up(NVME)
with zi.init(config):
    warm = make(1)
zi.save(NVME + "/warm", *zi.prepare(warm, adamw(warm), config))
used = limit({HEADROOM})
before = anonymous_bytes()
with zi.init(config):
    model = make({DEPTH // 2})
model, optimizer = zi.prepare(model, adamw(model), config)
train(model, optimizer, 1)
expected = checksums(model)
folder = zi.save(NVME + "/saved", model, optimizer)
saved = anonymous_bytes() - before
beside = zi.save(NVME + "/beside", model, optimizer, background=True)
losses = train(model, optimizer, 1)
zi.synchronize(model)
same = (folder / "manifest.json").read_bytes() == (beside / "manifest.json").read_bytes()
zi.load(folder, model, optimizer)
loaded = checksums(model)
again = train(model, optimizer, 1)
zi.load_pretrained(model, folder / "model-00001-of-00001.safetensors")
report(expected=expected, loaded=loaded, pretrained=checksums(model), losses=losses, again=again, used=used,
       peak=peak_bytes(), grown=anonymous_bytes() - before, saved=saved, same=same,
       num_bytes=sum(path.stat().st_size for path in folder.iterdir()))
"""
)

_PRETRAINED = (
    _COMMON
    + f"""
from transformers import LlamaForCausalLM
warm_up(NVME)
config = zi.Config(memory={BUDGET}, nvme=NVME)
with zi.init(config):
    LlamaForCausalLM.from_pretrained(NVME + "/small")
used = limit({HEADROOM})
before = anonymous_bytes()
with zi.init(config):
    model = LlamaForCausalLM.from_pretrained(NVME + "/large")
grown = anonymous_bytes() - before
report(checksums=checksums(model), used=used, peak=peak_bytes(), grown=grown)
"""
)


def run(group: Group, script: str, directory: Path, *, streamed: bool = True) -> Ended:
    return run_limited(group, f"NVME = {str(directory)!r}\nSTREAMED = {streamed}\n" + script)


def plain() -> SimpleNamespace:
    """What the scripts define, in this process, which has no limit."""
    names: dict[str, Any] = {}
    exec(_COMMON, names)
    return SimpleNamespace(**names)


def test_training_within_a_limit_that_kills_plain_pytorch(tmp_path: Path) -> None:
    with control_group() as group:
        streamed = run(group, _TRAIN, tmp_path)
        assert streamed.returncode == 0, streamed.output
        assert streamed.report is not None
        assert streamed.report["states"] >= 16 * HEADROOM
        assert streamed.report["peak"] <= streamed.report["used"] + HEADROOM
        assert group.num_kills() == 0
    with control_group() as group:
        killed = run(group, _TRAIN, tmp_path, streamed=False)
        assert killed.returncode == -signal.SIGKILL, killed.output
        assert group.num_kills() == 1
    script = plain()
    model = script.make(DEPTH)
    assert streamed.report["losses"] == script.train(model, script.adamw(model))
    assert streamed.report["checksums"] == script.checksums(model)


def test_a_model_ten_times_the_limit_is_built(tmp_path: Path) -> None:
    with control_group() as group:
        built = run(group, _BUILD, tmp_path)
        assert built.returncode == 0, built.output
        assert built.report is not None
        assert built.report["num_bytes"] >= 10 * HEADROOM
        assert built.report["grown"] <= HEADROOM
        assert group.num_kills() == 0
    script = plain()
    assert built.report["checksums"] == script.checksums(script.make(10 * HEADROOM // MIB))


@pytest.mark.long
def test_pretrained_weights_of_four_times_the_limit_are_read(tmp_path: Path) -> None:
    """Pages of the mapped files are the kernel's to drop, so they fit in any limit."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 1000}
    for name, num_layers in (("small", 1), ("large", 10)):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers, **sizes))
        model.save_pretrained(tmp_path / name)
    assert sum(p.nbytes for p in model.parameters()) >= 4 * HEADROOM
    expected = [zlib.crc32(p.detach().numpy()) for p in model.parameters()]
    with control_group() as group:
        ended = run(group, _PRETRAINED, tmp_path)
        assert ended.returncode == 0, ended.output
        assert ended.report is not None
        assert ended.report["grown"] <= HEADROOM
        assert group.num_kills() == 0
    assert ended.report["checksums"] == expected


@pytest.mark.long
def test_a_checkpoint_of_eight_times_the_limit_is_saved_and_loaded(tmp_path: Path) -> None:
    with control_group() as group:
        ended = run(group, _CHECKPOINT, tmp_path)
        assert ended.returncode == 0, ended.output
        assert ended.report is not None
        assert ended.report["num_bytes"] >= 8 * HEADROOM
        assert ended.report["peak"] <= ended.report["used"] + HEADROOM
        assert max(ended.report["saved"], ended.report["grown"]) <= HEADROOM
        assert group.num_kills() == 0
    assert ended.report["loaded"] == ended.report["pretrained"] == ended.report["expected"]
    assert ended.report["again"] == ended.report["losses"]
    assert ended.report["same"], "what was written while training went on is not what was written while it waited"
