"""The rollout as one kernel: generated code run on numpy, equal to the loop over steps; on a GPU the kernel itself."""

import pytest
import torch

import funcppo as fp
from examples import grid_world as grid_world_example
from funcppo import rollout, train_step
from funcppo.core import tree
from funcppo.interfaces import NoWorld
from funcppo.runtime.env_kernel import rollout as rollout_kernel
from funcppo.runtime.env_kernel.rollout import RolloutKernel, StepArguments
from funcppo.runtime.env_kernel.writer import UnsupportedError
from tests.learning import assert_trees_equal, on_gpu
from tests.nets import test_fused_mlp  # noqa: F401  (its operators on a CPU)
from tests.runtime.env_kernel import numpy_triton

N_STEPS = 5
CLASSIC = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0")
CLASSIC += ("MountainCarContinuous-v0",)
# whose programs are short enough to be compiled in seconds
GAMES = tuple(
    f"MinAtar/{name}-v1"
    for name in ("Breakout", "SpaceInvaders", "Asterix", "Freeway")
)


def make_learner(
    name, n_envs, *hidden, device="cpu", n_steps=N_STEPS, **options
):
    """A learner and its first state; images are rows of numbers."""
    env = fp.envs.make(name)
    if len(env.spec.shape) > 1:
        env = fp.envs.wrappers.flatten_observation(env)
    sizes = {"n_envs": n_envs, "n_steps": n_steps}
    sizes |= {"n_updates": 2, "n_minibatches": 1}
    ppo = fp.ppo(env=env, network=fp.nets.mlp(*hidden, **options), **sizes)
    return ppo, ppo.init(fp.random.key(3, device))


def rollout_arguments(learner, state):
    """The arguments of a whole rollout."""
    inputs = train_step.sample_randomness(learner.cfg, NoWorld(), state.key)
    first = rollout.RolloutState(state.env_state, state.episode_stats)
    if learner.cfg.env.truncates:
        # Episodes are about to end, so that rows are reset on the way.
        late = lambda x: x + 196 if x.dtype == torch.int64 else x
        first = first._replace(env_state=tree.map(late, first.env_state))
    return StepArguments(NoWorld(), state.params, first, inputs.random_inputs)


def arguments_of_many(learner, n_learners, device="cpu"):
    """The arguments of a whole rollout of several learners."""
    keys = [fp.random.key(seed, device) for seed in range(n_learners)]
    each = [rollout_arguments(learner, learner.init(key)) for key in keys]
    args = tree.map(lambda *x: torch.stack(x), *each)
    random_inputs = tree.map(lambda x: x.transpose(0, 1), args.random_inputs)
    return args._replace(random_inputs=random_inputs)


def parts_of(args):
    """The parts of one learner, or of several."""
    is_many = tree.leaves(args.random_inputs)[0].ndim == 3
    parts = train_step.EAGER_PARTS
    return train_step.vmap_parts(parts) if is_many else parts


def functions_of(args, values_apart):
    """The step that a kernel makes, and what computes the values of all steps, if that does not."""
    parts = parts_of(args)
    if values_apart:
        return parts.kernels.actor_step, parts.kernels.values
    return parts.rollout_step, None


def first_step(args):
    """The arguments of the first step of a rollout."""
    return args._replace(random_inputs=tree.item(args.random_inputs, 0))


def on_numpy(learner, args, values_apart=False):
    """The kernel of a rollout, which runs on numpy."""
    step, values = functions_of(args, values_apart)
    kernel = RolloutKernel.__new__(RolloutKernel)
    first = learner.cfg, first_step(args)
    kernel.code = rollout_kernel.write_rollout_kernel(step, *first)
    kernel._values = values
    kernel._kernel = numpy_triton.Kernel(kernel.code.source, "rollout_kernel")
    return kernel


def compile_kernel(learner, args, values_apart=False):
    """The kernel of a rollout on a GPU."""
    step, values = functions_of(args, values_apart)
    first = learner.cfg, first_step(args)
    return rollout_kernel.compile_unroll(step, *first, values)


def assert_equals_the_loop(kernel, learner, args, rtol=0.0001, atol=1e-05):
    with torch.no_grad():
        actual = kernel(learner.cfg, *args)
        how = tree.scan, parts_of(args).rollout_step
        expected = rollout.unroll(learner.cfg, *args, *how)
    assert_trees_equal(actual, expected, rtol=rtol, atol=atol)


def check_on_numpy(*learner_of, **options):
    """The kernel of a learner, on numpy, once it has equalled the loop."""
    learner, state = make_learner(*learner_of, **options)
    args = rollout_arguments(learner, state)
    kernel = on_numpy(learner, args)
    assert_equals_the_loop(kernel, learner, args)
    return kernel


@pytest.mark.parametrize("name", CLASSIC)
def test_the_code_computes_what_the_loop_does(name):
    check_on_numpy(name, 3, 16)


