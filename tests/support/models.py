"""Tiny models of many kinds, each with batches and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from support.compare import seeded
from support.device import on_device, placed

VOCABULARY = 96


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its data, both on the device, and what is minimised."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]

    def __post_init__(self) -> None:
        object.__setattr__(self, "make", placed(self.make))


# ---------------------------------------------------------------------- data


def vectors(width: int = 32, num_rows: int = 8) -> Callable[[int], torch.Tensor]:
    return lambda number: on_device(torch.randn(num_rows, width, generator=seeded(number)))


def sequences(width: int = 32, length: int = 6, num_rows: int = 3) -> Callable[[int], torch.Tensor]:
    return lambda number: on_device(torch.randn(num_rows, length, width, generator=seeded(number)))


def images(size: int = 8, channels: int = 3, num_rows: int = 4) -> Callable[[int], torch.Tensor]:
    return lambda number: on_device(torch.randn(num_rows, channels, size, size, generator=seeded(number)))


def tokens(length: int = 8, num_rows: int = 2) -> Callable[[int], torch.Tensor]:
    return lambda number: on_device(torch.randint(2, VOCABULARY, (num_rows, length), generator=seeded(number)))


# ---------------------------------------------------------------------- losses


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 0.5).square().mean()


def of_labels(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss of a transformers model that predicts its own input."""
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def next_token(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def of_classes(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(len(batch), device=batch.device) % 5
    loss: torch.Tensor = model(pixel_values=batch, labels=labels).loss
    return loss


# ---------------------------------------------------------------------- plain torch


@placed
def mlp(width: int = 32, depth: int = 4) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(width, width))


class ConvNet(nn.Module):
    """Convolutions, batch norms with their running statistics, a residual and a linear head."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.middle = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, groups=2)
        self.norm3 = nn.BatchNorm2d(2 * width)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.stem(x)))
        x = x + F.relu(self.norm2(self.middle(x)))
        x = F.relu(self.norm3(self.down(x)))
        return self.head(x.mean(dim=(2, 3)))


class WholeTransformer(nn.Module):
    """nn.Transformer, encoder and decoder."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            width, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=48, dropout=0.1, batch_first=True
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.transformer(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True)


@placed
def encoder(width: int = 32) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 2, dim_feedforward=48, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)


class Attention(nn.Module):
    """nn.MultiheadAttention uses its children's weights by name, without calling them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(width, 4, batch_first=True, add_bias_kv=True, dropout=0.1)
        self.second = nn.MultiheadAttention(width, 4, batch_first=True, kdim=16, vdim=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x, x, x, need_weights=False)[0]
        mixed, weights = self.second(x, x[..., :16], x[..., :8])
        return mixed + weights.sum()


class Recurrent(nn.Module):
    """An LSTM or GRU with a head."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], width: int = 24) -> None:
        super().__init__()
        self.cells = kind(32, width, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(2 * width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0])


class TiedHead(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.body = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(self.embedding(x)).tanh()))


# ---------------------------------------------------------------------- transformers


@placed
def gpt2(**changes: Any) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2, **_special(), **changes)
    )


@placed
def llama(**changes: Any) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_dropout=0.1,
            **_special(),
            **changes,
        )
    )


@placed
def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            **_special(),
        )
    )


@placed
def mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            **_special(),
        )
    )


@placed
def bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            **_special(),
        )
    )


@placed
def vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=8,
            patch_size=4,
            num_labels=5,
            hidden_dropout_prob=0.1,
        )
    )


def _special() -> dict[str, int]:
    return {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


# ---------------------------------------------------------------------- all of them

CASES = {
    "mlp": Case(mlp, vectors(), mean_square),
    "conv": Case(ConvNet, images(), mean_square),
    "conv_channels_last": Case(
        lambda: ConvNet().to(memory_format=torch.channels_last),
        lambda number: images()(number).contiguous(memory_format=torch.channels_last),
        mean_square,
    ),
    "transformer": Case(WholeTransformer, sequences(), mean_square),
    "encoder": Case(encoder, sequences(), mean_square),
    "attention": Case(Attention, sequences(), mean_square),
    "lstm": Case(lambda: Recurrent(nn.LSTM), sequences(), mean_square),
    "gru": Case(lambda: Recurrent(nn.GRU), sequences(), mean_square),
    "tied": Case(TiedHead, tokens(), next_token),
    "gpt2": Case(gpt2, tokens(), of_labels),
    "llama": Case(llama, tokens(), of_labels),
    "t5": Case(t5, tokens(), of_labels),
    "mixtral": Case(mixtral, tokens(), of_labels),
    "bert": Case(bert, tokens(), of_labels),
    "vit": Case(vit, images(), of_classes),
}
