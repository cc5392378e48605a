"""Triples: files against a loop over lines, terms of N-Triples, tables, random splits, mapped names, settings."""

import csv
import gzip
import io

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from funcppo.core.settings import FieldError
from funcppo.kg.graph import triples
from funcppo.kg.graph.text import decode, read_content, read_text

A, B = ("a", "r", "b"), ("b", "s", "c")


def read_triples(text, path, columns=None):
    """The file of a text or of bytes, its triples in names."""
    content = text if isinstance(text, bytes) else text.encode()
    numbers = triples.NameNumbers()
    file = triples.read_triples(content, path, numbers, columns)
    names = list(numbers)
    rows = [tuple(names[i] for i in row) for row in file.triples.tolist()]
    return file._replace(triples=rows)


# -- files


@pytest.mark.parametrize("name", ["f.txt", "f.txt.gz"])
def test_the_mark_and_returns_are_no_part_of_the_text(tmp_path, name):
    content = "\ufeffZoë\r\nb\rc\n".encode()
    pack = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(pack(content))
    assert read_content(tmp_path / name) == "Zoë\nb\rc\n".encode()
    assert read_text(tmp_path / name) == "Zoë\nb\rc\n"


def test_what_is_no_text_is_named_by_its_line(tmp_path):
    for text, problem in (
        (b"a\n\xff", "2: expected UTF-8, got byte 0xff"),
        (b"a\n\n\0", "3: expected text, got a NUL byte"),
    ):
        with pytest.raises(ValueError, match=f"^f:{problem}"):
            decode(text, "f")
    (tmp_path / "f.gz").write_bytes(gzip.compress(b"text")[:-3])
    with pytest.raises(ValueError, match=r"f\.gz: expected a whole gzip file"):
        read_content(tmp_path / "f.gz")
    with pytest.raises(ValueError, match="can be read: No such file"):
        read_content(tmp_path / "none")


def test_the_ending_says_what_is_read_as_triples():
    names = ["x.txt", "x.tsv.gz", "d/x.csv", "x.pl", "x.gz", "x", "x.tsv.bz2"]
    assert [name for name in names if triples.is_triple_file(name)] == names[:3]


@pytest.mark.parametrize(
    ("path", "columns", "text"),
    [
        ("f.txt", None, "a\tr\tb\nb\ts\tc"),
        ("f.tsv", None, "a\tr\tb\nb\ts\tc\n\n"),
        ("f.csv.gz", None, '"a","r", b\nb,"s",c'),
        ("f.csv", "3,1,2", "r,b,a\ns,c,b\n"),
        ("f.tsv", "04,2,1", "b\tr\t\ta\nc\ts\t\tb\n"),
        ("f.csv", "from, what,to", "what,when,from,to\nr,1999,a,b\ns,2000,b,c"),
        ("f.tsv", "x,y,z", "z\ty\t x\nb\tr\ta\nc\ts\tb"),
        ("f.txt", None, "head\trelation\ttail\na\tr\tb\nb\ts\tc"),
        ("f.csv", "2,1,3", "P,S,O\nr,a,b\ns,b,c"),
    ],
)
def test_two_triples_in_every_form(path, columns, text):
    assert read_triples(text, path, columns).triples == [A, B]


def test_a_first_line_that_can_be_nothing_but_a_header_is_told():
    file = read_triples("h,r,t\na,knows,b\n", "f.csv")
    assert file.triples == [("a", "knows", "b")]
    note = "f.csv:1: 'h,r,t' read as a header"
    assert (file.first_line, file.notes) == (2, [note])
    for text in ("h,r,t\nt,r,h\n", "h,x,t\na,r,b\n", "a,r,t\nb,x,c\n"):
        file = read_triples(text, "f.csv")
        assert (len(file.triples), file.first_line, file.notes) == (2, 1, [])


