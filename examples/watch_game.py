"""Watch a MinAtar game as text: `python examples/watch_game.py`, or with `--game asterix --steps 50`."""

import argparse

import funcppo as fp

# One glyph for each channel of an observation; a later one covers those before.
GLYPHS = {
    "asterix": "@x-$",
    "breakout": "=o'#",
    "freeway": "@c12345",
    "space_invaders": "AW<>|!",
}


def picture(image, glyphs: str) -> str:
    """An image [10, 10, F] as lines of cells."""
    lines = []
    for cells in image.tolist():
        shown = [
            ["."] + [g for g, value in zip(glyphs, channels) if value]
            for channels in cells
        ]
        lines.append(" ".join(found[-1] for found in shown))
    return "\n".join(lines)


def main(game: str, n_steps: int) -> None:
    """Print the pictures of some steps of a policy that samples its actions."""
    env = getattr(fp.envs, game)()
    learner = fp.ppo(env=env, network=fp.nets.cnn(), n_envs=1)
    agent, world = learner.cfg.agent, learner.world
    params = learner.init(fp.random.key(0)).params  # or those of a checkpoint
    state = env.reset(env.cfg, world, fp.random.split(fp.random.key(1), 1))
    for key in fp.random.split(fp.random.key(2), n_steps):
        image = env.observe(env.cfg, world, state)
        print(picture(image[0], GLYPHS[game]), end="\n\n")
        output = agent.apply(agent.cfg, world, params, image)
        action = agent.distribution.sample(key, output)
        state, _ = env.step_functional(env.cfg, world, state, action, key[None])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--game", choices=GLYPHS, default="breakout")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    main(options.game, options.steps)
