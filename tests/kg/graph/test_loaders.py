"""Loaders: folders, programs and rule files; the standard sets have their published sizes."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from funcppo.kg.graph.config import DataConfig
from funcppo.kg.graph.loaders import GENERATORS, load
from funcppo.kg.graph.rules import TSV_HEADER, format_rule, with_counts_line
from tests.kg.graph.python_datalog import triples
from tests.learning import DATA


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(
        tmp_path,
        train="a\tr\tb\nb\tr\tc\na\tr\tb\n",
        valid="a\ts\tc\n",
        test="d\ts\ta\n",
        facts="c\tr\td\na\tr\tb\n",
    )


def test_a_folder_gives_the_ids_splits_and_rules_worked_out_by_hand(folder):
    write(folder, rules="0.5\ts(X,Y) :- r(Z,Y), r(X,Z)\n\tr(U,U) :- s(b,U)\n")
    d = load(folder)
    assert (d.entities, d.predicates, d.arities) == (
        ("a", "b", "c", "d"),
        ("r", "s"),
        (2, 2),
    )
    assert d.train.tolist() == [[1, 1, 2], [1, 2, 3]]
    assert (d.valid.tolist(), d.test.tolist()) == ([[2, 1, 3]], [[2, 4, 1]])
    assert d.facts.tolist() == [[1, 1, 2], [1, 2, 3], [1, 3, 4]]
    assert d.rules.tolist() == [
        [[2, 5, 6], [1, 7, 6], [1, 5, 7]],
        [[1, 5, 5], [2, 2, 5], [0, 0, 0]],
    ]
    assert d.rule_weights[0] == 0.5 and np.isnan(d.rule_weights[1])
    assert (
        d.n_constants,
        d.n_predicates,
        d.atom_width,
        d.n_duplicates,
        d.n_unseen_entities,
    ) == (4, 2, 3, 1, 0)
    assert [format_rule(d, rule) for rule in d.rules] == [
        "s(X, Y) :- r(Z, Y), r(X, Z)",
        "r(X, X) :- s(b, X)",
    ]


def test_gzip_and_windows_lines_and_a_byte_order_mark_change_nothing(
    folder, tmp_path_factory
):
    other = tmp_path_factory.mktemp("other")
    for path in folder.iterdir():
        changed = b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n")
        (other / f"{path.name}.gz").write_bytes(gzip.compress(changed))
    assert load(other).fingerprint == load(folder).fingerprint


def test_the_given_rule_file_replaces_the_rules_of_the_folder(folder):
    write(folder, rules="s(X,Y) :- r(X,Y)", others="s(X,Y) :- r(Y,X)")
    assert [
        format_rule(d, d.rules[0])[-7:]
        for d in (load(folder), load(folder, folder / "others.txt"))
    ] == [
        "r(X, Y)",
        "r(Y, X)",
    ]


def test_a_head_may_define_a_new_relation_and_a_note_says_so(folder):
    write(folder, rules="t(X,Y,Z) :- r(X,Y), r(Y,Z)")
    d = load(folder)
    assert (d.predicates, d.arities, d.atom_width) == (
        ("r", "s", "t"),
        (2, 2, 3),
        4,
    )
    assert d.train.tolist() == [[1, 1, 2, 0], [1, 2, 3, 0]]
    assert d.notes[-1:] == (
        f"{folder}/rules.txt:1: only rules derive 't', no triple has it",
    )


def test_known_facts_alone_are_train_and_facts(folder):
    write(folder, rules="s(X,Y) :- r(X,Y)")
    for name in ("valid", "test"):
        (folder / f"{name}.txt").unlink()
    d = load(folder, facts_only=True)
    assert (
        d.entities,
        len(d.train),
        len(d.facts),
        len(d.valid),
        len(d.rules),
    ) == (("a", "b", "c", "d"), 2, 3, 0, 0)
    write(folder, train="")
    assert load(folder, facts_only=True).train.shape == (0, 3)
    with pytest.raises(ValueError, match=r"train\.txt: empty"):
        load(folder)


def test_valid_and_test_may_be_missing_or_empty(folder):
    (folder / "valid.txt").unlink()
    write(folder, test="")
    d = load(folder)
    assert (len(d.train), len(d.facts)) == (2, 3)
    assert d.valid.shape == d.test.shape == (0, 3)
    assert not d.is_program


def test_one_file_of_triples_is_train(tmp_path):
    lines = "a\tr\tb\nb\tr\tc\na\tr\tb\n"
    (tmp_path / "graph.tsv").write_text(lines)
    (tmp_path / "graph.csv.gz").write_bytes(
        gzip.compress(lines.replace("\t", ",").encode())
    )
    d = load(tmp_path / "graph.tsv")
    assert (d.name, d.n_duplicates, len(d.valid), len(d.test)) == (
        "graph.tsv",
        1,
        0,
        0,
    )
    assert d.train.tolist() == [[1, 1, 2], [1, 2, 3]]
    assert load(tmp_path / "graph.csv.gz").fingerprint == d.fingerprint
    with pytest.raises(ValueError, match=r"nothing\.tsv: expected a file that"):
        load(tmp_path / "nothing.tsv")


@pytest.fixture
def chain(tmp_path):
    path = tmp_path / "chain.csv"
    rows = [f"{i},next,e{i},e{i + 1}\n" for i in range(100)]
    path.write_text("row,what,from,to\n" + "".join(rows) + rows[0])
    return path


def test_a_file_is_split_at_random(chain):
    cfg = DataConfig(
        columns="from,what,to", split_ratios="0.8,0.1,0.1", split_seed=1
    )
    d = load(chain, cfg=cfg)
    assert (len(d.train), len(d.valid), len(d.test)) == (80, 10, 10)
    assert d.n_duplicates == 1
    assert d.notes[-2:] == (
        "split at random by 0.8,0.1,0.1 with seed 1: 80 / 10 / 10 train / valid / test",
        "train: 1 lines repeat another and were dropped",
    )
    parts = [triples(d, part) for part in (d.train, d.valid, d.test)]
    assert len(set.union(*parts)) == 100
    assert load(chain, cfg=cfg).fingerprint == d.fingerprint
    other = DataConfig(columns="3,2,4", split_ratios="0.8,0.1,0.1")
    # Without names the header is one triple more.
    assert len(load(chain, cfg=other).facts) == 81

    known = load(chain, cfg=cfg, facts_only=True)
    assert triples(known, known.facts) == parts[0]
    assert not len(known.valid) and not len(known.test)


def test_the_triples_of_a_folder_are_split_if_it_holds_no_valid_and_test(
    folder,
):
    cfg = DataConfig(split_ratios="0.5,0,0.5")
    for facts_only in (False, True):
        with pytest.raises(ValueError, match="has valid or test triples alr"):
            load(folder, cfg=cfg, facts_only=facts_only)
    for name in ("valid", "test"):
        (folder / f"{name}.txt").unlink()
    d = load(folder, cfg=cfg)
    # facts.txt stays known, and holds one of the two triples of train.
    assert (len(d.train), len(d.valid), len(d.test)) == (1, 0, 1)
    assert len(d.facts) in (2, 3)


@pytest.mark.parametrize("name", ["clans:100:0", "program.pl"])
def test_only_files_of_triples_have_columns_and_are_split(name):
    for cfg in (DataConfig(columns="1,2,3"), DataConfig(split_ratios="1,0,0")):
        with pytest.raises(ValueError, match="expected a folder or a file of "):
            load(name, cfg=cfg)


def test_the_first_rule_file_of_a_folder_is_taken(folder):
    (folder / "rules.pl").write_text("s(X, Y) :- r(X, Y).")
    assert (
        format_rule(load(folder), load(folder).rules[0]) == "s(X, Y) :- r(X, Y)"
    )
    write(folder, rules="s(X,Y) :- r(Y,X)")
    assert (
        format_rule(load(folder), load(folder).rules[0]) == "s(X, Y) :- r(Y, X)"
    )


def test_an_embedded_and_a_generated_data_set_are_found_by_name():
    assert load("countries_s1").name == "countries_s1"
    for generator in GENERATORS:
        assert load(f"{generator}:120:3").name == f"{generator}:120:3"


@pytest.mark.parametrize(
    "name",
    [
        "clans",
        "clans:120",
        "clans:120:-1",
        "clans:1e3:0",
        "tribes:120:0",
        "countries_s4",
    ],
)
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(name):
    with pytest.raises(
        ValueError,
        match=r"^unknown data set .*countries_s3, family_tree:PEOPLE:SEED, clans:PEOPLE:SEED, pykeen:NAME$",
    ):
        load(name)


@pytest.mark.parametrize(
    ("name", "rules", "sizes"),
    # entities, relations, distinct train, valid, test, rules, entities of valid and test only
    [
        ("countries_S1", None, (271, 2, 1110, 24, 24, 1, 0)),
        ("countries_S2", None, (271, 2, 1062, 24, 24, 2, 0)),
        ("countries_S3", "rules_ntp_variant.txt", (271, 2, 978, 24, 24, 3, 0)),
        ("family", None, (3007, 12, 23483, 2038, 2835, 41, 15)),
        (
            "family",
            "rules_rnnlogic.tsv",
            (3007, 12, 23483, 2038, 2835, 2400, 15),
        ),
        ("family_kns", None, (2968, 12, 19845, 2799, 5626, 48, 0)),
        ("umls", None, (135, 46, 5216, 652, 661, 33, 0)),
        ("wn18rr", None, (40943, 11, 86835, 3034, 3134, 34, 384)),
        (
            "wn18rr",
            "rules_kns_amie_full.tsv",
            (40943, 11, 86835, 3034, 3134, 508, 384),
        ),
        (
            "wn18rr",
            "rules_rnnlogic.tsv",
            (40943, 11, 86835, 3034, 3134, 6092, 384),
        ),
        (
            "fb15k-237",
            "rules_kns.tsv",
            (14541, 238, 272115, 17535, 20466, 394, 36),
        ),
        (
            "fb15k-237",
            "rules_rnnlogic_top.tsv.gz",
            (14541, 237, 272115, 17535, 20466, 15000, 36),
        ),
    ],
)
def test_the_standard_sets_have_their_published_sizes(name, rules, sizes):
    if not (DATA / name).is_dir():
        pytest.skip(f"no {DATA / name}: set FUNCPPO_DATA")
    d = load(DATA / name, rules and DATA / name / rules)
    got = (
        d.n_constants,
        d.n_predicates,
        len(d.train),
        len(d.valid),
        len(d.test),
        len(d.rules),
        d.n_unseen_entities,
    )
    assert got == sizes
    assert d.facts.dtype == d.rules.dtype == np.int32 and d.facts.min() >= 1


def test_rules_that_were_mined_from_held_out_triples_too_are_told(tmp_path):
    """Only where the rule file says what it was mined from."""
    graph, rules = tmp_path / "graph.tsv", tmp_path / "rules.tsv"
    graph.write_text("".join(f"e{i}\tr\te{i * 7 % 20}\n" for i in range(20)))
    split = DataConfig(split_ratios="0.6,0.2,0.2")
    header = TSV_HEADER.replace(" ", "\t")
    cells = [
        "1",
        "1",
        "2",
        *[".5"] * 3,
        "1",
        ".5",
        "0",
        "0",
        "r(X,Y) :- r(Y,X)",
    ]
    table = f"{header}\n" + "\t".join(cells) + "\n"
    for cfg, is_told in ((DataConfig(), True), (split, False)):
        mined_from = load(graph, cfg=cfg)
        rules.write_text(with_counts_line(table, mined_from))
        notes = load(graph, rules, cfg=split).notes
        assert any("mined from all triples" in x for x in notes) == is_told
        assert not any("mined" in note for note in load(graph, rules).notes)
    rules.write_text(table)
    assert not any("mined" in x for x in load(graph, rules, cfg=split).notes)
