"""Paths through a graph of binary facts: which of them close a fact, and which pairs they join.

A *step* walks along a fact, from its first argument to its second or back; its *label* is 2(p - 1) for predicate p
walked forwards and 2(p - 1) + 1 walked backwards, so `label ^ 1` is the way back. A *body* is a row of labels
[b1, ..., bn]: the path X -b1-> Z1 -b2-> ... -bn-> Y. The pairs that a body joins are the entries of a product of
sparse boolean matrices, taken here by joins over hashed and sorted keys, for all bodies at once.

Runs on the device of the facts, in a loop on the host: the sizes depend on the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic import keys
from funcppo.logic.joins import positions
from funcppo.logic.keys import HashTable
from funcppo.types import F32, I64, Bool

BLOCK = 1 << 22  # rows that a block of facts or sources is to make, about


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The facts of two arguments walked both ways, in the order of source, label and target; a value of the host."""

    label: I64[Tensor, "L"]
    target: I64[Tensor, "L"]
    fact: I64[Tensor, "L"]  # row of the fact that the step walks along
    start: I64[Tensor, "C2"]  # steps from entity e: start[e] to start[e + 1]
    of_label: HashTable  # source * n_labels + label -> start and number of such steps
    joining: HashTable  # source * base + target -> start and number in `by_pair`
    by_pair: I64[Tensor, "L"]  # rows of the steps in the order of source, target and label
    first: I64[Tensor, "N"]  # the arguments of each fact
    second: I64[Tensor, "N"]
    n_labels: int
    base: int  # C + 1


class Closed(NamedTuple):
    """Pairs of a fact and a body that joins its two arguments, each once, in that order."""

    fact: I64[Tensor, "n"]
    body: I64[Tensor, "n J"]
    circular: Bool[Tensor, "n"]  # every such path walks along the fact itself


class Ends(NamedTuple):
    """The pairs that bodies join, each once a body, in the order of body, source and target."""

    body: I64[Tensor, "n"]  # row of the bodies asked for
    source: I64[Tensor, "n"]
    target: I64[Tensor, "n"]


def steps_of(facts: I64[Tensor, "N 3"], n_predicates: int, n_constants: int) -> Steps:
    """Both directions of each fact [predicate, first, second]."""
    predicate, first, second = facts.to(torch.int64).unbind(1)
    row = torch.arange(len(facts), device=facts.device)
    label = torch.cat([2 * predicate - 2, 2 * predicate - 1])
    source, target, fact = torch.cat([first, second]), torch.cat([second, first]), torch.cat([row, row])
    n_labels, base = 2 * n_predicates, n_constants + 1
    order = torch.sort(target, stable=True).indices
    order = order[torch.sort((source * n_labels + label)[order], stable=True).indices]
    source, label, target, fact = source[order], label[order], target[order], fact[order]
    pair, by_pair = torch.sort(source * base + target, stable=True)
    return Steps(
        label=label,
        target=target,
        fact=fact,
        start=torch.searchsorted(source, torch.arange(base + 1, device=facts.device)),
        of_label=keys.hash_table(keys.spans(source * n_labels + label)),
        joining=keys.hash_table(keys.spans(pair)),
        by_pair=by_pair,
        first=first,
        second=second,
        n_labels=n_labels,
        base=base,
    )


def closing_cost(steps: Steps, length: int) -> I64[Tensor, "N"]:
    """How many rows `closed` looks at for each fact."""
    degree = torch.diff(steps.start)
    first, second = degree[steps.first], degree[steps.second]
    return torch.ones_like(first) if length == 1 else torch.minimum(first, second) if length == 2 else first * second


