"""Rules with constants: h(X, c) :- b(X, Z) and h(X, c) :- b(X, d), and the same with either atom the other way round.

And rules with X twice in the head, whose bodies have the same two shapes: h(X, X) :- b(X, Z) and h(X, X) :- b(X, d).

An edge from X is a *feature* of X: its label and target for the second shape, its label alone for the first. Which
features occur together is the product of the sparse boolean matrix of entities and features with its transpose,
computed here by a join over the entities, block by block of heads, those with the most facts first.

Source: Meilicke et al. 2019, "Anytime bottom-up rule learning", section 3 (acyclic rules AC1 and AC2);
Meilicke et al. 2024, "Anytime bottom-up rule learning for large-scale knowledge graph completion" (heads h(X, X)).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcppo.core.types import I64
from funcppo.kg.logic import row_index
from funcppo.kg.logic.joins import expand_ranges
from funcppo.kg.mining import paths
from funcppo.kg.mining.mined_rules import (
    MAX_RULE_ATOMS,
    SAME_ENTITY,
    Budget,
    FoundRules,
    MinedRules,
    select_rules,
)
from funcppo.kg.mining.path_rules import CountedPart
from funcppo.kg.mining.paths import CHUNK_ROWS, EdgeIndex


class _Features(NamedTuple):
    """Features of entities, grouped by entity."""

    offsets: Tensor  # features of entity e: offsets[e] to offsets[e + 1]
    code: Tensor  # label * n_entity_ids + target; 0 for any target
    number: Tensor  # which distinct feature each is
    n_entities: Tensor  # how many entities have each distinct feature


class ConstantSearch(NamedTuple):
    """The heads and the bodies to combine."""

    heads: I64[Tensor, "n"]  # edges, grouped by what they are a head of
    # what each edge is a head of: label and target, or a predicate whose two arguments are equal
    head_code: I64[Tensor, "n"]
    bodies: tuple[_Features, ...]  # labels alone, and with targets
    # how many bodies of either shape the source of each head edge has
    n_bodies: tuple[I64[Tensor, "n"], ...]

    @property
    def n_rows(self) -> float:
        """Rows that the search computes."""
        return float(sum(n.sum() for n in self.n_bodies))


def plan_search(edges: EdgeIndex, min_support: int) -> ConstantSearch:
    """The heads and bodies that enough entities have."""
    code = _edge_code(edges)
    label_code = edges.label * edges.n_entity_ids
    is_first = row_index.first_of_run(
        edges.source * edges.n_labels + edges.label
    )
    label_features = _frequent_features(
        edges.source[is_first], label_code[is_first], edges, min_support
    )
    edge_features = _frequent_features(edges.source, code, edges, min_support)

    # Heads: edges whose label and target are frequent, the most frequent first.
    is_loop = (edges.source == edges.target) & (edges.label % 2 == 0)
    loop = is_loop.nonzero().squeeze(1)
    head = torch.cat([torch.arange(len(code), device=code.device), loop])
    head_code = torch.cat([code, _first_loop_code(edges) + edges.label[loop]])
    count = _count_values(head_code).count
    row = (count >= min_support).nonzero().squeeze(1)
    row = row[row_index.sort_keys(head_code[row]).order]
    most_first = torch.sort(count[row], descending=True, stable=True)
    row = row[most_first.indices]
    head = head[row]
    bodies = (label_features, edge_features)
    source = edges.source[head]
    return ConstantSearch(
        heads=head,
        head_code=head_code[row],
        bodies=bodies,
        n_bodies=(
            torch.diff(bodies[0].offsets)[source],
            torch.diff(bodies[1].offsets)[source],
        ),
    )


def find_constant_rules(
    edges: EdgeIndex, search: ConstantSearch, budget: Budget
) -> Iterator[FoundRules]:
    """Yield the rules of all heads and bodies, block by block; each rule is in one block."""
    code = search.head_code
    for bodies, n_bodies in zip(search.bodies, search.n_bodies):
        for first, last in paths.pack_runs(code, n_bodies, CHUNK_ROWS):
            block = search.heads[first:last]
            yield _rules_of_block(edges, bodies, block, code[first:last])
            budget.spend(float(n_bodies[first:last].sum()))


def count_pca_pairs(
    edges: EdgeIndex, rules: MinedRules, budget: Budget
) -> Iterator[CountedPart]:
    """Yield rules with constants with their PCA pairs, part by part in their order, until the budget is spent.

    PCA pairs are pairs of the rule whose first argument has some fact of the head's predicate.
    """
    # The entities of every feature, by feature.
    is_first = row_index.first_of_run(
        edges.source * edges.n_labels + edges.label
    )
    label_code = edges.label * edges.n_entity_ids
    code, order = row_index.sort_keys(
        torch.cat([_edge_code(edges), label_code[is_first]])
    )
    entity = torch.cat([edges.source, edges.source[is_first]])[order]
    body_code = (
        rules.labels[:, 1] * edges.n_entity_ids + rules.end_constants[:, 1]
    )
    start = torch.searchsorted(code, body_code)
    count = torch.searchsorted(code, body_code, right=True) - start

    for first, last in paths.pack(count.double(), CHUNK_ROWS):
        if budget.is_exhausted():
            return
        rows = torch.arange(first, last, device=code.device)
        rule, position = expand_ranges(start[rows], count[rows])
        head_label = rules.labels[rows, 0]
        key = entity[position] * edges.n_labels + head_label[rule]
        has_fact = paths.find_keys(edges.starts, key).row
        total = torch.bincount(rule[has_fact], minlength=last - first)

        # Of h(c, X) the first argument is c, which has a fact wherever one is derived.
        is_forward = head_label % 2 == 0
        pairs = torch.where(is_forward, total, count[rows]).double()
        part = select_rules(rules, rows)
        budget.spend(float(count[rows].sum()))
        yield CountedPart(
            rows,
            part._replace(
                pca_pairs=pairs, pca_std_error=torch.zeros_like(pairs)
            ),
            rows[:0],
            rows[:0],
        )


def _edge_code(edges: EdgeIndex) -> Tensor:
    """Label and target of each edge in one integer."""
    return edges.label * edges.n_entity_ids + edges.target


def _first_loop_code(edges: EdgeIndex) -> int:
    """The least code of a head h(X, X), above those of labels and targets."""
    return edges.n_labels * edges.n_entity_ids


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
    number = row_index.unique_inverse(code).inverse
    return _ValueCounts(number, torch.bincount(number)[number])


def _rules_of_block(
    edges: EdgeIndex, bodies: _Features, head_edges: Tensor, head_code: Tensor
) -> FoundRules:
    """The rules whose heads have these codes, with all edges of each of them."""
    start = bodies.offsets[edges.source[head_edges]]
    end = bodies.offsets[edges.source[head_edges] + 1]
    row, feature = expand_ranges(start, end - start)
    edge = head_edges[row]

    # A rule does not derive its head from the same atom.
    code = head_code[row]
    differs = (code != bodies.code[feature]).nonzero().squeeze(1)
    edge, feature, code = edge[differs], feature[differs], code[differs]
    head_number = _count_values(code).number
    has_twice = code >= _first_loop_code(edges)

    # Number the pairs of head and body; count their facts.
    pair = head_number * len(bodies.n_entities) + bodies.number[feature]
    rule = row_index.unique_inverse(pair).inverse
    support = torch.bincount(rule)
    is_circular = _is_circular(edges, edge, bodies.code[feature], has_twice)
    circular_support = torch.bincount(
        rule, is_circular.double(), minlength=len(support)
    )

    # Any pair of a rule tells its labels and constants.
    example = _example_rows(rule, len(support))
    head = edge[example]
    body_code = bodies.code[feature[example]]
    labels = torch.stack(
        [edges.label[head], body_code // edges.n_entity_ids], 1
    )
    head_end = edges.target[head].masked_fill(has_twice[example], SAME_ENTITY)
    constants = torch.stack([head_end, body_code % edges.n_entity_ids], 1)
    n_facts = torch.bincount(edges.predicate, minlength=edges.n_predicates)
    zeros = torch.zeros_like(circular_support)
    rules = MinedRules(
        labels=pad(labels, (0, MAX_RULE_ATOMS - 2), value=-1),
        end_constants=constants,
        support=support.double(),
        circular_support=circular_support,
        body_pairs=bodies.n_entities[bodies.number[feature[example]]].double(),
        pca_pairs=zeros,
        head_facts=n_facts[edges.label[head] // 2].double(),
        std_error=zeros,
        pca_std_error=zeros + torch.inf,
    )
    derives = (~is_circular).nonzero().squeeze(1)
    return FoundRules(
        rules, rules.body_pairs, edges.fact[edge[derives]], rule[derives]
    )


def _example_rows(rule: Tensor, n_rules: int) -> Tensor:
    """A row of each rule."""
    rows = torch.arange(len(rule), device=rule.device)
    return rows.new_zeros(n_rules).scatter(0, rule, rows)


def _is_circular(
    edges: EdgeIndex, edge: Tensor, code: Tensor, has_twice: Tensor
) -> Tensor:
    """Whether the body holds through the head's own fact alone.

    A body h(X, Z) holds through h(X, c) alone where X has no other edge of the label. Walked the other way, the fact
    h(c, c) is an edge of its own: a body of that label and target, or with no other edge of that label, is it again.
    For a head h(X, X) the body h(X, c) is that fact where X is c.

    Args:
      has_twice: the head is h(X, X).
    """
    label = code // edges.n_entity_ids
    constant = code % edges.n_entity_ids
    source = edges.source[edge]
    is_loop = edges.target[edge] == source
    is_same_fact_reversed = is_loop & (label == edges.label[edge] ^ 1)
    is_same_fact = (label == edges.label[edge]) | is_same_fact_reversed

    found = paths.find_keys(edges.starts, source * edges.n_labels + label)
    n_edges = torch.diff(edges.starts.offsets)[found.position]
    is_only_edge = torch.zeros_like(is_loop)
    is_only_edge = is_only_edge.index_copy(0, found.row, n_edges == 1)
    may_be_it = is_same_fact_reversed | has_twice
    is_it_again = may_be_it & (constant == source)
    return is_same_fact & torch.where(constant == 0, is_only_edge, is_it_again)
