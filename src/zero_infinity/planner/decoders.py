"""Today's decoders by name: Llama 3, Qwen 3, Mistral, Gemma, DeepSeek, GPT-OSS, from their public dimensions. Pure.

Owns the table and how a decoder with grouped queries, gated layers and experts is made of operators. A `config.json`
of the same model gives the same parameters, counted module by module.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from zero_infinity.errors import ConfigError
from zero_infinity.planner.model_shapes import (
    LOSS_BYTES,
    SINGLE_BYTES,
    ModelShape,
    OperatorShape,
    known,
    known_names,
)

_SEQ = 2048  # tokens, unless somebody asks for others: all of these have positions for more


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated layers of which each token uses some."""

    total: int
    used: int
    width: int
    shared: int = 0  # that every token uses
    dense_layers: int = 0  # the first so many layers have one gated layer of the model's `width` instead
    has_biases: bool = False


@dataclass(frozen=True, slots=True)
class LowRankAttention:
    """DeepSeek's attention: queries, keys and values from vectors of low rank."""

    query_rank: int
    value_rank: int
    rotated: int  # elements of a head with positions
    plain: int  # and without
    value: int


@dataclass(frozen=True, slots=True)
class Decoder:
    """The numbers in a model's config."""

    layers: int
    hidden: int
    heads: int
    groups: int  # heads of keys and values
    width: int  # of the gated layer
    vocabulary: int
    head: int = 128  # elements of a head
    tied: bool = False
    norms: int = 2  # in a layer
    experts: Experts | None = None
    low_rank: LowRankAttention | None = None
    has_biases: bool = False  # of attention


