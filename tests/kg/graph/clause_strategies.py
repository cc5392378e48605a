"""Names, atoms and clauses for tests of the lexer, the parser, readers and writers."""

import math

from hypothesis import strategies as st

from funcppo.kg.graph.text import COMPARED, TESTS, Atom, Clause, Variable

# Names that mean something to some format, or need quotes in it.
NASTY = [
    "X", "_", "_x", "P31", "ann lee", "a,b", "it's", "f(x)", "a:-b", "b.", "\\+", "not", "is", "true", "1", "-7",
    "-0", "01", '"', "Å", "#", "?a", "=>", "a<=b", "%", "/*", "\t", "\n", "\\", "a\\nb", "\x1f'", "  ", " => ",
    "日本", "Rule\t", "\u2028", "0.5", "a  b", "''", "'q'", "/m/02_x.y-z:w", "😀", "é", ".", "[]", "x|y", "\x00", "nl",
    "V1",
]  # fmt: skip
NAMES = st.sampled_from(NASTY) | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6
)
TERMS = st.builds(Variable, st.sampled_from("ABCDEF")) | NAMES
WEIGHTS = st.just(math.nan) | st.floats(0, allow_infinity=False)
ARITIES = st.integers(0, 3)
BINARY = st.just(2)


def atoms(terms, arity, sign=""):
    args = arity.flatmap(lambda n: st.tuples(*[terms] * n))
    return st.builds(Atom, NAMES, args, st.just(sign))


@st.composite
def rules(draw, arity, has_conditions=False):
    """A safe rule: the terms of the head and of conditions are constants, or come from the body."""
    body = draw(st.lists(atoms(TERMS, arity), min_size=1, max_size=3))
    bound = [t for atom in body for t in atom.args]
    terms = st.sampled_from(bound) if bound else NAMES
    head = draw(atoms(terms, arity))
    if has_conditions:
        names = st.builds(
            Atom,
            st.sampled_from(["=", "!="]),
            st.tuples(terms, terms),
            st.just(COMPARED),
        )
        numbers = st.sampled_from(
            [X for X in bound if isinstance(X, Variable)]
            + ["7", "-0.5", "+1e-05"]
        )
        values = st.builds(
            Atom,
            st.sampled_from([*TESTS]),
            st.tuples(numbers, numbers),
            st.just(COMPARED),
        )
        negated = atoms(terms | st.just(Variable("_ 0")), arity, "not")
        body += draw(st.lists(names | values | negated, max_size=3))
    return Clause(head, tuple(body), draw(WEIGHTS), 0)


FACTS = st.builds(
    lambda head: Clause(head, (), math.nan, 0), atoms(NAMES, ARITIES)
)


def canonical(clause):
    """Variables named by first occurrence, nan made comparable, the line left out."""
    names = {}

    def rename(term):
        if not isinstance(term, Variable):
            return term
        # each `_` of a condition is one of its own
        return " " in term.name or names.setdefault(term, len(names))

    parts = [
        (atom.predicate, tuple(map(rename, atom.args)), atom.sign)
        for atom in (clause.head, *clause.body)
    ]
    return parts, repr(clause.weight)
