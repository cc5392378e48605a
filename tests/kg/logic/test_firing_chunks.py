"""Chunks of questions give the firings of all; the derived atoms are those of one step that a query asks for."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.core import host
from funcppo.core.deadline import Deadline
from funcppo.kg.logic import derive, fixpoint, joins, kb
from funcppo.kg.logic.derive import FiringWork
from funcppo.kg.logic.joins import RowBudget, RowBudgetExceeded
from funcppo.kg.logic.triple_index import HEAD, TAIL
from tests.oracles import Program, programs


@given(programs, st.booleans())
@settings(max_examples=100)
def test_derived_answers_are_the_atoms_of_one_step_that_agree_with_a_query(
    program, identity
):
    world, sizes = kb.build(**program.arrays())
    plan = derive.plan_firings(world, sizes)
    model = fixpoint.least_model(
        world, sizes, max_height=1, max_atoms=10**6, object_identity=identity
    )
    atoms = [
        atom
        for atom in map(tuple, model.atoms.tolist())
        if len(atom) > TAIL and atom[TAIL] and not any(atom[TAIL + 1 :])
    ]
    queries = atoms[::2]
    if not queries:
        return
    for sides in ((HEAD,), (TAIL,), (HEAD, TAIL)):
        found = derive.derive_answers(
            plan,
            torch.tensor(queries),
            sides,
            object_identity=identity,
        )
        given = {(s, q[0], q[HEAD + TAIL - s]) for q in queries for s in sides}
        asked = {
            atom
            for atom in atoms
            for side in sides
            if (side, atom[0], atom[HEAD + TAIL - side]) in given
        }
        derived = {tuple(atom) for atom in found.tolist()}
        # A fact is listed where a rule derives it too.
        facts = {tuple(atom) for atom in world.facts.tolist()}
        assert derived - facts == asked - facts
        assert derived <= asked


X, Y, Z = 6, 7, 8
# near(X, Y) <- near(X, Z), near(Z, Y) over a chain of five entities.
CHAIN = Program(
    facts=tuple((1, i, i + 1) for i in range(1, 5)),
    rules=(((1, X, Y), (1, X, Z), (1, Z, Y)),),
    n_constants=5,
    arity=(2,),
)


# like(X, Y) <- near(X, Y) over nine pairs: one firing a question
STARS = Program(
    facts=tuple((1, i, i + 1) for i in range(1, 10)),
    rules=(((2, 11, 12), (1, 11, 12)),),
    n_constants=10,
    arity=(2, 2),
)


def test_half_of_the_memory_halves_the_chunks_and_not_what_they_hold(
    monkeypatch,
):
    monkeypatch.setattr(derive, "PILOT_QUESTIONS", 1)
    monkeypatch.setattr(derive, "MAX_CHUNK_FIRINGS", 4)
    world, sizes = kb.build(**STARS.arrays())
    queries = world.facts.long() + torch.tensor([1, 0, 0])  # like(X, ?)
    asked = derive.open_questions(queries, TAIL)
    sizes_of: dict[float, list[int]] = {}
    found: dict[float, list[int]] = {}
    for share in (1.0, 0.5):
        plan = derive.plan_firings(world, sizes, share)
        chunks = list(derive.iter_firing_chunks(plan, asked))
        sizes_of[share] = [len(chunk.questions.entity) for chunk in chunks]
        candidates = [chunk.firings.candidate for chunk in chunks]
        found[share] = torch.cat(candidates).tolist()
    assert sizes_of == {1.0: [1, 4, 4], 0.5: [1, 2, 2, 2, 2]}
    assert found[1.0] == found[0.5] == list(range(2, 11))


def joined(chunks):
    """The columns of all chunks, whose questions are numbered from the first one of all."""
    start, parts = 0, []
    for questions, found in chunks:
        own = found._replace(question=found.question + start)
        parts.append((*questions, *own))
        start += len(questions.entity)
    return [torch.cat(columns) for columns in zip(*parts, strict=True)]


@given(programs, st.booleans(), st.integers(2, 4))
@settings(max_examples=40)
def test_any_number_of_threads_gives_the_same_firings(
    program, identity, n_threads
):
    world, sizes = kb.build(**program.arrays())
    plan = derive.plan_firings(world, sizes)
    queries = world.facts.long()
    if not len(queries) or world.facts.shape[1] <= TAIL:
        return
    asked = derive.open_questions(queries, TAIL)
    threads_of_parts = set()

    def compute(questions, found):
        threads_of_parts.add(threading.get_ident())
        return questions, found

    def run(n_threads, work, most_rows=10**6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(derive, "PILOT_QUESTIONS", 1)
            patch.setattr(derive, "MIN_PART_ROWS", 1)
            patch.setattr(derive, "MAX_CHUNK_JOIN_ROWS", most_rows)
            return joined(
                derive.map_firing_chunks(
                    compute,
                    plan,
                    asked,
                    object_identity=identity,
                    work=work,
                    n_threads=n_threads,
                )
            )

    one, several = FiringWork(), FiringWork()
    alone = run(1, one)
    assert threads_of_parts == {threading.get_ident()}
    for column, expected in zip(run(n_threads, several), alone, strict=True):
        assert torch.equal(column, expected)
    assert several.n_rows == one.n_rows
    # Chunks that are too large are halved, down to one question.
    for column, expected in zip(run(n_threads, FiringWork(), 1), alone):
        assert torch.equal(column, expected)


def test_a_chunk_has_as_many_parts_as_there_is_work_for(monkeypatch):
    """The first one, whose work is unknown, has one, and each of several has two questions."""
    world, sizes = kb.build(**STARS.arrays())
    plan = derive.plan_firings(world, sizes)
    queries = world.facts.long() + torch.tensor([1, 0, 0])
    asked = derive.open_questions(queries, TAIL)
    monkeypatch.setattr(derive, "PILOT_QUESTIONS", 1)
    monkeypatch.setattr(derive, "MIN_PART_ROWS", 1)

    def sizes_of_parts():
        chunks = derive.iter_firing_chunks(plan, asked)
        return [len(chunk.questions.entity) for chunk in chunks]

    for n_threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", n_threads)
        assert sizes_of_parts() == [1, 2, 2, 2, 2]
    monkeypatch.setattr(derive, "MAX_PARTS", 3)
    assert sizes_of_parts() == [1, 2, 3, 3]
    monkeypatch.setattr(derive, "MIN_PART_ROWS", 1000)
    assert sizes_of_parts() == [1, 8]


def test_parts_that_are_computed_at_once_are_half_of_a_chunk_at_most(
    monkeypatch,
):
    """Temporary tensors of each are held: with as many parts as threads they were those of the whole chunk."""
    monkeypatch.setattr(derive, "MIN_PART_ROWS", 1)
    done = derive._Done(
        began=0.0, n_links_before=0, n_questions=16, n_firings=160, n_rows=1600
    )
    n_parts = done.count_parts(4096)
    assert n_parts // 2 >= host.MAX_THREADS


def test_a_chunk_has_no_more_questions_than_there_is_time_for(monkeypatch):
    monkeypatch.setattr(derive, "PILOT_QUESTIONS", 1)
    monkeypatch.setattr(derive, "MAX_CHUNK_GROWTH", 100)
    world, sizes = kb.build(**STARS.arrays())
    plan = derive.plan_firings(world, sizes)
    queries = world.facts.long() + torch.tensor([1, 0, 0])
    asked = derive.open_questions(queries, TAIL)
    now = [0.0]
    work = FiringWork(deadline=Deadline(at=6.0, clock=lambda: now[0]))
    n_questions = []
    for chunk in derive.iter_firing_chunks(plan, asked, work=work):
        n_questions.append(len(chunk.questions.entity))
        now[0] += n_questions[-1]  # a second each
        if work.deadline.is_over:
            break
    assert n_questions == [1, 5]


def test_the_budget_bounds_the_rows_and_the_joins_of_all_chunks(monkeypatch):
    world, sizes = kb.build(**CHAIN.arrays())
    plan = derive.plan_firings(world, sizes)
    asked = derive.open_questions(world.facts.long(), TAIL)
    monkeypatch.setattr(derive, "PILOT_QUESTIONS", 1)
    monkeypatch.setattr(derive, "MAX_CHUNK_GROWTH", 1)

    def run(budget, work=None):
        chunks = derive.iter_firing_chunks(
            plan, asked, work=work, budget=budget
        )
        return sum(len(chunk.firings.rule) for chunk in chunks)

    spent, work = RowBudget(10**9), FiringWork()
    assert run(spent, work) == 3
    n_joins, rest = divmod(spent.n_rows - work.n_rows, joins.JOIN_OVERHEAD_ROWS)
    assert n_joins >= 4 and not rest
    assert run(RowBudget(spent.n_rows)) == 3
    with pytest.raises(RowBudgetExceeded):
        run(RowBudget(spent.n_rows - 1))
