"""The weights of evidence that training moved: of rules, of their features, of facts for and against, of the prior.

All weights add to the score of a candidate, which is a logit: those of rules, links and degrees as they are, those of
features and of the prior as factors of what they weigh. Their changes are compared as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core.types import F64, I64
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import format_rule
from funcppo.kg.logic.triple_index import HEAD, SIDE_NAMES
from funcppo.kg.run import validation
from funcppo.kg.run.run import QuestionSetup, Run
from funcppo.kg.scores import aggregation
from funcppo.kg.show.report.tables import (
    LearntWeights,
    MovedRelation,
    MovedWeight,
)

# weights that are listed of a run, those that moved most
MAX_WEIGHTS = 500
SHARE_NAME = "log of the share of groundings"
FEATURE_NAMES = (
    "log-odds of the confidence",
    "log of the support",
    "log of the fan-out",
    "log of the groundings",
    SHARE_NAME,
    "constant",
)
# in place of the share of groundings
WALK_NAME = "log of the probability of a random walk (of the share of groundings where there is none)"


class _Moves(NamedTuple):
    """The weights of a kind that moved."""

    kind: str
    place: I64[np.ndarray, "n d"]  # in their tensor
    label: I64[np.ndarray, "n"]  # of the questions that they count for
    before: F64[np.ndarray, "n"]
    after: F64[np.ndarray, "n"]
    describe: Callable[[list[int]], str]  # says what a place weighs


def learnt_weights(run: Run) -> LearntWeights | None:
    """The weights that differ between the untrained policy and the trained one; None where a run searches proofs."""
    setup = run.questions
    if setup is None:
        return None
    untrained, *_, trained = validation.policies(run).values()
    moves = list(
        _iter_moves(run.task.dataset, setup, untrained.score, trained.score)
    )

    # The largest changes of all kinds together.
    change = np.concatenate([np.abs(m.after - m.before) for m in moves])
    largest = np.argsort(-change, kind="stable")[:MAX_WEIGHTS]
    start = np.cumsum([0, *(len(m.label) for m in moves)])
    kind = np.searchsorted(start, largest, side="right") - 1
    return LearntWeights(
        n_moved=len(change),
        weights=tuple(
            _weight(run.task.dataset, moves[k], int(i - start[k]))
            for i, k in zip(largest, kind)
        ),
        relations=_by_relation(
            run.task.dataset,
            np.concatenate([m.label for m in moves]) // 2,
            change,
        ),
    )


def _weight(dataset: Dataset, moves: _Moves, i: int) -> MovedWeight:
    """One of the weights of a kind."""
    label = int(moves.label[i])
    return MovedWeight(
        kind=moves.kind,
        evidence=moves.describe(moves.place[i].tolist()),
        relation=_relation_name(dataset, label // 2),
        side=_side_name(label),
        before=float(moves.before[i]),
        after=float(moves.after[i]),
    )


def _by_relation(
    dataset: Dataset, predicate: I64[np.ndarray, "n"], change: np.ndarray
) -> tuple[MovedRelation, ...]:
    """How far the weights of each relation moved together, the farthest first."""
    squares = np.bincount(predicate, weights=change**2)
    counts = np.bincount(predicate)
    order = np.argsort(-squares, kind="stable")
    return tuple(
        MovedRelation(
            _relation_name(dataset, int(p)),
            int(counts[p]),
            float(np.sqrt(squares[p])),
        )
        for p in order
        if counts[p]
    )


def _iter_moves(
    dataset: Dataset,
    setup: QuestionSetup,
    before: aggregation.Params,
    after: aggregation.Params,
) -> Iterator[_Moves]:
    """Yield the weights that moved, by kind."""
    head = torch.from_numpy(np.ascontiguousarray(dataset.rules[:, 0, 0])).long()
    rule_label = 2 * head + torch.arange(2)[:, None]
    described = _describe_places(dataset, setup)
    for name, (kind, describe) in described.items():
        new: Tensor = getattr(after, name).double().cpu()
        old: Tensor = getattr(before, name).double().cpu()
        place = (new != old).nonzero()
        at = place.unbind(1)
        # Weights of pairs have the label of the question last, all others first.
        label = at[-1] if name in ("link_weight", "degree_weight") else at[0]
        if name == "rule_weight":
            label = rule_label[at]
        yield _Moves(
            kind=kind,
            place=place.numpy(),
            label=label.numpy(),
            before=old[at].numpy(),
            after=new[at].numpy(),
            describe=describe,
        )


def _describe_places(
    dataset: Dataset, setup: QuestionSetup
) -> dict[str, tuple[str, Callable[[list[int]], str]]]:
    """The kind of each tensor of weights, and what says which evidence one of them weighs."""
    shape = setup.aggregation.shape.tolist()
    share_name = SHARE_NAME
    if setup.policy.aggregation.uses_walks:
        share_name = WALK_NAME
    names = [share_name if n == SHARE_NAME else n for n in FEATURE_NAMES]

    def link(label: int) -> str:
        return f"{_relation_name(dataset, label // 2)} with the candidate as {_side_name(label)}"

    def feature(place: list[int]) -> str:
        rule = dataset.rules[shape.index(place[1])]
        n_atoms = int((rule[:, 0] > 0).sum())
        terms = rule[:, 1:]
        n_constants = int(((terms > 0) & (terms <= dataset.n_constants)).sum())
        atoms, constants = (
            _plural(n_atoms, "atom"),
            _plural(n_constants, "constant"),
        )
        return f"{names[place[2]]}, rules of {atoms} and {constants}"

    def degree(place: list[int]) -> str:
        label, bucket = divmod(place[0], aggregation.N_BUCKETS)
        return f"{_count_text(bucket, 'fact')} of {link(label)}"

    return {
        "rule_weight": (
            "rule",
            lambda at: format_rule(dataset, dataset.rules[at[1]]),
        ),
        "feature_weight": ("feature of rules", feature),
        "own_degree_weight": (
            "known answers",
            lambda at: f"it is {_count_text(at[1], 'known answer')}",
        ),
        "linked_weight": ("linked", lambda _: "some fact links it"),
        "link_weight": ("link", lambda at: link(at[0])),
        "degree_weight": ("degree", degree),
        "prior_weight": ("prior", lambda _: "prior by link embeddings"),
        "network_prior_weight": (
            "prior",
            lambda _: "prior by a Bellman-Ford network",
        ),
    }


def _count_text(bucket: int, noun: str) -> str:
    """The degrees of a bucket, of what the noun names."""
    edges = (0, *aggregation.DEGREE_BUCKETS)
    if bucket == len(edges) - 1:
        return f"{edges[bucket]} or more {noun}s"
    low, high = edges[bucket], edges[bucket + 1] - 1
    return _plural(low, noun) if low == high else f"{low} to {high} {noun}s"


def _plural(n: int, noun: str) -> str:
    """A number of things."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _relation_name(dataset: Dataset, predicate: int) -> str:
    return dataset.predicates[predicate - 1]


def _side_name(label: int) -> str:
    return SIDE_NAMES[HEAD + label % 2]
