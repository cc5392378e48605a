"""Files of triples: columns, headers, and what CSV adds."""

import csv
import io

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from funcppo.kg.graph.triples import NameTable, is_triple_file, parse_columns
from funcppo.kg.graph.triples import read_triples as read_table

A, B = ("a", "r", "b"), ("b", "s", "c")


def read_triples(text, path, columns=None):
    """The file of a text or of bytes, its triples in names."""
    content = text if isinstance(text, bytes) else text.encode()
    table = NameTable()
    file = read_table(content, path, table, columns)
    names = table.names()
    triples = [tuple(names[i] for i in row) for row in file.triples.tolist()]
    return file._replace(triples=triples)


def test_the_ending_says_what_is_read_as_triples():
    names = ["x.txt", "x.tsv.gz", "d/x.csv", "x.pl", "x.gz", "x", "x.tsv.bz2"]
    assert [name for name in names if is_triple_file(name)] == names[:3]


def test_columns_are_names_or_numbers():
    assert parse_columns("s, p,o") == ["s", "p", "o"]
    assert parse_columns("03,1,2") == ["3", "1", "2"]


@pytest.mark.parametrize(
    ("path", "columns", "text"),
    [
        ("f.txt", None, "a\tr\tb\nb\ts\tc"),
        ("f.tsv", None, "a\tr\tb\nb\ts\tc\n\n"),
        ("f.csv", None, "a,r,b\nb,s,c\n"),
        ("f.csv.gz", None, '"a","r", b\nb,"s",c'),
        ("f.csv", "1,2,3", "a,r,b\nb,s,c\n"),
        ("f.csv", "3,1,2", "r,b,a\ns,c,b\n"),
        ("f.tsv", "4,2,1", "b\tr\t\ta\nc\ts\t\tb\n"),
        ("f.csv", "from,what,to", "what,when,from,to\nr,1999,a,b\ns,2000,b,c"),
        ("f.tsv", "x,y,z", "z\ty\t x\nb\tr\ta\nc\ts\tb"),
        ("f.txt", None, "head\trelation\ttail\na\tr\tb\nb\ts\tc"),
        ("f.csv", None, "Subject,Predicate,Object\na,r,b\nb,s,c"),
        ("f.csv", "2,1,3", "P,S,O\nr,a,b\ns,b,c"),
    ],
)
def test_two_triples_in_every_form(path, columns, text):
    assert read_triples(text, path, columns).triples == [A, B]


def test_a_first_line_that_can_be_nothing_but_a_header_is_told():
    file = read_triples("h,r,t\na,knows,b\n", "f.csv")
    assert file.triples == [("a", "knows", "b")]
    assert (file.first_line, file.notes) == (
        2,
        ["f.csv:1: 'h,r,t' read as a header"],
    )
    for text in ("h,r,t\nt,r,h\n", "h,x,t\na,r,b\n", "t,r,h\na,x,b\n"):
        file = read_triples(text, "f.csv")
        assert (len(file.triples), file.first_line, file.notes) == (2, 1, [])


@pytest.mark.parametrize("text", ["head\trelation\ttail\n", "", "\n \n"])
def test_a_header_alone_holds_no_triple(text):
    assert read_triples(text, "f.txt").triples == []


def test_quotes_mean_nothing_where_tabs_separate():
    file = read_triples('"a\tr, s\tb"\n', "f.tsv")
    assert file.triples == [('"a', "r, s", 'b"')]


