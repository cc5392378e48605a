"""Loaders: folders, names, memory, DuckDB, PyKEEN, stored graphs; published sizes; one line for bad input."""

import dataclasses
import gzip
import io
import os
import sys
import urllib.parse
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from funcppo.kg.graph import loaders
from funcppo.kg.graph.loaders import (
    GENERATORS,
    from_text,
    from_triples,
    id_files,
    load,
    to_triples,
    write_splits,
)
from funcppo.kg.graph.rules import (
    format_atom,
    format_rule,
    read_query,
    with_counts_line,
)
from funcppo.kg.graph.triples import DataConfig
from funcppo.kg.logic import kb
from tests.kg.graph.python_datalog import triples
from tests.learning import DATA

SPLITS = {
    "train": "a\tr\tb\nb\tr\tc\na\tr\tb\n",
    "valid": "a\ts\tc\n",
    "test": "d\ts\ta\n",
    "facts": "c\tr\td\na\tr\tb\n",
}


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, **SPLITS)


def message(call, *args, **options):
    """The one line of an error of input."""
    with pytest.raises(ValueError) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- folders and files


def test_a_folder_gives_the_ids_splits_and_rules_worked_out_by_hand(folder):
    write(folder, rules="0.5\ts(X,Y) :- r(Z,Y), r(X,Z)\n\tr(U,U) :- s(b,U)\n")
    d = load(folder)
    assert (d.entities, d.predicates) == (("a", "b", "c", "d"), ("r", "s"))
    assert (d.arities, d.n_duplicates) == ((2, 2), 1)
    assert d.train.tolist() == [[1, 1, 2], [1, 2, 3]]
    assert (d.valid.tolist(), d.test.tolist()) == ([[2, 1, 3]], [[2, 4, 1]])
    assert d.facts.tolist() == [[1, 1, 2], [1, 2, 3], [1, 3, 4]]
    assert d.rules.tolist() == [
        [[2, 5, 6], [1, 7, 6], [1, 5, 7]],
        [[1, 5, 5], [2, 2, 5], [0, 0, 0]],
    ]
    assert d.rule_weights[0] == 0.5 and np.isnan(d.rule_weights[1])
    assert [format_rule(d, rule) for rule in d.rules] == [
        "s(X, Y) :- r(Z, Y), r(X, Z)",
        "r(X, X) :- s(b, X)",
    ]


def test_the_first_rule_file_of_a_folder_or_the_given_one_is_taken(folder):
    (folder / "rules.pl").write_text("s(X, Y) :- r(X, Y).")
    d = load(folder)
    assert format_rule(d, d.rules[0]) == "s(X, Y) :- r(X, Y)"
    write(folder, rules="s(X,Y) :- r(Y,X)", others="r(X,Y) :- s(Y,X)")
    d = load(folder)
    assert format_rule(d, d.rules[0]) == "s(X, Y) :- r(Y, X)"
    d = load(folder, folder / "others.txt")
    assert format_rule(d, d.rules[0]) == "r(X, Y) :- s(Y, X)"


def test_train_alone_is_read_without_facts_and_rules(folder):
    write(folder, rules="s(X,Y) :- r(X,Y)", test="")
    (folder / "valid.txt").unlink()
    d = load(folder)
    assert d.valid.shape == d.test.shape == (0, 3)
    d = load(folder, train_only=True)
    sizes = [len(t) for t in (d.train, d.facts, d.valid, d.rules)]
    assert sizes == [2, 2, 0, 0]
    write(folder, train="")
    for train_only in (False, True):
        problem = message(load, folder, train_only=train_only)
        assert "train.txt: empty" in problem


