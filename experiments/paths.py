"""The files and folders that several programs use."""

import argparse
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
EMBEDDED_DATA = ROOT / "funcppo" / "kg" / "graph" / "embedded"
# The standard data sets are not part of the project; FUNCPPO_DATA names the folder that holds them.
DATA = Path(os.environ.get("FUNCPPO_DATA", ROOT / ".." / "shared" / "data"))

README = ROOT / "README.md"
INVESTIGATION = ROOT / "INVESTIGATION.md"
NOTES = ROOT / "experiments" / "README.md"
DOCS = ROOT / "docs"
MATRIX_TABLES = RESULTS / "full_step_matrix.md"
MATRIX_DOCUMENTS = (INVESTIGATION, MATRIX_TABLES)


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser of options whose help is the text of a program as it stands."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