def blocks(steps: Steps, facts: I64[Tensor, "n"], length: int) -> Sequence[Tensor]:
    """The facts cut where their closing cost adds up to about BLOCK."""
    cut = torch.diff(torch.cumsum(closing_cost(steps, length)[facts], 0) // BLOCK).nonzero().squeeze(1) + 1
    return torch.tensor_split(facts, cut.cpu()) if len(facts) else ()


def closed(steps: Steps, facts: I64[Tensor, "n"], length: int) -> Closed:
    """The bodies of one to three labels that join the arguments of each fact.

    A path of two steps is walked from the end that has fewer, a path of three meets in its middle step.
    """
    none = Closed(facts[:0], facts[:0].view(0, 1).expand(0, length), facts[:0].bool())
    if not len(facts):
        return none
    pieces = [none, *(_distinct_closed(steps, piece) for piece in _CLOSED[length](steps, facts))]
    return _distinct_closed(steps, Closed(*(torch.cat(same) for same in zip(*pieces))))


def ends(
    steps: Steps,
    bodies: I64[Tensor, "K J"],
    sources: I64[Tensor, "S"],
    share: F32[Tensor, "K"],
    draw: F32[Tensor, "C1"],
) -> Iterator[tuple[Ends, float]]:
    """The pairs that each body joins from those of the sources that it draws, and the draw that all of them are below.

    All pairs of a source come together, and the sources in their order.

    Args:
      bodies: distinct, in lexicographic order.
      sources: distinct, in the order of their draw.
      share: a body draws the sources whose `draw` is below it; 1 draws all.
      draw: a number in [0, 1) for each entity.
    """
    if not len(bodies):
        return
    levels, low, size = _trie(bodies, share), 0, 64
    while low < len(sources):
        some = sources[low : low + size]
        table, rows = Ends(torch.zeros_like(some), some, some), 0
        for level in levels:
            table, walked = _walk(steps, level, table, draw)
            rows += walked
        low += size
        yield table, float(draw[sources[low]]) if low < len(sources) else 1.0
        size = max(1, min(size * 2, size * BLOCK // max(rows, 1)))


def outgoing(steps: Steps, entity: I64[Tensor, "n"], label: I64[Tensor, "n"]) -> tuple[Tensor, Tensor]:
    """Where the steps of each label from each entity start, and how many there are."""
    span, _ = keys.look_up(steps.of_label, entity * steps.n_labels + label)
    return span >> keys.HALF, span & ((1 << keys.HALF) - 1)


def joining(steps: Steps, source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs (row, step) of every step from a row's source to its target, in pieces."""
    span, found = keys.look_up(steps.joining, source * steps.base + target)
    hit = found.nonzero().squeeze(1)
    span = span[hit]
    for row, at in positions(span >> keys.HALF, span & ((1 << keys.HALF) - 1)) if len(hit) else ():
        yield hit[row], steps.by_pair[at]


def _closed_1(steps: Steps, facts: Tensor) -> Iterator[Closed]:
    for row, step in joining(steps, steps.first[facts], steps.second[facts]):
        fact = facts[row]
        yield Closed(fact, steps.label[step, None], steps.fact[step] == fact)


def _closed_2(steps: Steps, facts: Tensor) -> Iterator[Closed]:
    first, second = steps.first[facts], steps.second[facts]
    degree = torch.diff(steps.start)
    back = degree[first] > degree[second]
    near, far = torch.where(back, second, first), torch.where(back, first, second)
    for row, one in positions(steps.start[near], degree[near]):
        for at, two in joining(steps, steps.target[one], far[row]):
            fact, there, here = facts[row[at]], one[at], back[row[at]]
            a, b = steps.label[there], steps.label[two]
            body = torch.stack([torch.where(here, b ^ 1, a), torch.where(here, a ^ 1, b)], 1)
            yield Closed(fact, body, (steps.fact[there] == fact) | (steps.fact[two] == fact))


def _closed_3(steps: Steps, facts: Tensor) -> Iterator[Closed]:
    first, second = steps.first[facts], steps.second[facts]
    degree = torch.diff(steps.start)
    for row, i in positions(torch.zeros_like(first), degree[first] * degree[second]):
        width = degree[second[row]]
        one, three = steps.start[first[row]] + i // width, steps.start[second[row]] + i % width
        for at, two in joining(steps, steps.target[one], steps.target[three]):
            fact, a, c = facts[row[at]], one[at], three[at]
            body = torch.stack([steps.label[a], steps.label[two], steps.label[c] ^ 1], 1)
            around = torch.stack([steps.fact[step] == fact for step in (a, two, c)]).any(0)
            yield Closed(fact, body, around)


_CLOSED = {1: _closed_1, 2: _closed_2, 3: _closed_3}


def _distinct_closed(steps: Steps, found: Closed) -> Closed:
    """Each fact and body once, circular only if all its rows are."""
    columns = (found.fact, *found.body.unbind(1), found.circular.to(torch.int64))
    bits = [len(steps.first).bit_length(), *[steps.n_labels.bit_length()] * found.body.shape[1], 1]
    key, order = torch.sort(keys.pack(columns, bits)[1])
    first = order[torch.diff(key >> 1, prepend=key.new_tensor([-1])).nonzero().squeeze(1)]
    return Closed(*(column.index_select(0, first) for column in found))


class _Level(NamedTuple):
    """One level of the trie of bodies: the children of each node of the level above."""

    start: Tensor  # children of node i: start[i] to start[i + 1]
    label: Tensor  # of each child
    share: Tensor  # the largest of the bodies below each child


def _trie(bodies: Tensor, share: Tensor) -> list[_Level]:
    levels, parent = [], torch.zeros(len(bodies), dtype=torch.int64, device=bodies.device)
    for label in bodies.unbind(1):
        new = (torch.diff(parent, prepend=parent[:1]) != 0) | (torch.diff(label, prepend=label[:1]) != 0)
        node = torch.cumsum(new, 0)
        first = torch.searchsorted(node, torch.arange(int(node[-1]) + 1, device=bodies.device))
        edges = torch.arange(int(parent[-1]) + 2, device=bodies.device)
        most = torch.zeros(len(first), device=bodies.device).scatter_reduce(0, node, share, "amax")
        levels.append(_Level(torch.searchsorted(parent[first], edges), label[first], most))
        parent = node
    return levels


def _walk(steps: Steps, level: _Level, table: Ends, draw: Tensor) -> tuple[Ends, int]:
    """The ends one step further, and how many rows were walked."""
    if not table.body.numel():
        return table, 0
    held, rows, low = [], 0, level.start[table.body]
    for row, child in positions(low, level.start[table.body + 1] - low):
        kept = (draw[table.source[row]] < level.share[child]).nonzero().squeeze(1)
        row, child = row[kept], child[kept]
        if not len(row):
            continue
        start, count = outgoing(steps, table.target[row], level.label[child])
        for at, step in positions(start, count):
            part = (child[at], table.source[row[at]], steps.target[step])
            held.append(keys.distinct(part, _bits(steps, len(level.label))))
            rows += len(at)
    if len(held) > 1:
        held = [keys.distinct(tuple(torch.cat(same) for same in zip(*held)), _bits(steps, len(level.label)))]
    return Ends(*held[0]) if held else Ends(*(table.body[:0],) * 3), rows


def _bits(steps: Steps, n: int) -> list[int]:
    return [n.bit_length(), steps.base.bit_length(), steps.base.bit_length()]