@pytest.mark.parametrize(
    ("hidden", "options"),
    [
        ((20, 16), {"activation": "relu"}),
        ((7, 33), {"shared_trunk": True}),
        ((), {}),
    ],
)
def test_layers_of_any_width_and_blocks_that_are_not_full(
    hidden, options, monkeypatch
):
    monkeypatch.setattr(rollout_kernel, "MIN_ROWS_TO_SHARE", 19)
    check_on_numpy("CartPole-v1", 19, *hidden, **options)


@pytest.mark.parametrize(
    ("n_learners", "n_envs", "rows_a_block"), [(3, 5, 1), (2, 19, 16)]
)
def test_learners_side_by_side_compute_what_the_loop_does(
    n_learners, n_envs, rows_a_block, monkeypatch
):
    """Each with params of its own, in blocks that may not be full."""
    monkeypatch.setattr(rollout_kernel, "MIN_ROWS_TO_SHARE", 19)
    learner, _ = make_learner("Pendulum-v1", n_envs, 16)
    args = arguments_of_many(learner, n_learners)
    kernel = on_numpy(learner, args)
    assert kernel.code.batch_shape == (n_learners, n_envs)
    assert kernel.code.block[0] == rows_a_block
    assert_equals_the_loop(kernel, learner, args)


VALUES_APART = ("CartPole-v1", "Pendulum-v1", GAMES[0])


@pytest.mark.parametrize("name", VALUES_APART)
def test_values_that_are_computed_after_all_steps(name):
    """The kernel has no critic then."""
    learner, state = make_learner(name, 3, 64, 20)
    args = rollout_arguments(learner, state)
    kernel = on_numpy(learner, args, values_apart=True)
    assert_equals_the_loop(kernel, learner, args)
    whole = on_numpy(learner, args).code
    assert kernel.code.source.count("tl.load") < whole.source.count("tl.load")


@pytest.mark.parametrize(
    ("name", "hidden"), [*((x, (16,)) for x in GAMES), (GAMES[0], (64, 64))]
)
def test_games_with_images_in_tiles(name, hidden):
    assert check_on_numpy(name, 3, *hidden).code.block[0] == 1


def test_a_game_with_bricks_broken_and_balls_lost():
    learner, state = make_learner("MinAtar/Breakout-v1", 4, 16, n_steps=40)
    args = rollout_arguments(learner, state)
    kernel = on_numpy(learner, args)
    assert_equals_the_loop(kernel, learner, args)
    with torch.no_grad():
        _, trajectory = kernel(learner.cfg, *args)
    assert trajectory.reward.any()
    assert trajectory.terminated.any()


@pytest.mark.parametrize(
    ("n_envs", "hidden", "reason"),
    [
        (3, (90,) * 5, "params, more than the 24576"),
        (3, (512, 512), "params of large layers, more than the 131072"),
        (300, (128, 128), "300 environments would read large layers"),
    ],
)
def test_params_that_do_not_fit_into_a_block_are_refused(
    n_envs, hidden, reason
):
    learner, state = make_learner("CartPole-v1", n_envs, *hidden)
    with pytest.raises(UnsupportedError, match=reason):
        on_numpy(learner, rollout_arguments(learner, state))


@on_gpu
@pytest.mark.parametrize("name", CLASSIC)
@pytest.mark.parametrize("n_envs", [4, 300])
def test_the_kernel_equals_the_loop_on_a_gpu(name, n_envs):
    learner, state = make_learner(name, n_envs, 64, 64, device="cuda")
    args = rollout_arguments(learner, state)
    assert_equals_the_loop(compile_kernel(learner, args), learner, args)


@on_gpu
@pytest.mark.parametrize(
    ("name", "hidden"),
    [(GAMES[0], (128, 100)), *((name, (64, 64)) for name in GAMES)],
)
@pytest.mark.parametrize("matmul_dtype", [None, torch.bfloat16])
def test_games_on_a_gpu(name, hidden, matmul_dtype):
    options = {"device": "cuda", "matmul_dtype": matmul_dtype}
    learner, state = make_learner(name, 40, *hidden, **options)
    args = rollout_arguments(learner, state)
    kernel = compile_kernel(learner, args)
    tolerance = 2e-2 if matmul_dtype else 1e-4
    assert_equals_the_loop(kernel, learner, args, tolerance, tolerance)


def grid_world(n_envs, device="cpu"):
    """The learner of the example, and the arguments of a rollout in which rows are reset."""
    world = tree.map(lambda x: x.to(device), grid_world_example.grid)
    sizes = {"n_envs": n_envs, "n_steps": 60, "n_minibatches": 1}
    parts = {"env": grid_world_example.env, "network": fp.nets.mlp(16, 16)}
    learner = fp.ppo(world=world, **parts, **sizes)
    state = learner.init(fp.random.key(3, device))
    inputs = train_step.sample_randomness(learner.cfg, world, state.key)
    first = rollout.RolloutState(state.env_state, state.episode_stats)
    args = StepArguments(world, state.params, first, inputs.random_inputs)
    return learner, args


def test_a_world_that_is_read_by_indices():
    """The legal moves of a cell, and where a move leads to."""
    learner, args = grid_world(3)
    kernel = on_numpy(learner, args)
    assert kernel.code.has_checks
    assert_equals_the_loop(kernel, learner, args)