def test_columns_are_recognised_by_their_names():
    for text in (
        "source,target,relation\na,b,r\nb,c,s\n",
        ":START_ID(Person),:TYPE,:END_ID(City)\na,r,b\nb,s,c\n",
        "relation,when,Head,Tail,source\nr,1,a,b,x\ns,2,b,c,x\n",
        ":START_ID,since,:END_ID,:TYPE\na,1,b,r\nb,2,c,s\n",
    ):
        file = read_triples(text, "f.csv")
        assert file.triples == [A, B]
        assert (file.first_line, len(file.notes)) == (2, 1)
    # A header that says two columns of three is refused.
    for header in ("source,target,weight", "subject,verb,object", "head,tail,edges"):  # fmt: skip
        problem = r"f\.csv:1: expected columns named"
        with pytest.raises(ValueError, match=problem):
            read_triples(f"{header}\na,b,r\n", "f.csv")
        read_triples(f"{header}\na,b,r\n", "f.csv", columns="1,2,3")


def test_lines_of_json_are_read_by_their_keys():
    text = '{"tail": "b", "x": null, "head": "a", "relation": "r"}\n'
    text += '{"head": "b", "relation": "s", "tail": "c"}\n'
    file = read_triples(text, "f.jsonl.gz")
    assert (file.triples, file.first_line) == ([A, B], 1)
    turned = read_triples(text, "f.jsonl", "tail,relation,head")
    assert turned.triples[0] == ("b", "r", "a")
    for line, problem in (
        ('{"head": "a", "relation": "r"}', "expected 4 columns"),
        ('{"head": "a", "relation": 0.5, "tail": "b"}', "expected texts or"),
        (r'{"head": "\ud800", "relation": "r", "tail": "b"}', "expected texts"),
        ("[1, 2, 3]", "expected a JSON object"),
        ("{", "expected a JSON object"),
    ):
        with pytest.raises(ValueError, match=f"f.jsonl:3: {problem}"):
            read_triples(f"{text}{line}\n", "f.jsonl")
    with pytest.raises(ValueError, match=r"f\.jsonl:1: expected columns named"):
        read_triples('{"from": "a", "what": "r", "to": "b"}\n', "f.jsonl")


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
    found = []
    i, j, k = map(int, (columns or "1,2,3").split(","))
    width = 3
    for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
        cells = line.split("\t")
        if path.endswith(".csv"):
            try:
                [cells] = csv.reader([line], skipinitialspace=True, strict=True)
            except csv.Error:
                return number
        if number == 1 and columns:
            width = len(cells)
        if len(cells) != width or width < max(i, j, k):
            return number
        found.append((cells[i - 1], cells[j - 1], cells[k - 1]))
        if not all(found[-1]):
            return number
    return found


# Short texts of what separates, ends and disturbs.
PARTS = 'a|b|Zoë|\u00a0|a long name|\t|\t|\t|,|,|\n|\n| |"|a\tr\tb\n|a,r,b\n|a\tr\tb\tx\n'
TEXTS = st.lists(st.sampled_from(PARTS.split("|")), max_size=30)
CONTENTS = TEXTS.map(lambda parts: "".join(parts).encode())
DISTURBED = CONTENTS | st.tuples(
    CONTENTS, st.sampled_from([b"\xff", b"\0"]), CONTENTS
).map(b"".join)


@given(
    DISTURBED,
    st.sampled_from(["f.tsv", "f.csv"]),
    st.sampled_from([None, "1,2,3", "4,1,2"]),
)
@example("\u00a0\t\u00a0\t\u00a0\n".encode(), "f.tsv", None)
@example(b"a\tr\tb\t\xff\n", "f.tsv", "1,2,3")
@example(b"\na", "f.csv", None)
@example(b"a\tr\tb\n" * 3 + b"a\tr\n\xff", "f.tsv", None)
def test_a_file_is_read_as_line_by_line(content, path, columns):
    expected = read_line_by_line(content, path, columns)
    if isinstance(expected, list):
        assert read_triples(content, path, columns).triples == expected
        return
    with pytest.raises(ValueError) as caught:
        read_triples(content, path, columns)
    assert str(caught.value).startswith(f"{path}:{expected}: ")


NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n"),
    min_size=1,
).filter(lambda name: not name.startswith(" "))


@given(
    st.lists(st.tuples(*[NAMES] * 4), min_size=1), st.permutations([0, 1, 2, 3])
)
def test_what_the_csv_module_writes_is_read_back(rows, order):
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([["c0", "c1", "c2", "c3"], *rows])
    i, j, k = order[:3]
    file = read_triples(text.getvalue(), "f.csv", f"c{i},c{j},c{k}")
    assert file.triples == [(row[i], row[j], row[k]) for row in rows]
    assert (file.first_line, file.notes) == (2, [])


@pytest.mark.parametrize(
    ("path", "columns", "text", "expected"),
    [
        ("f.csv", None, "a,r,b\na,r\n", "2: expected 3 columns head,relation,tail, got 2, in 'a,r'"),
        ("f.csv", None, "a,r,b,c\n",
         "1: expected 3 columns head,relation,tail, got 4 (--columns chooses three), in 'a,r,b,c'"),
        ("f.csv", None, "a,r,b\n\na,r,b\n", "2: expected 3 columns head,relation,tail, got 0, in ''"),
        ("f.csv", "1,2,4", "a,r,b\n", "1: expected column 4, as --columns says, got 3 columns, 'a,r,b'"),
        ("f.tsv", "s,p,o", "s\tp\tx\n", "1: expected one column o, as --columns says, got 3 columns, 's\\tp\\tx'"),
        ("f.csv", "s,p,o", "s,p,o,s\n", "1: expected one column s, as --columns says, got 4 columns, 's,p,o,s'"),
        ("f.csv", "s,p,o", "s,p,o,w\na,r,b,1\na,r,,1\n",
         "3: expected 4 columns, as in the first line, got an empty one, in 'a,r,,1'"),
        ("f.csv", None, 'a,r,b\na,"r\nr",b\n', "2: expected a row on one line, got one with a line break in quotes"),
        ("f.csv", None, 'a,r,b\na,r,"b\n', "2: expected comma-separated values: unexpected end of data"),
        ("f.csv", None, 'a,r,b\n"a"x,r,b\n', "2: expected comma-separated values: ',' expected after '\"'"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(path, columns, text, expected):
    with pytest.raises(ValueError) as caught:
        read_triples(text, path, columns)
    assert str(caught.value) == f"{path}:{expected}"


# -- N-Triples

S, P = "<http://ex.org/a>", "<http://ex.org/p>"


@pytest.mark.parametrize(
    ("term", "name"),
    [
        (S, "http://ex.org/a"),
        ("<http://ex.org/Zo\\u00EB>", "http://ex.org/Zoë"),
        ("<urn:x:\\U0001F600>", "urn:x:\U0001f600"),
        ("_:0.a", "_:0.a"),
        ('"Paris, France"', '"Paris, France"'),
        ('"chat"@fr-BE', '"chat"@fr-be'),
        ('"5"^^<http://ex.org/int>', '"5"^^<http://ex.org/int>'),
        ('"a"^^<http://www.w3.org/2001/XMLSchema#string>', '"a"'),
        ('"a\\tb\\u00EB\\\'c"', '"a\\tbë\'c"'),
        ('"a\\nb \\"c\\" \\\\"@en', '"a\\nb \\"c\\" \\\\"@en'),
        ('""', '""'),
    ],
)
def test_a_term_has_one_name(term, name):
    file = read_triples(f"{S} {P} {term} .\n", "f.nt")
    assert file.triples == [("http://ex.org/a", "http://ex.org/p", name)]


def test_space_comments_and_empty_lines_are_no_triples():
    text = f'# head\n\n \t{S}{P}"x#y".# end\r\n_:a {P} _:b.\n  # last'
    rows = read_triples(text, "f.nt").triples
    assert [row[2] for row in rows] == ['"x#y"', "_:b"]
    assert read_triples("# nothing\n", "f.nt").triples == []


@pytest.mark.parametrize(
    "line",
    [
        f"{S} {P} {S}", f'"a" {P} {S} .', f"{S} _:b {S} .", f"{S} {P} a .", f'{S} {P} "a .', f'{S} {P} "a\\x" .',
        f'{S} {P} "a"@- .', f"{S} {P} <a b> .", f"{S} {P} _:b. {S} .", f"{S} {P} <a> .", f"{S} {P} <urn:\\u0020> .",
        f'{S} {P} "\\uD800" .', f'{S} {P} "\\UFFFFFFFF" .',
    ],
)  # fmt: skip
def test_a_bad_line_of_n_triples_is_named(line):
    problem = r"^f\.nt:[34]: expected N-Triples, got"
    with pytest.raises(ValueError, match=problem):
        read_triples(f"{S} {P} {S} .\n# x\n{line}\n", "f.nt")


RDF = {
    "ttl": "@prefix x: <http://ex.org/> . x:a x:p x:b, [ x:p x:c ] .",
    "trig": "@prefix x: <http://ex.org/> . x:a x:p x:b . x:g { x:a x:p _:n . _:n x:p x:c . }",
    "nq": f"{S} {P} <http://ex.org/b> .\n{S} {P} _:n <urn:g> .\n_:n {P} <http://ex.org/c> <urn:g> .",
    "rdf": '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns:x="http://ex.org/">'
    '<rdf:Description rdf:about="http://ex.org/a"><x:p rdf:resource="http://ex.org/b"/><x:p rdf:nodeID="n"/>'
    '</rdf:Description><rdf:Description rdf:nodeID="n"><x:p rdf:resource="http://ex.org/c"/></rdf:Description></rdf:RDF>',
    "jsonld": '{"@context": {"p": {"@id": "http://ex.org/p", "@type": "@id"}}, "@id": "http://ex.org/a", '
    '"p": ["http://ex.org/b", {"@id": "_:n", "p": "http://ex.org/c"}]}',
}


@pytest.mark.parametrize("suffix", RDF)
def test_each_format_of_rdf_gives_the_same_triples_each_time(suffix):
    file = read_triples(RDF[suffix], f"a/f.{suffix}.gz")
    node = "_:n" if suffix == "nq" else "_:f-0"
    a, b, c, p = (f"http://ex.org/{x}" for x in "abcp")
    assert sorted(file.triples) == [(node, p, c), (a, p, node), (a, p, b)]
    n_named = 2 if suffix in ("trig", "nq") else 0
    note = f"a/f.{suffix}.gz: 2 triples stand in named graphs, whose names are left out"
    assert file.notes == [note] * bool(n_named)
    for text, name, problem in (
        ("\n<a b", "f.ttl", r"f\.ttl:2: expected Turtle, got an error: ."),
        ("\n<a", "f.rdf", r"f\.rdf: expected RDF/XML, got an error: ."),
    ):
        with pytest.raises(ValueError, match=problem):
            read_triples(text, name)


# -- tables

NUMBERS = st.integers(0, 5)


@given(st.lists(NUMBERS))
def test_the_order_of_occurrence_is_that_of_a_dictionary(numbers):
    order = triples.order_of_occurrence(np.array(numbers, np.int32), 6)
    assert order.tolist() == list(dict.fromkeys(numbers))


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS)), st.booleans())
def test_rows_that_repeat_another_are_dropped(rows, has_large_numbers):
    """A code of three numbers near 2^31 needs more than 64 bits."""
    if has_large_numbers:
        rows = [tuple(2**31 - 1 - number for number in row) for row in rows]
    table = np.array(rows, np.int32).reshape(-1, 3)
    distinct = [tuple(row) for row in triples.drop_duplicates(table).tolist()]
    assert distinct == list(dict.fromkeys(rows))