def test_one_file_of_triples_is_train_whatever_its_name(tmp_path, monkeypatch):
    lines = SPLITS["train"]
    packed = gzip.compress(lines.replace("\t", ",").encode())
    (tmp_path / "graph.csv.gz").write_bytes(packed)
    names = ["graph.tsv", "[x].tsv", "*.tsv", "?.tsv", "a'b.tsv", "{a,b}.tsv"]
    for name in names:  # which are no patterns
        (tmp_path / "x.tsv").write_text("other\tr\tb\n")
        (tmp_path / name).write_text(lines)
        d = load(tmp_path / name)
        assert (d.name, d.n_duplicates) == (name, 1)
        assert d.train.tolist() == [[1, 1, 2], [1, 2, 3]]
        assert not len(d.valid) and not len(d.test)
    assert load(tmp_path / "graph.csv.gz").fingerprint == d.fingerprint
    for text, name in ((lines, "auto"), (lines.replace("\t", ","), "csv")):
        stream = SimpleNamespace(buffer=io.BytesIO(text.encode()))
        monkeypatch.setattr(sys, "stdin", stream)
        cfg = DataConfig(format=name)
        assert load("-", cfg=cfg).fingerprint == d.fingerprint
    path = tmp_path / "data.bin"
    path.write_text("a,r\n")
    problem = message(load, path, cfg=cfg)
    assert problem.startswith(f"{path}.csv:1: expected 3 columns")
    assert "expected none for a folder" in message(load, tmp_path, cfg=cfg)


def test_a_file_is_split_at_random(tmp_path):
    path = tmp_path / "chain.csv"
    rows = [f"{i},next,e{i},e{i + 1}\n" for i in range(100)]
    path.write_text("row,what,from,to\n" + "".join(rows) + rows[0])
    ratios = "0.8,0.1,0.1"
    cfg = DataConfig(columns="from,what,to", split_ratios=ratios, split_seed=1)
    d = load(path, cfg=cfg)
    assert (len(d.train), len(d.valid), len(d.test)) == (80, 10, 10)
    assert d.n_duplicates == 1
    assert d.notes[-2:] == (
        "split at random by 0.8,0.1,0.1 with seed 1: 80 / 10 / 10 train / valid / test",
        "train: 1 lines repeat another and were dropped",
    )
    parts = [triples(d, part) for part in (d.train, d.valid, d.test)]
    assert len(set.union(*parts)) == 100
    other = DataConfig(columns="3,2,4", split_ratios=ratios)
    # Without names the header is one triple more.
    assert len(load(path, cfg=other).facts) == 81

    known = load(path, cfg=cfg, train_only=True)
    assert triples(known, known.facts) == parts[0]
    assert not len(known.valid) and not len(known.test)


STORIES = """story\tfacts\tasked pair\trelation
7\t0,father,1 1,sister,2\t0,2\taunt
8\t0,aunt,1\t1,0\tniece
"""


def test_each_story_is_a_graph_of_its_own(tmp_path):
    """What stories tell is known, what those of test ask is held out; a named split takes the place of test."""
    for name in ("train", "test", "test_2"):
        (tmp_path / f"{name}.tsv").write_text(STORIES)
    dataset = load(tmp_path)
    for split in ("test", "test_2"):
        if split == "test_2":
            path = loaders.find_split(tmp_path, split)
            dataset = loaders.with_test(dataset, path)
        told = triples(dataset, dataset.facts[len(dataset.train) :])
        assert len(dataset.train) == 5
        of_split = {x for x in told if x[0].startswith(f"{split}-")}
        assert of_split == {
            (f"{split}-7:0", "father", f"{split}-7:1"),
            (f"{split}-7:1", "sister", f"{split}-7:2"),
            (f"{split}-8:0", "aunt", f"{split}-8:1"),
        }
        assert triples(dataset, dataset.test) == {
            (f"{split}-7:0", "aunt", f"{split}-7:2"),
            (f"{split}-8:1", "niece", f"{split}-8:0"),
        }
    for line in ("1\t0,father 1,sister,2\t0,2\taunt", "1\t0,r,1\t0\ts", "1"):
        (tmp_path / "train.tsv").write_text(STORIES + line + "\n")
        assert "train.tsv:4: expected a story" in message(load, tmp_path)


LABELLED = {
    "train.tsv": "q1\tp\tq2\nq3\tp\tq2\n",
    "train.csv": "head,headLabel,tail_label,tail,relation,relation_label\n"
    "q1,Ann,Bob,q2,p,knows\nq3,,Bob,q2,p,knows\n",
    "train.ttl": "@prefix rdfs: <http://www.w3.org/2000/01/rdf-schema#> .\n"
    '<q:1> <q:p> <q:2> ; rdfs:label "Anna"@de, "Ann"@en . <q:3> <q:p> <q:2> .\n'
    '<q:p> rdfs:label "knows" . <q:2> rdfs:label "Bob"@fr .\n',
}


