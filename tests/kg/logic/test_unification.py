import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.kg.logic.resolve import canonicalize, substitute, unify
from tests import sld

C = 3  # constants 1..3; 4.. are variables
V, W, X, Y = 4, 5, 6, 7


@pytest.mark.parametrize(
    ("a", "b", "probe", "want"),
    [
        ((1, V, W), (1, Y, Y), (V, W, Y), (Y, Y, Y)),
        ((1, V, 2), (1, Y, Y), (V, Y), (2, 2)),
        ((1, V, V), (1, 2, X), (V, X), (2, 2)),
        ((1, V, W, V), (1, W, 3, X), (V, W, X), (3, 3, 3)),
    ],
)
def test_repeated_variables_and_chains_are_bound_everywhere(a, b, probe, want):
    unifies, mgu = unify(torch.tensor(a), torch.tensor(b), C)
    assert unifies
    assert substitute(torch.tensor(probe), mgu).tolist() == list(want)


@pytest.mark.parametrize(
    ("a", "b"),
    [((1, V, V), (1, 2, 3)), ((1, V, 2), (2, V, 2)), ((1, 1, V), (1, 2, V))],
)
def test_a_clash_does_not_unify(a, b):
    assert not unify(torch.tensor(a), torch.tensor(b), C)[0]


def atoms(seed: int, n: int, arity: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.concatenate(
        [rng.integers(1, 3, (n, 1)), rng.integers(1, C + 5, (n, arity))], 1
    )


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
@settings(max_examples=50)
def test_unify_equals_a_plain_python_unifier(seed, arity):
    """50 x 2,000 pairs that share variables; most general: it renames the unified pair as the oracle does."""
    n = 2000
    a, b = atoms(seed, n, arity), atoms(seed + 1, n, arity)
    unifies, mgu = unify(torch.from_numpy(a), torch.from_numpy(b), C)
    both = substitute(
        torch.from_numpy(np.concatenate([a[:, 1:], b[:, 1:]], 1)), mgu
    )
    got = canonicalize(both, C).tolist()
    for i in range(n):
        left, right = tuple(a[i].tolist()), tuple(b[i].tolist())
        bindings = sld.unify(left, right, C)
        assert bool(unifies[i]) == (bindings is not None), (left, right)
        if bindings is not None:
            want = sld.rename(
                [
                    (sld.apply(left, bindings), 0),
                    (sld.apply(right, bindings), 0),
                ],
                C,
            )
            assert got[i] == [t for atom, _ in want for t in atom[1:]], (
                left,
                right,
            )


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_canonical_rows_are_equal_exactly_when_rows_are_renamings(seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, C + 4, (40, 5))
    forms = canonicalize(torch.from_numpy(rows), C).tolist()
    want = [
        [t for atom, _ in sld.rename([((1, *row), 0)], C) for t in atom[1:]]
        for row in rows.tolist()
    ]
    assert forms == want


def test_canonical_is_idempotent():
    rows = torch.from_numpy(atoms(7, 500, 4))[:, 1:]
    once = canonicalize(rows, C)
    assert torch.equal(canonicalize(once, C), once)


def test_unify_maps_over_a_batch():
    a, b = torch.from_numpy(atoms(1, 64, 3)), torch.from_numpy(atoms(2, 64, 3))
    got = torch.func.vmap(lambda x, y: unify(x, y, C))(a, b)
    want = unify(a, b, C)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1].term, want[1].term)
