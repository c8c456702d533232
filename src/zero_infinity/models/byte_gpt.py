"""The built-in model: a small byte-level GPT in plain PyTorch, independent of offloading.

Pre-norm blocks, learned positions, causal attention. Each module initialises its own weights when constructed, so the
model can be built piece by piece if the whole does not fit in memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

from zero_infinity.errors import UsageError
from zero_infinity.models.presets import VOCABULARY, Shape

_EMBEDDING_STD = 0.02


class ByteGPT(nn.Module):
    """Predicts the next byte. Returns the mean loss if called with targets, otherwise the logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = TokenEmbedding(VOCABULARY, shape.hidden)
        self.positions = TokenEmbedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(DecoderBlock(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        length = tokens.shape[-1]
        if length > self.shape.seq:
            raise UsageError(f"got {length} tokens, but the model has positions for {self.shape.seq}")
        hidden: Tensor = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class TokenEmbedding(nn.Embedding):
    """`nn.Embedding` with the small weights of GPT-2."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_EMBEDDING_STD)


class DecoderBlock(nn.Module):
    """Attention, then an MLP, each on the normalised input and added to it."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        result: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return result


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(hidden, 3 * hidden, bias=False)
        self.projection = nn.Linear(hidden, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.queries_keys_values(hidden).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)  # each: batch, heads, length, features
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        result: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(hidden)))
        return result
