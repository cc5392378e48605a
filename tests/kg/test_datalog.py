"""The answers to queries of random programs are those of SWI-Prolog and clingo."""

import itertools
from collections import Counter
from random import Random

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.graph.loaders import load
from funcppo.kg.graph.rules import comparison_tests, read_query
from funcppo.kg.graph.text import COMPARED, TESTS, Atom, Variable
from funcppo.kg.logic import kb, proof, prove
from tests import prolog

# Names that need quotes, or mean something without them; integers, which programs spell in several ways.
PREDICATES = ["p", "q", "has part", "P", "it's", "_r", "\u00e9t\u00e9", "0.5"]
CONSTANTS = ["a", "X", "_", "b c", "'", "\\", '"', "a\nb", "\u65e5", "1.0"]
SPELLINGS = {"7": "007", "-7": "-07", "0": "-0", "1234567890123456789": ""}
NAMES = [*CONSTANTS, *SPELLINGS]
VARIABLES = [Variable(name) for name in "ABCDE"]


NUMBERS = {
    "0.5": "00.50",
    "-2.25": "-2.2500",
    "7": "007",
    "-7": "-07",
    "70": "",
}
NEGATIONS = ["\\+ {}", "not {}", "! {}", "~{}"]
SPELLED = {"!=": ["\\=", "!=", "\\=="], "=": ["=", "=="], "<=": ["=<", "<="]}
OPEN = Variable("_")


def random_clauses(random, has_conditions=False):
    """Facts and rules of predicates of 0 to 4 arguments, some empty, some recursive.

    Heads have constants, variables repeat, clauses stand twice, and some rules say no more than others. Conditions are
    comparisons, and negated atoms of predicates before the head's, in which a place may be open.
    """
    arities = [0, 1, 1, 2, 2, 2, 3, 4]
    names = random.sample(PREDICATES, random.randint(1, 4) + has_conditions)
    predicates = [(x, random.choice(arities)) for x in (*names, names[0])]
    predicates = [*dict.fromkeys(predicates)]
    last = len(predicates) - 1
    numbers = [*random.sample([*NUMBERS], 3), *random.sample("abc", 2)]
    constants = numbers if has_conditions else NAMES
    constants = random.sample(constants, random.randint(1, 4))

    def atom(last, terms, sign=""):
        name, arity = predicates[random.randint(0, last)]
        args = tuple(random.choice(terms) for _ in range(arity))
        return Atom(name, args, sign)

    clauses = [(atom(last, constants),) for _ in range(random.randint(3, 15))]
    for _ in range(random.randint(1, 8)):
        place = random.randint(0, last)
        known = place if has_conditions else last
        terms = VARIABLES[: random.randint(1, 5)] * 3 + constants[:1]
        n_body = random.choice([0] * has_conditions + [1, 1, 2, 2, 3])
        body = [atom(known, terms) for _ in range(n_body)]
        bound = [t for a in body for t in a.args] + [random.choice(constants)]
        conditions = []
        if has_conditions and place:
            for _ in range(random.choice([0, 1, 1, 2])):
                terms = [*dict.fromkeys(bound), OPEN]
                conditions.append(atom(place - 1, terms, "not"))
        for _ in range(random.choice([0, 0, 1, 2]) * has_conditions):
            operator = random.choice([*TESTS])
            numbers = [t for t in bound if t not in [*"abc"]] or ["7"]
            of = bound if operator in ("=", "!=") else numbers
            args = random.choice(of), random.choice(of)
            conditions.append(Atom(operator, args, COMPARED))
        for condition in conditions:
            body.insert(random.randint(0, len(body)), condition)
        name, arity = predicates[place]
        head = Atom(name, tuple(random.choice(bound) for _ in range(arity)))
        clauses.append((head, *body))
        if random.random() < 0.2:  # a rule that the last one subsumes
            clauses.append((head, *body, atom(known, bound)))
    clauses += random.choices(clauses, k=random.randint(0, 2))
    return random.sample(clauses, len(clauses))


def format_atom(atom, once, random, n_spellings=9):
    """An atom as a programmer may write it; a variable that occurs once may be `_`."""
    spellings = SPELLINGS | NUMBERS

    def term(x):
        if isinstance(x, Variable):
            return "_" if x in once and random.random() < 0.5 else x.name
        if x in spellings:
            return random.choice([str(x), spellings[x] or str(x)])
        return name(str(x))

    def name(x):
        if x.isascii() and x.isidentifier() and x.islower() and x[0] != "_":
            return random.choice([x, f"'{x}'"])
        x = x.replace("\\", "\\\\").replace("\n", "\\n")
        return "'" + x.replace("'", random.choice(["''", "\\'"])) + "'"

    if atom.sign == COMPARED:
        spelled = SPELLED.get(atom.predicate, [atom.predicate])[:n_spellings]
        return f" {random.choice(spelled)} ".join(map(term, atom.args))
    arguments = ", ".join(map(term, atom.args))
    text = name(atom.predicate) + f"({arguments})" * bool(atom.args)
    negation = random.choice(NEGATIONS[:n_spellings])
    return negation.format(text) if atom.sign else text


def format_program(clauses, random, n_spellings=9):
    lines = []
    for atoms in clauses:
        n_uses = Counter(t for a in atoms for t in a.args)
        n_uses += Counter(t for a in atoms if a.sign for t in a.args)
        once = {t for t, n in n_uses.items() if n == 1}
        head, *body = [format_atom(a, once, random, n_spellings) for a in atoms]
        body += ["true"] * (bool(body) and random.random() < 0.1)
        lines.append(head + " :- " * bool(body) + ", ".join(body) + ".\n")
    return "".join(lines)


