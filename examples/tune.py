"""Search PPO settings with Optuna; each trial trains several seeds in one step, and poor trials end early.

    pip install optuna
    python examples/tune.py --trials 20

The best of many trials is lucky, too: train it again with other seeds.
"""

import argparse

import optuna

import funcppo as fp


def objective(
    trial: optuna.Trial, total_steps: int = 50_000, seeds: int = 4
) -> float:
    """Train with suggested settings; the mean sampled return of the last evaluation."""
    learner = fp.ppo(
        env=fp.envs.cartpole(),
        network=fp.nets.mlp(64, 64),
        n_envs=8,
        n_steps=64,
        learning_rate=trial.suggest_float(
            "learning_rate", 1e-5, 1e-2, log=True
        ),
        clip_eps=trial.suggest_float("clip_eps", 0.05, 0.5, log=True),
        entropy_coef=trial.suggest_float("entropy_coef", 1e-5, 1e-1, log=True),
    )

    def report(progress) -> bool:  # whether to end the trial
        if progress.evaluation is None:
            return False
        trial.report(mean_return(progress.evaluation), progress.n_steps)
        return trial.should_prune()

    result = fp.train_many(
        learner, total_steps, seeds=seeds, callbacks=[report], evaluate_every=20
    )
    if result.is_stopped:
        raise optuna.TrialPruned
    return mean_return(result.evaluations[-1])


def mean_return(evaluations) -> float:
    return sum(each.sampled.mean for each in evaluations) / len(evaluations)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=0)
    )
    study.optimize(objective, n_trials=parser.parse_args().trials)
    print(study.best_value, study.best_params)
