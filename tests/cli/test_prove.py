"""`prove`: a proof worked by hand; the answers of Prolog; exit statuses, and one line for bad input."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest

from funcppo.kg.config import ProverTaskConfig, RunConfig
from funcppo.kg.graph.loaders import load
from funcppo.kg.logic import proof as proof_
from tests import prolog
from tests.cli.runner import contains, json_of, prove
from tests.kg.logic.proof_cases import read_proof
from tests.kg.run.runs import new_run, store

WORLD = """
path(X, Y) :- path(X, Z), edge(Z, Y).
path(X, Y) :- edge(X, Y).
edge(a, b). edge(b, c). edge(c, a). edge(c, 'D').
path(a, 'D'). path('D', 'D').
wet :- rain. rain. dry :- sun.
far(X, Y) :- path(Y, X), edge(X, Z), edge(Z, X).
"""


@pytest.fixture
def world(tmp_path):
    path = tmp_path / "world.pl"
    path.write_text(WORLD)
    return str(path)


@pytest.fixture
def said(capsys):
    """The lines that `prove` prints, which ends in a status."""

    def lines(*words, status=0):
        capsys.readouterr()
        assert prove(*words) == status
        return capsys.readouterr().out.splitlines()

    return lines


# worked by hand


def test_france_is_in_europe_because_its_part_of_europe_is(said):
    assert said("countries_s3", "locatedIn(france, europe)") == [
        "proved: locatedIn(france, europe): at height 1",
        "",
        "locatedIn(france, europe)      by rule 0: locatedIn(X, Y) :- locatedIn(X, Z), locatedIn(Z, Y)",
        "├─ locatedIn(france, western_europe)      fact",
        "└─ locatedIn(western_europe, europe)      fact",
    ]


def test_a_refutation_names_the_goals_that_nothing_satisfies(world, said):
    assert said(world, "far(a, b)", status=1) == [
        "refuted: far(a, b): no proof exists",
        "rule 4: far(X, Y) :- path(Y, X), edge(X, Z), edge(Z, X)",
        "    nothing derived satisfies edge(a, Z), edge(Z, a)",
    ]
    assert "    nothing derived satisfies sun" in said(world, "dry", status=1)
    *_, why = said(world, "edge(a, a)", status=1)
    assert "no rule's head matches it" in why


def test_a_known_fact_is_stated_and_its_derivation_is_shown(world, said):
    first, *proof = said(world, "path(a, 'D')")
    why = "stated as a fact; also derived from other facts, at height 3"
    assert first == f"proved: path(a, 'D'): {why}"
    assert "\n├─ path(a, c)      by rule 0" in "\n".join(proof)
    (line,) = said(world, "path('D', 'D')")
    why = "stated as a fact; from other facts, no proof exists"
    assert line.startswith(f"proved: path('D', 'D'): {why}")


def refuted_apart(atom):
    return [
        f"refuted: {atom}: no proof exists under object identity",
        "it is not stated, and no rule's head matches it",
    ]


def test_different_variables_may_be_different_constants(world, said, capsys):
    """a -> b -> c -> a: only a rule whose X and Y are both a, or whose Z is, leads back to a."""
    ask = partial(said, world, "--object-identity")
    assert ask("path(a, a)", status=1) == refuted_apart("path(a, a)")
    assert ask("path(a, c)")
    words = (world, "path(a, X)", "--all", "--object-identity")
    status, found = json_of(capsys, prove, *words)
    assert (status, found["object_identity"]) == (0, True)
    names = {row["bindings"]["X"] for row in found["answers"]}
    assert names == {"D", "b", "c"}
    first, *_ = ask("path(a, X)")
    assert first.startswith("3 answers to path(a, X) under object identity")


def test_a_variable_may_be_no_constant_of_its_rule(tmp_path, said, capsys):
    """AnyBURL materialises p(e, c) alone; PyClause counts so too."""
    program = tmp_path / "program.pl"
    program.write_text("p(X,c) :- b(X,d). b(c,d). b(e,d).")
    options = (str(program), "p(X,Y)", "--all")
    answers = []
    for more in ((), ("--object-identity",)):
        _, found = json_of(capsys, prove, *options, *more)
        answers.append({row["atom"] for row in found["answers"]})
    assert answers == [{"p(c, c)", "p(e, c)"}, {"p(e, c)"}]
    apart = said(str(program), "p(c,c)", "--object-identity", status=1)
    assert apart == refuted_apart("p(c, c)")


def test_an_open_query_shows_the_nearest_answers_first(world, said):
    assert said(world, "path(b, To)") == [
        "4 answers to path(b, To)",
        "  path(b, c)      height 1",
        "  path(b, a)      height 2",
        "  path(b, 'D')      height 2",
        "  path(b, b)      height 3",
    ]


def test_a_terminal_gets_no_control_character_of_a_query(tmp_path, said):
    graph = tmp_path / "graph.tsv"
    graph.write_text("a\x1b[31m\tnear\tb\x07\n")
    first, second = said(str(graph), "near('a\x1b[31m', ?x)")
    assert first == "1 answer to near('a\\x1b[31m', ?x)"
    assert "\x1b" not in second and "\x07" not in second


# the answers of Prolog

# How recursion, constants and variables are read, tests of `logic` compare with random programs.
TRICKY = {
    "propositions": """
        rain. who(ann).
        wet :- rain.
        cold :- wet, wind.
        wind :- cold.
        go(X) :- wet, who(X).
        stay :- dry.""",
    "quoted names": """
        'has Part'('New York', 'it''s'). 'has Part'('it''s', x).
        'P'(X) :- 'has Part'('New York', Y), 'has Part'(Y, X).
        'P'('X') :- 'P'(x).""",
    "true and quoted names": """
        p(a) :- 'true'.
        q(X) :- true, 'p'(X), true.
        'r s' :- q('a').""",
    "one name with several arities": """
        p(a). p(b). p(a, b). p.
        q(X) :- p(X), p(X, Y), p(Y), p.
        p(X, Y, Y) :- p(Y, X).""",
    "names of the library that the program defines": """
        succ(a, b). succ(b, c). not(b). between(a, b, c).
        plus(X, Y, Z) :- between(X, Y, Z), succ(X, Y), not(Y).
        member(X, Y) :- succ(X, Z), succ(Z, Y).
        table(X) :- member(a, X).""",
    "directives": """
        :- dynamic p/1, q/1.
        :- discontiguous(e/2).
        e(a, b).
        p(X) :- e(X, _).
        e(b, c).""",
    "combining marks": """
        कि(a). cafe\u0301(a, b).
        x(X) :- कि(X), cafe\u0301(X, _).""",
}


@pytest.mark.skipif(not prolog.AVAILABLE, reason="no swipl on this machine")
@pytest.mark.parametrize("name", TRICKY)
def test_all_answers_are_those_of_prolog(name, tmp_path, capsys):
    path = tmp_path / "program.pl"
    path.write_text(TRICKY[name])
    dataset = load(path)
    names = list(zip(dataset.predicates, dataset.arities))
    heads = {int(row[0]) for row in [*dataset.facts, *dataset.rules[:, 0]]}
    (answers_of_prolog,) = prolog.all_answers([TRICKY[name]], [names])
    for i, (predicate, arity) in enumerate(names, 1):
        if i not in heads:
            continue  # no clause: bad input
        arguments = f"({', '.join('ABC'[:arity])})" * bool(arity)
        query = f"'{predicate}'{arguments}"
        status, found = json_of(capsys, prove, str(path), query, "--all")
        is_asked = lambda x, of=(predicate, arity): (x[0], len(x[1])) == of
        expected = {args for _, args in filter(is_asked, answers_of_prolog)}
        answers = [tuple(answer["args"]) for answer in found["answers"]]
        assert sorted(answers) == sorted(expected)
        assert status == (0 if expected else 1) and found["complete"]
        assert found["n_answers"] == len(expected)
        for answer in found["answers"]:
            assert answer["bindings"] == dict(zip("ABC", answer["args"]))


def test_nothing_holds_of_a_constant_that_is_nowhere(world, said, capsys):
    """As in Prolog, where `path(a, nobody)` is false."""
    assert prove(world, "path(a, nobody)") == 1
    seen = capsys.readouterr()
    assert "note: no fact and no rule has 'nobody'" in seen.err
    first, *_, last = seen.out.splitlines()
    assert first == "refuted: path(a, nobody): no proof exists"
    assert last == "    nothing derived satisfies edge(a, nobody)"
    none = said(world, "path(nobody, X)", status=1)
    assert none == ["0 answers to path(nobody, X)"]


def test_a_name_of_the_data_is_that_entity(tmp_path, capsys):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text("Zoë\tlives in\tChina\n")
    target = str(tmp_path)
    assert prove(target, "'lives in'(Zoë, China)") == 0
    assert capsys.readouterr().out.startswith("proved: 'lives in'('Zoë', ")
    assert prove(target, "'lives in'(China, Zoë)") == 1
    _, found = json_of(capsys, prove, target, "'lives in'(?who, China)")
    assert [row["bindings"] for row in found["answers"]] == [{"who": "Zoë"}]
    with pytest.raises(ValueError, match=r"unknown entity 'Zoe': .*'Zoë'"):
        prove(target, "'lives in'(Zoe, China)")


# exit statuses, and what is printed for machines


@pytest.mark.parametrize(
    ("query", "options", "status"),
    [
        ("path(a, a)", [], 0),
        ("path('D', a)", [], 1),
        ("path(a, a)", ["--height", "2"], 1),
        ("path(a, a)", ["--height", "3"], 0),
        ("path(b, a)", ["--set", "max_atoms=3"], 3),
        ("path(b, a)", ["--seconds", "1e-9"], 3),
        ("path(X, X)", [], 0),
        ("far(X, Y)", [], 1),
        ("far(X, Y)", ["--set", "max_rows=1"], 3),
        ("path(X, Y)", ["--set", "max_atoms=7"], 0),
        ("path(X, Y)", ["--set", "max_atoms=7", "--all"], 3),
        ("path(b, a)", ["--set", "max_rows=1"], 3),
        ("edge(a, b)", ["--set", "max_rows=1"], 0),
    ],
)
def test_the_exit_status_is_the_verdict(world, query, options, status, capsys):
    assert prove(world, query, *options) == status
    verdicts = ("proved:", "refuted:", "unknown:", "at", *"0123456789")
    assert capsys.readouterr().out.split()[0] in verdicts
    again, result = json_of(capsys, prove, world, query, *options)
    verdict = {0: "proved", 1: "refuted", 3: "unknown"}[status]
    assert (again, result["verdict"]) == (status, verdict)
    assert result["complete"] == (result["stop_reason"] == "")


@pytest.mark.parametrize(
    "limit", ["--set max_atoms=3", "--set max_rows=1", "--seconds 1e-9"]
)
@pytest.mark.parametrize("query", ["path(b, a)", "path(X, Y)"])
def test_a_limit_that_was_reached_is_named(world, limit, query, capsys):
    prove(world, query, *limit.split())
    where = "unknown beyond (--seconds, --set max_atoms=N and"
    assert contains(capsys.readouterr().out, f"stopped at ...{where}")


def test_the_proof_in_the_json_holds_by_the_checker(world, capsys):
    _, result = json_of(capsys, prove, world, "path(a, a)")
    dataset = load(world)
    found = read_proof(json.dumps(result["proof"]))
    facts = [tuple(fact) for fact in dataset.facts.tolist()]
    limits = {"max_height": result["height"], "leave_one_out": True}
    limits["n_constants"] = dataset.n_constants
    rules = dataset.rules.tolist()
    for first in (0, 1):
        known = set(facts[first:])
        errors = proof_.check_proof(found, known, rules, **limits)
        assert (errors == []) == (first == 0)
    goal = result["proof"]["nodes"][0]["goal_text"]
    assert goal == result["query"] == "path(a, a)"
    ids = {name: str(i) for i, name in enumerate(dataset.entities, 1)}
    assert result["proof"]["constants"] == {ids[n]: n for n in ("a", "b", "c")}
    assert result["proof"]["predicates"].keys() == {"1", "2"}
    assert set(result["proof"]["variables"].values()) == {"X", "Y", "Z"}


def test_the_most_probable_proofs_are_shown_and_the_last_one_is_said(capsys):
    """Of a data set by the confidences of its rules; all proofs of a query are those that it has."""
    query = "locatedIn(france, europe)"
    words = ("countries_s3", query, "--height", "1", "--proofs", "99")
    _, result = json_of(capsys, prove, *words)
    found = [row["probability"] for row in result["proofs"]]
    roots = [row["proof"]["nodes"][0] for row in result["proofs"]]
    assert found == sorted(found, reverse=True) and len({*found}) > 1
    assert [root["probability"] for root in roots] == found
    assert {root["goal_text"] for root in roots} == {query}
    texts = {json.dumps(row) for row in result["proofs"]}
    assert len(texts) == len(found) and result["proofs_stop_reason"] == ""

    assert prove(*words) == 0
    text = capsys.readouterr().out
    assert f"proof {len(found)}, probability {found[-1]:.4g}:" in text
    assert text.endswith("\n\nthere are no other proofs\n")


def test_the_formats_are_text_json_and_dot(world, capsys):
    query = "locatedIn(france, europe)"
    for options, n in ((["--dot"], 1), (["--dot", "--proofs", "2"], 2)):
        assert prove("countries_s3", query, *options) == 0
        assert capsys.readouterr().out.count("digraph proof {\n") == n
    assert prove(world, "path(a, a)", "--json", "-") == 0
    assert capsys.readouterr().out.startswith("{\n")


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("\\+ path(a, b)", "got negation"),
        ("?- path(a, b)", "got a query mark"),
        ("sun", "expected a predicate of some fact or of a rule's head"),
        ("path(" * 100_000, "compound term"),
    ],
)
def test_a_bad_query_is_one_line(world, query, expected):
    with pytest.raises(ValueError, match="query") as error:
        prove(world, query)
    line = str(error.value)
    assert expected in line and "\n" not in line and len(line) < 300


def test_a_run_shows_the_most_probable_proof_of_its_policy(tmp_path, capsys):
    choices = {"learner": "proofs", "score": "best-proof"}
    prover = ProverTaskConfig(embed_dim=4, hidden_dim=4)
    config = RunConfig(dataset="countries_s1", prover=prover, **choices)
    store(new_run(config), tmp_path)
    query, target = "locatedIn(france, europe)", str(tmp_path)
    status, result = json_of(capsys, prove, target, query)
    assert (status, result["proof_by"]) == (0, "policy")
    assert 0 < result["proof"]["nodes"][0]["probability"] < 1
    _, plain = json_of(capsys, prove, "countries_s1", query)
    assert plain["proof_by"] == "T_P"
    assert prove(target, "locatedIn(france, asia)") == 1
    with pytest.raises(ValueError, match="is a trained run"):
        prove(target, query, "--rules", "rules.txt")


def test_a_guide_costs_time_never_the_verdict(tmp_path, capsys):
    prover = ProverTaskConfig(max_height=2, embed_dim=4, hidden_dim=4)
    choices = {"learner": "guide", "prover": prover}
    store(new_run(RunConfig(dataset="countries_s1", **choices)), tmp_path)
    guided = ("--guide", str(tmp_path))
    for region, status in (("europe", 0), ("asia", 1)):
        atom = f"locatedIn(france, {region})"
        words = ("countries_s3", atom, "--height", "2")
        plain = json_of(capsys, prove, *words)
        found, result = json_of(capsys, prove, *words, *guided)
        assert (found, plain[0]) == (status, status)
        assert result["guide_found"] == (status == 0)
        assert result["guide_steps"] > 0
        assert result["verdict"] == plain[1]["verdict"]
    for query, options, expected in (
        ("locatedIn(X, asia)", guided, "expected a query without variables"),
        ("locatedIn(france, asia)", ("--guide", "none"), "expected a folder"),
        ("locatedIn(france, asia)", (*guided, "--proofs", "2"), "no --proofs"),
    ):
        with pytest.raises(ValueError, match=expected):
            prove("countries_s3", query, *options)


def test_a_command_line_is_utf_8_in_any_locale(tmp_path):
    path = tmp_path / "g.tsv"
    path.write_text("\u00f1a\tr\tb\n", encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-m", "funcppo", "prove", path, "r(\u00f1a,X)"]
    done = subprocess.run(words, env=os.environ | locale, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "r(\u00f1a, b)" in done.stdout.decode()
