"""Datalog over Python sets, slow and obviously right: the oracle of the fixpoint; and the programs that it runs on."""

import itertools
from dataclasses import dataclass
from random import Random

import numpy as np
from hypothesis import strategies as st

Atom = tuple[int, ...]
Clause = tuple[Atom, ...]  # head, then body
N_CONSTANTS = 6  # of every random program, used or not, so that programs can be put together


@dataclass(frozen=True)
class Program:
    """Facts and rules; atoms are not padded."""

    n_constants: int
    arity: tuple[int, ...]  # of predicates 1, 2, ...
    facts: tuple[Atom, ...]
    rules: tuple[Clause, ...]

    def arrays(self) -> dict:
        """The arguments of `kb.build`."""
        width = 1 + max(1, *self.arity)
        longest = max([len(rule) for rule in self.rules], default=1)
        facts = np.zeros((len(self.facts), width), int)
        rules = np.zeros((len(self.rules), longest, width), int)
        for i, fact in enumerate(self.facts):
            facts[i, : len(fact)] = fact
        for i, rule in enumerate(self.rules):
            for j, atom in enumerate(rule):
                rules[i, j, : len(atom)] = atom
        return dict(
            facts=facts,
            rules=rules,
            n_constants=self.n_constants,
            n_predicates=len(self.arity),
        )


def random_program(random: Random) -> Program:
    """A program with recursion, constants, repeated variables, loose variables and propositions, as chance has it."""
    constants = list(range(1, random.randint(1, N_CONSTANTS) + 1))
    unused = random.choice(
        [0, 8]
    )  # predicates, so that the others' ids are also those of variables
    arity = (0,) * unused + tuple(
        random.choice([0, 1, 2, 2, 2, 2, 2, 3])
        for _ in range(random.randint(1, 3))
    )

    def atom(terms: list[int]) -> Atom:
        p = random.randrange(unused, len(arity))
        return (p + 1, *(random.choice(terms) for _ in range(arity[p])))

    def rule() -> Clause:
        variables = list(
            range(N_CONSTANTS + 1, N_CONSTANTS + 1 + random.randint(1, 4))
        )
        length = random.choice([0, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3])
        body = [atom(variables * 4 + constants[:1]) for _ in range(length)]
        bound = sorted({t for a in body for t in a[1:] if t > N_CONSTANTS})
        return (atom(bound * 3 + [random.choice(constants)]), *body)

    facts = {atom(constants) for _ in range(random.randint(0, 14))}
    rules = tuple(rule() for _ in range(random.randint(0, 7)))
    return Program(N_CONSTANTS, arity, tuple(sorted(facts)), rules)


programs = st.builds(random_program, st.randoms(use_true_random=False))


def groundings(
    rule: Clause,
    atoms: set[Atom],
    n_constants: int,
    object_identity: bool = False,
) -> list[dict[int, int]]:
    """Every substitution of the variables of a rule that puts its body among the atoms."""
    found: list[dict[int, int]] = [{}]
    for goal in rule[1:]:
        found = [
            s | new
            for s in found
            for a in atoms
            if (new := match(goal, a, s, n_constants)) is not None
        ]
    if not object_identity:
        return found
    own = constants_of(rule, n_constants)
    return [s for s in found if are_distinct([*s.values(), *own])]


def constants_of(rule: Clause, n_constants: int) -> set[int]:
    """The constants that a rule names."""
    return {t for atom in rule for t in atom[1:] if 0 < t <= n_constants}


def are_distinct(values: list[int]) -> bool:
    """Whether no value occurs twice."""
    return len(set(values)) == len(values)


def match(
    goal: Atom, atom: Atom, known: dict[int, int], n_constants: int
) -> dict[int, int] | None:
    """What a goal's variables must be for it to equal a ground atom, given what is known of them."""
    if goal[0] != atom[0]:
        return None
    new: dict[int, int] = {}
    for term, value in zip(goal[1:], atom[1:]):
        bound = term if term <= n_constants else known.get(term, new.get(term))
        if bound is None:
            new[term] = value
        elif bound != value:
            return None
    return new


def put(atom: Atom, substitution: dict[int, int]) -> Atom:
    """The atom with its variables replaced."""
    return (atom[0], *(substitution.get(t, t) for t in atom[1:]))


def least_model(
    program: Program,
    max_height: int | None = None,
    object_identity: bool = False,
) -> dict[Atom, int]:
    """Every derivable atom and its smallest height."""
    height = dict.fromkeys(program.facts, 0)
    for step in itertools.count(1):
        if max_height is not None and step > max_height:
            return height
        known = set(height)
        base = known, program.n_constants, object_identity
        heads = {
            put(rule[0], s)
            for rule in program.rules
            for s in groundings(rule, *base)
        }
        if heads <= known:
            return height
        height |= dict.fromkeys(heads - known, step)
    raise AssertionError


def consequences(
    program: Program, leave_one_out: bool, object_identity: bool = False
) -> set[tuple[int, Atom]]:
    """Pairs (rule, head) over the facts; with `leave_one_out` a head never stands in its own body."""
    return {
        (i, put(rule[0], s))
        for i, rule in enumerate(program.rules)
        for s in groundings(
            rule, set(program.facts), program.n_constants, object_identity
        )
        if not leave_one_out
        or put(rule[0], s) not in [put(a, s) for a in rule[1:]]
    }


def together(programs: list[Program]) -> tuple[Program, list[int]]:
    """One program that holds all of them side by side, and what was added to the predicates of each."""
    shifts = list(
        itertools.accumulate((len(p.arity) for p in programs), initial=0)
    )[:-1]
    shifted = lambda atoms, by: tuple((a[0] + by, *a[1:]) for a in atoms)
    facts = [
        fact for p, by in zip(programs, shifts) for fact in shifted(p.facts, by)
    ]
    rules = [
        shifted(rule, by) for p, by in zip(programs, shifts) for rule in p.rules
    ]
    arity = sum((p.arity for p in programs), ())
    return Program(N_CONSTANTS, arity, tuple(facts), tuple(rules)), shifts


def within_six_sigma(counts, probabilities):
    """Each count of a multinomial within 6 standard deviations: a false alarm in 10**8 fixed seeds."""
    n, p = sum(counts), np.array(probabilities)
    return bool(
        (abs(np.array(counts) - n * p) <= 6 * np.sqrt(n * p * (1 - p))).all()
    )
