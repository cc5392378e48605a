"""`data`: its numbers and tables, an index, what the rules prove; one file of triples in the programs that read it."""

import json
from functools import partial
from pathlib import Path

import pytest

from funcppo.kg.config import read_config
from funcppo.kg.graph import loaders
from funcppo.kg.graph.loaders import load
from funcppo.kg.graph.triples import DataConfig
from tests import oracles
from tests.cli.runner import SMALL, data, funcppo, json_of, write_graph


@pytest.fixture
def folder(tmp_path):
    return write_graph(
        tmp_path / "graph",
        train="a\tr\tb\nb\tr\tc\nc\tr\td\na\x1b[31m\t[/x]\tb\n",
        valid="a\tp\tc\n",
        test="b\tp\td\nd\tp\ta\na\tr\tb\n",
        rules="1\tp(X,Y) :- r(X,Z), r(Z,Y)\n1\tp(X,Y) :- p(Y,X)\n",
    )


def test_the_rules_reach_what_they_derive(folder, programs):
    found = programs.json("data", folder)
    assert (found["n_facts"], found["splits"]["test"]["n_known"]) == (4, 1)
    relation = found["relations"][-1]
    assert (relation["name"], relation["functional_share"]) == ("p", None)
    words = ("data", folder, "--height", "1", "--provable")
    assert programs.json(*words, "valid")["n_derivable_by_height"] == {"1": 1}
    # No other fact proves r(a, b), which is a known fact.
    for bound in ((), ("--set", "max_atoms=4")):
        counted = programs.json(*words, "test", *bound)
        assert bool(counted["stop_reason"]) == bool(bound)
        assert counted["n_derivable_by_height"] == {"1": 1}


def test_the_tables_escape_names(folder, programs):
    text = programs.printed("data", folder)
    assert "[/x]" in text and "\x1b" not in text
    assert "note: test: 1 of 3 triples are known facts" in text
    (folder / "graph.tsv").write_text("a\tr\tb\nb\ts\ta\n")
    # An inverse relation is named.
    assert "s 1.00" in programs.printed("data", folder / "graph.tsv")
    error = programs.refused("data", folder / "none")
    assert error.startswith("unknown data set")


# -- an index of a data set


@pytest.fixture
def graph(tmp_path):
    """A folder with test triples that are facts, and rules of all kinds: paths and constants."""
    folder = tmp_path / "graph"
    folder.mkdir()
    pairs = [(i, (7 * i + 3) % 11) for i in range(11)] + [(i, (i + 1) % 11) for i in range(8)]  # fmt: skip
    rows = [f"e{a}\tp\te{b}\n" for a, b in dict.fromkeys(pairs)]
    rows += [f"e{a}\tq\te{(3 * a) % 11}\n" for a in range(9)]
    (folder / "train.tsv").write_text("".join(rows))
    facts = "".join(rows[::2])
    (folder / "valid.tsv").write_text("e9\tp\te10\ne2\tp\te8\n")
    (folder / "test.tsv").write_text(f"e10\tp\te0\ne5\tq\te9\n{facts}")
    (folder / "rules.txt").write_text(
        "0.5\tp(X,Y) :- q(X,Z), p(Z,Y)\n"
        "0.5\tp(X,Y) :- p(Y,X)\n"
        "0.5\tq(X,Y) :- p(X,Z), p(Z,Y)\n"
        "0.5\tp(X,Y) :- p(X,e4), q(Y,X)\n"
        "0.5\tq(X,e9) :- p(X,Y)\n"
    )
    return folder


