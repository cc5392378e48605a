"""A small run, and its training."""

from funcppo.config import PPOConfig
from funcppo.kg.run import training
from funcppo.kg.run.config import RunConfig
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.runtime.monitor import Monitor

CONFIG = RunConfig(
    dataset="countries_s1",
    steps=64,
    strategy="eager",
    learner="proofs",
    score="best-proof",
    n_validations=2,
    n_validation_queries=3,
    prover=ProverTaskConfig(max_height=1, embed_dim=4, hidden_dim=4),
    ppo=PPOConfig(
        n_envs=4, n_steps=4, n_epochs=1, n_minibatches=2, learning_rate=0.01
    ),
)
N_UPDATES = 4  # 64 steps of 4 environments in rollouts of 4


def trained(run, folder, stop_at=None):
    """The run after its last update, and the metrics of each; stopped after an update or in its validation."""
    captured, _ = training.prepare_train_step(run)
    rows = []
    for after, metrics in training.train(
        run,
        folder,
        captured,
        lambda: int(captured.state.update) == stop_at,
        Monitor(),
    ):
        run = after
        rows.append(metrics)
    return run, rows
