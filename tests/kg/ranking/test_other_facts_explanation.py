"""What other facts add to the score of an answer: it makes the score, and the text names the counts behind it."""

import math

import pytest
import torch

from funcppo.kg.graph import loaders
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import other_facts_explanation, scorers
from funcppo.kg.ranking.other_facts_explanation import OtherFacts
from funcppo.kg.ranking.ranking import ScorerBySide
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task, with_other_facts

FACTS = [
    ("a", "s", "b"),
    ("b", "s", "c"),
    ("c", "s", "a"),
    ("d", "s", "b"),
    ("a", "r", "b"),
    ("c", "r", "b"),
    ("d", "r", "a"),
]


@pytest.fixture
def task():
    dataset = loaders.from_triples(FACTS, rules="r(X, Y) :- s(X, Y)")
    return with_other_facts(
        build_task(dataset, ProverTaskConfig(max_height=1, smoothing=1.0))
    )


def atoms_of(task, *names):
    ids = {name: i for i, name in enumerate(task.dataset.entities, 1)}
    r = task.dataset.predicates.index("r") + 1
    return torch.tensor([[r, ids[x], ids[y]] for x, y in names])


def test_what_is_added_makes_the_score(task):
    """Of answers in any order, twice, and of a known fact."""
    atoms = atoms_of(task, "db", "ab", "bc", "ca", "db")
    distinct = torch.unique(atoms, dim=0).int()
    before = scorers.make_untrained_scorer(task, "noisy-or")(distinct)
    after = scorers.make_untrained_scorer(task, "noisy-or-other-facts")
    assert isinstance(after, ScorerBySide)
    n_others = set()
    for side in (HEAD, TAIL):
        added = dict(
            zip(
                map(tuple, distinct.tolist()),
                (after.of(side)(distinct) - before).tolist(),
            )
        )
        found = other_facts_explanation.explain_answers(task, atoms, side)
        for atom, others in zip(atoms.tolist(), found, strict=True):
            assert (others.relation, others.side) == (atom[0], side)
            assert others.log_odds == pytest.approx(
                added[tuple(atom)], abs=1e-14
            )
            n_others.add(others.n_facts)
    assert n_others == {0, 1, 2}


def test_the_text_names_the_counts(task):
    """r has the tails b, b and a: two of three facts have another one. s derives (b, c), (c, a) and (d, b)."""
    tail = other_facts_explanation.explain_answers(
        task, atoms_of(task, "db", "ca", "bc"), TAIL
    )
    assert [others.n_facts for others in tail] == [2, 1, 0]
    a, c = 3 / 5, 1 / 5  # the confidence is that of one fact of five pairs
    b = (2 * c + 1) / (3 * c + 2)
    assert tail[0] == OtherFacts(
        tail[0].relation,
        TAIL,
        2,
        pytest.approx(a),
        pytest.approx(b),
        pytest.approx(math.log(a / b)),
    )
    assert tail[2].log_odds == pytest.approx(math.log((1 - a) / (1 - b)))
    lines = [
        other_facts_explanation.to_line(task.dataset, others) for others in tail
    ]
    for line, text in zip(
        lines, ("2 other facts", "1 other fact", "no other facts"), strict=True
    ):
        assert (
            f" log-odds by other facts: it is the tail of {text} of r; " in line
        )
        assert line.endswith(
            f"{a:.4f} of its facts have another one there, {b:.4f} of what its rules derive beside them"
        )
    assert lines[0].startswith(f"{math.log(a / b):+.4f} ")
    fields = other_facts_explanation.to_json(task.dataset, tail[0])
    assert fields == tail[0]._asdict() | {"relation": "r", "side": "tail"}