def test_programs_say_the_same_of_an_index_and_of_the_files(graph, programs):
    """To the byte, times aside: ranks, answers, counts, and rules that are mined."""
    indexed = graph.with_name("indexed")
    assert programs("data", graph, "--index", indexed) == 0
    counts = loaders.read(indexed).rule_counts
    assert counts is not None and (counts[:, 1] > 0).all()
    for words in (
        "evaluate TARGET --details FILE",
        "evaluate TARGET --details FILE --height 1 --set object_identity=True --set smoothing=5",
        "predict TARGET --queries QUERY --height 1 --score noisy-or --known",
        "data TARGET --provable test --height fixpoint",
        "data TARGET",
        "prove TARGET --all p(e10,X)",
        "mine TARGET --out FILE",
    ):
        said = []
        for target in (graph, indexed):
            file = target.with_name("file")
            query = target.with_name("query")
            query.write_text("p(e10, X)")
            names = {"TARGET": target, "FILE": file, "QUERY": query}
            command = [names.get(word, word) for word in words.split()]
            text = programs.printed(*command, "--json", "-")
            if "FILE" in words:
                said.append(file.read_bytes())
                file.unlink()
                file.with_name("file.settings.json").unlink(missing_ok=True)
            else:
                said.append(strip(json.loads(text)))
        assert said[0] == said[1], words


