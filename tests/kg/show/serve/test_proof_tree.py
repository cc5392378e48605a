"""The drawing of proofs: nested as the proof is, shared subgoals once, and bounded."""

from funcppo.kg.show.serve import proof_tree
from funcppo.kg.show.serve.proof_tree import CUT, END, FACT, REPEATED, RULE


def proof(children):
    """A proof whose node i has these children, a fact without any."""
    nodes = [
        {
            "goal": [1, i + 1, 0],
            "goal_text": "",
            "rule": 7 if below else None,
            "rule_text": "p(X) :- p(Y)" if below else None,
            "substitution": [],
            "probability": 0.5 if below else None,
            "children": below,
        }
        for i, below in enumerate(children)
    ]
    return {
        "format": 2,
        "nodes": nodes,
        "predicates": {"1": "p"},
        "constants": {str(i + 1): f"c{i}" for i in range(len(children))},
        "variables": {},
    }


def test_children_stand_between_a_goal_and_its_end():
    drawn = proof_tree.draw(proof([[1, 2], [3], [], []]))
    kinds = [(d.kind, d.arguments and d.arguments[0]["name"]) for d in drawn]
    assert kinds == [
        (RULE, "c0"), (RULE, "c1"), (FACT, "c3"), (END, ()),
        (FACT, "c2"), (END, ()),
    ]  # fmt: skip
    assert drawn[0].rule == 7 and drawn[0].probability == 0.5
    assert drawn[0].relation == {"id": 1, "name": "p"}


def test_a_shared_subproof_is_drawn_once():
    drawn = proof_tree.draw(proof([[1, 1], [2], []]))
    assert [d.kind for d in drawn] == [RULE, RULE, FACT, END, REPEATED, END]


def test_what_is_too_deep_or_too_much_is_cut():
    chain = [[i + 1] for i in range(3000)] + [[]]
    drawn = proof_tree.draw(proof(chain))
    kinds = [d.kind for d in drawn]
    assert kinds == [
        *[RULE] * proof_tree.MAX_DEPTH, CUT, *[END] * proof_tree.MAX_DEPTH,
    ]  # fmt: skip

    n = 1000
    wide = [list(range(1, n + 1)), *[[i + n] for i in range(1, n + 1)]]
    kinds = [d.kind for d in proof_tree.draw(proof([*wide, *[[]] * n]))]
    assert kinds.count(RULE) <= proof_tree.MAX_NODES
    assert kinds.count(RULE) + kinds.count(CUT) == n + 1
    assert kinds.count(END) == kinds.count(RULE)
