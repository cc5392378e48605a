"""The examples and the code of the guide run as they stand; the examples learn what they say, and stay short."""

import importlib
import re
import textwrap
from pathlib import Path

import pytest
import torch

import funcppo as fp
from examples import custom_env, grid_world, predict, variants, watch_game
from funcppo import logs
from funcppo.core import random, tree
from funcppo.runtime.compile import select_strategy
from funcppo.train_step import EAGER_PARTS, collect, init, train_step
from tests.forked import printed
from tests.learning import WORLD, assert_trees_equal

FOLDER = Path(__file__).parents[1] / "examples"


def printed_numbers(name: str) -> list[float]:
    """The last number of each line that an example prints."""
    lines = printed(FOLDER / name)
    return [float(line.split()[-1]) for line in lines]


def test_cartpole_learns_to_balance():
    """From about 22 steps an episode, untrained, to more than 200."""
    returns = printed_numbers("cartpole.py")
    assert len(returns) == 6 and returns[-1] > 200


@pytest.mark.parametrize("game", watch_game.GLYPHS)
def test_a_game_is_shown_with_a_glyph_for_each_channel(game, capsys):
    env = getattr(fp.envs, game)()
    assert len(watch_game.GLYPHS[game]) == env.spec.observation_shape[-1]
    watch_game.main(game, 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 22 and len(set("".join(lines)) - {" ", "."}) >= 1


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_a_variant_learns_alone_side_by_side_and_as_one_graph(name, tmp_path):
    """Its own measures are logged; a compiled step equals an eager one."""
    learner = variants.make(name, n_envs=4, n_steps=16)
    state = learner.init(random.key(0))
    fast = fp.compile(learner, state, backend="aot_eager")
    assert fast.record.strategy == "one-graph"
    compiled = tree.map(torch.clone, fast.step(state))
    assert_trees_equal(compiled, learner.step(state), rtol=1e-4, atol=1e-5)
    assert not torch.equal(*params_of_last_layer(state, compiled[0]))

    result = fp.train(learner, 128, log=tmp_path)
    (_, row) = logs.read(tmp_path / "metrics.jsonl")
    has_measure = name in ("reference", "auxiliary", "novelty")
    assert row["loss"] is not None and ("distance" in row) == has_measure
    many = fp.train_many(learner, 128, seeds=2)
    first = tree.item(many.state.params, 0)
    assert_trees_equal(first, result.state.params, rtol=1e-3, atol=1e-4)


def params_of_last_layer(*states):
    return [tree.leaves(state.params)[0] for state in states]


def test_phases_alternate_on_one_state():
    state = variants.train_in_phases(1, 64, n_envs=4, n_steps=16)
    assert int(state.opt_state.step) == 2 * 16


def test_a2c_takes_the_step_of_ppo_with_one_pass():
    options = {"n_steps": 5, "gae_lambda": 1.0, **variants.ONE_PASS}
    by_ppo = fp.ppo(
        env=fp.envs.cartpole(), network=variants.NETWORK, n_envs=8,
        learning_rate=3e-3, **options,
    )  # fmt: skip
    states = [
        x.step(x.init(random.key(0)))[0].params
        for x in (variants.make("a2c", n_steps=5), by_ppo)
    ]
    assert_trees_equal(*states, rtol=0, atol=1e-6)


def test_v_trace_on_the_policy_of_the_rollout_has_the_targets_of_gae():
    learner = variants.make("v-trace", n_envs=4, n_steps=16)
    state = learner.init(random.key(0))
    by_gae = fp.ppo(
        env=learner.cfg.env, network=learner.cfg.agent, n_envs=4, n_steps=16
    )
    targets = [
        collect(x.cfg, x.world, state).batch.value_target
        for x in (learner, by_gae)
    ]
    torch.testing.assert_close(*targets)


def test_settings_are_searched():
    optuna = pytest.importorskip("optuna")
    tune = importlib.import_module("examples.tune")
    study = optuna.create_study(direction="maximize")
    study.optimize(lambda trial: tune.objective(trial, 512, 2), n_trials=1)
    assert len(study.trials) == 1 and study.best_value > 0
    assert 1e-5 <= study.best_params["learning_rate"] <= 1e-2


def test_your_own_environment_is_learnt():
    """From a random walk to 8 - 1.5 = 6.5 steps, the distance of the mean starting cell."""
    lengths = printed_numbers("custom_env.py")
    assert len(lengths) == 20 and lengths[0] > 15 and lengths[-1] < 8


def shortest_lengths() -> list[int]:
    """Steps to the goal from each start, by breadth-first search over the rows of the map."""
    rows = grid_world.ROWS
    length = {(4, 4): 0}
    frontier = [(4, 4)]
    while frontier:
        row, column = frontier.pop(0)
        for i, j in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            cell = (row + i, column + j)
            is_inside = 0 <= cell[0] < 5 and 0 <= cell[1] < 5
            if (
                is_inside
                and rows[cell[0]][cell[1]] == "."
                and cell not in length
            ):
                length[cell] = length[row, column] + 1
                frontier.append(cell)
    return [length[cell] for cell in sorted(length) if cell != (4, 4)]


def test_the_grid_is_learnt_by_legal_moves():
    """At most one step more than the shortest way, on average over the starts; more than twice that at first."""
    shortest = sum(shortest_lengths()) / len(grid_world.grid.start)
    *lengths, greedy = printed_numbers("grid_world.py")
    assert len(lengths) == 6 and lengths[0] > 2 * shortest
    assert shortest - 0.005 <= greedy < shortest + 1  # two decimals are printed


@pytest.mark.parametrize("example", [custom_env, grid_world])
def test_your_own_environment_and_network_are_one_graph(example):
    cfg, world = example.learner.cfg, example.learner.world
    state = init(cfg, world, random.key(0))
    parts, record = select_strategy(
        collect, EAGER_PARTS, cfg, world, state, backend="aot_eager"
    )
    assert record.strategy == "one-graph" and not record.failures
    assert_trees_equal(
        train_step(cfg, world, state, parts),
        train_step(cfg, world, state),
        rtol=1e-5,
        atol=1e-5,
    )


def test_your_own_mask_keeps_actions_from_the_wall():
    agent = custom_env.learner.cfg.agent
    output = agent.apply(
        agent.cfg,
        WORLD,
        agent.init(agent.cfg, random.key(0)),
        torch.zeros(500, dtype=torch.int64),
    )
    assert agent.distribution.sample(random.key(1), output).all()
    assert isinstance(output, fp.PolicyValue)


def blocks_of(name):
    """The code of a page."""
    page = (FOLDER.parent / "docs" / name).read_text()
    blocks = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", page, re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]


def test_the_code_of_the_guide_exports_its_policy(tmp_path, monkeypatch):
    """Every block of docs/rl.md, in order; compiled by the backend that compiles nothing."""
    monkeypatch.chdir(tmp_path)
    *first, exporting = blocks_of("rl.md")
    assert len(first) == 8
    names = {}
    for block in first:
        block = re.sub(
            r"(fp.compile\(\w+, \w+)\)", r"\1, backend='eager')", block
        )
        exec(block, names)
    for learner in ("swing_up", "two_layers", "hill_climber", "with_memory"):
        names[learner].init(random.key(0))
    assert Path("runs/acrobot/metrics.jsonl").exists()
    exec(exporting, names)
    names["simple"].step(names["simple"].init(random.key(0)))
    assert Path("policy.pt2").exists()


def run_page(name):
    """The names that the blocks of a page define, in its order and without the signatures."""
    code = "\n".join(x for x in blocks_of(name) if "  ->" not in x)
    names = {"__name__": "docs"}
    exec(compile(code, name, "exec", dont_inherit=True), names)
    return names


def test_the_boat_of_the_page_arrives(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_page("write_an_environment.md")
    assert names["result"].evaluations[-1].greedy.low > 0.8
    assert Path("runs/lake/metrics.jsonl").exists()
    assert (
        "step_functional of a finished row: position" in capsys.readouterr().out
    )

    fp.check(names["squared"])


def test_the_code_of_the_page_on_networks_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_page("write_a_network.md")
    assert names["result"].evaluations
    for name in ("of_module", "continuous", "of_recurrent_module"):
        learner = names[name]
        state, _ = learner.step(learner.init(random.key(0)))
        assert int(state.update) == 1
    assert state.memory.shape == (4, 16)


def test_a_grandparent_that_nobody_stated_is_proved(capsys):
    predict.main()
    output = capsys.readouterr().out
    assert "MRR 1.0000" in output and output.endswith("\nproved\n")
    assert "by rule" in output and "known  verdict" in output


def test_the_python_of_the_page_on_asking_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (FOLDER.parent / "docs" / "ask.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(code, names)
    assert len(names["answers"]) > 0 and names["run"].trained