def strip(value):
    """A result without times and the name of the data set."""
    if isinstance(value, dict):
        return {
            key: strip(part)
            for key, part in value.items()
            if "seconds" not in key and key not in ("dataset", "target", "rate")
        }
    return [strip(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("is_indexed", [False, True])
def test_what_is_not_held_is_derived(graph, is_indexed, programs):
    if is_indexed:
        error = programs.refused("data", graph, "--index", graph)
        assert "expected another folder than that of" in error
        indexed = graph.with_name("no") / "folder"
        assert programs("data", graph, "--index", indexed) == 0
        graph = indexed
    run = graph.with_name("run")
    program = ["train", graph, "-v", "--out", run]
    settings = ["--set", "prover.max_height=1", "--steps", "1024"]
    for prior in ("embedding", "bellman_ford"):
        settings += ["--set", f"questions.{prior}=False"]
    assert programs(*program, *settings) == 0
    asked = ["predict", run, "p(e10, X)", "--known", "--explain"]
    assert "by rule" in programs.printed(*asked)


# -- what the rules prove


TRAIN = "a\te\tb\nb\te\tc\nc\te\td\nd\te\te\na\tp\tb\n"
TEST = "a\tp\tc\na\tp\te\nb\tp\tb\nc\tp\td\na\tp\tb\n"
RULES = "1\tp(X,Y) :- e(X,Y)\n1\tp(X,Y) :- p(X,Z), e(Z,Y)\n"


@pytest.fixture
def chain(tmp_path):
    texts = {"train": TRAIN, "test": TEST, "rules": RULES}
    return str(write_graph(tmp_path, valid="a\tp\td\n", **texts))


def provable(chain, *args, split="test"):
    return data(chain, "--provable", split, *args)


def table_rows(text):
    """The cells of the rows of the printed table."""
    rows = [line.split() for line in text.splitlines()]
    return [row for row in rows if row and row[0].isdecimal() and len(row) > 3]


def counted(capsys, *args, split="test"):
    status, result = json_of(capsys, partial(provable, split=split), *args)
    assert status == 0
    return result


def test_the_paths_of_a_chain_are_counted_by_length(chain, capsys):
    result = counted(capsys, chain)
    assert (result["n_queries"], result["n_known_facts"]) == (5, 1)
    assert result["n_derivable_by_height"] == {"1": 3, "2": 3, "3": 4}
    assert result["n_atoms_after_step"] == [5, 9, 12, 14]
    assert result["complete"] and not result["fixpoint"]
    assert result["stop_reason"] == ""
    of_valid = counted(capsys, chain, split="valid")
    assert of_valid["n_derivable_by_height"] == {"1": 0, "2": 1, "3": 1}


@pytest.mark.parametrize(
    ("height", "identity"), [("2", False), ("fixpoint", True)]
)
def test_counts_are_those_of_a_least_model_over_sets(height, identity, capsys):
    dataset = load("family_tree:12:3")
    plain = lambda table: tuple(
        tuple(t for t in row if t) for row in table.tolist()
    )
    rules = tuple(plain(rule[rule[:, 0] > 0]) for rule in dataset.rules)
    program = oracles.Program(
        dataset.n_constants, dataset.arities, plain(dataset.facts), rules
    )
    limit = None if height == "fixpoint" else int(height)
    found = oracles.least_model(program, limit, object_identity=identity)
    options = ["--height", height, *["--object-identity"] * identity]
    result = counted(capsys, "family_tree:12:3", *options)
    last = max(found.values())
    assert result["n_atoms_after_step"] == [
        sum(h <= step for h in found.values()) for step in range(last + 1)
    ]
    tests = [found.get(atom, 99) for atom in plain(dataset.test)]
    assert result["n_derivable_by_height"] == {
        str(h): sum(t <= h for t in tests) for h in range(1, last + 1)
    }
    assert len(tests) == result["n_queries"] > 0


def test_the_counts_end_at_the_fixpoint(chain, capsys):
    low = counted(capsys, chain, "--height", "fixpoint")
    high = counted(capsys, chain, "--height", "1000000")
    assert low["n_derivable_by_height"] == {"1": 3, "2": 3, "3": 4}
    assert low["n_atoms_after_step"] == [5, 9, 12, 14] and low["fixpoint"]
    assert (low["height"], high["height"]) == ("fixpoint", 1000000)
    for result in (low, high):
        for name in ("height", "total_seconds", "fixpoint_seconds"):
            del result[name]
    assert low == high

    assert provable(chain, "--height", "1000000") == 0
    out = capsys.readouterr().out
    assert len(table_rows(out)) == 4
    assert "the fixpoint is reached at height 3; " in out


def test_seconds_end_the_count_after_a_step(chain, capsys):
    result = counted(capsys, chain, "--seconds", "1e-9")
    assert not result["complete"] and "more time" in result["stop_reason"]
    assert result["stop_code"] == "time_limit"
    assert result["n_atoms_after_step"] == [5]
    assert result["n_derivable_by_height"] == {}


def test_a_train_triple_counts_when_other_facts_derive_it(chain, capsys):
    result = counted(capsys, chain, split="train")
    assert (result["n_queries"], result["leave_one_out"]) == (5, True)
    assert result["n_derivable_by_height"] == {"1": 1}
    with pytest.raises(ValueError, match="expected 1 for --provable train"):
        provable(chain, "--height", "2", split="train")

    # A rule that repeats a fact does not derive it.
    path = Path(chain)
    (path / "train.txt").write_text("a\te\tb\nb\te\ta\nc\te\td\n")
    for rule, n in (("e(X,Y) :- e(X,Y)", 0), ("e(X,Y) :- e(Y,X)", 2)):
        (path / "rules.txt").write_text(f"1\t{rule}\n")
        result = counted(capsys, chain, split="train")
        assert result["n_derivable_by_height"] == {"1": n}


def test_a_program_has_atoms_and_no_queries(tmp_path, capsys):
    path = tmp_path / "chain.pl"
    facts = "e(1,2). e(2,3)."
    path.write_text(facts + " p(X,Y) :- e(X,Y). p(X,Y) :- p(X,Z), p(Z,Y).")
    result = counted(capsys, str(path), "--height", "fixpoint")
    assert (result["split"], result["n_queries"]) == (None, 0)
    assert result["n_derivable_by_height"] == {}
    assert result["n_atoms_after_step"] == [2, 4, 5]
    path.write_text(facts)
    assert counted(capsys, str(path))["n_atoms_after_step"] == [2]
    assert provable(str(path)) == 0
    assert "derivable" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--height", "0"], "height: expected 1 or more or fixpoint, got 0"),
        (["--split-ratios", "1,1"], "^--split-ratios: expected shares of"),
        (["--set", "max_atoms=0"], "max_atoms: expected 1 or more, got 0"),
        (["--rules", "nowhere.txt"], "nowhere.txt"),
        (["--index", "x"], "--provable, --index, --set out: expected one of"),
    ],
)
def test_a_bad_option_is_one_line(chain, options, expected):
    with pytest.raises(ValueError, match=expected):
        provable(chain, *options)


# -- one file of triples


