"""Rules with constants: h(X, c) :- b(X, Z) and h(X, c) :- b(X, d), and the same with either atom the other way round.

An edge from X is a *feature* of X: its label and target for the second shape, its label alone for the first. Which
features occur together is the product of the sparse boolean matrix of entities and features with its transpose,
computed here by a join over the entities, block by block of heads.

Source: Meilicke et al. 2019, "Anytime bottom-up rule learning", section 3 (acyclic rules AC1 and AC2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic import row_index
from funcppo.logic.joins import RowPairs, ragged_arange
from funcppo.mining import paths
from funcppo.mining.paths import BLOCK_ROWS, EdgeIndex
from funcppo.types import F64, I64


class ConstantRules(NamedTuple):
    """Rules with constants, and the facts that they derive from others."""

    head_label: I64[Tensor, "R"]  # label of the head's edge from X
    head_constant: I64[Tensor, "R"]  # its target
    body_label: I64[Tensor, "R"]  # label of the body's edge from X
    body_constant: I64[Tensor, "R"]  # its target; 0 for any
    support: F64[Tensor, "R"]
    # facts among the support that the rule derives from the fact itself alone
    circular_support: F64[Tensor, "R"]
    body_pairs: F64[Tensor, "R"]
    # pairs of a fact and a rule that derives it from others
    fact: I64[Tensor, "n"]
    rule: I64[Tensor, "n"]


class _Features(NamedTuple):
    """Features of entities, grouped by entity."""

    offsets: Tensor  # features of entity e: offsets[e] to offsets[e + 1]
    code: Tensor  # label * n_entity_ids + target
    number: Tensor  # which distinct feature each is
    n_entities: Tensor  # how many entities have each distinct feature


def find_constant_rules(
    edges: EdgeIndex, min_support: int
) -> Iterator[ConstantRules]:
    """Yield the rules that derive `min_support` facts from others, block by block; each rule is in one block."""
    source = torch.repeat_interleave(torch.diff(edges.offsets))
    code = _edge_code(edges)

    # Bodies of both shapes: the label alone, counted once an entity, and label with target.
    is_first = row_index.first_of_run(source * edges.n_labels + edges.label)
    label_code = edges.label[is_first] * edges.n_entity_ids
    label_features = _frequent_features(
        source[is_first], label_code, edges, min_support
    )
    edge_features = _frequent_features(source, code, edges, min_support)

    # Heads: edges whose label and target are frequent, grouped by both.
    is_frequent = _count_values(code).count >= min_support
    head_edges = is_frequent.nonzero().squeeze(1)
    head_edges = head_edges[torch.sort(code[head_edges], stable=True).indices]
    for bodies in (label_features, edge_features):
        n_bodies = (
            bodies.offsets[source[head_edges] + 1]
            - bodies.offsets[source[head_edges]]
        )
        for block in _split_between_groups(
            head_edges, code[head_edges], n_bodies
        ):
            yield _rules_of_block(edges, source, bodies, block, min_support)


def count_pca_pairs(
    edges: EdgeIndex,
    head_label: I64[Tensor, "R"],
    body_label: I64[Tensor, "R"],
    body_constant: I64[Tensor, "R"],
) -> F64[Tensor, "R"]:
    """Count the pairs of each rule whose first argument has some fact of the head's predicate.

    Args:
      head_label, body_label, body_constant: as in `ConstantRules`.
    """
    source = torch.repeat_interleave(torch.diff(edges.offsets))
    is_first = row_index.first_of_run(source * edges.n_labels + edges.label)

    # The entities of every feature, by feature.
    code = torch.cat(
        [_edge_code(edges), edges.label[is_first] * edges.n_entity_ids]
    )
    code, order = torch.sort(code, stable=True)
    entity = torch.cat([source, source[is_first]])[order]
    body_code = body_label * edges.n_entity_ids + body_constant
    start = torch.searchsorted(code, body_code)
    count = torch.searchsorted(code, body_code, right=True) - start

    n_rules = len(head_label)
    total = torch.zeros(n_rules, dtype=torch.float64, device=code.device)
    for rule, position in ragged_arange(start, count) if n_rules else ():
        n_head_edges = paths.outgoing_edges(
            edges, entity[position], head_label[rule]
        ).length
        total = total + torch.bincount(
            rule, (n_head_edges > 0).double(), minlength=n_rules
        )

    # Of h(c, X) the first argument is c, which has a fact wherever one is derived.
    is_forward = head_label % 2 == 0
    return torch.where(is_forward, total, count.double())


def _edge_code(edges: EdgeIndex) -> Tensor:
    """Label and target of each edge in one integer."""
    return edges.label * edges.n_entity_ids + edges.target


def _frequent_features(
    source: Tensor, code: Tensor, edges: EdgeIndex, min_support: int
) -> _Features:
    """The features that enough entities have, in the order of entities."""
    is_frequent = _count_values(code).count >= min_support
    source = source[is_frequent]
    code = code[is_frequent]
    number = _count_values(code).number
    entities = torch.arange(edges.n_entity_ids + 1, device=code.device)
    return _Features(
        torch.searchsorted(source, entities),
        code,
        number,
        torch.bincount(number),
    )


class _ValueCounts(NamedTuple):
    """For each element of a tensor, its value among the distinct ones."""

    number: Tensor  # which distinct value it is
    count: Tensor  # how often that value occurs  # pyright: ignore[reportIncompatibleMethodOverride]


def _count_values(code: Tensor) -> _ValueCounts:
    _, number, count = torch.unique(
        code, return_inverse=True, return_counts=True
    )
    return _ValueCounts(number, count[number])


def _split_between_groups(
    rows: Tensor, group: Tensor, cost: Tensor
) -> Iterator[Tensor]:
    """Yield the rows, cut between groups where their cost adds up to about BLOCK_ROWS."""
    if not len(rows):
        return
    _, size = torch.unique_consecutive(group, return_counts=True)
    group_end = torch.cumsum(size, 0)
    block = torch.cumsum(cost, 0)[group_end - 1] // BLOCK_ROWS
    cut = group_end[:-1][torch.diff(block) > 0]
    yield from torch.tensor_split(rows, cut.cpu())


def _rules_of_block(
    edges: EdgeIndex,
    source: Tensor,
    bodies: _Features,
    head_edges: Tensor,
    min_support: int,
) -> ConstantRules:
    """The rules whose heads are the features of these edges, which are all edges of each of them."""
    row, feature = _join_bodies(bodies, source[head_edges])
    edge = head_edges[row]

    # A rule does not derive its head from the same atom.
    code = edges.label[edge] * edges.n_entity_ids + edges.target[edge]
    differs = (code != bodies.code[feature]).nonzero().squeeze(1)
    edge = edge[differs]
    feature = feature[differs]
    head_number = _count_values(code[differs]).number

    # Number the pairs of head and body; count their facts.
    pair = head_number * len(bodies.n_entities) + bodies.number[feature]
    _, rule, support = torch.unique(
        pair, return_inverse=True, return_counts=True
    )
    is_circular = _is_circular(edges, edge, source[edge], bodies.code[feature])
    circular_support = torch.bincount(
        rule, is_circular.double(), minlength=len(support)
    )
    is_kept = support - circular_support >= min_support

    # Any pair of a rule tells its labels and constants.
    number = torch.arange(len(rule), device=rule.device)
    example = torch.zeros_like(support).scatter(0, rule, number)[is_kept]
    derives = (is_kept[rule] & ~is_circular).nonzero().squeeze(1)
    new_number = torch.cumsum(is_kept, 0) - 1
    return ConstantRules(
        head_label=edges.label[edge[example]],
        head_constant=edges.target[edge[example]],
        body_label=bodies.code[feature[example]] // edges.n_entity_ids,
        body_constant=bodies.code[feature[example]] % edges.n_entity_ids,
        support=support[is_kept].double(),
        circular_support=circular_support[is_kept],
        body_pairs=bodies.n_entities[bodies.number[feature[example]]].double(),
        fact=edges.fact[edge[derives]],
        rule=new_number[rule[derives]],
    )


def _join_bodies(bodies: _Features, entity: Tensor) -> RowPairs:
    """Every pair of an entity and one of its features."""
    start = bodies.offsets[entity]
    chunks = list(ragged_arange(start, bodies.offsets[entity + 1] - start))
    if not chunks:
        return RowPairs(entity[:0], entity[:0])
    return RowPairs(*(torch.cat(columns) for columns in zip(*chunks)))


def _is_circular(
    edges: EdgeIndex, edge: Tensor, source: Tensor, code: Tensor
) -> Tensor:
    """Whether the body holds through the head's own fact alone.

    A body h(X, Z) holds through h(X, c) alone where X has no other edge of the label. Walked the other way, the fact
    h(c, c) is an edge of its own: a body of that label and target, or with no other edge of that label, is it again.
    """
    label = code // edges.n_entity_ids
    constant = code % edges.n_entity_ids
    is_loop = edges.target[edge] == source
    is_same_fact_reversed = is_loop & (label == edges.label[edge] ^ 1)
    is_same_fact = (label == edges.label[edge]) | is_same_fact_reversed

    is_only_edge = paths.outgoing_edges(edges, source, label).length == 1
    is_reversed_loop = is_same_fact_reversed & (constant == source)
    return is_same_fact & torch.where(
        constant == 0, is_only_edge, is_reversed_loop
    )
