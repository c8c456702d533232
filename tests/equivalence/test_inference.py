"""`zi.prepare(model, config=...)`: the outputs of plain PyTorch, within the budget, and only what does not fit is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.device import DEVICE, IS_CPU, cpu_only, moved, on_device
from support.matrix import thinned
from support.models import CASES
from support.prompt import let_nothing_lag
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    TextGenerationPipeline,
)

import zero_infinity as zi
from zero_infinity.api import close, engine_of

NUM_TOKENS = 10


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=172, num_hidden_layers=24, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return moved(LlamaForCausalLM(config).eval())


def num_bytes(model: nn.Module) -> int:
    """As stored, in whole pages."""
    return sum(-(-p.nbytes // 4096) * 4096 for p in model.parameters())


def prompt() -> torch.Tensor:
    return on_device(torch.randint(2, 200, (2, 5), generator=torch.Generator().manual_seed(1)))


class Counted(LogitsProcessor):
    """Notes after each token how much was read so far."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.reads: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        zi.synchronize(self.model)
        self.reads.append(zi.stats(self.model).bytes_read)
        return scores

    def per_token(self) -> list[int]:
        return [after - before for before, after in zip(self.reads, self.reads[1:], strict=False)]


def generate(model: Any, **kwargs: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(prompt(), max_new_tokens=NUM_TOKENS, do_sample=False, **kwargs)
    return tokens


@cpu_only("it counts reads: on the device copies stay")
@pytest.mark.parametrize(("share", "tied"), thinned([0.5, 0.25], [False, True]))
def test_generate_reads_what_does_not_fit(share: float, tied: bool, tmp_path: Path) -> None:
    plain = llama(tied=tied)
    size = num_bytes(plain)
    model = zi.prepare(llama(tied=tied), config=zi.Config(memory=int(share * size), nvme=tmp_path))
    counted = Counted(model)
    assert torch.equal(generate(model, logits_processor=LogitsProcessorList([counted])), generate(plain))
    usual = counted.per_token()[2:]
    assert 0 < sum(usual) / len(usual) <= (1.05 - share) * size
    stats = zi.stats(model)
    assert stats.memory_peak <= stats.memory_budget
    assert (stats.optimizer_bytes, stats.gradient_bytes, stats.bucket_bytes) == (0, 0, 0)
    generate(model)
    assert zi.stats(model).bytes_written <= size, "a parameter is written twice"


def test_nothing_moves_where_all_fits(tmp_path: Path) -> None:
    plain = llama()
    model = zi.prepare(llama(), config=zi.Config(memory=2 * num_bytes(plain), nvme=tmp_path))
    assert torch.equal(generate(model), generate(plain))
    assert zi.stats(model).bytes_read == 0


@pytest.mark.parametrize("name", sorted(CASES))
def test_outputs_of_every_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.setattr(torch.backends.mha, "get_fastpath_enabled", lambda: False)  # it rounds differently
    torch.manual_seed(0)
    # As in a prepared model: torch multiplies in another way by matrices that require a gradient.
    plain = moved(case.make().eval().requires_grad_(False))
    torch.manual_seed(0)
    model = zi.prepare(
        moved(case.make().eval()), config=zi.Config(memory=max(num_bytes(plain), 100_000), nvme=tmp_path)
    )
    for number in range(3):
        batch = on_device(case.batch(number))
        with torch.no_grad():
            assert torch.equal(case.loss(model, batch), case.loss(plain, batch))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


def test_an_encoder_and_a_decoder_generate(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        config = T5Config(
            vocab_size=200, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0
        )
        return moved(T5ForConditionalGeneration(config).eval())

    plain = make()
    model = zi.prepare(make(), config=zi.Config(memory=num_bytes(plain) // 2, nvme=tmp_path))
    assert torch.equal(generate(model, min_new_tokens=NUM_TOKENS), generate(plain, min_new_tokens=NUM_TOKENS))


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of 200 words."""
    vocabulary = {f"w{number}": number for number in range(200)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0")


def test_a_pipeline_generates(tmp_path: Path) -> None:
    plain = llama()
    model = zi.prepare(llama(), config=zi.Config(memory=num_bytes(plain) // 2, nvme=tmp_path))
    asked = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    expected, found = (
        TextGenerationPipeline(model=m, tokenizer=words(), device=DEVICE)(["w5 w6 w7", "w9 w8 w7"], **asked)
        for m in (plain, model)
    )
    assert found == expected


@cpu_only("the accelerator is emulated on the CPU")
def test_copies_on_a_device_stay_between_forwards(tmp_path: Path) -> None:
    plain = llama()
    size = num_bytes(plain)
    device = zi.EmulatedAccelerator(size // 2, bytes_per_second=1e12, latency_seconds=0.0)
    model = zi.prepare(llama(), config=zi.Config(memory=2 * size, nvme=tmp_path), device=device)
    uploaded = []
    with torch.no_grad():
        for _ in range(6):
            assert torch.equal(model(prompt()).logits, plain(prompt()).logits)
            uploaded.append(device.bytes_uploaded)
    assert uploaded[-1] - uploaded[1] <= 4 * 0.55 * size
    assert device.bytes_downloaded == 0


def test_copies_in_another_dtype(tmp_path: Path) -> None:
    plain = llama()
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16()
    config = zi.Config(memory=num_bytes(llama()), nvme=tmp_path, compute_dtype="bfloat16")
    model = zi.prepare(llama(), config=config)
    with torch.no_grad():
        assert torch.equal(model(prompt()).logits, plain(prompt()).logits)


def test_evaluation_between_steps_leaves_training_as_it_was(tmp_path: Path) -> None:
    """Bytes of a step and its order are those of a run without evaluation."""

    def run(*, evaluates: bool) -> tuple[list[int], int, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.Tanh())))
        states = num_bytes(model) * 3
        adamw = torch.optim.AdamW(model.parameters())
        model, optimizer = zi.prepare(model, adamw, zi.Config(memory=states // 2, nvme=tmp_path))
        let_nothing_lag(model)
        batch = torch.ones(4, 64, device=DEVICE)
        deviations = []
        for _ in range(10):
            if evaluates:
                with torch.no_grad():
                    for _ in range(3):
                        model(batch)
            before = zi.stats(model).num_deviations
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            deviations.append(zi.stats(model).num_deviations - before)
        order = engine_of(model).host_cache.policy.order
        values = {name: value.clone() for name, value in model.state_dict().items()}
        close(model)
        return deviations, len(order), values

    with_evaluation, without = run(evaluates=True), run(evaluates=False)
    if IS_CPU:  # where an accelerator computes, copies of other threads are uses, too
        assert with_evaluation[:2] == without[:2]
    assert all(torch.equal(with_evaluation[2][name], value) for name, value in without[2].items())


def test_edits_are_kept_and_gradients_of_inputs_flow(tmp_path: Path) -> None:
    plain = moved(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)))
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model.load_state_dict(plain.state_dict())
    model = zi.prepare(model, config=zi.Config(memory="24KiB", nvme=tmp_path))
    assert not any(p.requires_grad for p in model.parameters())
    with torch.no_grad(), zi.gathered([model[0].weight]):
        model[0].weight.mul_(2)
    with torch.no_grad():
        plain[0].weight.mul_(2)
    inputs = [torch.ones(2, 64, device=DEVICE, requires_grad=True) for _ in range(2)]
    model(inputs[0]).square().sum().backward()
    plain(inputs[1]).square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def test_it_cannot_be_trained() -> None:
    model = zi.prepare(nn.Linear(4, 4), config=zi.Config(memory="1MiB"))
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(torch.ones(2, 4, device=DEVICE)).sum().backward()
    with pytest.raises(zi.UsageError, match="prepared already"):
        zi.prepare(model, torch.optim.SGD(model.parameters()))


def test_saved_loaded_and_exported(tmp_path: Path) -> None:
    """Weights of a training run are loaded for inference; those of inference are saved and exported."""
    trained = llama()
    trained, optimizer = zi.prepare(trained, torch.optim.AdamW(trained.parameters()), zi.Config(memory="32MiB"))
    trained(input_ids=prompt(), labels=prompt()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    zi.save(tmp_path / "saved", trained, optimizer)
    for settings in ({"memory": "1MiB", "nvme": tmp_path}, {"memory": "8MiB"}):
        model = zi.prepare(llama(tied=False), config=zi.Config(**settings))
        zi.load(tmp_path / "saved", model)
        with torch.no_grad():
            assert torch.equal(model(prompt()).logits, trained.eval()(prompt()).logits)
        folder = tmp_path / settings["memory"]
        zi.save(folder / "again", model)
        zi.export(folder / "exported", model)
        zi.load_pretrained(model, folder / "exported")
        assert zi.stats(model).memory_peak <= zi.stats(model).memory_budget
        read = moved(LlamaForCausalLM.from_pretrained(folder / "exported").eval())
        with torch.no_grad():
            assert torch.equal(read(prompt()).logits, trained(prompt()).logits)