def read_line_by_line(content, path, columns):
    """What `read_triples` returns, or the line of its error, by a loop over lines."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1
    if "\0" in text:
        return text.count("\n", 0, text.index("\0")) + 1
    if not text.strip():
        return []
    is_csv = path.endswith(".csv")
    triples = []
    i, j, k = map(int, (columns or "1,2,3").split(","))
    width = 3
    for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
        cells = line.split("\t")
        if is_csv:
            try:
                [cells] = csv.reader([line], skipinitialspace=True, strict=True)
            except csv.Error:
                return number
        if number == 1 and columns:
            width = len(cells)
        if len(cells) != width or width < max(i, j, k):
            return number
        triples.append((cells[i - 1], cells[j - 1], cells[k - 1]))
        if not all(triples[-1]):
            return number
    return triples


# Short texts of what separates, ends and disturbs.
PARTS = 'a|b|Zoë|\u00a0|a long name|\t|\t|\t|,|,|\n|\n| |"|a\tr\tb\n|a,r,b\n|a\tr\tb\tx\n'
TEXTS = st.lists(
    st.sampled_from(PARTS.split("|")),
    max_size=30,
).map(lambda parts: "".join(parts).encode())
DISTURBED = st.one_of(
    TEXTS,
    st.tuples(TEXTS, st.sampled_from([b"\xff", b"\0"]), TEXTS).map(b"".join),
)


@given(
    DISTURBED,
    st.sampled_from(["f.tsv", "f.csv"]),
    st.sampled_from([None, "1,2,3", "4,1,2"]),
)
@example("\u00a0\t\u00a0\t\u00a0\n".encode(), "f.tsv", None)
@example(b"a\tr\tb\t\xff\n", "f.tsv", "1,2,3")
@example(b"a\tr\tb\n" * 3 + b"a\tr\n\xff", "f.tsv", None)
def test_a_file_is_read_as_line_by_line(content, path, columns):
    expected = read_line_by_line(content, path, columns)
    if isinstance(expected, list):
        assert read_triples(content, path, columns).triples == expected
        return
    with pytest.raises(ValueError) as caught:
        read_triples(content, path, columns)
    assert str(caught.value).startswith(f"{path}:{expected}: ")


def test_a_file_of_several_blocks(monkeypatch):
    monkeypatch.setattr("funcppo.kg.graph.triples._BLOCK_BYTES", 20)
    monkeypatch.setattr("funcppo.kg.graph.triples._BLOCK_ROWS", 2)
    triples = [(f"e{i}", "r", f"e{i * 7 % 5}") for i in range(40)]
    for path, separator in (("f.tsv", "\t"), ("f.csv", ",")):
        text = "".join(separator.join(row) + "\n" for row in triples)
        assert read_triples(text, path).triples == triples


NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n"),
    min_size=1,
).filter(lambda name: not name.startswith(" "))


@given(
    st.lists(st.tuples(*[NAMES] * 4), min_size=1),
    st.permutations([0, 1, 2, 3]),
)
def test_what_the_csv_module_writes_is_read_back(rows, order):
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["c0", "c1", "c2", "c3"])
    writer.writerows(rows)
    i, j, k = order[:3]
    file = read_triples(text.getvalue(), "f.csv", f"c{i},c{j},c{k}")
    assert file.triples == [(row[i], row[j], row[k]) for row in rows]
    assert (file.first_line, file.notes) == (2, [])


@pytest.mark.parametrize(
    ("path", "columns", "text", "expected"),
    [
        (
            "f.csv",
            None,
            "a,r,b\na,r\n",
            "f.csv:2: expected 3 columns head,relation,tail, got 2, in 'a,r'",
        ),
        (
            "f.csv",
            None,
            "a,r,b,c\n",
            "f.csv:1: expected 3 columns head,relation,tail, got 4 (--columns chooses three), in 'a,r,b,c'",
        ),
        (
            "f.csv",
            None,
            "a,r,b\n\na,r,b\n",
            "f.csv:2: expected 3 columns head,relation,tail, got 0, in ''",
        ),
        (
            "f.csv",
            "1,2,4",
            "a,r,b\n",
            "f.csv:1: expected column 4, as --columns says, got 3 columns, 'a,r,b'",
        ),
        (
            "f.tsv",
            "s,p,o",
            "s\tp\tx\n",
            "f.tsv:1: expected one column o, as --columns says, got 3 columns, 's\\tp\\tx'",
        ),
        (
            "f.csv",
            "s,p,o",
            "s,p,o,s\n",
            "f.csv:1: expected one column s, as --columns says, got 4 columns, 's,p,o,s'",
        ),
        (
            "f.csv",
            "s,p,o",
            "s,p,o,w\na,r,b,1\na,r,,1\n",
            "f.csv:3: expected 4 columns, as in the first line, got an empty one, in 'a,r,,1'",
        ),
        (
            "f.csv",
            "s,p,o",
            "s,p,o,w\na,r,b\n",
            "f.csv:2: expected 4 columns, as in the first line, got 3, in 'a,r,b'",
        ),
        (
            "f.csv",
            None,
            'a,r,b\na,"r\nr",b\n',
            "f.csv:2: expected a row on one line, got one with a line break in quotes",
        ),
        (
            "f.csv",
            None,
            'a,r,b\na,r,"b\n',
            "f.csv:2: expected comma-separated values: unexpected end of data",
        ),
        (
            "f.csv",
            None,
            'a,r,b\n"a"x,r,b\n',
            "f.csv:2: expected comma-separated values: ',' expected after '\"'",
        ),
        (
            "f.csv",
            None,
            "a,r,b\na,r," + "b" * 200_000,
            "f.csv:2: expected comma-separated values: field larger than field limit (131072)",
        ),
    ],
)
def test_a_bad_row_is_named(path, columns, text, expected):
    with pytest.raises(ValueError) as caught:
        read_triples(text, path, columns)
    assert str(caught.value) == expected
