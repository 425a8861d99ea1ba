"""How sphinx builds the site: `make docs` (with the tutorials executed) or `make docs-check` (without)."""

from __future__ import annotations

import ast
import os
import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = str(HERE.parent / "src")
sys.path.insert(0, SOURCES)  # the sources beside this file, whatever is installed
os.environ["PYTHONPATH"] = SOURCES  # and the same in tutorials

project = "gramtower"
author = "the gramtower developers"
release = version = installed_version("gramtower")
copyright = "the gramtower developers, Apache-2.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
nitpicky = False
default_role = "code"  # `name` in docstrings

html_theme = "furo"
html_title = f"gramtower {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

# Formulas are Unicode text or plain code in most pages; MathJax would have to come from a network.
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4

# Tutorials: run every time, in a folder of their own; the first error ends the build.
nb_execution_mode = "force"
nb_execution_timeout = 180
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
nb_execution_show_tb = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

linkcheck_timeout = 20
linkcheck_retries = 2


def _commands(app, docname, source):
    """Append every command with its options, from the app itself, to the page of the command line."""
    if docname != "reference/command-line":
        return
    from gramtower.cli.program import COMMANDS, make_app

    text = make_app(*COMMANDS).generate_docs(output_format="markdown", heading_level=1)
    text = re.sub(r"^## `(gramtower .*)`$", r"## \1", text, flags=re.MULTILINE)  # as cyclopts 4.1 has them
    first = text.index("## gramtower ")  # after its own title and table of contents
    source[0] += "\n" + text[first:]


def _modules(app, docname, source):
    """Fill in the tree of modules on the page of the architecture: each with the first line of its docstring."""
    if docname != "architecture":
        return
    lines, root = [], Path(SOURCES) / "gramtower"
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        summary = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        if place.name == "__init__.py":
            lines.append(f"{'  ' * (len(place.parts) - 1)}{path.parent.name}/".ljust(32) + summary)
        else:
            lines.append(f"{'  ' * len(place.parts)}{place.name}".ljust(32) + summary)
    source[0] = source[0].replace("<!-- modules -->", "```\n" + "\n".join(lines) + "\n```")


def setup(app):
    """Connect what this file adds to sphinx."""
    app.connect("source-read", _modules)
    app.connect("source-read", _commands)
