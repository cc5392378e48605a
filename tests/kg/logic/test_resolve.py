"""Unification, and one resolution step against enumeration on the host."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.resolve import (
    Goals,
    canonicalize,
    make_resolve_config,
    resolve,
    rules_only_config,
    substitute,
    unify,
)
from tests import oracles, prolog, sld

N_CONSTANTS = 3  # constants 1..3; 4.. are variables
V, U, X, Y = 4, 5, 6, 7


def atoms(seed: int, n: int, arity: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    predicates = rng.integers(1, 3, (n, 1))
    terms = rng.integers(1, N_CONSTANTS + 5, (n, arity))
    return np.concatenate([predicates, terms], 1)


def renamed(*rows):
    """The terms of atoms, by the oracle's renaming."""
    atoms = sld.rename([(row, 0) for row in rows], N_CONSTANTS)
    return [term for atom, _ in atoms for term in atom[1:]]


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_unify_equals_a_plain_python_unifier(seed, arity):
    """50 x 2,000 pairs that share variables; most general: it renames the unified pair as the oracle does."""
    n = 2000
    a, b = atoms(seed, n, arity), atoms(seed + 1, n, arity)
    unifies, mgu = unify(torch.from_numpy(a), torch.from_numpy(b), N_CONSTANTS)
    terms = torch.from_numpy(np.concatenate([a[:, 1:], b[:, 1:]], 1))
    got = canonicalize(substitute(terms, mgu), N_CONSTANTS).tolist()
    for i in range(n):
        left, right = tuple(a[i].tolist()), tuple(b[i].tolist())
        bindings = sld.unify(left, right, N_CONSTANTS)
        assert bool(unifies[i]) == (bindings is not None), (left, right)
        if bindings is not None:
            want = renamed(*(sld.apply(x, bindings) for x in (left, right)))
            assert got[i] == want, (left, right)


@given(st.integers(0, 2**32 - 1))
def test_canonical_rows_are_equal_exactly_when_rows_are_renamings(seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, N_CONSTANTS + 4, (40, 5))
    forms = canonicalize(torch.from_numpy(rows), N_CONSTANTS).tolist()
    assert forms == [renamed((1, *row)) for row in rows.tolist()]


# -- test resolve

C, P, W = 4, 3, 3


def random_atoms(rng, n):
    """Ground atoms over the predicates and constants of `program`."""
    columns = rng.integers(1, P + 1, n), *rng.integers(1, C + 1, (2, n))
    return np.stack(columns, 1)


def start(roots: torch.Tensor, max_goals: int) -> Goals:
    """The goals of searches from their roots."""
    first = torch.arange(max_goals) == 0
    height = torch.zeros(len(roots), max_goals, dtype=torch.int32)
    return Goals(torch.where(first[:, None], roots[:, None], 0), height)


def program(seed: int):
    """A random safe program with recursion, constants and repeated variables in heads and bodies."""
    rng = np.random.default_rng(seed)
    facts = random_atoms(rng, 12)
    rules = np.zeros((5, 3, W), dtype=np.int64)
    for rule in rules:
        n_body = rng.integers(1, 3)
        rule[: 1 + n_body, 0] = rng.integers(1, P + 1, 1 + n_body)
        rule[1 : 1 + n_body, 1:] = rng.integers(C - 1, C + 4, (n_body, 2))
        terms = np.unique(rule[1 : 1 + n_body, 1:])
        safe = np.append(terms, rng.integers(1, C + 1))
        rule[0, 1:] = rng.choice(safe, 2)
    return facts, rules, rng


def unpacked(successors, b):
    out = []
    for s in successors.mask[b].nonzero().flatten().tolist():
        kind = "rule" if successors.rule[b, s] >= 0 else "fact"
        index = int(getattr(successors, kind)[b, s])
        out.append((kind, index, open_goals(successors.goals, (b, s))))
    return out


def open_goals(goals, at):
    """The goals of a place, with their heights."""
    rows = zip(goals.atoms[at].tolist(), goals.height[at].tolist())
    return tuple((tuple(atom), height) for atom, height in rows if atom[0])


@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_every_step_of_a_search_equals_the_oracle(seed, max_height):
    rows, steps = 8, 4
    facts, rules, rng = program(seed)
    kb, sizes = kbase.build(facts, rules, n_constants=C, n_predicates=P)
    cfg = make_resolve_config(kb, sizes, max_height)
    table = [tuple(f) for f in kb.facts.tolist()]
    root = torch.from_numpy(random_atoms(rng, rows)).to(torch.int32)
    goals = start(root, cfg.max_goals)
    want_goals = [((tuple(r), 0),) for r in root.tolist()]
    for _ in range(steps):
        got = resolve(cfg, kb, goals, root)
        assert not got.overflow.any()
        choice = torch.zeros(rows, dtype=torch.int64)
        for b in range(rows):
            query, want = tuple(root[b].tolist()), []
            if want_goals[b]:
                base = query, table, rules.tolist(), C, max_height
                want = sld.successors(want_goals[b], *base)
            assert unpacked(got, b) == want
            if want:
                choice[b] = int(rng.integers(len(want)))
                want_goals[b] = want[int(choice[b])][2]
            else:
                want_goals[b] = ()
        index = torch.arange(rows)
        alive = got.mask[index, choice][:, None]
        atoms, height = (x[index, choice] for x in got.goals[:2])
        atoms = torch.where(alive[..., None], atoms, 0)
        goals = Goals(atoms, torch.where(alive, height, 0))


