"""Models as the planner sees them: operators in order, with their parameters, operations and saved values. Pure.

Transformers are made from their numbers, well-known ones by name. `module_shapes` describes any other module.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zero_infinity.errors import ConfigError
from zero_infinity.planner.unit_states import UnitStates
from zero_infinity.policy.tile_sizes import rows_per_tile

OUTSIDE = -1  # the block of an operator that no checkpoint covers: embeddings, the head
HALF_BYTES = 2
SINGLE_BYTES = 4
LOSS_BYTES = SINGLE_BYTES  # for each logit beside itself: its logarithmic softmax, in float32


@dataclass(frozen=True, slots=True)
class OperatorShape:
    """One module's own part of the forward pass."""

    name: str
    num_parameters: int
    flops_per_token: float  # forward, a multiplication and an addition count 2
    saved_elements_per_token: float  # kept for backward in the dtype of activations, when nothing is computed again
    block: int = OUTSIDE  # operators of the same block are computed again together
    unit: str = ""  # whose parameters these are; operators that share parameters name the same
    weight_in_backward: bool = True  # an embedding's gradient does not need its value
    num_rows: int = 0  # of a weight that can be used in tiles of rows; 0: it is used whole
    seconds: tuple[float, float] | None = None  # forward and backward of a whole batch, where they were measured
    states: UnitStates | None = None  # of the unit, where they differ from what the job says
    saved_bytes_per_token: float = 0.0  # the same in a dtype of its own: logits in float32, indices
    num_backward: float = 2.0  # backward's operations, of those of forward: a frozen weight needs no gradient

    def __post_init__(self) -> None:
        if not self.unit:
            object.__setattr__(self, "unit", self.name)

    def tiles(self, num_parameters: int) -> list[OperatorShape]:
        """The same as operators with that many parameters each, the last with what is left."""
        tiles = []
        for number, start in enumerate(range(0, self.num_parameters, num_parameters)):
            size = min(num_parameters, self.num_parameters - start)
            part = size / self.num_parameters
            tiles.append(
                replace(
                    self,
                    name=f"{self.name}[{number}]",
                    unit=f"{self.unit}[{number}]",
                    num_parameters=size,
                    flops_per_token=self.flops_per_token * part,
                    saved_elements_per_token=self.saved_elements_per_token * part,
                    saved_bytes_per_token=self.saved_bytes_per_token * part,
                    num_rows=0,
                    states=None if self.states is None else self.states.part(size, self.num_parameters),
                    seconds=None if self.seconds is None else (self.seconds[0] * part, self.seconds[1] * part),
                )
            )
        return tiles


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Operators in the order of the forward pass; a tensor of `hidden` elements a token goes from block to block."""

    name: str
    operators: tuple[OperatorShape, ...]
    hidden: int
    seq: int
    logits_bytes: float = 0.0  # a token, of the gradient with which backward begins
    num_weights: int | None = None  # that people count, where fewer or more are stored: packed ones, adapters

    @property
    def units(self) -> dict[str, int]:
        """Parameters by unit: a shared one counts once, for the operator that comes first."""
        sizes: dict[str, int] = {}
        for operator in self.operators:
            if operator.num_parameters:
                sizes.setdefault(operator.unit, operator.num_parameters)
        return sizes

    @property
    def unit_states(self) -> dict[str, UnitStates]:
        """The states of units that say it themselves."""
        found: dict[str, UnitStates] = {}
        for operator in self.operators:
            if operator.states is not None:
                found.setdefault(operator.unit, operator.states)
        return found

    @property
    def num_parameters(self) -> int:
        return sum(self.units.values())

    @property
    def num_blocks(self) -> int:
        return len({operator.block for operator in self.operators} - {OUTSIDE})

    def timed(self, seconds: Mapping[str, tuple[float, float]]) -> ModelShape:
        """The same with measured times of a whole batch, forward and backward, in place of operations."""
        return replace(
            self, operators=tuple(replace(o, seconds=seconds.get(o.name, (0.0, 0.0))) for o in self.operators)
        )

    def with_states(self, states: Mapping[str, UnitStates]) -> ModelShape:
        """The same, where these units have these states."""
        return replace(self, operators=tuple(replace(o, states=states.get(o.unit, o.states)) for o in self.operators))

    def with_chunked_loss(self) -> ModelShape:
        """The same with a loss that makes the logits of a few tokens at a time, and keeps none."""
        spared = self.logits_bytes / SINGLE_BYTES
        operators = [
            replace(
                operator,
                saved_elements_per_token=max(0.0, operator.saved_elements_per_token - spared),
                saved_bytes_per_token=0.0,
            )
            if operator.block == OUTSIDE and operator.saved_bytes_per_token >= self.logits_bytes > 0
            else operator
            for operator in self.operators
        ]
        return replace(self, operators=tuple(operators), logits_bytes=0.0)

    def forward_flops(self, num_tokens: float) -> float:
        return num_tokens * sum(operator.flops_per_token for operator in self.operators)

    def checkpoint_elements(self, batch: float, interval: int) -> int:
        """The inputs of every `interval`-th block."""
        num_checkpoints = -(-self.num_blocks // interval)
        return int(batch * self.seq * self.hidden * num_checkpoints)

    def working_bytes(self, batch: float, interval: int, *, checkpointed: bool, element_bytes: int) -> int:
        """Saved values that exist at once: of the largest interval and of what is outside blocks, or of all.

        Where backward begins there is a gradient beside them, as large as the largest of those in their own dtype: that
        of the logits.
        """
        per_block: dict[int, float] = {}
        for operator in self.operators:
            saved = element_bytes * operator.saved_elements_per_token + operator.saved_bytes_per_token
            per_block[operator.block] = per_block.get(operator.block, 0.0) + saved
        outside = per_block.pop(OUTSIDE, 0.0)
        inside = interval * max(per_block.values()) if checkpointed and per_block else sum(per_block.values())
        return int(batch * self.seq * (inside + outside + self.logits_bytes))

    def tiled(self, max_parameters: int) -> ModelShape:
        """The same with every larger operator cut into tiles that are fetched and released one at a time."""
        operators: list[OperatorShape] = []
        for operator in self.operators:
            tiles = -(-operator.num_parameters // max_parameters)
            operators += operator.tiles(-(-operator.num_parameters // tiles)) if tiles > 1 else [operator]
        return replace(self, operators=tuple(operators))

    def tiled_by_rows(self, max_parameters: int) -> ModelShape:
        """The same with every larger weight that can be used in tiles cut into whole rows, as the engine does it."""
        operators: list[OperatorShape] = []
        for operator in self.operators:
            # A row's share of the bias counts as a part of it.
            row = -(-operator.num_parameters // max(1, operator.num_rows))
            fits = operator.num_parameters <= max_parameters
            rows = None if fits else rows_per_tile(operator.num_rows, row, max_parameters)
            operators += [operator] if rows is None else operator.tiles(rows * row)
        return replace(self, operators=tuple(operators)) if len(operators) > len(self.operators) else self

    def sliced(self, num_blocks: int) -> ModelShape:
        """Only the first blocks, and as much less of what is outside blocks."""
        part = num_blocks / self.num_blocks
        operators = [
            operator
            if operator.block != OUTSIDE
            else replace(
                operator,
                num_parameters=math.ceil(operator.num_parameters * part),
                flops_per_token=operator.flops_per_token * part,
            )
            for operator in self.operators
            if operator.block < num_blocks
        ]
        return replace(self, operators=tuple(operators))


def transformer(
    layers: int,
    hidden: int,
    heads: int,
    seq: int,
    *,
    vocabulary: int = 0,
    tied: bool = True,
    name: str | None = None,
    keeps_scores: bool = True,
) -> ModelShape:
    """A GPT-like Transformer: four linear layers and attention a block, and embeddings where there is a vocabulary.

    Norms and biases are left out, as in the papers: below 0.1% at any width that needs planning. `keeps_scores`: the
    scores of attention are kept for backward, as in the papers; torch's own attention computes them again.
    """
    for label, value in (("layers", layers), ("hidden", hidden), ("heads", heads), ("seq", seq)):
        if value < 1:
            raise ConfigError(f"{label} is {value}; accepted: an integer of at least 1")
    if vocabulary < 0:
        raise ConfigError(f"vocabulary is {vocabulary}; accepted: 0 (no embeddings) or more")
    operators: list[OperatorShape] = []
    if vocabulary:
        operators.append(
            OperatorShape("embedding", vocabulary * hidden, 0.0, hidden, weight_in_backward=False, num_rows=vocabulary)
        )
    for block in range(layers):
        operators += _block(block, hidden, seq, heads if keeps_scores else 0)
    if vocabulary:
        unit = "embedding" if tied else "head"
        logits = 2.0 * vocabulary * hidden
        operators.append(
            OperatorShape(
                "head",
                vocabulary * hidden,
                logits,
                hidden + vocabulary,
                unit=unit,
                num_rows=vocabulary,
                saved_bytes_per_token=LOSS_BYTES * vocabulary,
            )
        )
    return ModelShape(
        name or f"{layers} x {hidden}", tuple(operators), hidden, seq, logits_bytes=SINGLE_BYTES * vocabulary
    )


def _block(block: int, hidden: int, seq: int, heads: int) -> list[OperatorShape]:
    """What each operator saves adds up to the 16 x hidden + 2 x heads x seq of ZeRO-Infinity's section 3.

    `heads`: whose scores are kept.
    """
    scores = 4.0 * seq * hidden  # queries by keys, and weights by values
    square = hidden**2
    return [
        OperatorShape(f"{block}.qkv", 3 * square, 6.0 * square, 2.0 * hidden, block, num_rows=3 * hidden),
        OperatorShape(f"{block}.attention", 0, scores, 3.0 * hidden + 2.0 * heads * seq, block),
        OperatorShape(f"{block}.projection", square, 2.0 * square, hidden, block, num_rows=hidden),
        OperatorShape(f"{block}.up", 4 * square, 8.0 * square, 2.0 * hidden, block, num_rows=4 * hidden),
        OperatorShape(f"{block}.down", 4 * square, 8.0 * square, 8.0 * hidden, block, num_rows=hidden),
    ]


_GPT_VOCABULARY = 50257
# Layers, hidden, heads, seq, vocabulary. GPT-3's family: arXiv 2005.14165, table 2.1. zi-*: arXiv 2104.07857, table 1
# (heads as in its figure 2a for the next size there); they come without embeddings, as the paper counts.
_KNOWN = {
    "gpt2-124m": (12, 768, 12, 1024, _GPT_VOCABULARY),
    "gpt2-1.5b": (48, 1600, 25, 1024, _GPT_VOCABULARY),
    "gpt3-1.3b": (24, 2048, 16, 2048, _GPT_VOCABULARY),
    "gpt3-2.7b": (32, 2560, 32, 2048, _GPT_VOCABULARY),
    "gpt3-6.7b": (32, 4096, 32, 2048, _GPT_VOCABULARY),
    "gpt3-13b": (40, 5120, 40, 2048, _GPT_VOCABULARY),
    "gpt3-175b": (96, 12288, 96, 2048, _GPT_VOCABULARY),
    "zi-10b": (50, 4096, 16, 1024, 0),
    "zi-50b": (62, 8192, 32, 1024, 0),
    "zi-100b": (125, 8192, 32, 1024, 0),
    "zi-0.5t": (124, 18432, 160, 1024, 0),
    "zi-1t": (128, 25600, 256, 1024, 0),
    "zi-5t": (174, 49152, 512, 1024, 0),
    "zi-10t": (200, 65536, 512, 1024, 0),
    "zi-20t": (205, 90112, 1024, 1024, 0),
    "zi-100t": (315, 163840, 1024, 1024, 0),
}


def known_names() -> list[str]:
    return list(_KNOWN)


def known(name: str, seq: int | None = None) -> ModelShape:
    """A model by its name, in either case; `seq` in place of its own."""
    if name.lower() not in _KNOWN:
        near = difflib.get_close_matches(name.lower(), _KNOWN, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"there is no model {name!r}; {hint}there are: {', '.join(_KNOWN)}\n"
            "  fix:   one of these, the path of a Hugging Face config.json, or --layers, --hidden and --heads"
        )
    layers, hidden, heads, own_seq, vocabulary = _KNOWN[name.lower()]
    of_the_paper = not vocabulary
    return transformer(
        layers,
        hidden,
        heads,
        seq or own_seq,
        vocabulary=vocabulary,
        name=name.lower(),
        keeps_scores=of_the_paper,
    )
