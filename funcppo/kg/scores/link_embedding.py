"""Link embeddings: how likely a link is by vectors of its entities and its relation, a prior of what rules derive.

ComplEx scores an answer to a question by complex vectors of the entity given, of the answer, and of the question's
label (see `evidence`), so that a relation has a vector for each of its sides:

    score(label, given, answer) = Re sum_k given_k label_k conj(answer_k)

Several models are trained at once. The facts are divided into folds: model m has not seen those of fold m, and the last
model has seen all. The prior of a question that leaves out a fact is that of the model which has not seen it, so that
embeddings which know their training facts by heart are not trusted more than they deserve (cross-fitting).

Source: Trouillon et al. 2016, arXiv:1606.06357; the softmax over all entities and the penalty are those of Lacroix et
al. 2018, arXiv:1806.07297.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from funcppo import optim
from funcppo.config import AdamConfig
from funcppo.core import random, tree
from funcppo.core.types import F32, F64, I64
from funcppo.kg.config import EmbeddingConfig
from funcppo.kg.logic.derive import LeftOut, Questions
from funcppo.kg.logic.kb import HEAD
from funcppo.kg.logic.row_index import count_to, row_numbers, select_rows

# questions whose priors are computed at once
PRIOR_ROWS = 1 << 17


class Params(NamedTuple):
    """Complex vectors of entities and labels of all M models, as real and imaginary parts; M may be 0."""

    entity: F32[Tensor, "M C1 2 D"]
    label: F32[Tensor, "M B 2 D"]


class Links(NamedTuple):
    """Questions with one answer each and the fold of their fact."""

    label: I64[Tensor, "n"]
    given: I64[Tensor, "n"]
    answer: I64[Tensor, "n"]
    fold: I64[Tensor, "n"]  # of the fact


class TrainState(NamedTuple):
    """Vectors of the models and the moments of their optimizer."""

    params: Params
    adam: optim.AdamState[Params]


def init(
    cfg: EmbeddingConfig, n_entities: int, n_labels: int, key: I64[Tensor, "2"]
) -> Params:
    """Draw random vectors of a model for each fold, and of the model that sees all facts."""
    n_models = cfg.n_folds + 1
    entity_key, label_key = random.split(key).unbind(-2)

    def draw(key: I64[Tensor, "2"], n: int) -> F32[Tensor, "M n 2 D"]:
        shape = (n_models, n, 2, cfg.rank)
        return 0.1 * random.normal(key, shape)

    return Params(
        entity=draw(entity_key, n_entities + 1),
        label=draw(label_key, n_labels),
    )


def without_models(device: torch.device | str) -> Params:
    """Return parameters of 0 models, by which the prior of every candidate is 0."""
    none = torch.zeros((0, 1, 2, 0), device=device)
    return Params(none, none)


def n_models(params: Params) -> int:
    """Return the number of models; 0 without models."""
    return len(params.entity)


def fold_of(
    questions: Questions, n_folds: int, left_out: LeftOut
) -> I64[Tensor, "Q"]:
    """Return the fold of the fact that each question leaves out, or of its pair of entities if `left_out` is "pair"."""
    is_head = questions.side == HEAD
    answer, given = questions.left_out, questions.entity
    predicate = questions.predicate
    head = torch.where(is_head, answer, given)
    tail = torch.where(is_head, given, answer)
    if left_out == "pair":
        predicate = torch.zeros_like(predicate)
        head, tail = torch.minimum(head, tail), torch.maximum(head, tail)

    words = random.key(0, predicate.device)
    for data in (predicate, head, tail):
        words = random.fold_in(words, data)
    return random.integer_from_key(words, n_folds)


def model_of(
    params: Params, questions: Questions, left_out: LeftOut
) -> I64[Tensor, "Q"]:
    """Return the model that has not seen what each question leaves out; the last model where nothing is left out."""
    n_folds = n_models(params) - 1
    fold = fold_of(questions, n_folds, left_out)
    return torch.where(questions.left_out > 0, fold, n_folds)


def training_links(
    questions: Questions,
    label: I64[Tensor, "n"],
    n_folds: int,
    left_out: LeftOut,
) -> Links:
    """Return the facts that questions leave out as links to learn from."""
    return Links(
        label=label,
        given=questions.entity,
        answer=questions.left_out,
        fold=fold_of(questions, n_folds, left_out),
    )


def prior(
    params: Params,
    model: I64[Tensor, "n"],
    label: I64[Tensor, "n"],
    given: I64[Tensor, "n"],
    answer: I64[Tensor, "n"],
) -> F32[Tensor, "n"]:
    """Compute each answer's score minus the mean over all entities: a log-odds among the answers of a question.

    An entity that training did not have, with a vector of zeros, has the prior 0, and so have all answers about it.
    """
    above = _above_mean(params.entity.flatten(2))
    parts = [above.new_zeros(0)]
    for row in row_numbers(model).split(PRIOR_ROWS):
        m = model[row]
        asked = _multiply(
            params.entity[m, given[row]], params.label[m, label[row]]
        )
        # Sums of a row each: they do not depend on which rows are computed together.
        parts.append((asked * above[m, answer[row]]).sum(-1))
    return torch.cat(parts)


def entity_scores(
    params: Params, label: I64[Tensor, "n"], given: I64[Tensor, "n"]
) -> F64[Tensor, "n E"]:
    """Compute every entity's score as `prior` does, by the model that has seen all facts, in float64."""
    vectors, labels = params.entity[-1].double(), params.label[-1].double()
    asked = _multiply(vectors[given], labels[label])
    return asked @ _above_mean(vectors.flatten(1))[1:].T