@pytest.mark.parametrize("name", LABELLED)
def test_labels_are_shown_and_asked_by_and_names_stay(name, tmp_path):
    (tmp_path / name).write_text(LABELLED[name])
    if name == "train.tsv":
        labels = "q1\tAnn\nq2\tBob\np\tknows\nq9\tnobody\n"
        (tmp_path / "labels.tsv").write_text(labels)
    dataset = load(tmp_path)
    names = [x.replace(":", "") for x in dataset.entities]
    assert names == ["q1", "q2", "q3"] and len(dataset.facts) == 2
    assert len(dataset.labels) == 3 + (name == "train.tsv")
    assert dataset.shown.entities[:2] == ("Ann", "Bob")
    assert dataset.shown.entities[2] == dataset.entities[2]
    assert format_atom(dataset.shown, dataset.facts[0]) == "knows('Ann', 'Bob')"
    by_label = read_query(dataset, "knows(Ann, X)")
    first, relation = dataset.entities[0], dataset.predicates[0]
    by_name = read_query(dataset, f"'{relation}'('{first}', X)")
    assert by_label.atom.tolist() == by_name.atom.tolist() == [1, 1, 4]


def test_a_label_of_several_names_is_followed_by_the_name(folder):
    (folder / "labels.txt").write_text("a\tx\nb\tx\nc\td\nr\tx\n")
    dataset = load(folder)
    shown = zip(dataset.entities, dataset.shown.entities)
    assert dict(shown) == {"a": "x (a)", "b": "x (b)", "c": "d (c)", "d": "d"}
    assert dataset.shown.predicates[0] == "x (r)"
    assert "unknown entity 'x'" in message(read_query, dataset, "r(x, ?y)")
    for line in ("a", "a\t", "a\tb\tc", ""):
        (folder / "labels.txt").write_text(f"a\tx\n{line}\nb\ty\n")
        assert "labels.txt:2: expected name<TAB>label" in message(load, folder)


def test_the_triples_of_a_folder_without_splits_are_split(folder):
    cfg = DataConfig(split_ratios="0.5,0,0.5")
    for train_only in (False, True):
        problem = message(load, folder, cfg=cfg, train_only=train_only)
        assert "has valid or test triples already" in problem
    for name in ("valid", "test"):
        (folder / f"{name}.txt").unlink()
    d = load(folder, cfg=cfg)
    # facts.txt stays known, and holds one of the two triples of train.
    assert (len(d.train), len(d.valid), len(d.test)) == (1, 0, 1)
    assert len(d.facts) in (2, 3)
    for name in ("clans:100:0", "program.pl"):
        problem = message(load, name, cfg=cfg)
        assert "expected a folder or a file of triples" in problem


def test_an_embedded_and_a_generated_data_set_are_found_by_name():
    assert load("countries_s1").name == "countries_s1"
    for generator in GENERATORS:
        assert load(f"{generator}:120:3").name == f"{generator}:120:3"
    assert (
        message(load, "") == "data set: expected a name or a path, got no text"
    )
    for name in ("clans", "clans:120:-1", "clans:1e3:0", "countries_s4"):
        problem = message(load, name)
        assert problem.startswith(f"unknown data set '{name}': expected a fold")
        assert problem.endswith(
            "one of countries_s1, countries_s2, countries_s3, family_tree:PEOPLE:SEED, clans:PEOPLE:SEED, pykeen:NAME"
        )


