"""Priors by Bellman-Ford networks: what a question leaves out, and that those beside it do not matter."""

from __future__ import annotations

import pytest
import torch

from funcppo.core import random, tree
from funcppo.kg.logic import row_index
from funcppo.kg.logic.derive import Questions, make_label
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.scores import bellman_ford, evidence, network_prior
from funcppo.kg.scores.question_config import BellmanFordConfig

N_ENTITIES, N_LABELS = 9, 6


def random_facts(n=24, seed=0):
    """Distinct facts of two relations."""
    generator = torch.Generator().manual_seed(seed)
    high = torch.tensor([2, N_ENTITIES, N_ENTITIES])
    drawn = torch.rand((3 * n, 3), generator=generator) * high
    return torch.unique(drawn.long() + 1, dim=0)[:n]


def random_prior(width=8):
    """A network with random weights, and the facts that it reads."""
    cfg = BellmanFordConfig(width=width, n_layers=3)
    sizes = network_prior.network_config(cfg, N_ENTITIES, N_LABELS)
    params = bellman_ford.init(sizes, random.key(0))
    return network_prior.make_prior(params, random_facts(), N_ENTITIES)


def ask(n_each=4):
    """Both questions of each fact, two without a known answer, and some candidates of each question."""
    of_facts = evidence.training_questions(random_facts())
    others = Questions(
        predicate=torch.tensor([1, 2]),
        side=torch.tensor([HEAD, TAIL]),
        entity=torch.tensor([3, 7]),
        left_out=torch.tensor([0, 0]),
    )
    questions = Questions(*(torch.cat(x) for x in zip(of_facts, others)))
    n = len(questions.entity)
    # Of one question there is no candidate.
    count = torch.arange(n) % (n_each + 1)
    entity = 1 + torch.arange(int(count.sum())) * 5 % N_ENTITIES
    return questions, row_index.offsets(count), entity


@pytest.mark.parametrize("left_out", ["fact", "pair"])
def test_a_prior_is_the_logit_above_the_mean_without_what_is_left_out(
    left_out,
):
    prior = random_prior()
    questions, offsets, entity = ask()
    values = network_prior.prior(prior, questions, left_out, offsets, entity)
    label = make_label(questions.predicate, questions.side)
    facts = random_facts()
    for i in range(len(label)):
        known = evidence.training_questions(facts)
        answer, given = questions.left_out[i], questions.entity[i]
        is_out = (known.left_out == answer) & (known.entity == given)
        if left_out == "fact":
            is_out = is_out & (known.predicate == questions.predicate[i])
            is_out = is_out & (known.side == questions.side[i])
        else:
            swapped = (known.left_out == given) & (known.entity == answer)
            is_out = is_out | swapped
        is_out = is_out.view(2, -1).any(0)
        rest = bellman_ford.build_graph(prior.cfg, facts[~is_out], "fact")

        weights = tree.map(lambda x: x.double(), prior.params)
        (logits,) = bellman_ford.apply(
            prior.cfg, weights, rest, label[[i]], given[None]
        )
        some = slice(*offsets[i : i + 2].tolist())
        expected = (logits - logits.mean())[entity[some] - 1]
        unit = network_prior.PRIOR_UNIT
        assert ((values[some] - expected).abs() <= 0.501 * unit).all()
        assert torch.equal((values[some] / unit).round() * unit, values[some])


def test_the_questions_beside_it_change_no_bit_of_a_prior(monkeypatch):
    prior = random_prior(width=16)
    questions, offsets, entity = ask()
    together = network_prior.prior(prior, questions, "fact", offsets, entity)
    assert len(together) and together.abs().max() > 0.1
    monkeypatch.setattr(network_prior, "MAX_BYTES_AT_ONCE", 1)
    assert network_prior.n_at_once(prior.cfg, prior.graph) == 1
    one_by_one = network_prior.prior(prior, questions, "fact", offsets, entity)
    assert torch.equal(together, one_by_one)

    # a part of the questions, in another order
    rows = torch.tensor([7, 3, 49, 20])
    counts = offsets.diff()[rows]
    candidates = [entity[offsets[i] : offsets[i + 1]] for i in rows]
    some = network_prior.prior(
        prior,
        Questions(*(column[rows] for column in questions)),
        "fact",
        row_index.offsets(counts),
        torch.cat(candidates),
    )
    expected = [together[offsets[i] : offsets[i + 1]] for i in rows]
    assert torch.equal(some, torch.cat(expected))


def test_questions_that_are_not_asked_have_no_prior():
    prior = random_prior()
    questions, offsets, entity = ask()
    every = network_prior.prior(prior, questions, "fact", offsets, entity)
    is_asked = torch.arange(len(questions.entity)) % 3 > 0
    some = network_prior.prior(
        prior, questions, "fact", offsets, entity, is_asked
    )
    has_prior = is_asked.repeat_interleave(offsets.diff())
    assert torch.equal(some, torch.where(has_prior, every, 0.0))
    assert some.any() and (every[~has_prior] != 0).any()


def test_without_candidates_there_is_no_prior():
    prior = random_prior()
    questions, offsets, entity = ask()
    none = network_prior.prior(
        prior, questions, "fact", torch.zeros_like(offsets), entity[:0]
    )
    assert len(none) == 0


def test_no_network_has_the_dimensions_of_a_network():
    none = network_prior.without_network("cpu")
    some = random_prior().params
    assert [x.dim() for x in none] == [x.dim() for x in some]
    assert not any(x.numel() for x in none)
    assert network_prior.is_network(some)
    assert not network_prior.is_network(none)