def _above_mean(entity: F32[Tensor, "... C1 D"]) -> F32[Tensor, "... C1 D"]:
    """Return the vectors of entities minus their mean; 0 for one that training did not have, whose vector is 0."""
    is_known = (entity != 0).any(-1, keepdim=True)
    n_known = is_known[..., 1:, :].sum(-2, keepdim=True).clamp_min(1)
    mean = entity[..., 1:, :].sum(-2, keepdim=True) / n_known
    return torch.where(is_known, entity - mean, 0.0)


def loss(penalty: float, params: Params, links: Links) -> F32[Tensor, ""]:
    """Compute -log p(answer) among all entities plus the N3 penalty, averaged over links and summed over models.

    Args:
      penalty: factor of the cubed moduli of a link's three vectors.
    """
    given = _look_up(params.entity, links.given)
    label = _look_up(params.label, links.label)
    answer = _look_up(params.entity, links.answer)
    asked = _multiply(given, label)
    logits = asked @ params.entity[:, 1:].flatten(2).transpose(1, 2)
    score = (asked * answer.flatten(2)).sum(-1)
    log_p = score - torch.logsumexp(logits, -1)

    cubes = sum(_cubed_modulus(x) for x in (given, label, answer))
    model = count_to(n_models(params), links.fold)
    is_seen = (links.fold != model[:, None]).float()
    count = is_seen.sum(1).clamp_min(1.0)
    return (((penalty * cubes - log_p) * is_seen).sum(1) / count).sum()


def train_step(
    cfg: EmbeddingConfig,
    links: Links,
    rows: I64[Tensor, "b"],
    learning_rate: F32[Tensor, ""],
    state: TrainState,
) -> TrainState:
    """Take a step of Adam down the loss of some of the links; nothing of it waits for the host."""
    batch = select_rows(links, rows)
    gradient, _ = tree.grad_and_value(
        lambda params: loss(cfg.penalty, params, batch), state.params
    )
    params, adam = optim.update(
        AdamConfig(), gradient, state.adam, state.params, learning_rate
    )
    return TrainState(params, adam)


def _look_up(
    table: F32[Tensor, "M N 2 D"], index: I64[Tensor, "n"]
) -> F32[Tensor, "M n 2 D"]:
    """Return the rows of each model's table; the gradient of `embedding` is summed faster than that of an index."""
    n_tables, n_rows, *shape = table.shape
    shift = n_rows * count_to(n_tables, index)
    rows = embedding(
        shift[:, None] + index, table.reshape(n_tables * n_rows, -1)
    )
    return rows.view(n_tables, -1, *shape)


def _multiply(
    x: F32[Tensor, "... 2 D"], y: F32[Tensor, "... 2 D"]
) -> F32[Tensor, "... 2D"]:
    """Return the complex product, real parts first."""
    (a, b), (c, d) = x.unbind(-2), y.unbind(-2)
    return torch.cat([a * c - b * d, a * d + b * c], -1)


def _cubed_modulus(x: F32[Tensor, "... 2 D"]) -> F32[Tensor, "..."]:
    """Return the sum of the cubed moduli of complex numbers."""
    # The root of a modulus has no gradient at 0.
    return ((x * x).sum(-2) + 1e-12).pow(1.5).sum(-1)