@pytest.mark.parametrize(
    ("name", "rules", "sizes"),
    # entities, relations, distinct train, valid, test, rules
    [
        ("countries_S1", None, (271, 2, 1110, 24, 24, 1)),
        ("countries_S3", "rules_ntp_variant.txt", (271, 2, 978, 24, 24, 3)),
        ("family", None, (3007, 12, 23483, 2038, 2835, 41)),
        ("family", "rules_rnnlogic.tsv", (3007, 12, 23483, 2038, 2835, 1810)),
        ("umls", None, (135, 46, 5216, 652, 661, 33)),
        ("wn18rr", "rules_kns_amie_full.tsv", (40943, 11, 86835, 3034, 3134, 508)),
        ("fb15k-237", "rules_rnnlogic_top.tsv.gz", (14541, 237, 272115, 17535, 20466, 10532)),
    ],
)  # fmt: skip
def test_the_standard_sets_have_their_published_sizes(name, rules, sizes):
    if not (DATA / name).is_dir():
        pytest.skip(f"no {DATA / name}: set FUNCPPO_DATA")
    d = load(DATA / name, rules and DATA / name / rules)
    tables = (d.train, d.valid, d.test, d.rules)
    assert (d.n_constants, d.n_predicates, *map(len, tables)) == sizes
    assert d.facts.dtype == d.rules.dtype == np.int32 and d.facts.min() >= 1


def test_rules_that_were_mined_from_held_out_triples_too_are_told(tmp_path):
    """Only where the rule file says what it was mined from."""
    graph, rules = tmp_path / "graph.tsv", tmp_path / "rules.tsv"
    graph.write_text("".join(f"e{i}\tr\te{i * 7 % 20}\n" for i in range(20)))
    split = DataConfig(split_ratios="0.6,0.2,0.2")
    header = "#source_weight\ttrain_support\ttrain_body_pairs\tloo_support\tstd_error\trule"
    table = f"{header}\n1\t1\t2\t1\t0\tr(X,Y) :- r(Y,X)\n"
    for cfg, is_told in ((DataConfig(), True), (split, False)):
        mined_from = load(graph, cfg=cfg)
        rules.write_text(with_counts_line(table, mined_from))
        notes = load(graph, rules, cfg=split).notes
        assert any("mined from all triples" in x for x in notes) == is_told
        assert not any("mined" in note for note in load(graph, rules).notes)
    rules.write_text(table)
    assert not any("mined" in x for x in load(graph, rules, cfg=split).notes)


