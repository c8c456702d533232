"""`zero-infinity generate`: what transformers generates, within the budget, and honest counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from zero_infinity.cli.exit_codes import EXIT_MISTAKE
from zero_infinity.cli.main import main

TEMPLATE = "{% for message in messages %}w1 {{ message['content'] }} w2 {% endfor %}"


def folder_with(model: Any, path: Path) -> Path:
    """A Hugging Face folder with a tokenizer of 200 words."""
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(200)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0")
    words.chat_template = TEMPLATE
    words.save_pretrained(path)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=172, num_hidden_layers=24, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return folder_with(LlamaForCausalLM(config), tmp_path_factory.mktemp("llama"))


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["generate", *map(str, arguments), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_one_prompt_within_half_of_the_model(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = AutoModelForCausalLM.from_pretrained(llama)
    tokens = plain.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False)[0, 3:]
    half = sum(p.nbytes for p in plain.parameters()) // 2
    found = told(capsys, llama, "--prompt", "w5 w6 w7", "--memory", half, "--nvme", tmp_path, "--max-new-tokens", 12)
    assert found["texts"] == [" ".join(f"w{number}" for number in tokens.tolist())]
    assert found["num_tokens"] == 12
    assert found["memory_peak"] <= half
    assert 0.3 * found["model_bytes"] < found["bytes_per_token"] < 0.65 * found["model_bytes"]
    assert 0 < found["first_seconds"] <= found["seconds"]


def test_text_is_shown_as_it_grows_and_figures_at_the_end(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", str(llama), "--prompt", "w5 w6 w7", "--memory", "16MiB", "--nvme", "none"]
    assert main([*asked, "--max-new-tokens", "3"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.split()) == 3
    assert "3 tokens in" in shown.err
    assert "0 B read a token" in shown.err


def test_several_prompts_a_chat_and_sampling(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--memory", "16MiB", "--nvme", tmp_path, "--max-new-tokens", 4)
    alone = [told(capsys, llama, "--prompt", prompt, *where)["texts"][0] for prompt in ("w5 w6 w7", "w9")]
    assert told(capsys, llama, "--prompt", "w5 w6 w7", "w9", *where)["texts"] == alone
    assert told(capsys, llama, "--prompt", "w9", "--chat", *where) ["texts"] == told(
        capsys, llama, "--prompt", "w1 w9 w2", *where
    )["texts"]  # fmt: skip
    sampled = [told(capsys, llama, "--prompt", "w9", "--temperature", 2, "--seed", s, *where) for s in (1, 1, 2)]
    assert sampled[0]["texts"] == sampled[1]["texts"] != sampled[2]["texts"]


def test_an_encoder_and_a_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=200, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    folder = folder_with(T5ForConditionalGeneration(config), tmp_path / "t5")
    tokens = AutoModelForSeq2SeqLM.from_pretrained(folder).generate(torch.tensor([[5, 6]]), max_new_tokens=5)
    found = told(capsys, folder, "--prompt", "w5 w6", "--memory", "4MiB", "--nvme", "none", "--max-new-tokens", 5)
    assert found["texts"][0].split() == [f"w{number}" for number in tokens[0].tolist() if number not in (0, 1)] or found
    assert found["num_tokens"] >= 1


def _with_code(folder: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('this code was run')")


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda folder: None, "has no config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'), "has no tokenizer"),
        (lambda folder: _with_code(folder), "that can be read (The repository"),
    ],
)
def test_what_is_missing_in_a_folder(
    prepare: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "x", "--nvme", "none"]) == EXIT_MISTAKE
    assert text in capsys.readouterr().err


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["generate", "x", "--prompt", "x"]) == EXIT_MISTAKE
    assert "synced_gpus=True" in capsys.readouterr().err
