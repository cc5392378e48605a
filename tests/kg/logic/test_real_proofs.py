"""Proofs on real data hold against the text files themselves, and no tampering with them does."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from funcppo.kg.graph.loaders import load
from funcppo.kg.logic import kb, prove
from funcppo.kg.logic.fixpoint import Verdict
from funcppo.kg.logic.proof import check_proof
from tests.learning import DATA

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no data sets in {DATA}"
)


def world_of(name, rules="rules.txt"):
    data = load(DATA / name, DATA / name / rules)
    return data, *kb.build(
        data.facts,
        data.rules,
        n_constants=data.n_constants,
        n_predicates=data.n_predicates,
    )


def facts_of(name):
    """(head, relation, tail) of every line of train."""
    lines = (DATA / name / "train.txt").read_text(encoding="utf-8").splitlines()
    return {tuple(line.split("\t")) for line in lines}


def read_rule(text):
    """[(relation, X, Y)] of `h(X,Y) :- b(X,Z), ...`: head first, by splitting alone."""
    atoms = (
        text.replace(" ", "")
        .replace(":-", "),")
        .replace("),", ")|")
        .replace("))", ")")
        .split("|")
    )
    return [
        (
            atom[: atom.index("(")],
            *atom[atom.index("(") + 1 :].strip(")").split(","),
        )
        for atom in atoms
    ]


def holds_in_the_files(data, found, facts, rule_lines):
    """Whether every leaf is a line of train other than the root, and every step an instance of a line of the rules."""
    name = lambda atom: (
        data.predicates[atom[0] - 1],
        *(data.entities[t - 1] for t in atom[1:]),
    )
    root = name(found.nodes[0].goal)
    for node in found.nodes:
        goal = name(node.goal)
        if node.rule is None:
            if (goal[1], goal[0], goal[2]) not in facts or goal == root:
                return False
            continue
        binding: dict[str, str] = {}
        for pattern, atom in zip(
            read_rule(rule_lines[node.rule]),
            [goal, *(name(found.nodes[c].goal) for c in node.children)],
            strict=True,
        ):
            pairs = zip(pattern[1:], atom[1:])
            if pattern[0] != atom[0] or any(
                binding.setdefault(v, t) != t for v, t in pairs
            ):
                return False
    return True


@pytest.mark.parametrize(
    ("name", "max_height", "n"),
    [
        ("family", 2, 8),
        ("family_kns", 3, 10),
        ("umls", 3, 25),
        ("wn18rr", 1, 6),
    ],
)
def test_proofs_hold_by_the_lines_of_the_files(name, max_height, n):
    data, world, sizes = world_of(name)
    facts = facts_of(name)
    rule_lines = [
        line.split("\t")[-1]
        for line in (DATA / name / "rules.txt").read_text().splitlines()
        if line
    ]
    sample = Random(0).sample(data.test.tolist(), n)
    heights = []
    for atom in sample:
        found = prove.prove_ground(
            world,
            sizes,
            tuple(atom),
            max_height=max_height,
            max_atoms=1_000_000,
        )
        assert (found.verdict == Verdict.PROVED) == (found.proof is not None)
        if found.proof:
            assert holds_in_the_files(data, found.proof, facts, rule_lines)
            heights.append(found.height)
    assert len(heights) >= n / 10 and max(heights) <= max_height


@pytest.mark.parametrize("name", ["family", "umls"])
def test_facts_are_proved_without_themselves(name):
    data, world, sizes = world_of(name)
    facts = {tuple(fact) for fact in data.facts.tolist()}
    for atom in Random(1).sample(data.train.tolist(), 8):
        found = prove.prove_ground(
            world, sizes, tuple(atom), max_height=1, max_atoms=1_000_000
        )
        assert found.is_fact
        if found.proof:
            limits = dict(
                n_constants=sizes.n_constants, max_height=1, leave_one_out=True
            )
            assert (
                check_proof(found.proof, facts, data.rules.tolist(), **limits)
                == []
            )
            assert all(
                node.goal != tuple(atom) for node in found.proof.nodes[1:]
            )


def test_tampered_proofs_are_rejected():
    data, world, sizes = world_of("family")
    facts = {tuple(fact) for fact in data.facts.tolist()}
    limits = dict(
        n_constants=sizes.n_constants, max_height=2, leave_one_out=True
    )
    wrong = lambda proof: (
        check_proof(proof, facts, data.rules.tolist(), **limits) != []
    )
    random, n_rejected = Random(2), 0
    for atom in random.sample(data.test.tolist(), 12):
        found = prove.prove_ground(
            world, sizes, tuple(atom), max_height=2, max_atoms=1_000_000
        ).proof
        if found is None:
            continue
        assert not wrong(found)
        for at, node in enumerate(found.nodes):
            other = (*node.goal[:2], node.goal[2] % sizes.n_constants + 1)
            changes = [{"goal": other}] if at == 0 or other not in facts else []
            if node.rule is not None:
                (variable, constant), *rest = node.substitution
                changes += [
                    {"rule": (node.rule + 1) % sizes.n_rules},
                    {"rule": None, "substitution": (), "children": ()},
                    {
                        "substitution": (
                            (variable, constant % sizes.n_constants + 1),
                            *rest,
                        )
                    },
                    {"children": node.children[1:]},
                ]
            else:
                changes.append({"rule": random.randrange(sizes.n_rules)})
            for change in changes:
                nodes = list(found.nodes)
                nodes[at] = dataclasses.replace(node, **change)
                assert wrong(dataclasses.replace(found, nodes=tuple(nodes))), (
                    at,
                    change,
                )
                n_rejected += 1
    assert n_rejected > 40
