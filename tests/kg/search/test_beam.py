"""The beam search: scores are those of all paths, and depend on neither slots nor chunks; steps by hand."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from funcppo.core import random, tree
from funcppo.kg.logic import derive, resolve
from funcppo.kg.logic import kb as kbase
from funcppo.kg.search import beam as beams
from funcppo.kg.search import env as prover_env
from funcppo.kg.search import network as net
from funcppo.kg.search.beam import SearchConfig, score_candidates
from funcppo.runtime.capture import GraphedStep
from funcppo.runtime.memory import AsyncReadback
from tests.kg.logic.test_resolve import C, P, program, start
from tests.kg.search.small_tasks import perturbed
from tests.learning import assert_trees_equal

assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-5)
LOWEST = torch.finfo(torch.float32).min
SEEDS = st.integers(0, 10_000)
WIDE = dict(chunk_size=48, slots=12)
# shrinking a search takes minutes
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


def setup(seed: int, score: str, max_height: int = 1, **fields):
    """A random program, a policy that prefers nothing in particular, and every ground atom as a candidate."""
    facts, rules, _ = program(seed)
    kb, sizes = kbase.build(facts, rules, n_constants=C, n_predicates=P)
    support, pairs = torch.arange(1.0, 6), torch.full((5,), 7.0)
    kb = kb._replace(support=support, body_pairs=pairs)
    shape = resolve.make_resolve_config(kb, sizes, max_height)
    cfg = net.ProverNetworkConfig(
        sizes=sizes,
        n_variables=shape.max_goals * 2,
        max_height=max_height,
        embed_dim=4,
        hidden_dim=8,
    )
    params = perturbed(net.init(cfg, random.key(seed)))
    sizes_of = dict(
        max_depth=4, slots=6, beam=100, chunk_size=16, rows_per_step=120
    )
    sizes_of |= fields
    agent = net.agent(cfg)
    evaluation = SearchConfig(
        resolve=shape, agent=agent, score=score, **sizes_of
    )
    ids = (torch.arange(1, n + 1, dtype=torch.int32) for n in (P, C, C))
    atoms = torch.cartesian_prod(*ids)
    index = derive.empty_derivability_index(kb, sizes)
    none = kb.facts[:0]
    world = prover_env.World(kb, kb.facts, none, index, none[:, 0])
    return evaluation, world, params, atoms


def with_policy(cfg, apply, **fields):
    agent = dataclasses.replace(cfg.agent, apply=apply)
    return dataclasses.replace(cfg, agent=agent, **fields)


def with_sharper_policy(cfg, factor):
    """The same search with all logits of the policy multiplied by a factor."""

    def apply(*args):
        output = cfg.agent.apply(*args)
        logits = (factor * output.logits).clamp_min(LOWEST)
        return output._replace(logits=logits)

    return with_policy(cfg, apply)


def walk(cfg, world, params, query, visit):
    """`visit(log-probabilities of the path, of its rule choices, proved)` for every complete path of the policy."""
    search = prover_env.ProverEnvConfig(
        resolve=cfg.resolve,
        max_depth=cfg.max_depth,
        reward="proof",
        fact_selection="policy",
        negatives_per_positive=0.0,
        hard_negative_fraction=0.0,
    )
    S = cfg.resolve.max_successors
    label = torch.tensor([True])
    first = prover_env.initial_state(search, world, query[None], label)
    todo = [(first, 0.0, 0.0)]
    while todo:
        state, path, rules = todo.pop()
        status = int(state.status[0])
        if status != prover_env.RUNNING:
            visit(path, rules, status == prover_env.PROVED)
            continue
        obs = prover_env.observe(search, world, state)
        logits = cfg.agent.apply(cfg.agent.cfg, world, params, obs).logits
        logp = torch.log_softmax(logits.double(), -1)[0]
        for action in range(S + 1):
            if obs.action_mask[0, action]:
                chosen = torch.tensor([action]), random.key(0)
                after, _ = prover_env.step_functional(
                    search, world, state, *chosen
                )
                is_rule = action < S and obs.rule[0, action] >= 0
                step = float(logp[action])
                of_rules = rules + (step if is_rule else 0.0)
                todo.append((after, path + step, of_rules))


@pytest.mark.parametrize("score", ["success", "best-proof"])
@pytest.mark.parametrize("n_rules", [1, 2])
def test_a_score_near_1_keeps_its_digits(score, n_rules):
    """p(1, 2) by one or two rules p(X, Y) :- q(X, Y), each exp(20) times as probable as END: log p rounds to 0."""
    shape, world, params, _ = setup(0, score)
    rules = [[[1, C + 1, C + 2], [2, C + 1, C + 2]]] * n_rules
    base = np.array([[2, 1, 2]]), np.array(rules)
    kb, sizes = kbase.build(*base, n_constants=C, n_predicates=P)

    def apply(network_cfg, world, params, observation):
        logits = torch.where(observation.action_mask, 0.0, LOWEST)
        logits[:, -1] = -20.0  # END
        return net.ProverOutput(logits, logits, logits[:, 0])

    steps = resolve.make_resolve_config(kb, sizes, 1)
    cfg = with_policy(shape, apply, resolve=steps)
    index = derive.empty_derivability_index(kb, sizes)
    world = world._replace(kb=kb, derivability_index=index)
    atom = torch.tensor([[1, 1, 2]], dtype=torch.int32)
    result, _, _ = score_candidates(cfg, world, params, atom)
    # of one rule of two: 1 / (2 + exp(-20))
    want = 20 + math.log(n_rules) if score == "success" or n_rules == 1 else 0
    for got in (
        beams.log_odds(cfg, result),
        beams.score_by_rules(cfg, world, params, atom),
    ):
        assert got.tolist() == [pytest.approx(want, abs=1e-5)]


@pytest.mark.parametrize("score", ["success", "best-proof"])
@given(seed=SEEDS)
@settings(max_examples=5, phases=PHASES)
def test_a_score_equals_the_sum_over_all_paths_of_the_policy(score, seed):
    """Tolerance 1e-4 of the log-odds: the grid on which scores are ranked. A sharp policy has scores near 0 and 1."""
    cfg, world, params, atoms = setup(seed, score, max_height=1 + seed % 2)
    cfg = with_sharper_policy(cfg, 1 + 5 * (seed % 3))
    atoms = atoms[:: 1 + seed % 5][:8]
    got, _, _ = score_candidates(cfg, world, params, atoms)
    assert torch.isneginf(got.pruned_log_mass).all()
    log_odds = beams.log_odds(cfg, got)
    for i, atom in enumerate(atoms):
        masses, best = {True: [], False: []}, -math.inf

        def visit(path, rules, proved):
            nonlocal best
            masses[proved].append(math.exp(path))  # noqa: B023
            best = max(best, rules if proved else -math.inf)

        walk(cfg, world, params, atom, visit)
        proved, failed = math.fsum(masses[True]), math.fsum(masses[False])
        assert proved + failed == pytest.approx(1, abs=1e-9)
        success = math.log(proved) if proved else -math.inf
        want = success if score == "success" else best
        assert float(got.log_score[i]) == pytest.approx(want, abs=1e-4)
        rest = failed if score == "success" else -math.expm1(want)
        odds = want - math.log(rest)
        assert float(log_odds[i]) == pytest.approx(odds, abs=1e-4)


@given(SEEDS, st.integers(1, 9), st.integers(7, 60), st.integers(6, 40))
@settings(max_examples=10, phases=PHASES)
def test_scores_do_not_depend_on_sizes_or_order(seed, slots, window, rows):
    cfg, world, params, atoms = setup(
        seed, "success", beam=6, rows_per_step=24, **WIDE
    )
    want, _, _ = score_candidates(cfg, world, params, atoms)
    order = np.random.default_rng(seed).permutation(len(atoms))
    changes = {"slots": slots, "chunk_size": window, "rows_per_step": rows}
    other = dataclasses.replace(cfg, **changes)
    got, _, _ = score_candidates(other, world, params, atoms[order])
    assert_close(got.log_score, want.log_score[order])
    assert torch.equal(got.n_steps, want.n_steps[order])


@pytest.mark.parametrize(
    "device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
)
@given(SEEDS, st.sampled_from(["success", "best-proof"]))
@settings(max_examples=6, phases=PHASES)
def test_scores_are_the_same_graphed_and_read_later(device, seed, score):
    """Three chunks, the last not full, with two policies in turn."""
    cfg, *inputs = setup(seed, score, beam=6, rows_per_step=24)
    world, params, atoms = tree.map(lambda x: x.to(device), tuple(inputs))
    atoms = atoms[: 2 * cfg.chunk_size + 5]
    options = {
        "step": GraphedStep(beams.evaluate_step), "make_readback": AsyncReadback,
    }  # fmt: skip
    for policy in (params, tree.map(lambda x: 0.5 * x, params)):
        arguments = cfg, world, policy, atoms
        want, active, _ = score_candidates(*arguments)
        got, also, _ = score_candidates(*arguments, **options)
        assert_trees_equal(got, want, rtol=0, atol=0)
        assert active == also


@pytest.mark.parametrize("n_steps", range(6))
def test_a_search_on_a_cpu_can_be_ended_after_any_step(n_steps):
    cfg, world, params, atoms = setup(5, "success", beam=6, chunk_size=48)
    steps = []

    def step(*arguments):
        steps.append(None)
        return beams.evaluate_step(*arguments)

    def stop(n_started, n_candidates):
        assert 0 <= n_started <= n_candidates == len(atoms)
        if len(steps) == n_steps:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        score_candidates(cfg, world, params, atoms, step, stop)
    assert len(steps) == n_steps


@given(SEEDS, st.integers(1, 8))
@settings(max_examples=10, phases=PHASES)
def test_a_narrow_beam_bounds_the_score(seed, beam):
    """1e-6 absolute: rounding of float32 sums."""
    cfg, world, params, atoms = setup(seed, "success")
    exact, _, _ = score_candidates(cfg, world, params, atoms)
    cfg = dataclasses.replace(cfg, beam=beam)
    narrow, _, _ = score_candidates(cfg, world, params, atoms)
    low, whole = narrow.log_score.exp(), exact.log_score.exp()
    # What the beam dropped counts as failed.
    total = low + narrow.failed_log_mass.exp()
    torch.testing.assert_close(total, torch.ones_like(total))
    assert (low <= whole + 1e-6).all()
    lost = narrow.pruned_log_mass.exp() + narrow.overflow_log_mass.exp()
    assert (whole <= low + lost + 1e-6).all()


def test_a_trace_replays_to_the_best_proof():
    cfg, world, params, atoms = setup(3, "success")
    got, _, _ = score_candidates(cfg, world, params, atoms)
    proved = torch.isfinite(got.log_score)
    assert proved.any()
    assert ((got.proof_length > 0) == proved).all()
    for i in proved.nonzero().flatten().tolist():
        root = atoms[i][None]
        goals = start(root, cfg.resolve.max_goals)
        for code in got.trace[i, : int(got.proof_length[i])].tolist():
            successors = resolve.resolve(cfg.resolve, world.kb, goals, root)
            by_rule, by_fact = successors.rule[0], successors.fact[0]
            chosen = by_rule == code if code >= 0 else by_fact == -1 - code
            slot = int((chosen & successors.mask[0]).nonzero().item())
            goals = tree.map(lambda x, slot=slot: x[:, slot], successors.goals)
        assert int(goals.atoms[0, 0, 0]) == 0


# -- limits


def started(cfg, world, params, atoms, steps):
    """The search after some steps, one atom in each slot; the table of candidates is not used up."""
    padding = atoms.new_zeros((cfg.chunk_size + 1 - len(atoms), 3))
    chunk = torch.cat([atoms, padding])
    state = beams._refill(cfg, chunk, beams.init_scheduler(cfg, chunk))
    search = state.search
    for _ in range(steps):
        search = beams.extend_beams(cfg, world, params, search)[0]
    return search


@given(SEEDS)
@settings(max_examples=5, phases=PHASES)
def test_a_beam_keeps_the_most_probable_and_counts_the_rest_as_pruned(seed):
    """1e-5: rounding of float32 sums."""
    sizes = dict(beam=1, slots=48, rows_per_step=48, chunk_size=48)
    cfg, *inputs = setup(seed, "success", max_height=2, **sizes)
    narrow = started(cfg, *inputs, steps=1)
    cfg = dataclasses.replace(cfg, beam=50, rows_per_step=2400)
    wide = started(cfg, *inputs, steps=1)
    assert torch.isneginf(wide.result.pruned_log_mass).all()
    assert_close(narrow.log_prob, wide.log_prob.topk(1, dim=1).values)
    mass = lambda search: search.log_prob.logsumexp(1).exp()
    wide_mass, pruned = mass(wide), narrow.result.pruned_log_mass.exp()
    assert_close(mass(narrow) + pruned, wide_mass)
    assert_close(narrow.result.log_score, wide.result.log_score)
    assert (wide_mass + wide.result.log_score.exp() <= 1 + 1e-5).all()
