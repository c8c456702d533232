"""`zero-infinity train --model`: a folder and its tokenizer, conversations and text, all weights or adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.trainers import VOCABULARY, save_pretrained_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from zero_infinity.cli.exit_codes import EXIT_MISTAKE
from zero_infinity.cli.main import main

TEMPLATE = (
    "{% for m in messages %}{{ '[UNK] ' if m['role'] == 'user' else '' }}{{ m['content'] }} w60 {% endfor %}"
    "{% if add_generation_prompt %}{% endif %}"
)
CHATS = [
    [("user", "w1 w2 w3"), ("assistant", f"w{n} w5"), ("user", "w6"), ("assistant", "w7 " * (n % 4 + 1))]
    for n in range(10, 17)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_pretrained_folder(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def train(capsys: pytest.CaptureFixture[str], *options: object) -> list[float]:
    assert main(["train", *map(str, options), "--json"]) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


def plain_losses(folder: Path, chats: Path, *, steps: int, batch: int, accumulate: int, lr: float, lora: int) -> Any:
    """The same in plain PyTorch: labels made by hand from the known template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    if lora:
        settings = peft.LoraConfig(task_type="CAUSAL_LM", r=lora, lora_alpha=2 * lora, target_modules="all-linear")
        model = peft.get_peft_model(model, settings)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, fused=True)
    rows = [json.loads(line)["messages"] for line in chats.read_text().splitlines()]
    import random

    drawn = iter([])
    losses = []
    epoch = 0
    for _ in range(steps):
        batches = []
        for _ in range(accumulate):
            texts = []
            while len(texts) < batch:
                number = next(drawn, None)
                if number is None:
                    order = list(range(len(rows)))
                    random.Random(f"0/{epoch}").shuffle(order)
                    drawn, epoch = iter(order), epoch + 1
                    continue
                texts.append(rows[number])
            tokens, labels = [], []
            for messages in texts:
                tokens.append([])
                labels.append([])
                for message in messages:
                    mine = message["role"] == "assistant"
                    text = ("" if mine else "[UNK] ") + message["content"] + " w60"
                    part = tokenizer(text, add_special_tokens=False)["input_ids"]
                    tokens[-1] += part
                    labels[-1] += part if mine else [-100] * len(part)
            longest = max(map(len, tokens))
            inputs = {
                "input_ids": [t + [tokenizer.pad_token_id] * (longest - len(t)) for t in tokens],
                "attention_mask": [[1] * len(t) + [0] * (longest - len(t)) for t in tokens],
                "labels": [row + [-100] * (longest - len(row)) for row in labels],
            }
            batches.append({name: torch.tensor(value) for name, value in inputs.items()})
        total = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
        loss = 0.0
        for inputs in batches:
            part = model(**inputs, use_cache=False).loss * (int((inputs["labels"][:, 1:] != -100).sum()) / total)
            part.backward()
            loss += part.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, model


@pytest.mark.parametrize("lora", [0, 4], ids=["full", "lora"])
def test_answers_of_conversations_are_learnt_as_in_plain_pytorch(
    lora: int, folder: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", folder, "--data", chats, "--batch", 2, "--accumulate", 2, "--steps", 5, "--warmup", 0]
    options += ["--lr", 1e-2, "--memory", "400KiB", "--nvme", tmp_path, "--output", tmp_path / "tuned"]
    ours = train(capsys, *options, *(["--lora", lora] if lora else []))
    plain, expected = plain_losses(folder, chats, steps=5, batch=2, accumulate=2, lr=1e-2, lora=lora)
    assert ours == plain
    found = AutoModelForCausalLM.from_pretrained(folder if lora else tmp_path / "tuned")
    if lora:
        found = peft.PeftModel.from_pretrained(found, tmp_path / "tuned")
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in expected.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "tuned").chat_template == TEMPLATE


def test_what_was_adapted_generates(
    folder: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = tmp_path / "tuned"
    options = ["--model", folder, "--data", chats, "--lora", 4, "--lr", 0.1, "--steps", 5, "--nvme", "none"]
    train(capsys, *options, "--output", tuned)
    asked = ["generate", str(tuned), "--prompt", "w1 w2 w3", "--max-new-tokens", "6", "--nvme", "none", "--json"]
    assert main(asked) == 0
    ours = json.loads(capsys.readouterr().out)["texts"]
    base = AutoModelForCausalLM.from_pretrained(folder)
    plain = peft.PeftModel.from_pretrained(base, tuned)
    tokenizer = AutoTokenizer.from_pretrained(tuned)
    tokens = plain.generate(input_ids=torch.tensor([[3, 4, 5]]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert ours == [tokenizer.decode(tokens[0, 3:], skip_special_tokens=True)]
    with plain.disable_adapter():
        without = plain.generate(input_ids=torch.tensor([[3, 4, 5]]), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert not torch.equal(tokens, without)
    (tuned / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    assert main(asked) == EXIT_MISTAKE
    assert "has adapters for 'elsewhere', which is no folder" in capsys.readouterr().err


def test_adapters_are_saved_without_the_base_and_resumed(
    folder: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", folder, "--data", chats, "--batch", 2, "--lora", 4, "--memory", "400KiB", "--nvme", tmp_path]
    whole = train(capsys, *options, "--steps", 4)
    begun = train(capsys, *options, "--steps", 2, "--save", tmp_path / "saved")
    rest = train(capsys, *options, "--steps", 4, "--save", tmp_path / "saved", "--resume")
    assert begun + rest == whole
    assert "base_layer" not in (tmp_path / "saved" / "latest" / "manifest.json").read_text()
    assert main(["train", *map(str, options), "--save", str(tmp_path / "saved"), "--resume", "--lora", "8"]) != 0
    assert "different shapes" in capsys.readouterr().err


def test_text_goes_through_the_tokenizer(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text(" ".join(f"w{number * number % (VOCABULARY - 2)}" for number in range(400)))
    options = ["--model", folder, "--data", tmp_path / "notes.txt", "--seq", 16, "--lr", 1e-2, "--nvme", "none"]
    losses = train(capsys, *options, "--steps", 20)
    assert losses[0] == pytest.approx(4.16, abs=0.1)  # the logarithm of 64 tokens
    assert losses[-1] < 3.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora", "4"], "--lora needs --model DIR"),
        (["--model", "M", "--lora-targets", "q_proj"], "--lora-targets needs --lora RANK"),
        (["--model", "M"], "--model needs --data"),
        (["--model", "M", "--hf", "x.json"], "leave out --hf"),
        (["--model", "M", "--data", "ROWS", "--seq", "65"], "positions for 64"),
        (["--model", "M", "--data", "ROWS", "--lora", "4", "--lora-targets", "nothing"], "--lora-targets: Target"),
        (["--model", "M", "--data", "bad.jsonl"], "bad.jsonl, line 2 has 'question'"),
        (["--model", "M", "--data", "ROWS", "--output", "."], "exists and is not empty"),
        (["--model", "M", "--data", "ROWS", "--seq", "2"], "no row of a step has anything to learn within 2 tokens"),
    ],
)
def test_mistakes_are_told(
    options: list[str],
    message: str,
    folder: Path,
    chats: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('\n{"question": "why"}\n')
    given = [{"M": str(folder), "ROWS": str(chats)}.get(option, option) for option in options]
    assert main(["train", *given, "--steps", "1", "--memory", "1MiB", "--nvme", "none"]) == EXIT_MISTAKE
    assert message in capsys.readouterr().err
