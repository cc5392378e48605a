"""Small graphs, every rule over them, and counts of rules by brute force over Python sets."""

import itertools

import numpy as np
import torch
from hypothesis import strategies as st

from funcppo.kg.mining import MiningConfig, counts, miner, paths
from funcppo.kg.mining.counts import FoundRules, no_rules
from tests import oracles
from tests.oracles import Program

X, Y, Z = 7, 8, 9  # variables beside six constants
ALL = dict(min_support=1, min_confidence=0.0)


def draw_graph(random, n):
    draw = random.randint
    return sorted({(draw(1, 2), draw(1, 6), draw(1, 6)) for _ in range(n)})


randoms = st.randoms(use_true_random=False)
graphs = st.builds(draw_graph, randoms, st.integers(1, 16))


def edges_of(facts):
    return paths.build_edge_index(torch.tensor(facts), 2, 6)


def edge_sets(facts):
    """The pairs that each label joins."""
    steps = {label: set() for label in range(4)}
    for predicate, a, b in facts:
        steps[2 * predicate - 2].add((a, b))
        steps[2 * predicate - 1].add((b, a))
    return steps


def facts_by_rule(facts, found):
    """The facts that each rule derives from others, each once."""
    derived = [[] for _ in range(len(found.rules.cost))]
    for fact, rule in zip(found.fact.tolist(), found.rule.tolist()):
        derived[rule].append(facts[fact])
    assert all(len(set(part)) == len(part) for part in derived)
    return derived


def unlimited():
    return counts.Budget(max_rows=10**12, seconds=1e9)


def mined(facts, **settings):
    return miner.mine_rules(
        torch.tensor(facts), 2, 6, MiningConfig(**(ALL | settings))
    )


def clauses_of(rules):
    """Head and body of each rule, unpadded."""
    return [
        tuple(tuple(atom) for atom in rule if atom[0])
        for rule in counts.rule_atoms(rules, 6).tolist()
    ]


def brute_force(facts, clauses):
    """(support, circular, body pairs, PCA pairs) of each clause, over Python sets."""
    program = Program(6, (2, 2), tuple(facts), tuple(clauses))
    every, left_out = (
        oracles.consequences(program, leave_one_out=flag)
        for flag in (False, True)
    )
    rows = []
    for i, clause in enumerate(clauses):
        heads = [atom for j, atom in every if j == i]
        known = [atom for atom in heads if atom in facts]
        sources = {(p, a) for p, a, _ in facts}
        pca = sum((p, a) in sources for p, a, _ in heads)
        assert all(atom[0] == clause[0][0] for atom in heads)
        n_circular = sum((i, atom) not in left_out for atom in known)
        rows.append((len(known), n_circular, len(heads), pca))
    return rows


def path_clauses(max_length):
    """Every closed path rule over two predicates, as mine.atoms writes it."""
    found = []
    for length in range(1, max_length + 1):
        inner = [X, *range(Z, Z + length - 1), Y]
        for head, *labels in itertools.product((1, 2), *[range(4)] * length):
            ends = [
                (a, b) if label % 2 == 0 else (b, a)
                for label, a, b in zip(labels, inner, inner[1:])
            ]
            steps = zip(labels, ends)
            body = ((label // 2 + 1, *pair) for label, pair in steps)
            found.append(((head, X, Y), *body))
    return found


def constant_clauses():
    """Every rule with constants over two predicates and six constants."""
    atom = lambda label, x, y: (
        (label // 2 + 1, x, y) if label % 2 == 0 else (label // 2 + 1, y, x)
    )
    heads = [atom(label, X, c) for label in range(4) for c in range(1, 7)]
    heads += [(predicate, X, X) for predicate in (1, 2)]
    bodies = [
        atom(label, X, d) for label in range(4) for d in (*range(1, 7), Y)
    ]
    return [(head, body) for head in heads for body in bodies if head != body]


def counts_of(rules):
    columns = rules.support, rules.circular_support, rules.body_pairs
    columns += (rules.pca_pairs,)
    return [
        tuple(int(v) for v in row)
        for row in zip(*(column.tolist() for column in columns))
    ]


def path_counts(facts, lengths):
    """(facts derived from others, support, body pairs) of each path rule that derives a fact from others.

    Keys are the labels of head and body. The pairs of a body are a product of boolean matrices.
    """
    facts = list(facts)
    every = _joined(facts, lengths)
    derived = {}
    for i, (predicate, x, y) in enumerate(facts):
        rest = _joined(facts[:i] + facts[i + 1 :], lengths)
        for body, pairs in rest.items():
            if pairs[x, y]:
                rule = (2 * predicate - 2, *body)
                derived.setdefault(rule, []).append((predicate, x, y))
    found = {}
    for (head, *body), some in derived.items():
        pairs = every[tuple(body)]
        own = [(x, y) for p, x, y in facts if 2 * p - 2 == head]
        n_right = sum(bool(pairs[pair]) for pair in own)
        found[head, *body] = some, n_right, int(pairs.sum())
    return found


def _joined(facts, lengths):
    """The pairs that each body of some lengths joins, as a matrix."""
    steps = np.zeros((4, 7, 7), dtype=bool)
    for label, pairs in edge_sets(facts).items():
        for x, y in pairs:
            steps[label, x, y] = True
    bodies = {(): np.eye(7, dtype=bool)}
    found = {}
    for length in range(1, max(lengths) + 1):
        bodies = {
            (*body, label): pairs @ steps[label]
            for body, pairs in bodies.items()
            for label in range(4)
        }
        bodies = {body: pairs for body, pairs in bodies.items() if pairs.any()}
        if length in lengths:
            found |= bodies
    return found


def no_found(edges):
    """No rules, which derive nothing."""
    none = edges.fact[:0]
    return FoundRules(no_rules(none.device), none, none)
