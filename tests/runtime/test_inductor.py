"""A product keeps its value in every form, and gets the form that its shape asks for; so do random bits."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from funcppo.core import random
from funcppo.runtime import inductor
from funcppo.runtime.compile import compile_function, stable_argsort

THRESHOLDS = inductor.RewriteThresholds(
    mul_sum_max_macs=100,
    mul_sum_max_k=3,
    narrow_mul_sum_max_macs=200,
    split_k_min_k=32,
    split_k_chunk_size=16,
    transpose_max_n=2,
    rowwise_max_n=3,
    cat_as_sum_max_elements=20,
    tanh_from_exp=True,
    argsort_by_pytorch=True,
)


def rewritten(*args, thresholds=THRESHOLDS, fn=torch.matmul):
    """The graph of a @ b, or of another function, after the pass."""
    graph = make_fx(fn, tracing_mode="fake")(*args)
    inductor.MatmulPass(gpu=thresholds, cpu=thresholds)(graph.graph)
    graph.recompile()
    return graph


def named(graph) -> set[str]:
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    names = {str(n.target).split(".")[1] for n in calls}
    return names & {"mm", "bmm", "sum", "mul", "permute", "clone"}


def normal(seed, *shape):
    return random.normal(random.key(seed), shape).double()


@given(
    batch=st.sampled_from([(), (1,), (3,)]),
    m=st.integers(1, 6),
    k=st.sampled_from([1, 2, 3, 4, 8, 32, 48, 50]),
    n=st.integers(1, 6),
    turned=st.booleans(),
)
def test_every_form_has_the_value_of_the_product(batch, m, k, n, turned):
    """1e-12 in float64; the left factor contiguous, or transposed as a weight gradient's is."""
    a = normal(0, *batch, *((k, m) if turned else (m, k)))
    a = a.transpose(-1, -2) if turned else a
    b = normal(1, *batch, k, n)
    torch.testing.assert_close(
        rewritten(a, b)(a, b), a @ b, rtol=1e-12, atol=1e-12
    )


def test_the_form_follows_the_shape():
    """Small, short inside, long inside, none of these; small and narrow, and not small enough."""
    summed, cut, left = {"mul", "sum"}, {"permute", "bmm", "sum"}, {"mm"}
    cases = {(2, 4, 5): summed, (100, 3, 100): summed}
    cases |= {(8, 64, 8): cut, (8, 20, 8): left}
    cases |= {(4, 20, 2): {"permute", "clone", *summed}, (8, 20, 2): left}
    for (m, k, n), want in cases.items():
        found = named(rewritten(normal(0, m, k), normal(1, k, n)))
        assert found == want, (m, k, n)


