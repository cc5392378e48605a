"""Sources of evidence give a rule score the same ranks; what the score of a policy computes, in which chunks."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from funcppo.core import random, tree
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.logic import derive
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.ranking import explain, ranking, scoring
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.ranking.scoring import PolicyScore, search_config
from funcppo.kg.scores import evidence, learned
from funcppo.kg.scores.learned import LearnedScore, Weights
from funcppo.kg.scores.score import parse
from funcppo.kg.search import env as prover_env
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.beam import (
    evaluate_step,
    log_odds,
    score_by_rules,
    score_candidates,
)
from funcppo.kg.search.env import PROVED, RUNNING
from funcppo.kg.search.task import build_task
from tests.kg.ranking.scores import score_by_name
from tests.kg.run.runs import random_graph
from tests.kg.search.small_tasks import (
    SIZES,
    perturbed,
    small_task,
    untrained_policy,
)
from tests.runtime.test_capture import on_gpu


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "identity"])
def task(request):
    settings = ProverTaskConfig(
        max_height=1, smoothing=5.0, object_identity=request.param
    )
    return build_task(random_graph(), settings)


BOTH = RankingProtocol(sides=(HEAD, TAIL))
assert_close = partial(torch.testing.assert_close, **{"rtol": 0, "atol": 1e-5})


def parts_of(task, facts, split):
    atoms = torch.from_numpy(split)
    return {
        side: list(scoring.query_evidence(task, facts, atoms, side))
        for side in (HEAD, TAIL)
    }


def assert_same_counts(one, other):
    assert (one.counts.n_better > 0).any()
    for got, want in zip(one.counts, other.counts, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "name",
    [
        *("exists@1", "max-confidence", "noisy-or", "noisy-or@2"),
        *(
            "noisy-or-top-2",
            "noisy-or@3-other-facts",
            "max-confidence-other-facts",
        ),
    ],
)
def test_a_rule_score_is_the_same_from_every_side(task, name, monkeypatch):
    monkeypatch.setattr(derive, "PILOT_QUESTIONS", 2)
    facts = evidence.index_facts(task.kb, task.sizes)
    split, score = task.dataset.valid, parse(name)
    assert task.derivability_index is not None
    rank = lambda of: ranking.rank_split(of, split, score, BOTH)
    by_index = rank(task)
    by_joins = rank(replace(task, derivability_index=None))
    assert_same_counts(by_joins, by_index) if name != "exists@1" else None
    parts = parts_of(task, facts, split)

    def collected(atoms, side):
        return scoring.score_collected(task, parts[side], score, atoms, side)

    listed = ranking.list_split(task, split, BOTH, by_side=True)
    by_evidence = ranking.rank_listed(listed, collected)
    for got, want in zip(by_evidence.counts, by_index.counts, strict=True):
        assert torch.equal(got, want)
    assert set(by_evidence.scored_side.tolist()) == {HEAD, TAIL}
    by_question = build_task(task.dataset, task.cfg, with_derivations=False)
    assert scoring.derives_by_question(by_question)
    if name != "exists@1":
        assert_same_counts(rank(by_question), by_index)


def learned_score(task, facts, **changes):
    world = learned.make_world(task.kb, task.sizes)
    sizes = {"sizes": task.sizes, "n_shapes": learned.n_shapes(world)}
    cfg = learned.AggregationConfig(**sizes)
    params = learned.init(cfg, random.key(0))
    params = params._replace(**changes)
    weights = Weights(facts, cfg, world, params, "fact", 5.0)
    return LearnedScore("evidence", weights)


def test_a_learnt_score_ranks_the_candidates_of_each_side(task, monkeypatch):
    facts = evidence.index_facts(task.kb, task.sizes)
    before = learned_score(task, facts)
    weight = before.weights.params.own_degree_weight.clone()
    # For a tail, tails of three and more known facts come last.
    weight[1::2, 3:] = -100.0
    learned = learned_score(task, facts, own_degree_weight=weight)
    split = task.dataset.valid
    parts = parts_of(task, facts, split)[TAIL]
    found = evidence.concatenate([part.evidence for part in parts])
    is_last = found.own_degree >= 3
    scores = learned.log_odds(scoring.QuestionCandidates(task, found))
    assert scores[is_last].max() < -50 < scores[~is_last].min()

    before, after = (
        ranking.rank_split(task, split, score, BOTH)
        for score in (before, learned)
    )
    changed = before.counts.n_better != after.counts.n_better
    assert changed[before.side == TAIL].any()
    assert torch.equal(before.answer_provable, after.answer_provable)
    is_low = after.log_odds < -50
    assert is_low.any() and (after.scored_side[is_low] == TAIL).all()

    # Where each question derives its answers, its evidence lists them: nothing is derived twice.
    by_question = build_task(task.dataset, task.cfg, with_derivations=False)
    monkeypatch.setattr(derive, "derive_answers", pytest.fail)
    shown = []
    show = lambda *n: shown.append(n)
    again = ranking.rank_split(by_question, split, learned, BOTH, None, show)
    assert_same_counts(again, after)
    assert torch.equal(again.answer_provable, after.answer_provable)
    assert shown[0][0] == 0 and shown[-1][0] == shown[-1][1] > 0


def test_a_known_fact_is_scored_by_the_other_facts(task):
    """As in a graph without it: its log-odds are those of a triple that is no fact."""
    facts = evidence.index_facts(task.kb, task.sizes)
    score = learned_score(task, facts)
    known = evidence.binary_facts(task.kb)
    found = scoring.score_atoms(task, score, known.int(), TAIL)
    parts = scoring.query_evidence(task, facts, known, TAIL)
    open_ = scoring.score_collected(task, parts, score, known.int(), TAIL)
    assert (found != open_).any()
    for i in range(0, len(known), 7):
        explained = explain.explain_answer(task, score, known[i], TAIL)
        expected = explained.score if explained else -torch.inf
        assert float(found[i]) == pytest.approx(expected)


def random_weights(task):
    facts = evidence.index_facts(task.kb, task.sizes)
    generator = torch.Generator().manual_seed(0)
    weights = learned_score(task, facts).weights
    noisy = lambda x: x + torch.randn(x.shape, generator=generator)
    return weights._replace(params=tree.map(noisy, weights.params))


def test_a_fact_without_a_proof_is_scored_as_in_a_graph_without_it(task):
    weights = random_weights(task)
    weights = weights._replace(cfg=replace(weights.cfg, no_proof=-2.5))
    known = evidence.binary_facts(task.kb)
    score = LearnedScore("evidence", weights)
    plain = LearnedScore("evidence", random_weights(task))
    assert score.ranks_all and not plain.ranks_all
    by_rules, found = (
        scoring.score_atoms(task, x, known.int(), TAIL) for x in (plain, score)
    )
    is_unproved = by_rules.isneginf()
    assert torch.equal(found[~is_unproved], by_rules[~is_unproved])
    assert is_unproved.any()
    table = task.dataset.facts
    for i in is_unproved.nonzero()[:5, 0].tolist():
        kept = table[(table != known[i].numpy()).any(1)]
        others = replace(task.dataset, facts=kept, train=kept)
        facts = evidence.index_facts(*kbase.from_dataset(others))
        without = LearnedScore("evidence", weights._replace(facts=facts))
        (want,) = scoring.score_without_rules(without, known[i : i + 1], TAIL)
        assert_close(found[i], want)


def test_kinds_of_evidence_add_up_as_scores(task):
    """In the order in which the learnt score adds them, to the last bit."""
    weights = random_weights(task)
    whole = LearnedScore("evidence", weights)
    kinds = learned.weighed_kinds(weights.cfg)
    first, *others = (LearnedScore(kind, weights, [kind]) for kind in kinds)
    for other in others:
        first = first + other
    split = task.dataset.valid
    got, want = (
        ranking.rank_split(task, split, score, BOTH) for score in (first, whole)
    )
    assert len(others) == 2 and torch.equal(got.log_odds, want.log_odds)


def test_an_atom_that_no_rule_derives_scores_nothing(task):
    facts = evidence.index_facts(task.kb, task.sizes)
    n = task.sizes.n_constants
    ids = torch.arange(1, n + 1, dtype=torch.int32)
    atoms = torch.cartesian_prod(ids[:2], ids, ids)
    # A fact in the body of its own derivation is evidence, but proves nothing.
    is_fact = (atoms[:, None] == task.kb.facts).all(2).any(1)
    atoms = atoms[~is_fact]
    derivations = score_by_name(task, "noisy-or@3", atoms)
    is_derived = derivations > -torch.inf
    assert is_derived.any() and not is_derived.all()
    for side in (HEAD, TAIL):
        score = learned_score(task, facts)
        found = scoring.score_atoms(task, score, atoms, side)
        assert torch.equal(found > -torch.inf, is_derived)


# -- the score of a policy


@cache
def untrained(**fields):
    """A task on a small family, a policy that has learnt nothing, and the task's derivable atoms."""
    settings = {"max_height": 1, "max_depth": 4, "hard_negative_fraction": 0.0}
    task = small_task("family_tree:30:0", **(settings | fields))
    cfg, params = untrained_policy(task)
    return task, cfg, params, task.least_model.atoms[::7].to(torch.int32)


