"""Files read by DuckDB: the data sets of the text reader, to the fingerprint; one line for what is wrong."""

from __future__ import annotations

import gzip
import sys

import pytest

from funcppo.core.settings import FieldError
from funcppo.kg.graph import loaders
from funcppo.kg.graph.config import DataConfig
from funcppo.kg.graph.loaders import load

duckdb = pytest.importorskip("duckdb")

TRIPLES = [
    ("Zoë", "knows", "a b"),
    ("a b", "knows", '"q"'),
    ("knows", "is", "Zoë"),
    ("Zoë", "knows", "a b"),
    ("x,y", "is", "NULL"),
]
BY_DUCKDB = DataConfig(reader="duckdb")


def write_folder(folder, suffix=".tsv", pack=False):
    """A folder with three splits; names with spaces, quotes, commas and letters beyond ASCII."""
    folder.mkdir()
    parts = {"train": TRIPLES, "valid": TRIPLES[1:2], "test": []}
    parts["facts"] = [("new", "is", "Zoë")]
    for split, triples in parts.items():
        rows = [list(triple) for triple in triples]
        separator = "\t"
        if suffix == ".csv":
            separator = ","
            rows = [[f'"{n.replace(chr(34), 2 * chr(34))}"' for n in r] for r in rows]  # fmt: skip
        text = "".join(separator.join(row) + "\n" for row in rows).encode()
        name = f"{split}{suffix}" + (".gz" if pack else "")
        (folder / name).write_bytes(gzip.compress(text) if pack else text)
    return folder


@pytest.mark.parametrize("suffix", [".tsv", ".csv"])
@pytest.mark.parametrize("pack", [False, True])
def test_a_folder_is_the_data_set_of_the_text_reader(tmp_path, suffix, pack):
    folder = write_folder(tmp_path / "graph", suffix, pack)
    by_text, by_duckdb = load(folder), load(folder, cfg=BY_DUCKDB)
    assert by_duckdb.fingerprint == by_text.fingerprint
    assert by_duckdb.entities == by_text.entities
    assert by_duckdb.notes == by_text.notes
    assert by_text.n_duplicates == 1


def test_rows_stay_in_their_order_over_blocks_and_threads(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("funcppo.kg.graph.loaders._BLOCK_ROWS", 4096)
    path = tmp_path / "graph.tsv"
    rows = [
        f"e{i * 7919 % 5003}\tr{i % 7}\te{i % 4999}\n" for i in range(20_000)
    ]
    path.write_text("".join(rows))
    by_duckdb = load(path, cfg=BY_DUCKDB)
    assert by_duckdb.fingerprint == load(path).fingerprint


def test_headers_and_chosen_columns_are_those_of_the_text_reader(tmp_path):
    path = tmp_path / "graph.tsv"
    path.write_text("head\trelation\ttail\na\tr\tb\n")
    assert load(path, cfg=BY_DUCKDB).notes == load(path).notes
    assert load(path, cfg=BY_DUCKDB).entities == ("a", "b")
    wide = tmp_path / "wide.csv"
    wide.write_text("id,to,rel,from\n1,b,r,a\n2,c,r,b\n")
    for columns in ("from,rel,to", "4,3,2"):
        cfg = DataConfig(columns=columns, reader="duckdb")
        expected = load(wide, cfg=DataConfig(columns=columns))
        assert load(wide, cfg=cfg).fingerprint == expected.fingerprint


def test_parquet_is_read_by_the_names_of_its_columns(tmp_path):
    folder = write_folder(tmp_path / "text")
    packed = tmp_path / "parquet"
    packed.mkdir()
    for path in folder.iterdir():
        columns = (
            "{'head': 'VARCHAR', 'relation': 'VARCHAR', 'tail': 'VARCHAR'}"
        )
        duckdb.sql(
            f"COPY (SELECT tail, head, relation FROM read_csv('{path}', delim='\\t', quote='', escape='', "
            f"header=false, auto_detect=false, columns={columns})) TO '{packed / path.stem}.parquet'"
        )
    assert load(packed).fingerprint == load(folder).fingerprint
    with pytest.raises(ValueError, match=r"train\.parquet: expected three col"):
        load(packed, cfg=DataConfig(columns="a,b,c"))


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("g.tsv", "a\tr\tb\na\tr\n", "g.tsv: DuckDB: .*[Ll]ine"),
        ("g.tsv", "a\tr\tb\na\t\tb\n", "g.tsv: row 2: expected three names"),
        ("g.csv", "a,r, b\n", "g.csv: row 1: expected .* without spaces"),
        ("g.nt", "<a> <b> <c> .\n", "g.nt: expected .* got N-Triples"),
        ("g.tsv", "", "g.tsv: (1: expected 3 columns|empty)"),
        ("g.tsv.gz", "a\tr\tb\n", "g.tsv.gz: expected a whole gzip file"),
    ],
)
def test_bad_files_are_one_line_that_names_them(tmp_path, name, text, problem):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=problem) as caught:
        load(path, cfg=BY_DUCKDB)
    assert "\n" not in str(caught.value)


def test_without_duckdb_the_error_names_the_extra(tmp_path, monkeypatch):
    path = tmp_path / "g.tsv"
    path.write_text("a\tr\tb\n")
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ValueError, match=r"the extra `big`"):
        load(path, cfg=BY_DUCKDB)


def test_another_reader_is_refused():
    with pytest.raises(FieldError, match="expected one of text, duckdb"):
        DataConfig(reader="pandas")


def test_duckdb_keeps_to_a_part_of_its_own_limit():
    """That limit is four fifths of the memory of the machine or of its container."""
    database = duckdb.connect()
    database.execute("SET memory_limit = '4GiB'")
    loaders._limit_memory(database)
    query = "SELECT current_setting('memory_limit')"
    assert database.execute(query).fetchone() == ("2.5 GiB",)
