"""Tokenizers of Hugging Face folders, and rows of training data as their tokens; nothing is downloaded.

A row is a conversation, a prompt with its completion, or text. What is learnt of it has labels: the answers of a
conversation, the completion, or all of the text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_infinity.errors import ConfigError
from zero_infinity.models.hugging_face_config import reason

ADAPTER_CONFIG = "adapter_config.json"  # instead of config.json in a folder of adapters, as PEFT writes it
NOT_LEARNT = -100  # the label that losses of torch and transformers leave out


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens, and for each the token itself or `NOT_LEARNT`."""

    tokens: list[int]
    labels: list[int]


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder; one without padding gets a token to pad with."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: contact no server
    try:
        import transformers
    except ImportError:
        raise ConfigError("tokenizers need transformers\n  fix:   pip install 'zero-infinity[hf]'") from None
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise ConfigError(
            f"{folder} has no config.json\n"
            "  fix:   a folder written by save_pretrained of transformers, or downloaded by hf download"
        )
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001 - whatever the tokenizer's own code raises
        raise ConfigError(
            f"{folder} has no tokenizer that can be read ({reason(error)})\n"
            "  fix:   save it there: AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)"
        ) from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


class RowReader:
    """Turns a row of JSON into tokens.

    It takes `{"messages": [{"role": ..., "content": ...}, ...]}`, `{"prompt": ..., "completion": ...}` and
    `{"text": ...}`; "conversations" is another name of "messages".
    """

    def __init__(self, tokenizer: Any, *, everything: bool = False) -> None:
        """`everything`: learn prompts, too."""
        self._tokenizer = tokenizer
        self._everything = everything

    def read(self, row: Mapping[str, Any], place: str) -> Row:
        """Return the tokens of a row; `place` names it in errors."""
        messages = row.get("messages", row.get("conversations"))
        if isinstance(messages, list) and messages:
            return self._conversation(messages, place)
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._conversation([*prompt, *completion], place)
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._learnt_after(self._encode(prompt), [*self._encode(completion, beginning=False), *self._end()])
        if isinstance(row.get("text"), str):
            return self._learnt_after([], [*self._encode(row["text"]), *self._end()])
        raise ConfigError(
            f"{place} has {', '.join(map(repr, row)) or 'no names'}\n"
            '  fix:   {"messages": [...]}, {"prompt": "...", "completion": "..."} or {"text": "..."}'
        )

    def _conversation(self, messages: list[Any], place: str) -> Row:
        """The tokens of a conversation. An answer is what the chat template adds for a message of the assistant."""
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"{place} is a conversation, but the tokenizer has no chat template\n"
                "  fix:   the folder of a chat model, or rows of prompt and completion"
            )
        tokens = self._templated(messages, place)
        if self._everything:
            return Row(tokens, list(tokens))
        labels = [NOT_LEARNT] * len(tokens)
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._templated(messages[:number], place, add_generation_prompt=True)
            after = self._templated(messages[: number + 1], place)
            if tokens[: len(before)] != before or tokens[: len(after)] != after:
                raise ConfigError(
                    f"{place}: the chat template does not keep earlier messages as they were, so answers cannot be "
                    "told from the rest\n  fix:   --learn everything"
                )
            labels[len(before) : len(after)] = tokens[len(before) : len(after)]
        return Row(tokens, labels)

    def _templated(self, messages: list[Any], place: str, **options: Any) -> list[int]:
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # noqa: BLE001 - the template is code, and messages may be anything
            raise ConfigError(
                f"{place} does not fit the chat template: {reason(error)}\n"
                '  fix:   messages as {"role": "user", "content": "..."}, in the order that the model expects'
            ) from None
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def _learnt_after(self, prompt: list[int], learnt: list[int]) -> Row:
        labels = prompt if self._everything else [NOT_LEARNT] * len(prompt)
        return Row([*prompt, *learnt], [*labels, *learnt])

    def _encode(self, text: str, *, beginning: bool = True) -> list[int]:
        """Tokens of a text; `beginning`: with what the tokenizer puts before every text."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=beginning)["input_ids"]
        end = self._tokenizer.eos_token_id
        return tokens[:-1] if tokens and tokens[-1] == end else tokens

    def _end(self) -> list[int]:
        end = self._tokenizer.eos_token_id
        return [] if end is None else [end]
