"""Learn CartPole: `python examples/cartpole.py`, or `python examples/cartpole.py --compile`.

Compiling takes a minute or two the first time; on a GPU the compiled step is replayed as one CUDA graph.
"""

import argparse

import torch

import funcppo as fp

N_UPDATES = 30

learner = fp.ppo(
    env=fp.envs.cartpole(),
    network=fp.nets.mlp(64, 64),
    n_envs=32,
    n_steps=64,
    n_updates=N_UPDATES,
    learning_rate=2.5e-3,
)


def main(compile_step: bool) -> None:
    """Print the mean return of the episodes that end in every fifth update."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state = learner.init(fp.random.key(0, device))
    step = learner.step
    if compile_step:
        fast = fp.compile(learner, state)
        print(
            f"strategy {fast.record.strategy}, replayed by: {fast.record.replay_mode}"
        )
        step = fast.step

    for update in range(1, N_UPDATES + 1):
        state, metrics = step(state)
        if update % 5 == 0:
            mean_return = (
                metrics.rollout.episode_return_sum
                / metrics.rollout.n_episodes.clamp(min=1)
            )
            print(f"update {update:2}  mean return {mean_return:6.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--compile", action="store_true", help="compile the training step"
    )
    main(parser.parse_args().compile)
