"""The height of a stored run without one: the smallest that proves nearly as much of valid as the greatest."""

import pytest

from funcppo.kg.graph import loaders
from funcppo.kg.run.config import RunConfig
from funcppo.kg.run.stored_height import with_stored_height
from funcppo.kg.search.config import ProverTaskConfig

CHAIN = "path(X, Y) :- edge(X, Y)\npath(X, Z) :- edge(X, Y), path(Y, Z)"
EDGES = [("a", "edge", "b"), ("b", "edge", "c"), ("c", "edge", "d")]


@pytest.mark.parametrize(
    ("target", "height"), [("b", 1), ("c", 2), ("d", 3), ("a", 1)]
)
def test_the_height_of_the_only_valid_query(target, height):
    """A path of n edges has a proof of height n; path(a, a) has none."""
    dataset = loaders.from_triples(EDGES, [("a", "path", target)], rules=CHAIN)
    config = with_stored_height(RunConfig(dataset="chain"), dataset)
    assert config.prover.max_height == height


def test_a_stored_height_is_kept():
    config = RunConfig(dataset="x", prover=ProverTaskConfig(max_height=2))
    dataset = loaders.from_triples(EDGES, rules=CHAIN)
    assert with_stored_height(config, dataset) is config