TRIPLE = "expected 3 columns head<TAB>relation<TAB>tail"
EMPTY = "empty: expected lines of head<TAB>relation<TAB>tail"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("train.txt", "a\tr\tb\na b c\n", f"train.txt:2: {TRIPLE}, got 1, in 'a b c'"),
        ("test.txt", "a\tr\tb\tc\n", f"test.txt:1: {TRIPLE}, got 4 (--columns chooses three), in 'a\\tr\\tb\\tc'"),
        ("train.txt", "a\tr\t\n", f"train.txt:1: {TRIPLE}, got an empty one, in 'a\\tr\\t'"),
        ("train.txt", "\n\n", f"train.txt: {EMPTY}"),
        ("train.txt", "head\trelation\ttail\n", f"train.txt: {EMPTY}"),
        ("facts.txt", "", f"facts.txt: {EMPTY}"),
        ("rules.txt", "r(X,Y) :- r(Y,X)\n\0", "rules.txt:2: expected text, got a NUL byte"),
        ("train.csv", "a,r,b\n", "train.txt: expected one of it and train.csv, got both"),
        ("train.txt.gz", "", "train.txt: expected one of it and train.txt.gz, got both"),
        ("valid.txt", "a\tr\tb\na\tr\tb \n",
         "valid.txt:2: expected one spelling, got 'b' and 'b ', which differ in white space"),
        ("test.txt", "a\tr\u00a0\tb\n",
         "test.txt:1: expected one spelling, got 'r' and 'r\\xa0', which differ in white space"),
        ("rules.txt", "r(a, b).", "rules.txt:1: as Prolog: expected rules with a body: facts belong in facts.txt"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named(folder, name, content, expected):
    (folder / name).write_text(content, encoding="utf-8")
    assert message(load, folder) == f"{folder}/{expected}"


def test_what_is_missing_is_named(folder):
    (folder / "train.txt").unlink()
    others = "train.tsv, train.csv or train.nt, or one of them with .gz"
    problem = f"missing split: expected this file, {others}"
    assert message(load, folder) == f"{folder}/train.txt: {problem}"
    for name in ("no/such.pl", "nothing.tsv"):
        expected = "expected a file that can be read: No such file or directory"
        assert message(load, name) == f"{name}: {expected}"


# -- triples in memory

TRIPLES = [("a", "p", "b"), ("b", "q", "c")]


class Frame:
    """What is read of a data frame of pandas or polars."""

    def __init__(self, columns):
        self._columns = columns
        self.columns = list(columns)

    def __getitem__(self, name):
        return SimpleNamespace(to_list=lambda: self._columns[name])


def triples_factory(triples):
    """What is read of a triples factory of PyKEEN; ids do not begin with the first triple."""
    heads, relations, tails = zip(*triples)
    entities = sorted({*heads, *tails}, reverse=True)
    kinds = sorted(set(relations), reverse=True)
    columns = ((entities, heads), (kinds, relations), (entities, tails))
    ids = [[names.index(x) for x in column] for names, column in columns]
    return SimpleNamespace(
        mapped_triples=np.array(ids).T,
        entity_id_to_label=dict(enumerate(entities)),
        relation_id_to_label=dict(enumerate(kinds)),
    )


@pytest.mark.parametrize(
    "source",
    [
        iter(TRIPLES),
        [list(triple) for triple in TRIPLES],
        np.array(TRIPLES),
        np.array(TRIPLES, dtype=object),
        Frame({"tail": ["b", "c"], "n": [1, 2], "relation": ["p", "q"], "head": ["a", "b"]}),
        Frame({0: ["a", "b"], 1: ["p", "q"], 2: ["b", "c"]}),
        # a lazy data frame of polars, whose columns cannot be indexed
        SimpleNamespace(columns=[*"hrt"], collect=lambda: Frame({"h": ["a", "b"], "r": ["p", "q"], "t": ["b", "c"]})),
        triples_factory(TRIPLES),
    ],
)  # fmt: skip
def test_triples_are_read_from_every_kind_of_source(source):
    found = to_triples(source)
    assert found == TRIPLES
    assert all(type(name) is str for triple in found for name in triple)
    # Whole numbers are names.
    for numbers in (np.array([[1, 2, 3]]), [(1, np.int64(2), "3")]):
        assert to_triples(numbers) == [("1", "2", "3")]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ([("a", "p", "b"), ("a", "p")], "triple 1: expected three names"),
        *[([("a", "p", name)], "triple 0: expected three names") for name in ("", None, float("nan"), "x\ny", True)],
        (["abc"], "triple 0: expected"),
        (np.zeros((2, 2)), "shape [n, 3], got [2, 2]"),
        (Frame({"x": [], "y": []}), "expected columns named head"),
        (SimpleNamespace(mapped_triples=...), "got one with ids alone"),
        (7, "got int"),
    ],
)  # fmt: skip
def test_a_bad_source_is_one_line(source, problem):
    assert problem in message(to_triples, source)


TERM_NAMES = ["a b", "d'e", 'f"g', "Zoë 🙂", "http://ex.org/x", "_:n1"]
TERM_NAMES += ['"5"@en', "%41", "b,c", "#h"]


@pytest.mark.parametrize("suffix", ["tsv", "csv", "parquet", "nt", "ttl", "nq"])
def test_triples_are_written_in_each_format(suffix, tmp_path):
    pytest.importorskip("duckdb")
    subjects = [name for name in TERM_NAMES if name[0] != '"']
    rows = [(name, "is a", TERM_NAMES[4]) for name in subjects]
    rows += [("a b", "is a", name) for name in TERM_NAMES]
    dataset = from_triples(rows[:9], test=rows[9:])
    files = write_splits(dataset, f"{tmp_path}/new/{{split}}.{suffix}")
    assert [x.name for x in files] == [f"train.{suffix}", f"test.{suffix}"]
    found = load(tmp_path / "new")
    # Names that are no terms of RDF become IRIs, a blank node of Turtle has a number.
    is_rdf = suffix in ("nt", "ttl", "nq")

    def term(name):
        is_kept = name == "_:n1" and suffix != "ttl"
        if not is_rdf or is_kept or name.startswith(('"', "http", "urn:name:")):
            return name
        iri = f"urn:name:{urllib.parse.quote(name, safe='')}"
        return "_" if name.startswith("_:") else iri

    for split in ("train", "test"):
        got, expected = (
            {tuple(map(term, row)) for row in triples(d, getattr(d, split))}
            for d in (found, dataset)
        )
        assert got == expected
    (path,) = write_splits(dataset, f"{tmp_path}/all.{suffix}")
    assert len(load(path).facts) == 9