def search(score, chunk_size=16, **fields):
    task, cfg, _, _ = untrained(**fields)
    sizes = {
        "slots": 6,
        "beam": 8,
        "rows_per_step": 12,
        "chunk_size": chunk_size,
    }
    return search_config(task, cfg, score, **sizes)


def score(value, atoms):
    """The log-odds of atoms by a score of the small family."""
    return scoring.score_atoms(untrained()[0], value, atoms, 0)


# -- scores of a policy


def test_a_search_is_needed_unless_the_rules_decide():
    """The oracle selects the facts at height 1; `best-proof` counts no choice of facts there."""
    for fields, needed in (
        ({"fact_selection": "oracle"}, []),
        ({"fact_selection": "policy"}, ["success"]),
        ({"max_height": 2}, ["success", "best-proof"]),
    ):
        task, names = untrained(**fields)[0], ("success", "best-proof")
        found = [x for x in names if scoring.needs_search(task, search(x))]
        assert found == needed


@pytest.mark.parametrize("name", ["success", "best-proof"])
@pytest.mark.parametrize("chunk_size", [5, 64])
def test_a_score_without_a_search_scores_all_atoms_in_chunks(name, chunk_size):
    """5-atom chunks of 13 atoms: 5, 5 and 3, the last padded to 4."""
    task, _, params, atoms = untrained()
    atoms, cfg = atoms[:13], search(name, chunk_size)
    progress, outcomes = [], []
    told = lambda *n: progress.append(n), lambda *o: outcomes.append(o)
    scorer = PolicyScore(cfg, task, params, None, *told)
    world = prover_task.inference_world(task)
    expected = score_by_rules(cfg, world, params, atoms)
    assert_close(score(scorer, atoms), expected, rtol=1e-5)
    n_started = [0, 5, 10, 13] if chunk_size == 5 else [0, 13]
    assert progress == [(n, 13) for n in n_started]
    assert outcomes == [(None, 13, 14 if chunk_size == 5 else 16)]


