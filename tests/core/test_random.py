import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.core import random
from tests.learning import compiled, oracle

SEEDS = st.integers(0, 2**64 - 1)
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("k", "x", "y"),
    [  # Random123, file kat_vectors, threefry2x32 with 20 rounds
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
        (
            (0x13198A2E, 0x03707344),
            (0x243F6A88, 0x85A308D3),
            (0xC4923A9C, 0x483DF7A0),
        ),
    ],
)
def test_threefry_gives_the_published_known_answers(k, x, y):
    got = random.threefry2x32(*torch.tensor((*k, *x)).unbind())
    assert tuple(int(v) for v in got) == y


def test_an_eager_run_imports_no_compiler():
    code = "import sys, funcppo as fp; sizes = dict(n_envs=4, n_steps=4); "
    code += "ppo = fp.ppo(env=fp.envs.cartpole(), network=fp.nets.mlp(4), **sizes); "
    code += "fp.train(ppo, 16); sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("n", [1, random.MAX_NUMBERS_AHEAD + 1])
def test_rows_of_keys_draw_ahead_what_each_draws_by_itself(n, monkeypatch):
    """Of a view of keys, too; and all of them are drawn in one call, unless a row draws many numbers."""
    keys = random.split(random.split(random.key(3), 5), 2)[:, 1]
    samplers = (random.bits, random.uniform, random.normal, random.gumbel)
    want = [[f(key, (n,)) for f in samplers] for key in keys.clone()]
    rows = []
    count = lambda *words: (rows.append(len(words[0])), threefry(*words))[1]
    threefry = random.threefry2x32
    monkeypatch.setattr(random, "threefry2x32", count)
    with random.drawing_ahead(keys):
        got = [[f(key, (n,)) for f in samplers] for key in keys.unbind()]
        other = random.bits(random.key(3), (n,))
    for x, y in zip(want, got):
        assert all(map(torch.equal, x, y))
    assert rows.count(5) == (len(samplers) if n == 1 else 0)
    assert other.equal(random.bits(random.key(3), (n,)))


def test_integers_and_uniforms_equal_jax_exactly():
    want, key = oracle("jax_random.npz"), random.key(42)
    got = {
        "key": key,
        "split2": random.split(key),
        "split5": random.split(key, 5),
        "fold_in_7": random.fold_in(key, 7),
        "fold_in_123456789": random.fold_in(key, 123456789),
        "bits_10": random.bits(key, (10,)),
        "bits_3x5": random.bits(key, (3, 5)),
        "uniform_10": random.uniform(key, (10,)),
        "uniform_m005_005_4": random.uniform(key, (4,), -0.05, 0.05),
        "categorical_8x3": random.categorical(
            key, torch.tensor([0.2, 0.3, 0.5]).log().expand(8, 3)
        ),
        "permutation_10": random.permutation(key, 10),
        "permutation_1000": random.permutation(key, 1000),
        "key_0": random.key(0),
        "key_2p40_1": random.key(2**31 - 1),
    }
    for name, value in got.items():
        np.testing.assert_array_equal(value.numpy(), want[name], err_msg=name)


def test_normals_and_gumbels_equal_jax_within_1e_6():
    want, key = oracle("jax_random.npz"), random.key(42)
    for name in ("normal", "gumbel"):
        got = getattr(random, name)(key, (10,)).numpy()
        np.testing.assert_allclose(got, want[f"{name}_10"], 1e-6, 1e-6)


def test_one_number_is_the_first_of_several():
    key = random.key(3)
    one = random.bits(key, ())
    assert one.shape == () and one == random.bits(key, (1,))[0]


@given(SEEDS, st.integers(1, 50))
def test_split_is_fold_in(seed, n):
    key = random.key(seed)
    assert torch.equal(random.split(key, n)[n - 1], random.fold_in(key, n - 1))


@given(SEEDS)
@settings(max_examples=20)
def test_a_row_depends_on_its_own_key_alone(seed):
    keys = random.split(random.key(seed), 5)
    for draw in (random.bits, random.uniform, random.normal, random.gumbel):
        alone = torch.stack([draw(k, (2, 3)) for k in keys])
        assert torch.equal(draw(keys, (2, 3)), alone)
    alone = torch.stack([random.split(k, 3) for k in keys])
    assert torch.equal(random.split(keys, 3), alone)


@given(SEEDS)
@settings(max_examples=20)
def test_a_masked_action_is_never_drawn(seed):
    mask_key, key = random.split(random.key(seed))
    mask = (random.uniform(mask_key, (64, 7)) < 0.5) | (torch.arange(7) == 3)
    lowest = torch.finfo(torch.float32).min
    action = random.categorical(key, torch.where(mask, -30.0, lowest))
    assert mask.gather(1, action[:, None]).all()


def draw(key):
    return random.bits(key, (33,)), random.uniform(key, (33,), -0.05, 0.05)


def test_bits_and_uniforms_are_the_same_compiled_and_under_vmap():
    keys = random.split(random.key(9), 4)
    want = [torch.stack(x) for x in zip(*(draw(k) for k in keys))]
    assert all(torch.equal(a, b) for a, b in zip(torch.vmap(draw)(keys), want))
    got = [torch.stack(x) for x in zip(*(compiled(draw)(k) for k in keys))]
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("fast", [False, True], ids=["eager", "compiled"])
def test_bits_and_uniforms_are_the_same_on_a_gpu_and_replayed(fast):
    """A graph recorded with the key zero and replayed with others gives what the CPU gives."""
    fn = compiled(draw) if fast else draw
    held = torch.zeros(2, dtype=torch.int64, device="cuda")
    fn(held)  # what is loaded or compiled at the first call cannot be recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = fn(held)
    for key in random.split(random.key(9), 4):
        held.copy_(key)
        graph.replay()
        for got in (replayed, fn(key.cuda())):
            assert all(
                torch.equal(a.cpu(), b)
                for a, b in zip(got, draw(key), strict=True)
            )


def test_draws_use_no_global_generator():
    before = torch.random.get_rng_state()
    random.permutation(random.key(1), 10)
    random.normal(random.key(1), (3,))
    assert torch.equal(torch.random.get_rng_state(), before)


@given(st.floats(1e-30, 1e30) | st.floats(-1e30, -1e-30) | st.just(0.0))
def test_bounds_are_rounded_as_float32_rounds(x):
    assert random.round_to_float32(x) == float(np.float32(x))


@pytest.mark.parametrize("seed", [1.5, "1", None])
def test_a_seed_that_is_no_integer_is_refused_by_name(seed):
    with pytest.raises(TypeError, match=r"^seed: expected an integer, got"):
        random.key(seed)


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1, 1 << 10_000])
def test_a_seed_of_more_than_64_bits_is_refused(seed):
    with pytest.raises(ValueError, match="seed: expected an integer of 64 bit"):
        random.key(seed)
