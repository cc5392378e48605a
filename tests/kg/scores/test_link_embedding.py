"""ComplEx by hand and by complex numbers, folds that their model has not seen, and a pattern that it learns."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad

from funcppo import optim
from funcppo.core import random, tree
from funcppo.kg.config import EmbeddingConfig
from funcppo.kg.logic.kb import TAIL
from funcppo.kg.scores import evidence, link_embedding
from funcppo.kg.scores.link_embedding import Links, Params, TrainState


def random_params(n_folds, n_constants, n_labels, rank, seed=0):
    cfg = EmbeddingConfig(rank=rank, n_folds=n_folds)
    key = random.key(seed)
    return link_embedding.init(cfg, n_constants, n_labels, key)


def random_links(n, n_folds, n_constants, n_labels, seed=0):
    keys = random.split(random.key(seed), 4)
    bounds = (n_labels, n_constants, n_constants, n_folds)
    columns = [
        random.integer_from_key(random.split(key, n), bound)
        for key, bound in zip(keys, bounds)
    ]
    return Links(columns[0], columns[1] + 1, columns[2] + 1, columns[3])


def facts_of(pairs):
    return torch.tensor([(1, head, tail) for head, tail in pairs])


def links_of(facts, n_folds):
    asked = evidence.training_questions(facts)
    label = evidence.make_label(asked.predicate, asked.side)
    return link_embedding.training_links(asked, label, n_folds, "fact")


def test_a_prior_worked_by_hand():
    # entities 1: 1 + 2i, 2: i, 3: 2; label 0: 3 - i
    entity = torch.tensor([[[9.0], [9.0]], [[1], [2]], [[0], [1]], [[2], [0]]])
    label = torch.tensor([[[3.0], [-1.0]]])
    params = Params(entity[None], label[None])
    zero, one = torch.zeros(3, dtype=torch.int64), torch.ones(3).long()
    answer = torch.tensor([1, 2, 3])
    got = link_embedding.prior(params, zero, zero, one, answer)
    # (1 + 2i)(3 - i) = 5 + 5i; times the conjugates: 15, 5, 10, whose mean is 10
    assert got.tolist() == [5.0, -5.0, 0.0]


@given(
    n=st.integers(1, 9),
    n_folds=st.integers(1, 3),
    n_constants=st.integers(1, 6),
    rank=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_the_loss_is_by_complex_numbers(n, n_folds, n_constants, rank, seed):
    params = random_params(n_folds, n_constants, 4, rank, seed)
    params = Params(*(3.0 * x.double() for x in params))
    links = random_links(n, n_folds, n_constants, 4, seed)
    leaves = [x.clone().requires_grad_() for x in params]
    entity, label = (torch.complex(x[:, :, 0], x[:, :, 1]) for x in leaves)

    expected = torch.zeros((), dtype=torch.float64)
    for model in range(n_folds + 1):
        terms = []
        for i in range(n):
            if links.fold[i] == model:
                continue
            vectors = (
                entity[model, links.given[i]],
                label[model, links.label[i]],
                entity[model, links.answer[i]],
            )
            asked = vectors[0] * vectors[1]
            scores = (asked * entity[model, 1:].conj()).sum(-1).real
            log_p = torch.log_softmax(scores, 0)[links.answer[i] - 1]
            penalty = sum((v.abs() ** 3).sum() for v in vectors)
            terms.append(0.1 * penalty - log_p)
        if terms:
            expected = expected + torch.stack(terms).mean()

    value = link_embedding.loss(0.1, params, links)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-9, atol=1e-9)
    if not expected.requires_grad:
        return
    expected.backward()
    gradient = grad(link_embedding.loss, argnums=1)(0.1, params, links)
    for got, leaf in zip(gradient, leaves):
        torch.testing.assert_close(got, leaf.grad, rtol=1e-7, atol=1e-7)


def take_step(penalty, links, rate, state):
    """A step on all links."""
    cfg = EmbeddingConfig(penalty=penalty)
    rows = torch.arange(len(links.label))
    return link_embedding.train_step(
        cfg, links, rows, torch.tensor(rate), state
    )


def test_a_step_is_one_on_the_links_of_its_rows():
    """Of two steps with the same shapes a CUDA graph replays the first, so that rows and rate are tensors."""
    links = random_links(20, 2, 8, 4)
    params = random_params(2, 8, 4, 2)
    state = TrainState(params, optim.init(params))
    rows = torch.tensor([3, 1, 7, 12])
    cfg, rate = EmbeddingConfig(penalty=0.01), torch.tensor(0.1)
    got = link_embedding.train_step(cfg, links, rows, rate, state)
    some = Links(*(column[rows] for column in links))
    expected = take_step(0.01, some, 0.1, state)
    for ours, theirs in zip(got.params, expected.params, strict=True):
        assert torch.equal(ours, theirs)
    with torch.device("meta"):  # none of its values are read by the host
        args = tree.map(lambda x: x.to("meta"), (links, rows, rate, state))
        link_embedding.train_step(cfg, *args)


def test_a_model_never_sees_the_facts_of_its_fold():
    n_folds = 3
    params = random_params(n_folds, 8, 4, 2)
    links = random_links(20, n_folds, 8, 4)
    links = links._replace(fold=torch.full_like(links.fold, 1))
    state = TrainState(params, optim.init(params))
    after = take_step(0.01, links, 0.1, state).params
    for before, moved in zip(params, after):
        assert torch.equal(before[1], moved[1])
        for model in (0, 2, 3):
            assert not torch.equal(before[model], moved[model])


@pytest.mark.parametrize("left_out", ["fact", "pair"])
def test_the_prior_of_a_question_is_of_the_model_without_it(left_out):
    n_folds = 4
    facts = facts_of([(i, j) for i in range(1, 31) for j in range(1, 31)])
    asked = evidence.training_questions(facts)
    params = random_params(n_folds, 30, 4, 1)
    model = link_embedding.model_of(params, asked, left_out)
    label = evidence.make_label(asked.predicate, asked.side)
    links = link_embedding.training_links(asked, label, n_folds, left_out)
    assert torch.equal(model, links.fold)

    # both questions of a fact are in one fold, and the folds are of one size
    as_head, as_tail = model.chunk(2)
    assert torch.equal(as_head, as_tail)
    share = torch.bincount(as_head, minlength=n_folds) / len(facts)
    assert (share - 1 / n_folds).abs().max() < 0.05
    by_pair = as_head.view(30, 30)
    assert torch.equal(by_pair, by_pair.T) == (left_out == "pair")

    nothing = torch.zeros_like(asked.left_out)
    open_ones = asked._replace(left_out=nothing)
    models = link_embedding.model_of(params, open_ones, left_out)
    assert (models == n_folds).all()


def test_a_symmetric_relation_is_learnt():
    """Half of the pairs are known in one direction alone; which is likelier, the other direction or any entity?"""
    pairs = [(2 * i + 1, 2 * i + 2) for i in range(20)]
    known = [(b, a) for a, b in pairs[:10]] + pairs
    links = links_of(facts_of(known), n_folds=1)
    # No fact is left out of any model, so the last one sees each.
    links = links._replace(fold=torch.full_like(links.fold, 5))
    params = random_params(1, 40, 4, 8)
    state = TrainState(params, optim.init(params))
    for _ in range(150):
        state = take_step(0.02, links, 0.05, state)

    entities = torch.arange(1, 41)
    ranks = []
    for a, b in pairs[10:]:
        same = torch.ones_like(entities)
        label = evidence.make_label(same, TAIL)
        asked = same, label, b * same, entities
        priors = link_embedding.prior(state.params, *asked)
        ranks.append(int((priors > priors[a - 1]).sum()) + 1)
    # a random order has a mean rank of 20
    assert sum(ranks) / len(ranks) < 3
