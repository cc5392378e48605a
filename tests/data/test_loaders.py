"""Data sets from files: ids, splits, rules, and the printed forms that read back as the same."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from funcppo.data import (
    format_atom,
    format_rule,
    from_text,
    from_triples,
    load,
    parse_query,
)

SHARED = Path(os.environ.get("FUNCPPO_DATA", Path(__file__).parents[2] / "../shared/data"))
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6) | st.sampled_from(
    [
        "X",
        "_",
        "ann lee",
        "a,b",
        "it's",
        "f(x)",
        "a:-b",
        "b.",
        "\\+",
        "not",
        "is",
        "1",
        "-0",
        "01",
        '"',
        "Å",
        "#",
        "?a",
        "=>",
    ]
)


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(
        tmp_path, train="a\tr\tb\nb\tr\tc\na\tr\tb\n", valid="a\ts\tc\n", test="d\ts\ta\n", facts="c\tr\td\na\tr\tb\n"
    )


def test_a_folder_gives_the_ids_splits_and_rules_worked_out_by_hand(folder):
    write(folder, rules="0.5\ts(X,Y) :- r(Z,Y), r(X,Z)\n\tr(U,U) :- s(b,U)\n")
    d = load(folder)
    assert (d.entities, d.predicates, d.arities) == (("a", "b", "c", "d"), ("r", "s"), (2, 2))
    assert d.train.tolist() == [[1, 1, 2], [1, 2, 3]]
    assert (d.valid.tolist(), d.test.tolist()) == ([[2, 1, 3]], [[2, 4, 1]])
    assert d.facts.tolist() == [[1, 1, 2], [1, 2, 3], [1, 3, 4]]
    assert d.rules.tolist() == [[[2, 5, 6], [1, 7, 6], [1, 5, 7]], [[1, 5, 5], [2, 2, 5], [0, 0, 0]]]
    assert d.rule_weights[0] == 0.5 and np.isnan(d.rule_weights[1])
    assert (d.n_constants, d.n_predicates, d.atom_width, d.n_duplicates, d.n_unseen_entities) == (4, 2, 3, 1, 0)
    assert [format_rule(d, rule) for rule in d.rules] == ["s(X, Y) :- r(Z, Y), r(X, Z)", "r(X, X) :- s(b, X)"]


def test_a_program_gives_facts_and_rules_of_any_arity():
    d = from_text("edge(a, b). path(X,Y) :- edge(X,Y). hot. r(7, a, b).\npath(X,Y) :- path(X,Z), edge(Z,Y).")
    assert (d.entities, d.predicates, d.arities) == (("a", "b", "7"), ("edge", "path", "hot", "r"), (2, 2, 0, 3))
    assert d.train.tolist() == d.facts.tolist() == [[1, 1, 2, 0], [3, 0, 0, 0], [4, 3, 1, 2]]
    assert d.rules.tolist()[0] == [[2, 4, 5, 0], [1, 4, 5, 0], [0] * 4]
    assert len(d.valid) == len(d.test) == 0
    assert parse_query(d, "hot").tolist() == [3, 0, 0, 0]


def test_gzip_and_windows_lines_and_a_byte_order_mark_change_nothing(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for path in folder.iterdir():
        changed = b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n")
        (other / f"{path.name}.gz").write_bytes(gzip.compress(changed))
    assert load(other).fingerprint == load(folder).fingerprint


def test_the_given_rule_file_replaces_the_rules_of_the_folder(folder):
    write(folder, rules="s(X,Y) :- r(X,Y)", others="s(X,Y) :- r(Y,X)")
    assert [format_rule(d, d.rules[0])[-7:] for d in (load(folder), load(folder, folder / "others.txt"))] == [
        "r(X, Y)",
        "r(Y, X)",
    ]


def test_a_head_may_define_a_new_relation_and_a_note_says_so(folder):
    write(folder, rules="t(X,Y,Z) :- r(X,Y), r(Y,Z)")
    d = load(folder)
    assert (d.predicates, d.arities, d.atom_width) == (("r", "s", "t"), (2, 2, 3), 4)
    assert d.train.tolist() == [[1, 1, 2, 0], [1, 2, 3, 0]]
    assert d.notes[-1:] == (f"{folder}/rules.txt:1: only rules derive 't', no triple has it",)


def test_the_fingerprint_tells_order_rules_and_splits_apart_but_not_weights():
    a, b = ("a", "r", "b"), ("b", "r", "a")
    sets = [from_triples([a, b]), from_triples([b, a]), from_triples([a], [b]), from_triples([a], [], [b])]
    sets += [from_triples([a, b], rules="r(X,Y) :- r(Y,X)")]
    assert len({d.fingerprint for d in sets}) == 5
    assert from_triples([a, b], rules="1\tr(X,Y) :- r(Y,X)").fingerprint == sets[-1].fingerprint


@given(st.lists(st.tuples(NAMES, NAMES, NAMES), min_size=1, max_size=4), st.data())
@example([("X", "_", "it's"), ("a,b", "not", "\n")], None)
def test_a_printed_atom_or_rule_reads_back_as_the_same(triples, data):
    d = from_triples(triples)
    for atom in d.train:
        assert parse_query(d, format_atom(d, atom)).tolist() == atom.tolist()
    if data is None:
        return
    term = st.integers(1, d.n_constants + 6)
    atoms = data.draw(st.lists(st.tuples(st.integers(1, d.n_predicates), term, term), min_size=1, max_size=3))
    rule = canonical(np.array([(1, *[t for t in atoms[-1][1:]]), *atoms]), d.n_constants)
    again = from_triples(triples, rules=format_rule(d, rule))
    assert again.rules.tolist() == [rule.tolist()]


def canonical(rule: np.ndarray, n_constants: int) -> np.ndarray:
    """Variables numbered by first occurrence."""
    seen: dict[int, int] = {}
    for atom in rule:
        for j in (1, 2):
            if atom[j] > n_constants:
                atom[j] = seen.setdefault(int(atom[j]), n_constants + 1 + len(seen))
    return rule


@pytest.mark.parametrize(
    ("name", "rules", "sizes"),
    [  # entities, relations, distinct train, valid, test, rules, entities of valid and test only
        ("countries_S1", None, (271, 2, 1110, 24, 24, 1, 0)),
        ("countries_S2", None, (271, 2, 1062, 24, 24, 2, 0)),
        ("countries_S3", "rules_ntp_variant.txt", (271, 2, 978, 24, 24, 3, 0)),
        ("family", None, (3007, 12, 23483, 2038, 2835, 41, 15)),
        ("family", "rules_rnnlogic.tsv", (3007, 12, 23483, 2038, 2835, 2400, 15)),
        ("family_kns", None, (2968, 12, 19845, 2799, 5626, 48, 0)),
        ("umls", None, (135, 46, 5216, 652, 661, 33, 0)),
        ("wn18rr", None, (40943, 11, 86835, 3034, 3134, 34, 384)),
        ("wn18rr", "rules_kns_amie_full.tsv", (40943, 11, 86835, 3034, 3134, 508, 384)),
        ("wn18rr", "rules_rnnlogic.tsv", (40943, 11, 86835, 3034, 3134, 6092, 384)),
        ("fb15k-237", "rules_kns.tsv", (14541, 238, 272115, 17535, 20466, 394, 36)),
        ("fb15k-237", "rules_rnnlogic_top.tsv.gz", (14541, 237, 272115, 17535, 20466, 15000, 36)),
    ],
)
def test_the_standard_sets_have_their_published_sizes(name, rules, sizes):
    if not (SHARED / name).is_dir():
        pytest.skip(f"no {SHARED / name}: set FUNCPPO_DATA")
    d = load(SHARED / name, rules and SHARED / name / rules)
    got = (d.n_constants, d.n_predicates, len(d.train), len(d.valid), len(d.test), len(d.rules), d.n_unseen_entities)
    assert got == sizes
    assert d.facts.dtype == d.rules.dtype == np.int32 and d.facts.min() >= 1
