"""Sphinx settings of the documentation: `make docs` writes it to build/docs without network access."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import zero_infinity

project = "zero-infinity"
copyright = "the zero-infinity authors"
version = release = zero_infinity.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.programoutput"]
exclude_patterns = ["results"]
html_theme = "furo"
html_title = f"zero-infinity {version}"
html_show_sourcelink = False
pygments_style = "default"

# `name` in a docstring is code, as in Markdown.
default_role = "code"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3


def _check_public_names(app: Sphinx, env: BuildEnvironment) -> None:
    """A public name that the reference lacks is a warning, and so an error of `make docs`."""
    documented = {name for name, *_ in env.get_domain("py").get_objects()}
    missing = [name for name in zero_infinity.__all__ if f"zero_infinity.{name}" not in documented]
    if missing:
        logging.getLogger(__name__).warning("the API reference lacks %s", ", ".join(missing))


def setup(app: Sphinx) -> None:
    app.connect("env-check-consistency", _check_public_names)
