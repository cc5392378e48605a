"""The index of what derives each atom, and one step of T_P for queries: the part of the whole that they ask for."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from funcppo.kg.graph.loaders import load
from funcppo.kg.logic import consequences, derivability, fixpoint, kb
from funcppo.kg.logic.resolve import Goals, make_resolve_config, resolve
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import ranking
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.scores.score import parse
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.config import ProverTaskConfig
from tests import oracles, sld
from tests.kg.logic.test_resolve import C, P, program
from tests.oracles import Program, programs

FAMILY = Program(
    3,
    (2, 2),
    ((1, 1, 2), (1, 2, 3)),
    (((2, 4, 6), (1, 4, 5), (1, 5, 6)), ((1, 4, 5), (1, 4, 5))),
)


def build(program: Program, max_height: int, object_identity: bool = False):
    world, sizes = kb.build(**program.arrays())
    how = dict(max_atoms=100_000, object_identity=object_identity)
    model = fixpoint.least_model(world, sizes, max_height=max_height, **how)
    known = derivability.build_derivability_index(
        world, sizes, model, max_height, max_derivations=100_000
    )
    assert known is not None
    return world, sizes, model, known


def test_by_hand_a_rule_that_needs_the_atom_itself_does_not_derive_it():
    _, sizes, model, known = build(FAMILY, 1)
    assert model.atoms.tolist() == [[1, 1, 2], [1, 2, 3], [2, 1, 3]]
    rules = torch.tensor([[0, 1, -1]] * 3, dtype=torch.int32)
    assert derivability.rule_derives(
        known, sizes, model.atoms, rules
    ).tolist() == [
        [False] * 3,
        [False] * 3,
        [True, False, False],
    ]


@given(programs, st.booleans())
@example(FAMILY, False)
@settings(max_examples=100)
def test_the_rules_that_derive_an_atom_at_height_1_are_those_of_the_oracle(
    program, object_identity
):
    _, sizes, model, known = build(program, 1, object_identity)
    want = oracles.consequences(program, True, object_identity)
    rules = torch.arange(len(program.rules), dtype=torch.int32).expand(
        len(model.atoms), -1
    )
    got = derivability.rule_derives(known, sizes, model.atoms, rules)
    for atom, row in zip(model.atoms.tolist(), got.tolist()):
        unpadded = tuple(t for t in atom if t)
        assert row == [(i, unpadded) in want for i in range(len(program.rules))]


@given(programs, st.integers(1, 9))
@settings(max_examples=60)
def test_indexed_derivations_are_those_counted_anew(program, n_pairs):
    """However many are held at once, which is never more than asked for and one atom's."""
    world, sizes, model, known = build(program, 1)
    some = model.atoms[::2]
    pairs = lambda found: list(
        zip(found.atom_row.tolist(), found.rule.tolist())
    )
    want = sorted(
        pairs(consequences.collect_derivations(world, sizes, model, 1, some))
    )
    for held in (
        known,
        derivability.build_derivability_index_for_atoms(
            world, sizes, model, some
        ),
    ):
        parts = [
            pairs(part)
            for part in derivability.iter_indexed_derivations(
                held, sizes, some, n_pairs
            )
        ]
        assert [pair for part in parts for pair in part] == want
        assert max(map(len, parts), default=0) < n_pairs + max(
            len(program.rules), 1
        )


@given(st.integers(0, 10_000), st.integers(1, 2))
@example(2, 2)  # a body that holds the root, which another rule proves
@settings(max_examples=40)
def test_a_dead_end_leads_to_no_proof(seed, max_height):
    """All searches from every ground atom, followed to their ends by the slow resolver."""
    facts, rules, _ = program(seed)
    world, sizes = kb.build(facts, rules, n_constants=C, n_predicates=P)
    model = fixpoint.least_model(
        world, sizes, max_height=max_height, max_atoms=100_000
    )
    known, cfg = (
        derivability.build_derivability_index(
            world, sizes, model, max_height, max_derivations=100_000
        ),
        make_resolve_config(world, sizes, max_height),
    )
    assert known is not None
    roots = torch.cartesian_prod(
        *(torch.arange(1, n + 1) for n in (P, C, C))
    ).to(torch.int32)
    goals = start(roots, cfg.max_goals)
    successors = resolve(cfg, world, goals, roots)
    lost = derivability.dead_end_mask(
        known, sizes, max_height, roots, goals, successors
    )
    assert not lost[~successors.mask].any()
    clauses = [tuple(f) for f in world.facts.tolist()], rules.tolist()
    for b, s in lost.nonzero().tolist():
        atoms, height = (
            successors.goals.atoms[b, s].tolist(),
            successors.goals.height[b, s].tolist(),
        )
        state = tuple((tuple(a), h) for a, h in zip(atoms, height) if a[0])
        assert not provable(
            state, tuple(roots[b].tolist()), *clauses, max_height
        )
    proved = (successors.goals.atoms[:, :, 0, 0] == 0) & successors.mask
    assert not (proved & lost).any()


def test_too_many_derivations_give_none():
    world, sizes = kb.build(**FAMILY.arrays())
    model = fixpoint.least_model(world, sizes, max_height=1, max_atoms=100)
    assert (
        derivability.build_derivability_index(
            world, sizes, model, 1, max_derivations=0
        )
        is None
    )


