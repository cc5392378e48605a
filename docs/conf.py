"""Sphinx: `make docs` builds the site from these pages, the docstrings and the help texts of the programs."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import funcppo
from funcppo import cli
from funcppo.core import settings

DOCS = Path(__file__).parent
ROOT = DOCS.parent
project = "funcppo"
author = "The funcppo authors"
copyright = author
version = release = funcppo.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
]
myst_enable_extensions = ["dollarmath"]
exclude_patterns = ["_build", "conf.py"]
default_role = "code"  # of single backticks
html_theme = "furo"
html_title = f"funcppo {version}"

myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 180
nb_merge_streams = True
# Notebooks run in another folder, and import this checkout.
os.environ["PYTHONPATH"] = str(ROOT)
os.environ["OMP_NUM_THREADS"] = "1"

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# A number with a range is shown as its type.
autodoc_type_aliases = {
    name: get_args(value)[0].__name__
    for name, value in vars(settings).items()
    if get_origin(value) is Annotated
}
# Shapes in annotations are texts, which are no names of types.
suppress_warnings = ["sphinx_autodoc_typehints", "ref.python"]
# Notebooks that are not run do not say their language.
suppress_warnings += ["myst-nb.lexer"]

MADE = DOCS / "_made"  # pages and texts that other files are made into
HELP_WIDTH = 100


def help_text(program: str) -> str:
    """What a program prints on all of its options."""
    os.environ["COLUMNS"] = str(HELP_WIDTH)
    output = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(output):
        cli._run([program, "--help-all"])
    return output.getvalue().rstrip()


def write_help_texts(app: object) -> None:
    """The page on the command line: every option of each program."""
    lines = ["# Command line", ""]
    lines += ["The help of each program, with all of its options.", ""]
    for name, summary in cli.PROGRAMS.items():
        lines += [f"## funcppo {name}", "", summary, ""]
        lines += ["```text", help_text(name), "```", ""]
    MADE.mkdir(exist_ok=True)
    (MADE / "cli.md").write_text("\n".join(lines))


def write_files(app: object) -> None:
    """INVESTIGATION.md with its full tables, the changelog and the citation as pages; a link becomes a path."""
    citation = (ROOT / "CITATION.cff").read_text()
    lines = ["# Citation", "", "```yaml", citation.rstrip(), "```", ""]
    (MADE / "citation.md").write_text("\n".join(lines))
    pages = {
        "investigation.md": ROOT / "INVESTIGATION.md",
        "changelog.md": ROOT / "CHANGELOG.md",
        "investigation_tables.md": ROOT
        / "experiments"
        / "results"
        / "full_step_matrix.md",
    }
    by_path = {
        str(path.relative_to(ROOT)): name for name, path in pages.items()
    }

    def page_link(link: re.Match[str]) -> str:
        text, target, anchor = link.groups(default="")
        name = by_path.get(target.removeprefix("../../"))
        return f"[{text}]({name}{anchor})" if name else text

    for name, path in pages.items():
        link = r"\[([^]]+)\]\(([^)#:]+)(#[^)]+)?\)"
        text = re.sub(link, page_link, path.read_text())
        (MADE / name).write_text(text)


def link_to_investigation(app: object, name: str, source: list[str]) -> None:
    """Lead links to INVESTIGATION.md, which is no page, to the page made of it."""
    source[0] = source[0].replace(
        "](../INVESTIGATION.md", "](_made/investigation.md"
    )


def mark_code(
    app: object,
    what: str,
    name: str,
    obj: object,
    options: object,
    lines: list[str],
) -> None:
    """Mark indented paragraphs of a docstring as code, but for those of sections such as Args."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")  # or napoleon takes a text before a colon as a type
    marked: list[str] = []
    text = ""  # the last line that is not indented
    for previous, line in zip(["", *lines], lines):
        is_indented = line.startswith("    ")
        if is_indented and not previous and not text.endswith(":"):
            marked += ["::", ""]
        if line and not is_indented:
            text = line
        marked.append(line)
    lines[:] = marked


def name_aliases(
    app: object,
    what: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """A signature without Sphinx's stand-ins for names of types."""
    stand_in = r"TypeAliasForwardRef\('(\w+)'\)"
    return signature and re.sub(stand_in, r"\1", signature), returns


def setup(app: Any) -> None:
    """Write the pages that are made of other files before all are read; read docstrings before napoleon does."""
    for write in (write_help_texts, write_files):
        app.connect("builder-inited", write)
    app.connect("source-read", link_to_investigation)
    app.connect("autodoc-process-signature", name_aliases)
    app.connect("autodoc-process-docstring", mark_code, priority=400)