def test_triples_that_a_format_cannot_hold_are_one_line(tmp_path):
    dataset = from_triples([("a\tb", "r", "c")])
    problem = message(write_splits, dataset, f"{tmp_path}/x.tsv")
    assert problem == "x.tsv: expected names without tabs, got one"
    problem = message(write_splits, dataset, f"{tmp_path}/x.xls")
    assert "expected a name that ends in" in problem
    problem = message(write_splits, from_text("p(a)."), f"{tmp_path}/x.csv")
    assert "expected facts of two arguments" in problem
    assert not list(tmp_path.iterdir())


# -- PyKEEN


def get_dataset(dataset):
    if dataset == "far":
        raise OSError("no\nnetwork")
    return SimpleNamespace(
        training=triples_factory([("a b", "r", "c"), ("c", "r", "d")]),
        validation=None,
        testing=triples_factory([("d", "r", "a b")]),
    )


def test_the_splits_are_those_of_pykeen(monkeypatch):
    resolver = SimpleNamespace(lookup_dict={"kinships": None, "far": None})
    module = SimpleNamespace(dataset_resolver=resolver, get_dataset=get_dataset)
    monkeypatch.setitem(sys.modules, "pykeen", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pykeen.datasets", module)
    d = load("pykeen:kinships")
    assert (d.name, d.entities) == ("pykeen:kinships", ("a b", "c", "d"))
    assert d.train.tolist() == [[1, 1, 2], [1, 2, 3]]
    assert (d.valid.tolist(), d.test.tolist()) == ([], [[1, 3, 1]])
    problem = message(load, "pykeen:kinship")
    assert "has no 'kinship' (close: 'kinships')" in problem
    problem = "'pykeen:far': PyKEEN could not load it: no network"
    assert message(load, "pykeen:far") == problem
    monkeypatch.setitem(sys.modules, "pykeen.datasets", None)
    assert "pip install pykeen" in message(load, "pykeen:kinships")


IDS = {
    "openke": {
        "entity2id.txt": "2\na b\t0\nc\t1\n",
        "relation2id.txt": "1\nr\t0\n",
        "train2id.txt": "1\n0 1 0\n",
        "test2id.txt": "1\n1\t0\t0\n",
    },
    "pykeen": {
        "training/entity_to_id.tsv.gz": "id\tlabel\n0\ta b\n1\tc\n",
        "training/relation_to_id.tsv.gz": "id\tlabel\n0\tr\n",
        "training/numeric_triples.tsv.gz": "head\trelation\ttail\n0\t0\t1\n",
        "testing/numeric_triples.tsv.gz": "head\trelation\ttail\n1\t0\t0\n",
    },
}


def _write_ids(layout, folder):
    for name, text in IDS[layout].items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        opened = gzip.open if name.endswith(".gz") else open
        with opened(path, "wt") as file:
            file.write(text)


@pytest.mark.parametrize("layout", IDS)
def test_triples_as_numbers_get_their_names(layout, tmp_path):
    _write_ids(layout, tmp_path)
    expected = from_triples([("a b", "r", "c")], test=[("c", "r", "a b")])
    assert load(tmp_path).fingerprint == expected.fingerprint
    assert {*id_files(tmp_path)} == {tmp_path / name for name in IDS[layout]}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("train", "1\n0 7 0\n", ": expected numbers that entity2id.txt and relation2id.txt name, got another"),
        *(("train", f"1\n{x}\n", ": expected three numbers a line below") for x in ("0 1 0\n0 1", "0 x 0", "0 1")),
        ("entity", "2\na b\t0\nc\t2\n", ": expected the numbers 0 to 1, each once"),
        ("entity", "2\na b 0\n", ":2: expected a name and a number, got 'a b 0'"),
    ],
)  # fmt: skip
def test_bad_triples_as_numbers_are_one_line(name, text, problem, tmp_path):
    _write_ids("openke", tmp_path)
    path = tmp_path / f"{name}2id.txt"
    path.write_text(text)
    assert message(load, tmp_path).startswith(f"{path}{problem}")


