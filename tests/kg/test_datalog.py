"""The answers to queries of random programs are those of SWI-Prolog and clingo."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.graph.loaders import load
from funcppo.kg.graph.rules import read_query
from funcppo.kg.graph.text import Atom, Variable
from funcppo.kg.logic import kb, prove
from tests import prolog

# Names that need quotes, or mean something without them; integers, which programs spell in several ways.
PREDICATES = ["p", "q", "has part", "P", "it's", "_r", "\u00e9t\u00e9", "0.5"]
CONSTANTS = ["a", "X", "_", "b c", "'", "\\", '"', "a\nb", "\u65e5", "1.0"]
SPELLINGS = {"7": "007", "-7": "-07", "0": "-0", "1234567890123456789": ""}
NAMES = [*CONSTANTS, *SPELLINGS]
VARIABLES = [Variable(name) for name in "ABCDE"]


def random_clauses(random: Random) -> list[tuple[Atom, ...]]:
    """Facts and rules of predicates of 0 to 4 arguments, some empty, some recursive.

    Heads have constants, variables repeat, clauses stand twice, and some rules say no more than others.
    """
    arities = [0, 1, 1, 2, 2, 2, 3, 4]
    predicates = random.sample(PREDICATES, random.randint(1, 4))
    predicates = [(name, random.choice(arities)) for name in predicates]
    predicates.append((predicates[0][0], random.choice(arities)))
    constants = random.sample(NAMES, random.randint(1, 4))

    def atom(terms: list) -> Atom:
        name, arity = random.choice(predicates)
        return Atom(name, tuple(random.choice(terms) for _ in range(arity)))

    clauses = [(atom(constants),) for _ in range(random.randint(3, 15))]
    for _ in range(random.randint(1, 6)):
        terms = VARIABLES[: random.randint(1, 5)] * 3 + constants[:1]
        body = [atom(terms) for _ in range(random.choice([1, 1, 2, 2, 3]))]
        bound = [t for a in body for t in a.args] + [random.choice(constants)]
        head = atom(bound)
        clauses.append((head, *body))
        if random.random() < 0.2:  # a rule that the last one subsumes
            clauses.append((head, *body, atom(bound)))
    clauses += random.choices(clauses, k=random.randint(0, 2))
    return random.sample(clauses, len(clauses))


def format_atom(atom: Atom, once: set, random: Random) -> str:
    """An atom as a programmer may write it; a variable that occurs once may be `_`."""

    def term(x: object) -> str:
        if isinstance(x, Variable):
            return "_" if x in once and random.random() < 0.5 else x.name
        if x in SPELLINGS:
            return random.choice([str(x), SPELLINGS[x] or str(x)])
        return name(str(x))

    def name(x: str) -> str:
        if x.isascii() and x.isidentifier() and x.islower() and x[0] != "_":
            return random.choice([x, f"'{x}'"])
        x = x.replace("\\", "\\\\").replace("\n", "\\n")
        return "'" + x.replace("'", random.choice(["''", "\\'"])) + "'"

    arguments = ", ".join(map(term, atom.args))
    return name(atom.predicate) + f"({arguments})" * bool(atom.args)


def format_program(clauses: list[tuple[Atom, ...]], random: Random) -> str:
    lines = []
    for atoms in clauses:
        n_uses = Counter(t for a in atoms for t in a.args)
        once = {t for t, n in n_uses.items() if n == 1}
        head, *body = [format_atom(a, once, random) for a in atoms]
        body += ["true"] * (bool(body) and random.random() < 0.1)
        lines.append(head + " :- " * bool(body) + ", ".join(body) + ".\n")
    return "".join(lines)


def assert_answers(path, clauses, random, expected, object_identity=False):
    """Assert that `prove` gives the expected ground atoms, for open queries and for others, each in two spellings."""
    dataset = load(path)
    rules = prove.Clauses(*kb.from_dataset(dataset))
    heads = sorted({(c[0].predicate, len(c[0].args)) for c in clauses})
    for predicate, arity in heads:
        mixed = [*VARIABLES[:2], *random.sample(NAMES, 2)]
        for terms in (VARIABLES[:arity], random.choices(mixed, k=arity)):
            atom = Atom(predicate, tuple(terms))
            query = read_query(dataset, format_atom(atom, set(), random))
            if query.dataset is not dataset:  # it has a constant of its own
                dataset = query.dataset
                rules = prove.Clauses(*kb.from_dataset(dataset))
            limits = prove.Limits(object_identity=object_identity)
            ids = tuple(query.atom.tolist())
            found = prove.solve(rules, ids, limits)
            assert found.complete
            rows = set(found.heights)
            if not query.variables:  # it is no fact while it is proved
                rows |= {ids} & set(map(tuple, dataset.facts.tolist()))
            names = [
                tuple(dataset.entities[i - 1] for i in row[1 : 1 + arity])
                for row in rows
            ]
            assert sorted(names) == sorted(
                args
                for name, args in expected
                if (name, len(args)) == (predicate, arity)
                and matches(terms, args)
            )


def matches(terms, args):
    binding = {}
    for term, name in zip(terms, args):
        known = binding.setdefault(term, name)
        if name != (known if isinstance(term, Variable) else term):
            return False
    return True


# -- clingo


def clingo_answers(clauses, object_identity=False):
    """The stable model of a program, which has one, as pairs of a predicate and its arguments."""
    clingo = pytest.importorskip("clingo")
    names: list[str] = []

    def number(name: str) -> int:
        if name not in names:
            names.append(name)
        return names.index(name)

    def term(x) -> str:
        return x.name if isinstance(x, Variable) else f"c{number(x)}"

    def atom(a: Atom) -> str:
        return f"p{number(a.predicate)}({','.join(map(term, a.args))})"

    control = clingo.Control(message_limit=0)
    for head, *body in clauses:
        goals = list(map(atom, body))
        if object_identity:
            terms = {t for a in (head, *body) for t in a.args}
            for x, y in itertools.combinations(terms, 2):
                goals.append(f"{term(x)} != {term(y)}")
        control.add(f"{atom(head)} :- {', '.join(goals)}.")
    control.ground()
    (symbols,) = [
        model.symbols(atoms=True) for model in control.solve(yield_=True)
    ]
    return {
        (
            names[int(x.name[1:])],
            tuple(names[int(y.name[1:])] for y in x.arguments),
        )
        for x in symbols
    }


@given(st.integers(0, 2**32), st.booleans())
def test_answers_are_those_of_clingo(tmp_path_factory, seed, object_identity):
    random = Random(seed)
    clauses = random_clauses(random)
    path = tmp_path_factory.mktemp("program") / "program.pl"
    path.write_text(format_program(clauses, random))
    expected = clingo_answers(clauses, object_identity)
    assert_answers(path, clauses, random, expected, object_identity)


# -- SWI-Prolog


@pytest.mark.skipif(not prolog.AVAILABLE, reason="swipl is not installed")
def test_answers_are_those_of_prolog(tmp_path):
    """Of all programs at once: a start of Prolog takes longer than its answers."""
    random = Random(0)
    n_programs = 8 * hypothesis.settings().max_examples
    programs = [random_clauses(random) for _ in range(n_programs)]
    texts = [format_program(clauses, random) for clauses in programs]
    predicates = [signatures(clauses) for clauses in programs]
    answers = prolog.all_answers(texts, predicates)
    assert sum(map(len, answers)) > 5 * n_programs
    for clauses, text, expected in zip(programs, texts, answers):
        path = tmp_path / "program.pl"
        path.write_text(text)
        assert_answers(path, clauses, random, expected)


def signatures(clauses):
    return {(a.predicate, len(a.args)) for atoms in clauses for a in atoms}
