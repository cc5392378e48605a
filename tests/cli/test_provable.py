"""`data --provable`: counts worked by hand or known; equal to a least model over sets; what is said of each bound."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from funcppo.kg.graph.loaders import load
from tests import oracles
from tests.cli.runner import data, funcppo, json_of
from tests.learning import DATA

has_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no data sets in {DATA}"
)
TRAIN = "a\te\tb\nb\te\tc\nc\te\td\nd\te\te\na\tp\tb\n"
TEST = "a\tp\tc\na\tp\te\nb\tp\tb\nc\tp\td\na\tp\tb\n"
RULES = "1\tp(X,Y) :- e(X,Y)\n1\tp(X,Y) :- p(X,Z), e(Z,Y)\n"


@pytest.fixture
def folder(tmp_path):
    for name, text in {
        "train": TRAIN,
        "valid": "a\tp\td\n",
        "test": TEST,
        "rules": RULES,
    }.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return str(tmp_path)


def provable(folder, *args, split="test"):
    return data(folder, "--provable", split, *args)


def table_rows(text):
    """The cells of the rows of the printed table."""
    rows = [line.split() for line in text.splitlines()]
    return [row for row in rows if row and row[0].isdecimal() and len(row) > 3]


def counted(capsys, *args, split="test"):
    status, result = json_of(capsys, partial(provable, split=split), *args)
    assert status == 0
    return result


def test_the_paths_of_a_chain_are_counted_by_length(folder, capsys):
    result = counted(capsys, folder)
    assert (result["n_queries"], result["n_known_facts"]) == (5, 1)
    assert result["n_derivable_by_height"] == {"1": 3, "2": 3, "3": 4}
    assert result["n_atoms_after_step"] == [5, 9, 12, 14]
    assert (result["complete"], result["fixpoint"], result["stop_reason"]) == (
        True,
        False,
        "",
    )
    assert counted(capsys, folder, split="valid")["n_derivable_by_height"] == {
        "1": 0,
        "2": 1,
        "3": 1,
    }


def test_the_table_says_the_same(folder, capsys):
    assert provable(folder) == 0
    out = capsys.readouterr().out
    assert table_rows(out) == [
        ["0", "5", "0", "0.0000"],
        ["1", "9", "3", "0.6000"],
        ["2", "12", "3", "0.6000"],
        ["3", "14", "4", "0.8000"],
    ]
    assert "5 facts, 2 rules" in out and "complete to this height" in out


@pytest.mark.parametrize("height", ["1", "2", "3", "fixpoint"])
@pytest.mark.parametrize("identity", [False, True])
def test_the_counts_are_those_of_a_least_model_over_sets(
    height, identity, capsys
):
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
    result = counted(
        capsys,
        "family_tree:12:3",
        "--height",
        height,
        *(["--object-identity"] if identity else []),
    )
    last = max(found.values())
    assert result["n_atoms_after_step"] == [
        sum(h <= step for h in found.values()) for step in range(last + 1)
    ]
    tests = [found.get(atom, 99) for atom in plain(dataset.test)]
    assert result["n_derivable_by_height"] == {
        str(h): sum(t <= h for t in tests) for h in range(1, last + 1)
    }
    assert len(tests) == result["n_queries"] > 0


def test_the_counts_end_at_the_fixpoint(folder, capsys):
    low = counted(capsys, folder, "--height", "fixpoint")
    high = counted(capsys, folder, "--height", "1000000")
    assert low["n_derivable_by_height"] == {"1": 3, "2": 3, "3": 4}
    assert low["n_atoms_after_step"] == [5, 9, 12, 14] and low["fixpoint"]
    assert (low["height"], high["height"]) == ("fixpoint", 1000000)
    for result in (low, high):
        for name in ("height", "total_seconds", "fixpoint_seconds"):
            del result[name]
    assert low == high

    assert provable(folder, "--height", "1000000") == 0
    out = capsys.readouterr().out
    assert len(table_rows(out)) == 4
    assert "the fixpoint is reached at height 3; " in out


def test_max_atoms_ends_the_count_after_a_step_for_the_split_only(
    folder, capsys
):
    result = counted(capsys, folder, "--set", "max_atoms=13")
    assert result["n_atoms_after_step"] == [5, 9, 12]
    assert result["n_derivable_by_height"] == {"1": 3, "2": 3, "3": 4}
    assert result["stop_reason"].startswith("stopped at 12 atoms: step 3 ")
    assert (result["complete"], result["stop_code"]) == (False, "max_atoms")
    assert provable(folder, "--set", "max_atoms=13") == 0
    out = capsys.readouterr().out
    assert table_rows(out)[-1] == ["3", "too", "many", "4", "0.8000"]
    assert "stopped at 12 atoms" in out


def test_seconds_end_the_count_after_a_step(folder, capsys):
    result = counted(capsys, folder, "--seconds", "1e-9")
    assert not result["complete"] and "more time" in result["stop_reason"]
    assert result["stop_code"] == "time_limit"
    assert result["n_atoms_after_step"] == [5]
    assert result["n_derivable_by_height"] == {}


def test_a_train_triple_counts_when_other_facts_derive_it(folder, capsys):
    result = counted(capsys, folder, split="train")
    assert (result["n_queries"], result["leave_one_out"]) == (5, True)
    assert result["n_derivable_by_height"] == {"1": 1}
    with pytest.raises(ValueError, match="expected 1 for --provable train"):
        provable(folder, "--height", "2", split="train")

    # A rule that repeats a fact does not derive it.
    path = Path(folder)
    (path / "train.txt").write_text("a\te\tb\nb\te\ta\nc\te\td\n")
    for rule, n in (("e(X,Y) :- e(X,Y)", 0), ("e(X,Y) :- e(Y,X)", 2)):
        (path / "rules.txt").write_text(f"1\t{rule}\n")
        result = counted(capsys, folder, split="train")
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
        (["--set", "max_atoms=0"], "max_atoms: expected 1 or more, got 0"),
        (["--rules", "nowhere.txt"], "nowhere.txt"),
        (["--index", "x"], "--provable, --index: expected one of them"),
    ],
)
def test_a_bad_option_is_one_line(folder, options, expected):
    with pytest.raises(ValueError, match=expected):
        provable(folder, *options)


def test_the_error_of_a_data_set_without_rules_comes_without_notes(
    folder, monkeypatch, capsys
):
    """Its test split repeats a known fact, which a note counts where the program goes on."""
    assert funcppo(monkeypatch, "data", folder, "--provable", "test") == 0
    assert "note: " in capsys.readouterr().err
    (Path(folder) / "rules.txt").unlink()
    assert funcppo(monkeypatch, "data", folder, "--provable", "test") == 2
    error = capsys.readouterr().err
    assert error.startswith("funcppo: ") and error.count("\n") == 1
    assert "expected rules (--rules FILE" in error


@has_data
@pytest.mark.parametrize(
    ("name", "height", "shares"),
    [
        ("family_kns", "fixpoint", [0.764, 0.780, 0.781]),
        ("umls", "fixpoint", [0.242, 0.269, 0.274]),
        ("wn18rr", "2", [0.366, 0.383]),
    ],
)
def test_the_ceilings_are_those_known(name, height, shares, capsys):
    result = counted(capsys, str(DATA / name), "--height", height)
    assert result["complete"]
    found = [
        round(count / result["n_queries"], 3)
        for count in result["n_derivable_by_height"].values()
    ]
    assert found[: len(shares)] == shares
    assert all(share == found[-1] for share in found[len(shares) :])
    assert result["fixpoint"] == (height == "fixpoint")
