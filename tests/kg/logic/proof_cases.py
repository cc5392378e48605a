"""Programs, proofs and a naive prover that the tests of proofs share."""

import dataclasses
import itertools
import json

from hypothesis import strategies as st

from funcppo.kg.logic import kb, prove
from funcppo.kg.logic.proof import Node, Proof, check_proof
from tests import oracles
from tests.oracles import Program


def trace(program, root, choices):
    """The proof of a root by the choices of a search."""
    base = kb.build(**program.arrays())
    return prove.from_trace(prove.Clauses(*base), root, choices)


C = 3  # constants 1..3, variables from 4
X, Y, Z, V = 4, 5, 6, 7


def heights_and_derivations(program):
    """Every derivable atom with its height and, above 0, the rule and body that give it: sets and all groundings."""
    model = {fact: (0, None, None) for fact in program.facts}
    for height in itertools.count(1):
        new = {}
        for i, rule in enumerate(program.rules):
            base = set(model), program.n_constants
            for theta in oracles.groundings(rule, *base):
                head, *body = (oracles.put(atom, theta) for atom in rule)
                new.setdefault(head, (height, i, body))
        new = {a: how for a, how in new.items() if a not in model}
        if not new:
            return model
        model |= new


@st.composite
def programs(draw):
    """Safe rules over three predicates with recursion, constants and repeated variables; a few facts."""
    constant, term = st.integers(1, C), st.integers(1, V)
    fact = st.tuples(st.integers(1, 3), constant, constant)
    facts = draw(st.sets(fact, min_size=3, max_size=8))
    rules = []
    for _ in range(draw(st.integers(2, 4))):
        body = [
            (draw(st.integers(1, 3)), draw(term), draw(term))
            for _ in range(draw(st.integers(1, 2)))
        ]
        bound = sorted({t for a in body for t in a[1:]} | {draw(constant)})
        predicate = draw(st.integers(1, 3))
        terms = [draw(st.sampled_from(bound)) for _ in range(2)]
        rules.append([(predicate, *terms), *body])
    return Program(C, (2, 2, 2), tuple(sorted(facts)), tuple(rules))


def checked(program, proof, max_height=None, leave_one_out=False, facts=None):
    facts = {*program.facts} if facts is None else facts
    return check_proof(
        proof,
        facts,
        program.rules,
        n_constants=program.n_constants,
        max_height=max_height,
        leave_one_out=leave_one_out,
    )


def read_proof(text):
    """The proof that a JSON object holds, without its texts and names."""
    names = [field.name for field in dataclasses.fields(Node)]
    nodes = []
    for row in json.loads(text)["nodes"]:
        fields = {name: row[name] for name in names}
        fields["goal"] = tuple(row["goal"])
        fields["children"] = tuple(row["children"])
        fields["substitution"] = tuple(map(tuple, row["substitution"]))
        nodes.append(Node(**fields))
    return Proof(nodes=tuple(nodes))


def make_node(goal, rule=None, substitution=(), children=(), probability=None):
    """A node of a proof; a fact unless it has a rule."""
    how = {"rule": rule, "substitution": substitution, "children": children}
    return Node(goal=goal, probability=probability, **how)


NAMES = ["france", "germany", "europe"]


COUNTRIES = Program(
    C,
    (2, 2),
    # neighborOf(france, germany), locatedIn(germany, europe)
    ((1, 1, 2), (2, 2, 3)),
    (((2, X, Y), (1, X, Z), (2, Z, Y)), ((1, X, Y), (1, Y, X))),
)


def format_atom(atom):
    terms = (NAMES[t - 1] if t <= C else "XYZV"[t - X] for t in atom[1:])
    return f"{['neighborOf', 'locatedIn'][atom[0] - 1]}({', '.join(terms)})"


def format_rule(i):
    head, *body = map(format_atom, COUNTRIES.rules[i])
    return f"{head} :- {', '.join(body)}"


def proved_by_model(program):
    """Proofs of all derivable atoms with their heights."""
    model = heights_and_derivations(program)
    derive = lambda atom: model[atom][1:] if model[atom][0] else None
    return [
        (model[atom][0], modelled(program, derive, atom))
        for atom in sorted(model)
    ]


def modelled(program, derive, root):
    """The proof of a root by `derive`."""
    last_step = lambda atom: (*(derive(atom) or (None, ())), None)
    return prove.assemble(program.rules, program.n_constants, root, last_step)