SPLIT = ("--columns", "s,p,o", "--split-ratios", "0.7,0.2,0.1")
CONFIG = DataConfig(columns="s,p,o", split_ratios="0.7,0.2,0.1")
SHORT = (*SMALL, "--set", "prover.max_height=1", "--steps", "64")


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A CSV file of a family; every relation but two follows from the others by a rule."""
    path = tmp_path_factory.mktemp("graph") / "family.csv"
    tree = load("family_tree:30:1")
    names = tree.entities
    lines = [
        f"{names[h - 1]},x,{tree.predicates[r - 1]},{names[t - 1]}\n"
        for r, h, t in [*tree.train, *tree.valid, *tree.test]
    ]
    path.write_text("s,note,p,o\n" + "".join(lines))
    return path


@pytest.fixture(scope="module")
def split_run(family, tmp_path_factory):
    """A run on the split file, with rules mined from its train part."""
    folder = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.parent))
        words = ("train", family, "--out", folder, *SPLIT, *SHORT)
        assert funcppo(patch, *words) == 0
    return folder


def test_a_run_keeps_how_triples_were_split(split_run, family, programs):
    assert read_config(split_run).data == CONFIG
    results = json.loads((split_run / "results.json").read_text())
    n_test = len(load(family, cfg=CONFIG).test)
    assert results["test"]["max-confidence"]["n_queries"] == 2 * n_test
    assert any(note.startswith("split at random") for note in results["notes"])

    assert programs.json("evaluate", split_run)["n_queries"] == 2 * n_test
    assert programs("train", family, "--out", split_run, "--resume") == 0
    again = json.loads((split_run / "results.json").read_text())
    assert again["test"].keys() == results["test"].keys()


def test_a_run_knows_nothing_held_out(split_run, family, programs, capsys):
    dataset = load(family, cfg=CONFIG)
    relation, head, tail = dataset.test[0]
    query = f"{dataset.predicates[relation - 1]}({dataset.entities[head - 1]}, {dataset.entities[tail - 1]})"
    programs("prove", split_run, query, "--json", "-")
    assert json.loads(capsys.readouterr().out)["is_fact"] is False
    whole = ("prove", family, query, "--columns", "s,p,o")
    assert programs.json(*whole)["is_fact"] is True


def test_it_is_said_that_none_is_split(family, programs, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ("train", family, "--out", tmp_path / "run", *SPLIT[:2], *SHORT)
    printed = programs.printed(*arguments)
    assert "no test split; the test evaluation is skipped" in printed
    assert "no valid split" in printed
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["test"], results["best_valid_metric"]) == ({}, None)

    assert "--split-ratios" in programs.refused("evaluate", tmp_path / "run")


def test_only_the_train_part_of_a_file_is_mined(family, programs, tmp_path):
    """As a folder whose train part is the same, with names in place of columns."""
    dataset = load(family, cfg=CONFIG)
    names = dataset.entities
    lines = (
        f"{names[h - 1]}\t{dataset.predicates[r - 1]}\t{names[t - 1]}\n"
        for r, h, t in dataset.train
    )
    train = write_graph(tmp_path / "train", train="".join(lines))
    texts = []
    for target, *options in ((family, *SPLIT), (train,), (family, *SPLIT[:2])):
        out = tmp_path / "rules.tsv"
        words = ("mine", target, "--out", out, "--min-support", "1", *options)
        assert programs(*words) == 0
        texts.append(out.read_text())
    assert texts[0] == texts[1] != texts[2]


def test_triples_are_written_as_another_program_takes_them(graph, programs):
    out = graph.with_name("written")
    out.mkdir()
    option = ["--set", f"out={out}/{{split}}.csv"]
    files = programs.printed("data", graph, *option).split()
    assert files[0] == f"{out}/train.csv"
    assert load(out).train.shape == load(graph).train.shape
    own = ["--set", f"out={graph}/{{split}}.txt"]
    error = programs.refused("data", graph, *own)
    assert "another name than that of a split" in error
    error = programs.refused("data", graph, "--json", "x.parquet")
    assert "--json x.parquet: expected another format" in error