# -- random splits

TRIPLES = [(f"e{i}", f"r{i % 3}", f"e{i * 7 % 50}") for i in range(50)]


def split_triples(rows, ratios, seed):
    """The parts of a list of triples in names: train, valid, test."""
    numbers = triples.NameNumbers()
    table = numbers.number(name for row in rows for name in row)
    names = list(numbers)
    parts = triples.split_triples(table, names, ratios, seed)
    return [
        [tuple(names[i] for i in row) for row in parts[split].tolist()]
        for split in ("train", "valid", "test")
    ]


@given(
    st.lists(st.tuples(*[st.sampled_from("abcd")] * 3), min_size=20),
    st.sampled_from(["0.8,0.1,0.1", ".5,  .5, 0", "1,0,0", "0.4,0 ,.6"]),
    st.integers(-3, 3),
)
def test_each_triple_is_in_one_part_of_its_share(rows, ratios, seed):
    distinct = list(dict.fromkeys(rows))
    if len(distinct) < 5:
        return
    parts = split_triples(rows, ratios, seed)
    assert sorted(row for part in parts for row in part) == sorted(distinct)
    _, *shares = triples.parse_ratios(ratios)
    sizes = [round(share * len(distinct)) for share in shares]
    assert [len(part) for part in parts[1:]] == sizes
    for part in parts:
        assert part == [triple for triple in distinct if triple in part]


