"""Names, atoms and clauses for tests of the lexer, the parser, readers and writers."""

import math

from hypothesis import strategies as st

from funcppo.kg.graph.text import Atom, Clause, Variable

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


def atoms(terms, arity):
    return st.builds(
        Atom, NAMES, arity.flatmap(lambda n: st.tuples(*[terms] * n))
    )


@st.composite
def rules(draw, arity):
    """A safe rule: the head's terms are constants, or come from the body."""
    body = tuple(draw(st.lists(atoms(TERMS, arity), min_size=1, max_size=3)))
    bound = [t for atom in body for t in atom.args]
    head = draw(atoms(st.sampled_from(bound) if bound else NAMES, arity))
    return Clause(head, body, draw(WEIGHTS), 0)


FACTS = st.builds(
    lambda head: Clause(head, (), math.nan, 0), atoms(NAMES, ARITIES)
)


def canonical(clause):
    """Variables named by first occurrence, nan made comparable, the line left out."""
    names = {}

    def rename(term):
        return (
            names.setdefault(term, len(names))
            if isinstance(term, Variable)
            else term
        )

    parts = [
        (atom.predicate, tuple(map(rename, atom.args)))
        for atom in (clause.head, *clause.body)
    ]
    return parts, repr(clause.weight)