def test_what_has_an_arrow_stream_is_read():
    pyarrow = pytest.importorskip("pyarrow")
    columns = {"target": ["b", "7"], "source": ["a", "b"], "type": ["r", "r"]}
    found = to_triples(pyarrow.table(columns))
    assert found == [("a", "r", "b"), ("b", "r", "7")]
    duckdb = pytest.importorskip("duckdb")
    relation = duckdb.sql("SELECT 'a' AS s, 'r' AS p, 'b' AS o")
    assert to_triples(relation) == [("a", "r", "b")]
    with pytest.raises(ValueError, match="triple 0: expected three names"):
        to_triples(pyarrow.table({"s": [None], "p": ["r"], "o": ["b"]}))


def test_pykeen_itself():
    pytest.importorskip("pykeen", reason="PyKEEN is not installed")
    d = load("pykeen:kinships")
    sizes = [len(d.train), len(d.valid), len(d.test)]
    assert (d.n_constants, d.n_predicates) == (104, 25)
    assert sizes == [8544, 1068, 1074]


# -- Parquet

NAMED = """Zoë\tknows\ta b
a b\tknows\t"q"
knows\tis\tZoë
Zoë\tknows\ta b
x,y\tis\tNULL
"""


def test_parquet_is_read_by_the_names_of_its_columns(tmp_path, monkeypatch):
    duckdb = pytest.importorskip("duckdb")
    folder, packed = tmp_path / "text", tmp_path / "parquet"
    folder.mkdir()
    packed.mkdir()
    splits = {"valid": NAMED.splitlines(True)[1], "test": "", "train": NAMED}
    write(folder, **splits, facts="new\tis\tZoë\n")
    columns = "{'head': 'VARCHAR', 'relation': 'VARCHAR', 'tail': 'VARCHAR'}"
    for path in folder.iterdir():
        duckdb.sql(
            f"COPY (SELECT tail, head, relation FROM read_csv('{path}', delim='\\t', quote='', escape='', "
            f"header=false, auto_detect=false, columns={columns})) TO '{packed / path.stem}.parquet'"
        )
    assert load(packed).fingerprint == load(folder).fingerprint
    swapped = load(packed, cfg=DataConfig(columns="1,3,2"))
    assert swapped.entities[:2] == ("a b", "Zoë")
    problem = message(load, packed, cfg=DataConfig(columns="a,b,c"))
    assert "train.parquet: expected one column a, as --columns" in problem
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert "pip install 'funcppo[big]'" in message(load, packed)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ("'a', 'r', NULL", "g.parquet:2: expected 3 columns head<TAB>relation"),
        ("'a', 'r', ''", "g.parquet:2: expected 3 columns head<TAB>relation"),
        (r"'a', 'r', E'b\nc'", r"g.parquet:2: expected names on one line, got 'b\nc'"),
        ("'a', 'r', chr(0)", r"g.parquet:2: expected names on one line, got '\x00'"),
        ("", "g.parquet: expected Parquet, got "),
        (None, "g.parquet: expected Parquet, got no such file"),
    ],
)  # fmt: skip
def test_a_bad_file_of_parquet_is_one_line(tmp_path, values, problem):
    duckdb = pytest.importorskip("duckdb")
    path = tmp_path / "g.parquet"
    if values is not None:
        path.write_text("no Parquet")
    if values:
        rows = f"SELECT 'a' AS head, 'r' AS relation, 'b' AS tail UNION ALL SELECT {values}"
        duckdb.sql(f"COPY ({rows}) TO '{path}'")
    assert problem in message(load, path)


# -- stored graphs


