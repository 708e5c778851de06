"""The documentation site: the pages of this folder, and a reference made from docstrings.

``make docs`` builds it into ``build/docs``, without a network; a warning is an error.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

import pyg_scale

project = "pyg_scale"
author = "the pyg_scale authors"
project_copyright = f"2026, {author}"
version = release = pyg_scale.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
exclude_patterns = ["_static"]

html_theme = "furo"
html_title = f"pyg_scale {release}"
html_static_path = ["_static"]
html_css_files = ["pyg_scale.css"]
html_theme_options = {"navigation_with_keys": True}

# The signature of a tensor argument is read more often than the module of the class.
add_module_names = False
python_use_unqualified_type_names = True
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def skip_members_of_pyg(
    app: Sphinx, what: str, name: str, member: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out what PyG defines: its own documentation describes it."""
    home = getattr(inspect.unwrap(member) if callable(member) else member, "__module__", None)
    return True if str(home or "").partition(".")[0] in {"torch_geometric", "torch"} else None


def fenced_code(
    app: Sphinx, what: str, name: str, member: Any, options: Any, lines: list[str]
) -> None:
    """Turn the fenced examples of docstrings into literal blocks of reStructuredText."""
    turned: list[str] = []
    inside = False
    for line in lines:
        if fence := re.match(r"(\s*)```(\w*)\s*$", line):
            inside = not inside
            opening = ["", f"{fence[1]}.. code-block:: {fence[2] or 'text'}"]
            turned += [*(opening if inside else []), ""]
        else:
            turned.append(f"   {line}" if inside and line else line)
    lines[:] = turned


def setup(app: Sphinx) -> None:
    """Register what is above."""
    for language in ("vectors", "negatives", "hgt"):  # the blocks of draws.md that tests read
        app.add_lexer(language, TextLexer)
    app.connect("autodoc-skip-member", skip_members_of_pyg)
    app.connect("autodoc-process-docstring", fenced_code)