# Names as in the models' repositories; numbers as in the config.json published with each.
_DECODERS = {
    "llama3-8b": Decoder(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": Decoder(80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": Decoder(126, 16384, 128, 8, 53248, 128256),
    "llama3.2-1b": Decoder(16, 2048, 32, 8, 8192, 128256, head=64, tied=True),
    "llama3.2-3b": Decoder(28, 3072, 24, 8, 8192, 128256, tied=True),
    "qwen3-0.6b": Decoder(28, 1024, 16, 8, 3072, 151936, tied=True),
    "qwen3-1.7b": Decoder(28, 2048, 16, 8, 6144, 151936, tied=True),
    "qwen3-4b": Decoder(36, 2560, 32, 8, 9728, 151936, tied=True),
    "qwen3-8b": Decoder(36, 4096, 32, 8, 12288, 151936),
    "qwen3-14b": Decoder(40, 5120, 40, 8, 17408, 151936),
    "qwen3-32b": Decoder(64, 5120, 64, 8, 25600, 151936),
    "qwen3-30b-a3b": Decoder(48, 2048, 32, 4, 6144, 151936, experts=Experts(128, 8, 768)),
    "qwen3-235b-a22b": Decoder(94, 4096, 64, 4, 12288, 151936, experts=Experts(128, 8, 1536)),
    "mistral-7b": Decoder(32, 4096, 32, 8, 14336, 32768),
    "mixtral-8x7b": Decoder(32, 4096, 32, 8, 14336, 32000, experts=Experts(8, 2, 14336)),
    "gemma2-2b": Decoder(26, 2304, 8, 4, 9216, 256000, head=256, tied=True, norms=4),
    "gemma2-9b": Decoder(42, 3584, 16, 8, 14336, 256000, head=256, tied=True, norms=4),
    "gemma2-27b": Decoder(46, 4608, 32, 16, 36864, 256000, tied=True, norms=4),
    "deepseek-v3": Decoder(
        61, 7168, 128, 128, 18432, 129280,
        experts=Experts(256, 8, 2048, shared=1, dense_layers=3),
        low_rank=LowRankAttention(1536, 512, rotated=64, plain=128, value=128),
    ),
    "gpt-oss-20b": Decoder(
        24, 2880, 64, 8, 2880, 201088, head=64, experts=Experts(32, 4, 2880, has_biases=True), has_biases=True
    ),
    "gpt-oss-120b": Decoder(
        36, 2880, 64, 8, 2880, 201088, head=64, experts=Experts(128, 4, 2880, has_biases=True), has_biases=True
    ),
}  # fmt: skip


def all_names() -> list[str]:
    """Every model that has a name: these decoders, and the GPTs of `model_shapes`."""
    return [*_DECODERS, *known_names()]


def named(name: str, seq: int | None = None) -> ModelShape:
    """A model by its name, in either case; `seq` in place of its own."""
    numbers = _DECODERS.get(name.lower())
    if numbers is not None:
        return shape_of(numbers, name.lower(), seq or _SEQ)
    if name.lower() in known_names():
        return known(name, seq)
    near = difflib.get_close_matches(name.lower(), all_names(), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"there is no model {name!r}; {hint}there are: {', '.join(all_names())}\n"
        "  fix:   one of these, the path of a Hugging Face config.json, or --layers, --hidden and --heads"
    )


def shape_of(numbers: Decoder, name: str, seq: int) -> ModelShape:
    """The operators of a decoder."""
    hidden, vocabulary = numbers.hidden, numbers.vocabulary
    table = vocabulary * hidden
    operators = [OperatorShape("embed", table, 0.0, 0.0, weight_in_backward=False, num_rows=vocabulary)]
    for layer in range(numbers.layers):
        for norm in range(numbers.norms):
            operators.append(_norm(f"{layer}.norm{norm}", hidden, layer))
            if norm == 0:
                operators += _attention(numbers, layer, seq)
        operators += _layer(numbers, layer)
    operators += [
        _norm("norm", hidden, -1),
        OperatorShape(
            "head",
            table,
            2.0 * table,
            hidden + vocabulary,
            unit="embed" if numbers.tied else "head",
            num_rows=vocabulary,
            saved_bytes_per_token=LOSS_BYTES * vocabulary,
        ),
    ]
    return ModelShape(name, tuple(operators), hidden, seq, logits_bytes=SINGLE_BYTES * vocabulary)


def _norm(name: str, size: int, layer: int) -> OperatorShape:
    """Its input, and the normalised input before it is scaled, which is in float32 as these models compute it."""
    return OperatorShape(name, size, 0.0, size, layer, saved_bytes_per_token=SINGLE_BYTES * size)


def _linear(name: str, layer: int, inputs: int, outputs: int, saved: float, *, bias: bool = False) -> OperatorShape:
    size = inputs * outputs + (outputs if bias else 0)
    return OperatorShape(name, size, 2.0 * inputs * outputs, saved, layer, num_rows=outputs)


def _attention(numbers: Decoder, layer: int, seq: int) -> Iterator[OperatorShape]:
    """Queries, keys, values and the output are kept; scores are computed again."""
    hidden, heads, bias = numbers.hidden, numbers.heads, numbers.has_biases
    if numbers.low_rank is None:
        queries, keys = heads * numbers.head, numbers.groups * numbers.head
        yield _linear(f"{layer}.q", layer, hidden, queries, hidden, bias=bias)
        yield _linear(f"{layer}.k", layer, hidden, keys, 0.0, bias=bias)
        yield _linear(f"{layer}.v", layer, hidden, keys, 0.0, bias=bias)
        kept, wide, out = 2.0 * queries + 2 * keys, 2 * numbers.head, queries
    else:
        low = numbers.low_rank
        one = low.plain + low.rotated
        yield _linear(f"{layer}.q_a", layer, hidden, low.query_rank, hidden)
        yield _norm(f"{layer}.q_norm", low.query_rank, layer)
        yield _linear(f"{layer}.q_b", layer, low.query_rank, heads * one, low.query_rank)
        yield _linear(f"{layer}.kv_a", layer, hidden, low.value_rank + low.rotated, 0.0)
        yield _norm(f"{layer}.kv_norm", low.value_rank, layer)
        yield _linear(f"{layer}.kv_b", layer, low.value_rank, heads * (low.plain + low.value), low.value_rank)
        kept, wide, out = 2.0 * heads * (one + low.value), one + low.value, heads * low.value
    # Half of the scores are masked, and kernels for causal attention skip them.
    yield OperatorShape(f"{layer}.attention", 0, 1.0 * seq * heads * wide, kept, layer)
    yield _linear(f"{layer}.o", layer, out, hidden, 0.0, bias=bias)


def _layer(numbers: Decoder, layer: int) -> Iterator[OperatorShape]:
    experts, hidden = numbers.experts, numbers.hidden
    if experts is None or layer < experts.dense_layers:
        yield from _gated(f"{layer}", layer, hidden, numbers.width)
        return
    yield _linear(f"{layer}.router", layer, hidden, experts.total, hidden, bias=experts.has_biases)
    weights = 3 * hidden * experts.width
    biases = 2 * experts.width + hidden if experts.has_biases else 0
    # One module has the weights of all experts; each token uses some of them.
    yield OperatorShape(
        f"{layer}.experts",
        experts.total * (weights + biases),
        2.0 * experts.used * weights,
        experts.used * (2.0 * hidden + 4.0 * experts.width),
        layer,
    )
    if experts.shared:
        yield from _gated(f"{layer}.shared", layer, hidden, experts.shared * experts.width)


def _gated(name: str, layer: int, hidden: int, width: int) -> Iterator[OperatorShape]:
    yield _linear(f"{name}.gate", layer, hidden, width, hidden + 2.0 * width)
    yield _linear(f"{name}.up", layer, hidden, width, float(width))
    yield _linear(f"{name}.down", layer, width, hidden, float(width))