@pytest.mark.parametrize("name", ["success", "best-proof"])
def test_a_score_with_a_search_gives_the_scores_of_the_search(name):
    fields = {"max_height": 2}
    task, _, params, atoms = untrained(**fields)
    atoms, cfg = atoms[:24], search(name, **fields)
    progress, outcomes = [], []
    told = lambda *n: progress.append(n), lambda *o: outcomes.append(o)
    scorer = PolicyScore(cfg, task, params, evaluate_step, *told)
    world = prover_task.inference_world(task)
    run = score_candidates(cfg, world, params, atoms)
    assert_close(score(scorer, atoms), log_odds(cfg, run.results))
    n_started, n_candidates = progress[-1]
    assert n_started == n_candidates >= len(atoms) and len(outcomes) == 1
    result, active_row_steps, row_steps = outcomes[0]
    assert len(result.log_score) == len(atoms)
    assert 0 < active_row_steps <= row_steps


# -- steps


class CallTooLargeError(RuntimeError):
    """An error that is none of memory."""


def step_within(n_slots, error):
    """A step that fails with more slots, as where memory does not suffice."""

    def step(cfg, *args):
        if cfg.slots > n_slots:
            raise error
        return evaluate_step(cfg, *args)

    return step


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    ],
)
def test_slots_are_halved_until_the_search_fits(error):
    """Once for all later calls; scores do not depend on the number of slots (1e-5, as where they are set)."""
    task, _, params, atoms = untrained(max_height=2)
    cfg = replace(search("success", max_height=2), slots=8, rows_per_step=64)
    halved, step = [], step_within(2, error)
    scorer = PolicyScore(cfg, task, params, step, on_halved=halved.append)
    expected = PolicyScore(cfg, task, params, evaluate_step)
    for part in (atoms[:20], atoms[20:30]):
        assert_close(score(scorer, part), score(expected, part), rtol=1e-5)
    assert [smaller.slots for smaller in halved] == [4, 2]
    assert [smaller.rows_per_step for smaller in halved] == [32, 16]
    assert [smaller.chunk_size for smaller in halved] == [8, 4]


