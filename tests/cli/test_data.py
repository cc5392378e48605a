"""`data`: the numbers of the JSON and of the tables, what the rules derive, names of all kinds, bad input."""

import json

import pytest

from tests.cli.runner import funcppo


@pytest.fixture
def folder(tmp_path):
    graph = tmp_path / "graph"
    graph.mkdir()
    texts = {
        "train": "a\tr\tb\nb\tr\tc\nc\tr\td\na\x1b[31m\t[/x]\tb\n",
        "valid": "a\tp\tc\n",
        "test": "b\tp\td\nd\tp\ta\na\tr\tb\n",
        "rules": "1\tp(X,Y) :- r(X,Z), r(Z,Y)\n1\tp(X,Y) :- p(Y,X)\n",
    }
    for name, text in texts.items():
        (graph / f"{name}.txt").write_text(text)
    return graph


def described(monkeypatch, capsys, *args):
    capsys.readouterr()
    assert funcppo(monkeypatch, "data", *args, "--json", "-") == 0
    return json.loads(capsys.readouterr().out)


def test_the_rules_reach_what_they_derive(folder, monkeypatch, capsys):
    found = described(monkeypatch, capsys, folder)
    assert (found["n_facts"], found["splits"]["test"]["n_known"]) == (4, 1)
    assert found["derivable"]["valid"] == {"p": 1}
    # No other fact proves r(a, b), which is a known fact.
    assert found["derivable"]["test"] == {"p": 1}
    relation = found["relations"][-1]
    assert (relation["name"], relation["functional_share"]) == ("p", None)
    bounded = described(monkeypatch, capsys, folder, "--set", "max_atoms=4")
    assert bounded["derivable"]["stop_reason"]
    assert bounded["derivable"]["test"] == {"p": 1}


def test_the_tables_escape_names(folder, monkeypatch, capsys):
    assert funcppo(monkeypatch, "data", folder) == 0
    text = capsys.readouterr().out
    assert "[/x]" in text and "\x1b" not in text
    assert "1 of 1 valid triples and 1 of 3 test triples" in text
    assert "note: test: 1 of 3 triples are known facts" in text


def test_without_rules_nothing_is_derived(monkeypatch, capsys, tmp_path):
    graph = tmp_path / "graph.tsv"
    graph.write_text("a\tr\tb\nb\ts\ta\n")
    assert described(monkeypatch, capsys, graph)["derivable"] is None
    # No share stands where a ceiling would.
    assert funcppo(monkeypatch, "data", graph) == 0
    text = capsys.readouterr().out
    assert "ceiling" not in text and "s 1.00" in text


def test_a_long_name_is_on_one_line_of_a_file(monkeypatch, capsys, tmp_path):
    relation = "http://example.org/" + "x" * 300
    graph = tmp_path / "graph.tsv"
    graph.write_text(f"a\t{relation}\tb\nb\tr\ta\n")
    assert funcppo(monkeypatch, "data", graph) == 0
    text = capsys.readouterr().out
    assert text.count(relation) == 2  # its row, and the inverse of r


def test_a_relation_of_control_characters_is_shown_escaped(
    monkeypatch, capsys, tmp_path
):
    graph = tmp_path / "graph.tsv"
    graph.write_text("a\tr\x1b[2J\tb\n")
    assert funcppo(monkeypatch, "data", graph) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and r"r\x1b[2J" in text


def test_bad_input_is_one_line(monkeypatch, capsys, tmp_path):
    assert funcppo(monkeypatch, "data", tmp_path / "none") == 2
    assert capsys.readouterr().err.count("\n") == 1
