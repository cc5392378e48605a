"""N-Triples: terms by the grammar, one name a term, and lines that are none."""

import gzip

import pytest

from funcppo.kg.graph.config import DataConfig
from funcppo.kg.graph.loaders import load
from funcppo.kg.graph.triples import NameTable, read_ntriples

A, P = "<http://ex.org/a>", "<http://ex.org/p>"


def read(text):
    table = NameTable()
    rows = read_ntriples(text, "f.nt", table)
    names = table.names()
    return [tuple(names[i] for i in row) for row in rows.tolist()]


@pytest.mark.parametrize(
    ("term", "name"),
    [
        ("<http://ex.org/a>", "http://ex.org/a"),
        ("<http://ex.org/Zo\\u00EB>", "http://ex.org/Zoë"),
        ("<urn:x:\\U0001F600>", "urn:x:\U0001f600"),
        ("_:b1", "_:b1"),
        ("_:0.a", "_:0.a"),
        ('"Paris, France"', '"Paris, France"'),
        ('"chat"@fr-BE', '"chat"@fr-BE'),
        ('"5"^^<http://ex.org/int>', '"5"^^<http://ex.org/int>'),
        ('"a"^^<http://www.w3.org/2001/XMLSchema#string>', '"a"'),
        ('"a\\tb\\u00EB\\\'c"', '"a\tbë\'c"'),
        ('"a\\nb \\"c\\" \\\\"@en', '"a\\nb \\"c\\" \\\\"@en'),
        ('"<http://ex.org/a>"', '"<http://ex.org/a>"'),
        ('""', '""'),
    ],
)
def test_a_term_has_one_name(term, name):
    assert read(f"{A} {P} {term} .\n") == [
        ("http://ex.org/a", "http://ex.org/p", name)
    ]


def test_space_comments_and_empty_lines_are_no_triples():
    text = f'# head\n\n \t{A}{P}"x#y".# end\r\n_:a {P} _:b.\n  # last'
    assert [row[2] for row in read(text)] == ['"x#y"', "_:b"]
    assert read("# nothing\n") == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (f"{A} {P} {A}", "expected `subject predicate object .`"),
        (f'"a" {P} {A} .', "expected `subject predicate object .`"),
        (f"{A} _:b {A} .", "expected `subject predicate object .`"),
        (f"{A} {P} a .", "expected `subject predicate object .`"),
        (f'{A} {P} "a .', "expected `subject predicate object .`"),
        (f'{A} {P} "a\\x" .', "expected `subject predicate object .`"),
        (f'{A} {P} "a"@- .', "expected `subject predicate object .`"),
        (f"{A} {P} <a b> .", "expected `subject predicate object .`"),
        (f"{A} {P} _:b. {A} .", "expected `subject predicate object .`"),
        (f"{A} {P} <a> .", "expected an absolute IRI, got '<a>'"),
        (f"{A} {P} <urn:\\u0020> .", "expected an absolute IRI"),
        (f'{A} {P} "\\uD800" .', "expected a character, got the escape"),
        (f'{A} {P} "\\UFFFFFFFF" .', "expected a character, got the escape"),
    ],
)
def test_a_bad_line_is_named(line, problem):
    with pytest.raises(ValueError) as caught:
        read(f"{A} {P} {A} .\n# x\n{line}\n")
    assert str(caught.value).startswith(f"f.nt:3: {problem}")


def test_a_folder_of_packed_n_triples_beside_a_table(tmp_path):
    text = f'{A} {P} "a b" .\n{A} {P} "a  b" .\n'
    (tmp_path / "train.nt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "test.tsv").write_text("http://ex.org/a\thttp://ex.org/p\tc\n")
    d = load(tmp_path)
    assert d.entities == ("http://ex.org/a", '"a b"', '"a  b"', "c")
    assert d.test.tolist() == [[1, 1, 4]]
    (tmp_path / "test.tsv").write_text("a\tr \tc\nb\tr\tc\n")
    with pytest.raises(ValueError, match=r"test\.tsv:2: expected one spelling"):
        load(tmp_path)
    with pytest.raises(ValueError, match="columns: expected none for N-Tri"):
        load(tmp_path, cfg=DataConfig(columns="1,2,3"))
