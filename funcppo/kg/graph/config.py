"""Settings of reading a data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from funcppo.core.settings import FieldError, Seed, check_fields
from funcppo.kg.graph.triples import parse_columns, parse_ratios


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """How files of triples are read and split."""

    columns: str | None = None
    """Columns of head, relation and tail in files of triples: three names of the header line, or three numbers from 1,
    with commas between them. Default: the three columns of files without a header."""
    reader: Literal["text", "duckdb"] = "text"
    """What reads files with tabs or commas: text reads them whole, duckdb in bounded memory with all cores (extra
    `big`). Parquet is always read by DuckDB."""
    split_ratios: str | None = None
    """Shares of train, valid and test, such as 0.8,0.1,0.1, by which the triples of one file, or of a folder without
    valid and test, are split at random. Default: no split; a single file is train."""
    split_seed: Seed = 0
    """Random seed of --split-ratios; the same seed gives the same split of the same triples."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
          FieldError: a setting is out of range, or is no list of columns or shares; the message names it.
        """
        check_fields(self)
        if self.columns is not None:
            parse_columns(self.columns)
        if self.split_ratios is not None:
            parse_ratios(self.split_ratios)
        elif self.split_seed:
            raise FieldError("split_seed", "split_ratios too", self.split_seed)


DEFAULT_CONFIG = DataConfig()