def test_a_narrow_product_of_a_transposed_matrix_is_turned():
    """Large, and small enough to be a sum besides; one that is not transposed, or not narrow, is not."""
    a = normal(0, 20, 30).T  # [30, 20], columns first
    assert named(rewritten(a, normal(1, 20, 2))) == {"mm", "permute"}
    found = named(rewritten(a[:4, :4], normal(1, 4, 2)))
    assert found == {"mul", "sum", "permute"}
    assert named(rewritten(a.contiguous(), normal(1, 20, 2))) == {"mm"}
    assert named(rewritten(a, normal(1, 20, 3))) == {"mm"}


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((4,), 0), ((4,), -1), ((2, 3), 1), ((2, 3), 0), ((1,), 0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_small_stack_is_a_sum(shape, dim, dtype):
    """Bit for bit, of numbers that are no numbers too; a larger one stays, and so does what is no stack."""
    parts = [(10 * normal(i, *shape)).to(dtype) for i in range(3)]
    if dtype is torch.float32:
        parts[0].view(-1)[0], parts[1].view(-1)[0] = torch.inf, torch.nan
    # as it reaches Inductor
    stack = lambda *x: torch.cat([y.unsqueeze(dim) for y in x], dim)
    graph = rewritten(*parts, fn=stack)
    assert "constant_pad_nd" in graph.code and "cat" not in graph.code
    torch.testing.assert_close(
        graph(*parts), stack(*parts), rtol=0, atol=0, equal_nan=True
    )
    assert (
        "constant_pad_nd"
        not in rewritten(*[x.expand(9, *shape) for x in parts], fn=stack).code
    )
    join, ones = lambda *x: torch.cat(x), torch.ones(2)
    assert "constant_pad_nd" not in rewritten(ones, ones, fn=join).code


def test_tanh_by_its_exponential_is_tanh():
    """1e-15 in float64, 2e-7 in float32; exact at 0 and where it is flat, and what is not a number stays so."""
    wide = torch.cat(
        [20 * normal(0, 1000), normal(1, 1000), 1e-3 * normal(2, 1000)]
    )
    for x, near in ((wide, 1e-15), (wide.float(), 2e-7)):
        graph = rewritten(x, fn=torch.tanh)
        assert "tanh" not in graph.code
        torch.testing.assert_close(graph(x), torch.tanh(x), rtol=0, atol=near)
    ends = torch.tensor([-torch.inf, -1e4, 0.0, 1e4, torch.inf, torch.nan])
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    got = rewritten(ends, fn=torch.tanh)(ends)
    torch.testing.assert_close(got, torch.tanh(ends), **exactly)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("descending", [False, True])
def test_the_order_of_a_sort_is_computed_alone(dim, descending):
    """Stable; not where the sorted numbers are read, too, nor where PyTorch is not to sort."""
    x = torch.tensor([[3, 1, 3, 1, 2]]).repeat(4, 2)
    options = {"dim": dim, "descending": descending, "stable": True}
    order = lambda x: torch.argsort(x, **options)
    graph = rewritten(x, fn=order)
    assert "argsort" in graph.code and "aten.sort" not in graph.code
    assert torch.equal(graph(x), order(x))
    by_inductor = replace(THRESHOLDS, argsort_by_pytorch=False)
    assert "argsort" not in rewritten(x, thresholds=by_inductor, fn=order).code
    both = lambda x: torch.sort(x, **options)
    assert "argsort" not in rewritten(x, fn=both).code
    torch.library.opcheck(stable_argsort, (x, dim, descending))


def bits(key: torch.Tensor, counter: torch.Tensor):
    words = random.threefry2x32(
        key[0], key[1], torch.zeros_like(counter), counter
    )
    return words, words[0] + words[1]


@pytest.mark.parametrize(
    "n", [1, inductor.MIN_WORDS_TO_REALIZE - 1, inductor.MIN_WORDS_TO_REALIZE]
)
def test_the_words_are_those_of_the_operator_which_is_not_called(n):
    """One word, the most that are computed where they are used, and the fewest that are a kernel of their own."""
    args = random.key(7), torch.arange(n)
    with config.patch(force_disable_caches=True):
        (words, total), codes = run_and_get_code(compile_function(bits), *args)
    expected_words, expected_total = bits(*args)
    assert all(
        torch.equal(a, b)
        for a, b in zip((*words, total), (*expected_words, expected_total))
    )
    lines = [line for code in codes for line in code.splitlines()]
    lines = [line for line in lines if not line.lstrip().startswith("#")]
    assert lines and not any("threefry2x32.default" in line for line in lines)


def test_equal_nodes_are_computed_once_but_results_and_random_numbers_apart():
    def twice(x):
        same = (x @ x).sin() + (x @ x).sin()
        return same, x.cos(), x.cos(), torch.rand_like(x) - torch.rand_like(x)

    traced = make_fx(twice)(torch.eye(2)).graph
    inductor._merge_equal(traced)
    names = [str(node.target) for node in traced.nodes]
    count = lambda name: sum(f"aten.{name}." in text for text in names)
    found = [count(name) for name in ("mm", "sin", "cos", "rand_like")]
    assert found == [1, 1, 2, 2]