def test_the_split_depends_on_the_seed_and_not_on_the_order_or_the_machine():
    """Runs are opened by splitting their data again."""
    parts = split_triples(TRIPLES, "0.8,0.1,0.1", 0)
    again = split_triples(TRIPLES[::-1], "0.8,0.1,0.1", 0)
    assert [*map(set, parts)] == [*map(set, again)]
    held_out = [triple[0] for triple in parts[2]]
    assert held_out == ["e17", "e27", "e43", "e45", "e49"]
    others = {
        tuple(split_triples(TRIPLES, "0.8,0.1,0.1", seed)[2])
        for seed in range(20)
    }
    assert len(others) == 20


def test_a_triple_is_held_out_as_often_as_any_other():
    """Of 400 seeds each of 10 triples is in test about 80 times; 20 is over 3 standard deviations away."""
    n_in_test = dict.fromkeys(TRIPLES[:10], 0)
    for seed in range(400):
        for triple in split_triples(TRIPLES[:10], "0.8,0,0.2", seed)[2]:
            n_in_test[triple] += 1
    assert sum(n_in_test.values()) == 800
    assert all(60 < count < 100 for count in n_in_test.values()), n_in_test


def test_too_few_triples_for_a_part_are_an_error():
    for ratios in ("0.8,0.1,0.1", "0.1,0.9,0"):
        problem = f"split_ratios {ratios}: .* for each part, got 3"
        with pytest.raises(ValueError, match=problem):
            split_triples(TRIPLES[:3], ratios, 0)


# -- settings


@pytest.mark.parametrize(
    ("field", "value"),
    [("columns", text) for text in ("a,b", "a,b,b", "a,b,", "1,2,c", "0,1,2", "1,01,2")]
    + [("split_ratios", text) for text in (
        "", "0.8,0.2", "0.8,0.1,0.2", "0,0.5,0.5", "1.2,-0.1,-0.1", "nan,0.1,0.1", "inf,0,0", "a,b,c")]
    + [("split_seed", 1), ("format", "xls")],
)  # fmt: skip
def test_a_setting_that_is_none_is_named(field, value):
    with pytest.raises(FieldError) as caught:
        triples.DataConfig(**{field: value})
    assert caught.value.field == field
