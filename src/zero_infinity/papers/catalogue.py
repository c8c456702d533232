"""Every exhibit by its name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial

from zero_infinity.errors import ConfigError
from zero_infinity.papers import bandwidth_tables, infinity_paper, infinity_scale, simulated_figures, zero_paper
from zero_infinity.papers.exhibit import Exhibit

_EXHIBITS: dict[str, Callable[[], Exhibit]] = {
    "zero-table1": zero_paper.table_1,
    "zero-table2": zero_paper.table_2,
    "zero-figure1": zero_paper.figure_1,
    "zero-residual": zero_paper.residual,
    "infinity-figure1": infinity_scale.figure_1,
    "infinity-figure2a": infinity_paper.figure_2a,
    "infinity-figure2b": infinity_paper.figure_2b,
    "infinity-figure3a": partial(infinity_paper.figure_3, "a"),
    "infinity-figure3b": partial(infinity_paper.figure_3, "b"),
    "infinity-figure3c": partial(infinity_paper.figure_3, "c"),
    "infinity-figure6a": infinity_scale.figure_6a,
    "infinity-figure6b": infinity_scale.figure_6b,
    "infinity-table3": infinity_paper.table_3,
    "infinity-table4": infinity_paper.table_4,
    "bandwidth-required": bandwidth_tables.required,
    "bandwidth-partitioned": bandwidth_tables.partitioned,
    "bandwidth-sufficient": bandwidth_tables.sufficient,
    "infinity-figure5a": simulated_figures.figure_5a,
    "infinity-figure5b": simulated_figures.figure_5b,
    "infinity-figure5c": simulated_figures.figure_5c,
    "infinity-figure6c": simulated_figures.figure_6c,
    "infinity-figure6d": simulated_figures.figure_6d,
    "infinity-figure6e": simulated_figures.figure_6e,
}
_PAPERS = ("zero", "infinity", "bandwidth")
NAMES = tuple(sorted(_EXHIBITS, key=lambda name: (_PAPERS.index(name.split("-")[0]), name)))


def make(name: str) -> Exhibit:
    """The exhibit of that name."""
    if name in _EXHIBITS:
        return _EXHIBITS[name]()
    near = difflib.get_close_matches(name, NAMES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"there is no exhibit {name!r}; {hint}there are: all, {', '.join(NAMES)}")