@pytest.mark.skipif(not prolog.AVAILABLE, reason="swipl is not installed")
@pytest.mark.parametrize(
    "n_programs", [100, pytest.param(1000, marks=pytest.mark.long)]
)
def test_the_successors_of_a_step_are_prologs(n_programs):
    """A search in each program, a random successor at each step; all of them asked of Prolog."""
    random = Random(0)
    programs = [oracles.random_program(random) for _ in range(n_programs)]
    limits = [random.randint(1, 3) for _ in programs]
    asked, got = [], []
    for i, (program, limit) in enumerate(zip(programs, limits)):
        for step in walk(program, limit, random):
            asked.append((i, *step[:2]))
            got.append(step[2])
    want = prolog.successors(programs, limits, asked)
    for question, mine, prologs in zip(asked, got, want):
        assert mine == prologs, (programs[question[0]], question)
    seen = [kind for successors in got for kind, _, _ in successors]
    assert min(seen.count("rule"), seen.count("fact")) > n_programs / 4


def walk(program, limit, random):
    """(root, goals, successors) of each step of a search of at most four steps from a ground query."""
    kb, sizes = kbase.build(**program.arrays())
    cfg = make_resolve_config(kb, sizes, limit)
    bare = lambda atom: (*atom[: 1 + program.arity[atom[0] - 1]],)
    heads = [rule[0][0] for rule in program.rules]
    p = random.choice(heads or range(1, len(program.arity) + 1))
    arity = program.arity[p - 1]
    root = (p, *(random.randint(1, program.n_constants) for _ in range(arity)))
    padding = [0] * (sizes.atom_width - len(root))
    padded = torch.tensor([[*root, *padding]], dtype=torch.int32)
    goals = start(padded, cfg.max_goals)
    for _ in range(4):
        found = resolve(cfg, kb, goals, padded)
        assert not found.overflow.any()
        named = lambda goals: tuple((bare(atom), h) for atom, h in goals)
        after = unpacked(found, 0)
        successors = [(kind, i, named(left)) for kind, i, left in after]
        yield root, named(open_goals(goals, 0)), successors
        open_ones = [s for s, (_, _, left) in enumerate(after) if left]
        if not open_ones:
            break
        chosen = random.choice(open_ones)
        goals = Goals(*(x[:, chosen] for x in found.goals[:2]))


def test_what_does_not_fit_is_flagged():
    """p(x, Z) has three facts: two slots cannot hold them; one slot for goals cannot hold a body of two."""
    facts = np.array([[1, 1, 2], [1, 1, 3], [1, 1, 4]])
    rules = np.array([[[2, 5, 6], [1, 5, 7], [1, 7, 6]]])
    kb, sizes = kbase.build(facts, rules, n_constants=4, n_predicates=2)
    full = make_resolve_config(kb, sizes, 1)
    root = torch.tensor([[2, 1, 4]], dtype=torch.int32)
    open_goal = torch.tensor([[[1, 1, 5], [1, 5, 4]]], dtype=torch.int32)
    goals = Goals(open_goal, torch.ones((1, 2), dtype=torch.int32))
    assert not resolve(full, kb, goals, root).overflow
    for narrow in ({"max_fanout": 2}, {"max_successors": 2}):
        assert resolve(replace(full, **narrow), kb, goals, root).overflow
    cfg = replace(full, max_goals=1)
    assert resolve(cfg, kb, start(root, 1), root).overflow


@given(st.integers(0, 2**32 - 1))
def test_without_bodies_a_ground_root_has_the_same_rules(seed):
    facts, rules, rng = program(seed)
    kb, sizes = kbase.build(facts, rules, n_constants=C, n_predicates=P)
    root = torch.from_numpy(random_atoms(rng, 8)).to(torch.int32)
    full = make_resolve_config(kb, sizes, 1)
    alone = rules_only_config(full)
    want = resolve(full, kb, start(root, full.max_goals), root)
    got = resolve(alone, kb, start(root, 1), root)
    chosen = lambda x: [r[m].tolist() for r, m in zip(x.rule, x.mask)]
    assert chosen(got) == chosen(want)
    assert got.goals.atoms.shape[2] == 0 and not got.overflow.any()
