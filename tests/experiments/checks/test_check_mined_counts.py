"""Rules that are closed paths are told from those that are none; counts against a count by hand."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.checks import check_mined_counts
from funcppo.kg.graph.loaders import load

X, Y, Z, W = 11, 12, 13, 14  # variables, with ten constants


@pytest.mark.parametrize(
    ("atoms", "labels"),
    [
        ([(1, X, Y), (2, X, Y)], (0, 2)),
        ([(1, X, Y), (2, Y, X)], (0, 3)),
        ([(1, X, Y), (2, X, Z), (3, Z, Y)], (0, 2, 4)),
        ([(1, X, Y), (3, Z, Y), (2, Z, X)], (0, 3, 4)),  # in any order
        ([(1, X, Y), (2, X, Z), (3, Z, W), (1, W, Y)], (0, 2, 4, 0)),
        ([(1, X, Y), (2, X, Z)], None),  # does not reach Y
        ([(1, X, Y), (2, X, 5), (3, 5, Y)], None),  # through a constant
        ([(1, X, Y), (2, X, Y), (3, X, Z)], None),  # branches
        ([(1, X, Y), (2, X, Z), (3, Z, X), (1, X, Y)], None),  # comes back
        ([(1, X, Y), (2, Z, W)], None),  # does not start at X
    ],
)
def test_a_rule_is_a_path_or_none(atoms, labels):
    assert check_mined_counts.path_labels(atoms, n_constants=10) == labels


def test_counts_equal_those_of_a_file(tmp_path, capsys):
    """Three of the four pairs that two hops connect are grandparents; a wrong count is different."""
    hops = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "e")]
    train = [f"{x}\tparent\t{y}" for x, y in hops] + [
        "a\tgrand\tc",
        "b\tgrand\td",
        "x\tgrand\ty",
    ]
    for name, lines in (
        ("train", train),
        ("valid", train[:1]),
        ("test", train[:1]),
    ):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    rule = "grand(X,Y) :- parent(X,Z), parent(Z,Y)"
    head = "#source_weight\ttrain_support\ttrain_body_pairs\ttrain_conf\trule\n"

    def compare(support: int, pairs: int) -> dict[str, int]:
        (tmp_path / "rules.tsv").write_text(
            f"{head}\t{support}\t{pairs}\t{support / pairs}\t{rule}\n"
        )
        listed = check_mined_counts.read_counts(tmp_path / "rules.tsv")
        np.testing.assert_array_equal(listed, [[support, pairs]])
        return check_mined_counts.compare_counts(
            load(tmp_path, tmp_path / "rules.tsv"), listed, 3
        )

    right = {
        "rules": 1,
        "paths": 1,
        "equal": 1,
        "circular": 0,
        "different": 0,
    }
    assert compare(2, 3) == right
    assert compare(1, 3) == right | {"equal": 0, "different": 1}
