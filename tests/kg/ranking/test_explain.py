"""Proofs of single atoms; the parts of a score by evidence add up, and their counts are those of a recount."""

import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from funcppo.core import random, tree
from funcppo.kg import config
from funcppo.kg.graph import loaders
from funcppo.kg.logic import fixpoint
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.ranking import explain, ranking, scoring
from funcppo.kg.ranking.evaluate import Evaluator
from funcppo.kg.ranking.explain import explain_answer
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.ranking.recount_check import RecountCheck
from funcppo.kg.scores import evidence, learned, link_embedding, path_network
from funcppo.kg.scores.learned import LearnedScore, Weights
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.beam import score_by_rules, score_candidates
from funcppo.kg.search.task import build_task
from tests.kg.ranking.scores import FunctionScore
from tests.kg.run.runs import random_graph
from tests.kg.search.small_tasks import perturbed, small_task, untrained_policy


@cache
def setup(**fields):
    """A task on a small family, and a policy with preferences of its own."""
    fields |= {"max_depth": 4, "hard_negative_fraction": 0.0}
    task = small_task("family_tree:30:0", **fields)
    cfg, params = untrained_policy(task)
    return task, cfg, perturbed(params)


def derived_atoms(task, n):
    """Some atoms that are no facts, of every height."""
    atoms = task.least_model.atoms[task.least_model.height > 0]
    return atoms[:: max(1, len(atoms) // n)]


# -- a worked example


def test_the_smallest_proof_is_worked_by_hand():
    """far(a, c) takes two steps by way of near; the facts are its leaves."""
    train = [x.split() for x in ("a hop b", "b hop c", "c near a", "c far a")]
    rules = "near(X, Y) :- hop(X, Y)\nfar(X, Y) :- near(X, Z), hop(Z, Y)"
    dataset = loaders.from_triples(train, rules=rules)
    task = build_task(dataset, config.ProverTaskConfig(max_height=2))
    number = lambda names, name: names.index(name) + 1
    hop, near, far = (
        number(dataset.predicates, x) for x in ("hop", "near", "far")
    )
    a, b, c = (number(dataset.entities, name) for name in "abc")
    # the last two are a fact and not derivable
    atoms = torch.tensor([[far, a, c], [hop, a, b], [far, a, b]])
    found, *others = explain.smallest_proofs(task, atoms)
    assert found is not None and others == [None, None]
    nodes = {}
    for node in found.nodes:
        nodes[node.goal] = (
            node.rule,
            [found.nodes[i].goal for i in node.children],
        )
    assert found.nodes[0].goal == (far, a, c)
    assert nodes == {
        (far, a, c): (1, [(near, a, b), (hop, b, c)]),
        (near, a, b): (0, [(hop, a, b)]),
        (hop, a, b): (None, []),
        (hop, b, c): (None, []),
    }


# -- equality with the scores


def test_the_proof_by_rules_has_the_probability_of_the_best_rule():
    task, cfg, params = setup(max_height=1)
    assert task.fact_selection == "oracle"
    atoms = derived_atoms(task, 12)
    sizes = {"slots": 1, "beam": 1, "rows_per_step": 1, "chunk_size": 1}
    search = scoring.search_config(task, cfg, "best-proof", **sizes)
    world = prover_task.inference_world(task)
    score = score_by_rules(search, world, params, atoms.to(torch.int32))
    for atom, probability in zip(atoms, score.sigmoid().tolist()):
        proof = explain.most_probable_proof(task, cfg, params, atom)
        assert proof is not None
        root, *others = proof.nodes
        assert root.probability == pytest.approx(probability, rel=1e-5)
        assert all(node.probability is None for node in others)


def test_the_proof_by_search_has_the_probability_of_the_best_path():
    task, cfg, params = setup(max_height=2)
    assert task.fact_selection == "policy"
    atoms = derived_atoms(task, 8)
    sizes = {"slots": 1, "beam": 256, "rows_per_step": 256, "chunk_size": 8}
    search = scoring.search_config(task, cfg, "success", **sizes)
    world = prover_task.inference_world(task)
    result = score_candidates(
        search, world, params, atoms.to(torch.int32)
    ).results
    found = [
        explain.most_probable_proof(task, cfg, params, atom) for atom in atoms
    ]
    assert any(found)
    columns = result.best_log_prob.tolist(), result.proof_length.tolist()
    for proof, log_prob, n_choices in zip(found, *columns):
        assert (proof is not None) == (n_choices > 0)
        if proof is not None:
            chosen = [node.probability for node in proof.nodes]
            product = math.prod(p for p in chosen if p is not None)
            assert product == pytest.approx(math.exp(log_prob), rel=1e-4)


@pytest.mark.parametrize("object_identity", [False, True])
def test_smallest_proofs_are_those_of_a_model(object_identity):
    """Facts, derived atoms and others."""
    dataset = loaders.load("family_tree:30:0")
    options = {"smoothing": 5.0, "object_identity": object_identity}
    settings = config.ProverTaskConfig(max_height=1, **options)
    held = build_task(dataset, settings)
    by_query = build_task(dataset, settings, with_derivations=False)
    assert by_query.answers_plan is not None and held.answers_plan is None

    derived = derived_atoms(held, 40).long()
    others = torch.tensor([[1, i, i] for i in range(1, 9)])
    facts = held.kb.facts[::7].long()
    atoms = torch.cat([facts, derived.flip(0), others, derived[:2]])
    proofs = explain.smallest_proofs(by_query, atoms)
    assert proofs == explain.smallest_proofs(held, atoms)
    assert all(proofs[len(facts) : len(facts) + len(derived)])
    assert not all(proofs) and any(proofs[: len(facts)])


# -- limits


@pytest.mark.parametrize("max_height", [1, 2])
def test_an_atom_that_is_not_derivable_has_no_proof(max_height):
    task, cfg, params = setup(max_height=max_height)
    n = task.dataset.n_constants
    atoms = torch.tensor([[1, i, i] for i in range(1, n + 1)])
    refuted = atoms[fixpoint.atom_height(task.least_model, atoms) < 0]
    assert len(refuted)
    assert explain.most_probable_proof(task, cfg, params, refuted[0]) is None
    assert explain.smallest_proofs(task, refuted[:1]) == [None]


# -- scores of evidence


SECONDS = 3600.0  # never cut by the clock


@pytest.fixture(scope="module", params=["fact", "pair"])
def subject(request):
    """A task and random weights of all evidence; identity of objects with "pair"."""
    identity = request.param == "pair"
    settings = config.ProverTaskConfig(
        max_height=1, smoothing=5.0, object_identity=identity
    )
    task = build_task(random_graph(), settings)
    facts = evidence.index_facts(task.kb, task.sizes)
    world = learned.make_world(task.kb, task.sizes)
    cfg = learned.AggregationConfig(
        sizes=task.sizes,
        n_shapes=learned.n_shapes(world),
        uses_embedding=True,
        uses_bellman_ford=True,
    )
    shape = task.sizes.n_constants, evidence.n_labels(task.sizes)
    embedding = config.EmbeddingConfig(rank=3, n_folds=2)
    embedding = link_embedding.init(embedding, *shape, random.key(2))
    network = config.BellmanFordConfig(width=4, n_layers=2)
    network = path_network.network_config(network, *shape)
    waves = lambda x: torch.sin(torch.arange(x.numel())).view_as(x)
    network = tree.map(waves, path_network.init(network, random.key(0)))
    links = evidence.binary_facts(task.kb)
    network = path_network.make_network(network, links, task.sizes.n_constants)
    facts = facts._replace(embedding=embedding, network=network)
    params = learned.init(cfg, random.key(0))
    generator = torch.Generator().manual_seed(1)
    noisy = lambda x: x + 0.3 * torch.randn(x.shape, generator=generator)
    params = tree.map(noisy, params)
    weights = Weights(facts, cfg, world, params, request.param, 5.0)
    return task, weights


def explain_by(task, weights, atom, side):
    score = LearnedScore("evidence", weights)
    return explain_answer(task, score, atom, side)


def explanations(subject):
    task, weights = subject
    for split in (task.dataset.valid, task.dataset.train[:20]):
        for atom in torch.from_numpy(split):
            for side in (HEAD, TAIL):
                found = explain_by(task, weights, atom, side)
                if found is not None:
                    yield atom, side, found


def change_terms(found, kind, change):
    """The explanation with other details of the terms of a kind."""
    if found is None:
        return None
    terms = [
        term._replace(detail=change(term.detail)) if term.kind == kind else term
        for term in found.terms
    ]
    return found._replace(terms=tuple(terms))


def test_an_entity_without_a_proof_has_all_terms_but_that_of_rules(subject):
    """Checked where a rule derives it: the score less the rules' term, more the setting; and in a ranking."""
    task, weights = subject
    cfg = replace(weights.cfg, no_proof=-2.5)
    score = LearnedScore("evidence", weights._replace(cfg=cfg))
    assert score.ranks_all
    atoms = torch.from_numpy(task.dataset.valid).long()
    for side in (HEAD, TAIL):
        parts = scoring.query_evidence(task, weights.facts, atoms, side)
        for questions, part in parts:
            found = score.log_odds_of_all(questions)
            assert found.shape == (len(part.label), task.sizes.n_constants)
            batch = learned.whole(part)
            whole, of_rules = (
                learned.score(*weights[1:4], batch, kinds).double()
                for kinds in (None, ["rules"])
            )
            # A question's own known answers have a link that leaves them out.
            got, want = (
                found[part.question, part.entity - 1],
                whole - of_rules - 2.5,
            )
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    split, every = task.dataset.valid, RankingProtocol(score_unprovable=True)
    ranked = ranking.rank_split(task, split, score, RankingProtocol())
    expected = ranking.rank_split(task, split, score, every)
    for ours, theirs in zip(ranked.counts, expected.counts, strict=True):
        assert torch.equal(ours, theirs)
    few = ranking.rank_split(task, split, score, RankingProtocol(n_negatives=5))
    assert len(few.listed_score) == int(few.counts.n_candidates.sum())
    assert not LearnedScore("evidence", weights).ranks_all


def test_the_terms_add_up_to_the_score(subject):
    n_facts = 0
    for atom, side, e in explanations(subject):
        total = sum(term.log_odds for term in e.terms)
        assert total == pytest.approx(e.score, abs=1e-5)
        kinds = {term.kind for term in e.terms}
        assert kinds >= {"rules", "own-degree", "embedding", "bellman-ford"}
        assert ("linked" in kinds) == ("fact" in kinds)
        assert sum(rule.share for rule in e.rules) == pytest.approx(1.0)
        assert e.candidate == atom[side] and e.predicate == atom[0]
        assert 1 <= e.place <= e.n_candidates and 0 < e.probability <= 1
        n_facts += e.is_fact
    assert n_facts > 0


def wider(rules):
    return (rules[0]._replace(fan_out=1000), *rules[1:])


@pytest.mark.parametrize(
    "kind, change, text",
    [("rules", wider, "1000, recounted"), ("own-degree", lambda n: n + 1, "known answers")],
)  # fmt: skip
def test_the_recount_reports_what_does_not_agree(subject, kind, change, text):
    task, weights = subject
    compared = compare(task, weights)
    assert compared.n_compared == compared.n_total > 4
    assert compared.disagreements == ()

    def explain_wrongly(atom, side):
        found = explain_by(task, weights, atom, side)
        return change_terms(found, kind, change)

    wrong = compare(task, weights, explain_wrongly)
    assert text in "\n".join(wrong.disagreements)


def compare(task, weights, explain_one=None):
    protocol = RankingProtocol(sides=(HEAD, TAIL))
    zeros = lambda atoms: torch.zeros(len(atoms), dtype=torch.float64)
    options = {
        "score": FunctionScore(zeros),
        "prove": None,
        "all_scores": False,
    }
    evaluator = Evaluator(task=task, protocol=protocol, **options)
    # Facts of train are left out of their own evidence.
    split = torch.from_numpy(task.dataset.valid).tolist()
    split += task.dataset.train[:5].tolist()
    check = RecountCheck(evaluator)
    ranked = check.rank(torch.tensor(split).numpy(), range(len(split)))
    explain_one = explain_one or partial(explain_by, task, weights)
    bounds = weights.left_out, ranked, SECONDS
    return check.compare_evidence(explain_one, *bounds)


def test_an_atom_that_no_rule_derives_has_no_explanation(subject):
    task, weights = subject
    n = task.sizes.n_constants
    atoms = [(1, x, y) for x in range(1, n + 1) for y in range(1, n + 1)]
    found = [
        explain_by(task, weights, torch.tensor(atom), TAIL)
        for atom in atoms[:: max(1, len(atoms) // 15)]
    ]
    assert None in found and any(found)