def format_prolog(clauses, random):
    """The program for Prolog, which must ask whether what it compares is a number, and binds from left to right."""
    guarded = []
    for head, *body in clauses:
        atoms = []
        for a in sorted(body, key=lambda a: a.sign != ""):
            if a.sign == COMPARED and a.predicate not in ("=", "!="):
                atoms += [Atom("number", (t,)) for t in a.args]
            atoms.append(a)
        guarded.append((head, *atoms))
    return format_program(guarded, random, n_spellings=1)


def read_clauses(dataset):
    base = kb.from_dataset(dataset)
    return prove.Clauses(*base, comparisons=comparison_tests(dataset))


def assert_answers(path, clauses, random, expected, object_identity=False):
    """Assert that `prove` gives the expected ground atoms, for open queries and for others, each in two spellings."""
    dataset = load(path)
    rules = read_clauses(dataset)
    heads = sorted({(c[0].predicate, len(c[0].args)) for c in clauses})
    for predicate, arity in heads:
        mixed = [*VARIABLES[:2], *random.sample(NAMES, 2)]
        for terms in (VARIABLES[:arity], random.choices(mixed, k=arity)):
            atom = Atom(predicate, tuple(terms))
            query = read_query(dataset, format_atom(atom, set(), random))
            if query.dataset is not dataset:  # it has a constant of its own
                dataset = query.dataset
                rules = read_clauses(dataset)
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
    """The stable model of a program, which has one, as pairs of a predicate and its arguments.

    Numbers are integers for clingo, four times their value.
    """
    clingo = pytest.importorskip("clingo")
    names: list[str] = []

    def number(name):
        if name not in names:
            names.append(name)
        return names.index(name)

    def term(x):
        if isinstance(x, Variable):
            return x.name
        return str(round(4 * float(x))) if x in NUMBERS else f"c{number(x)}"

    def atom(a):
        args = list(map(term, a.args))
        if a.sign == COMPARED:
            is_of_numbers = a.predicate not in ("=", "!=")
            operator = {"=:=": "=", "=\\=": "!="}.get(a.predicate, a.predicate)
            tests = [f"number({x})" for x in args] * is_of_numbers
            return ", ".join([*tests, operator.join(args)])
        return f"{a.sign} p{number(a.predicate)}({','.join(args)})"

    control = clingo.Control(message_limit=0)
    control.add("".join(f"number({term(x)}). " for x in NUMBERS))
    for head, *body in clauses:
        goals = list(map(atom, body))
        if object_identity:
            atoms = [a for a in (head, *body) if a.sign != COMPARED]
            terms = {t for a in atoms for t in a.args} - {OPEN}
            for x, y in itertools.combinations(terms, 2):
                goals.append(f"{term(x)} != {term(y)}")
        control.add(f"{atom(head)} :- {', '.join(goals)}.")
    control.ground()
    (symbols,) = [
        model.symbols(atoms=True) for model in control.solve(yield_=True)
    ]
    of_value = {round(4 * float(x)): x for x in NUMBERS}
    return {
        (
            names[int(x.name[1:])],
            tuple(
                of_value[y.number]
                if y.type is clingo.SymbolType.Number
                else names[int(y.name[1:])]
                for y in x.arguments
            ),
        )
        for x in symbols
        if x.name != "number"
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
    n_programs = 2 * hypothesis.settings().max_examples
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
    return {
        (a.predicate, len(a.args))
        for atoms in clauses
        for a in atoms
        if a.sign != COMPARED
    }


# -- negation and comparisons


def test_strata_are_those_of_clingo_and_prolog(tmp_path):
    random = Random(0)
    path = tmp_path / "program.pl"
    n_programs = 2 * hypothesis.settings().max_examples
    programs = [random_clauses(random, True) for _ in range(n_programs)]
    expected = [clingo_answers(clauses) for clauses in programs]
    assert sum(map(len, expected)) > 5 * n_programs
    if prolog.AVAILABLE:
        texts = [format_prolog(clauses, random) for clauses in programs]
        predicates = [signatures(clauses) for clauses in programs]
        assert prolog.all_answers(texts, predicates) == expected
    for clauses, answers in zip(programs, expected):
        path.write_text(format_program(clauses, random))
        dataset = load(path)
        assert_absent(dataset, answers, random)
        assert_answers(path, clauses, random, answers)
        answers = clingo_answers(clauses, object_identity=True)
        assert_absent(dataset, answers, random, object_identity=True)
        assert_answers(path, clauses, random, answers, object_identity=True)


def assert_absent(dataset, answers, random, object_identity=False):
    """Assert that the checker finds absent what is no expected answer."""
    ids = {name: i for i, name in enumerate(dataset.entities, 1)}
    predicates = zip(dataset.predicates, dataset.arities)
    number = {key: i for i, key in enumerate(predicates, 1)}
    rows = [
        (number[name, len(args)], *(ids[x] for x in args))
        for name, args in answers
    ]
    facts = [*map(tuple, dataset.facts.tolist())]
    conditions = proof.Conditions(
        lambda p: [fact for fact in facts if fact[0] == p],
        dataset.rules.tolist(),
        comparison_tests(dataset),
        dataset.n_constants,
        object_identity,
    )
    for _ in range(10):
        p = random.randint(1, dataset.n_predicates)
        n = dataset.arities[p - 1]
        terms = [random.randint(0, dataset.n_constants) for _ in range(n)]
        goal = (p, *terms, *[0] * (dataset.atom_width - n - 1))
        is_given = any(
            all(t in (0, i) for t, i in zip(goal, row)) for row in rows
        )
        assert conditions.hold((-p, *goal[1:])) != is_given