def test_an_empty_index_has_no_dead_ends():
    world, sizes = kb.build(**FAMILY.arrays())
    cfg, roots = (
        make_resolve_config(world, sizes, 1),
        torch.tensor([[1, 3, 1]], dtype=torch.int32),
    )
    goals = start(roots, cfg.max_goals)
    successors = resolve(cfg, world, goals, roots)
    assert successors.mask.any()
    known = derivability.empty_derivability_index(world, sizes)
    assert not derivability.dead_end_mask(
        known, sizes, 1, roots, goals, successors
    ).any()
    assert not derivability.rule_derives(
        known, sizes, roots, successors.rule
    ).any()


def start(roots: torch.Tensor, max_goals: int) -> Goals:
    first = torch.arange(max_goals) == 0
    return Goals(
        torch.where(first[:, None], roots[:, None], 0),
        torch.zeros(len(roots), max_goals, dtype=torch.int32),
    )


def provable(goals, root, facts, rules, max_height) -> bool:
    children = (
        child
        for _, _, child in sld.successors(
            goals, root, facts, rules, C, max_height
        )
    )
    return any(
        not child or provable(child, root, facts, rules, max_height)
        for child in children
    )


# -- test partial fixpoint


@given(programs, st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=100)
def test_it_holds_the_facts_and_what_agrees_with_a_query_in_an_argument(
    program, random, identity
):
    world, sizes = kb.build(**program.arrays())
    whole = fixpoint.least_model(
        world, sizes, max_height=1, max_atoms=10**6, object_identity=identity
    )
    rows = [tuple(row) for row in whole.atoms.tolist()]
    queries = random.sample(rows, min(2, len(rows)))
    table = torch.tensor(queries or [[0] * sizes.atom_width])
    part = derivability.restricted_step(world, sizes, table, 10**6, identity)
    assert part is not None
    model = part[0]
    wanted = {
        (place, q[0], q[place])
        for q in queries
        for place in range(1, sizes.atom_width)
    }
    near = lambda row: any(
        (place, row[0], row[place]) in wanted
        for place in range(1, sizes.atom_width)
    )
    expected = {
        row: h
        for row, h in zip(rows, whole.height.tolist())
        if h == 0 or near(row)
    }
    assert (
        dict(zip(map(tuple, model.atoms.tolist()), model.height.tolist()))
        == expected
    )
    assert (
        fixpoint.atom_height(model, model.atoms.long()).tolist()
        == model.height.tolist()
    )


def test_a_split_is_ranked_as_with_the_whole():
    data = load("family_tree:60:3")
    ready = prover_task.build_task(data, ProverTaskConfig(max_height=1))
    found = derivability.restricted_step(
        ready.kb,
        ready.sizes,
        torch.from_numpy(data.test),
        10**6,
    )
    assert found is not None and len(ready.kb.facts) < len(
        found[0].atoms
    ) < len(ready.least_model.atoms)
    counts = []
    for each in (
        ready,
        replace(ready, least_model=found[0], derivability_index=found[1]),
    ):
        scorer = parse("noisy-or")
        counts.append(
            ranking.rank_split(
                each, data.test, scorer, RankingProtocol()
            ).counts
        )
    assert all(torch.equal(a, b) for a, b in zip(*counts))


@given(programs, st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=100)
def test_the_answers_of_queries_have_the_rules_that_derive_them(
    program, random, identity
):
    """For atoms that are no facts, those that both hold and a query asks for: the same rules."""
    world, sizes = kb.build(**program.arrays())
    whole = fixpoint.least_model(
        world, sizes, max_height=1, max_atoms=10**6, object_identity=identity
    )
    is_binary = (whole.atoms > 0).sum(1) == 3
    rows = [tuple(row) for row in whole.atoms[is_binary].tolist()]
    if not rows:
        return
    queries = torch.tensor(random.sample(rows, min(2, len(rows))))
    expected = derivability.restricted_step(
        world, sizes, queries, 10**6, identity
    )
    found = derivability.answered_step(
        world, sizes, queries, (HEAD, TAIL), 10**6, identity
    )
    assert expected is not None and found is not None

    def derivations(model, index):
        row = index.derivation_keys // sizes.n_rules
        rule = (index.derivation_keys % sizes.n_rules).tolist()
        pairs = zip(map(tuple, model.atoms[row].tolist()), rule)
        # A restricted step holds what agrees in the padding of wider atoms too.
        derived = {
            atom
            for atom in map(tuple, model.atoms[model.height == 1].tolist())
            if any(
                atom[0] == query[0] and atom[place] == query[place]
                for query in queries.tolist()
                for place in (HEAD, TAIL)
            )
        }
        pairs = [pair for pair in pairs if pair[0] in derived]
        assert len(pairs) == len(set(pairs))
        return derived, set(pairs)

    assert derivations(*found) == derivations(*expected)
    found = derivability.answered_step(
        world, sizes, queries, (HEAD, TAIL), -1, identity
    )
    assert found is None or not len(found[1].derivation_keys)


def test_too_many_derivations_of_queries_give_none():
    data = load("family_tree:60:3")
    ready = prover_task.build_task(data, ProverTaskConfig(max_height=1))
    assert (
        derivability.restricted_step(
            ready.kb,
            ready.sizes,
            torch.from_numpy(data.facts),
            10,
        )
        is None
    )