def test_a_search_that_cannot_be_smaller_and_other_errors_are_raised():
    task, _, params, atoms = untrained(max_height=2)
    cfg = search("success", max_height=2)
    for n_slots, error in (
        (0, torch.OutOfMemoryError("CUDA out of memory")),
        (5, CallTooLargeError("expected less")),
    ):
        scorer = PolicyScore(cfg, task, params, step_within(n_slots, error))
        with pytest.raises(type(error)):
            score(scorer, atoms[:3])


@on_gpu
def test_the_search_is_compiled_as_one_graph_that_equals_it():
    """By Inductor, with all widths, and captured; a graph break would be an error. It takes minutes on a CPU."""
    task, _, params, atoms = untrained(max_height=2)
    cfg = search("success", max_height=2)
    expected = PolicyScore(cfg, task, params, evaluate_step)
    on_cuda = prover_task.build_task(task.dataset, task.cfg, "cuda")
    cuda_params = tree.map(lambda x: x.cuda(), params)
    step = scoring.make_search_step("cuda", compiled=True)
    scoring.compile_search_step(cfg, on_cuda, cuda_params, atoms[:9], step)
    got = PolicyScore(cfg, on_cuda, cuda_params, step)
    both = score(got, atoms[:40]), score(expected, atoms[:40])
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)
    assert scoring.graph_fallback_notes(step) == []


# -- what a policy ranks by


def family(**fields):
    """A task, and a policy with preferences of its own."""
    fields |= {"max_height": 1, "hard_negative_fraction": 0.0}
    task = small_task("family_tree:120:3", **fields)
    cfg, params = untrained_policy(task)
    return task, cfg, perturbed(params)


@pytest.mark.parametrize("name", ["family_tree:120:3", "countries_s1"])
def test_an_untrained_policy_ranks_by_best_proof_as_max_confidence_does(name):
    """Height 1. Candidates of one query are ordered alike: no pair is strictly one way here and the other there."""
    task = small_task(name, max_height=1, hard_negative_fraction=0.0)
    cfg, params = untrained_policy(task)
    how = search_config(task, cfg, "best-proof", **SIZES)
    scores = PolicyScore(how, task, params, None), parse("max-confidence")
    some = task.dataset.test[:80]
    mine, theirs = (
        ranking.rank_split(task, some, score, RankingProtocol())
        for score in scores
    )
    assert torch.equal(mine.counts.n_better, theirs.counts.n_better)
    assert torch.equal(mine.counts.n_equal, theirs.counts.n_equal)
    assert int(mine.counts.n_better.sum()) + int(mine.counts.n_equal.sum()) > 0


def test_the_rules_that_apply_give_the_best_proof_that_search_finds():
    task, cfg, params = family(fact_selection="policy")
    how = search_config(task, cfg, "best-proof", **SIZES)
    atoms = torch.unique(torch.from_numpy(task.dataset.test[:60]), dim=0)
    score = PolicyScore(how, task, params, None)
    quick = scoring.score_atoms(task, score, atoms, 0)
    world = prover_task.inference_world(task)
    searched = score_candidates(how, world, params, atoms)[0]
    assert_close(quick, log_odds(how, searched))
    assert torch.isfinite(quick).any()


def test_with_the_oracle_success_is_the_sum_over_the_rules_that_derive():
    task, cfg, params = family()
    atoms = torch.unique(torch.from_numpy(task.dataset.test[:40]), dim=0).int()
    world, env = prover_task.training_world(task), cfg.env.cfg
    label = torch.ones(len(atoms), dtype=torch.bool)
    state = prover_env.initial_state(env, world, atoms, label)
    seen = prover_env.observe(env, world, state)
    logits, *_ = cfg.agent.apply(cfg.agent.cfg, world, params, seen)
    policy = torch.softmax(logits, 1)
    success = torch.zeros(len(atoms))
    for s in range(policy.shape[1]):
        keys = torch.zeros((len(atoms), 2), dtype=torch.int64)
        action = torch.full((len(atoms),), s)
        after, _ = prover_env.step_functional(env, world, state, action, keys)
        assert (after.status != RUNNING).all()
        is_proved = after.status == PROVED
        success += torch.where(is_proved, policy[:, s], 0.0)
    how = search_config(task, cfg, "success", **SIZES)
    value = PolicyScore(how, task, params, None)
    want = success.double().logit()
    assert_close(scoring.score_atoms(task, value, atoms, 0), want)
    assert torch.isfinite(success.log()).any()