@pytest.fixture
def source(tmp_path):
    """A folder with splits and rules, of which one defines a relation."""
    (tmp_path / "text").mkdir()
    return write(
        tmp_path / "text",
        train="Zoë\tknows\ta b\na b\tis\tQ1\nZoë\tknows\ta b\n",
        test="late\tknows\tZoë\n",
        facts="Q1\tis\tZoë\n",
        rules="0.5\tnew(X,Y) :- knows(X,Y)\n0.5\tknows(X,Y) :- knows(Y,X)\n",
    )


def tables_of(dataset):
    """The index of the facts, and the sizes that it is made by."""
    sizes = {x: getattr(dataset, x) for x in ("n_constants", "n_predicates")}
    return kb.index_facts(dataset.facts, **sizes), sizes


def store(dataset, folder, sources=()):
    return loaders.write(dataset, tables_of(dataset)[0], sources, folder)


@pytest.fixture
def stored(source, tmp_path):
    """The folder of the stored graph."""
    store(load(source), tmp_path / "stored", [source / "train.txt"])
    return tmp_path / "stored"


def test_what_is_read_is_what_was_written(source, stored):
    """Its index of facts is shared with a knowledge base that is made of them."""
    expected, read = load(source), load(stored)
    for field in dataclasses.fields(expected):
        a, b = getattr(read, field.name), getattr(expected, field.name)
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype and np.array_equal(a, b), field.name
        elif field.name not in ("name", "stored"):
            assert a == b, field.name
    assert read.fingerprint == expected.fingerprint
    assert np.shares_memory(read.train, read.facts)

    sizes = tables_of(read)[1]
    clauses, tables = (read.facts, read.rules), read.fact_tables
    mapped, mapped_sizes = kb.build(*clauses, **sizes, tables=tables)
    made, made_sizes = kb.build(*clauses, **sizes)
    assert mapped_sizes == made_sizes
    for a, b in zip(kb.tree.leaves(mapped), kb.tree.leaves(made)):
        assert a.equal(b)
    assert np.shares_memory(mapped.facts.numpy(), tables["facts"])

    assert not any("has changed since" in note for note in read.notes)
    write(source, train="a\tr\tb\n")
    assert any("has changed since" in note for note in load(stored).notes)


def test_other_rules_facts_or_names_are_not_the_stored(source, stored):
    rules = source / "other.txt"
    rules.write_text("0.5\tis(X,Y) :- knows(X,Y)\n")
    # The relation that the stored rules define stays.
    read = load(stored, rules)
    bare = dataclasses.replace(read, entities=tuple(read.entities), stored=None)
    assert read.fingerprint == bare.fingerprint
    assert read.fingerprint != load(stored).fingerprint
    assert read.fact_tables is not None
    rules.write_text("0.5\tother(X,Y) :- knows(X,Y)\n")
    assert load(stored, rules).fact_tables is None
    shorter = dataclasses.replace(read, facts=read.facts[:1])
    assert shorter.fact_tables is None
    alone = load(stored, train_only=True)
    assert not len(alone.test) and not len(alone.rules)
    assert len(alone.facts) == len(alone.train)


def test_what_is_not_the_stored_graph_is_refused(stored, tmp_path):
    problem = message(store, from_text("p(a)."), tmp_path / "program")
    assert "expected triples, got a program" in problem
    problem = message(load, stored, cfg=DataConfig(columns="1,2,3"))
    assert "options of reading and splitting" in problem
    path = stored / "graph.pt"
    content = path.read_bytes()
    torch.save({"format": 99}, path)
    assert f"{path}: expected format 3, got 99" in message(load, stored)
    for changed in (b"", b"{}", content[:-1], content[: len(content) // 2]):
        path.write_bytes(changed)
        assert f"{path}: expected the file that `fun" in message(load, stored)


def test_a_folder_appears_whole(source, stored, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    before = load(stored)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        for folder in (stored, tmp_path / "new"):
            with pytest.raises(KeyboardInterrupt):
                store(load(source), folder)
    assert load(stored).fingerprint == before.fingerprint
    assert not list((tmp_path / "new").iterdir())

    # What a killed process leaves goes with the next one.
    (tmp_path / "new" / "graph.pt.999999999.part").touch()
    store(load(source), tmp_path / "new")
    (path,) = (tmp_path / "new").iterdir()
    assert load(path.parent).fingerprint == before.fingerprint
