"""`funcppo train`: learn to prove the links of a knowledge graph."""

from __future__ import annotations

import dataclasses
import os
import platform
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from funcppo.cli import console as terminal
from funcppo.cli import write_json
from funcppo.config import PPOConfig
from funcppo.data import format_atom, format_rule
from funcppo.evaluation import ranking, scorers
from funcppo.experiment.config import RunConfig
from funcppo.mining.config import MiningConfig
from funcppo.prover.config import ProverTaskConfig

if TYPE_CHECKING:  # PyTorch takes seconds to import, and --help is not to wait for it
    from funcppo.experiment.training import Run
    from funcppo.runtime.capture import CapturedStep
    from funcppo.runtime.monitor import Monitor
    from funcppo.train_step import Metrics, TrainState

_DEFAULT = RunConfig(dataset="")


@dataclass
class Train:
    """Learn to prove the links of a knowledge graph; write params, metrics and results to a folder.

    The folder gets config.json, metrics.jsonl (a line an update), checkpoint.npz and results.json. Ctrl-C saves a
    checkpoint after the update in progress; --resume goes on from it bit for bit.
    """

    dataset: Annotated[str, tyro.conf.Positional]
    """countries_s1, countries_s2, countries_s3, family_tree:PEOPLE:SEED, a folder with train.txt, valid.txt, test.txt
    and rules.txt, or a program FILE.pl."""
    out: Path
    """Folder to write."""
    rules: str | None = None
    """Rule file in place of the data set's own; a data set without rules is mined first."""
    steps: int = _DEFAULT.steps
    """Environment steps."""
    seed: int = 0
    """Of weights, queries and actions."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to train."""
    strategy: str = "auto"
    """How a training step runs: eager, forward, two-graphs, one-graph; auto takes eager for a short run, where
    compiling would take longer than it saves, and else the highest rung that works."""
    precision: Literal["highest", "high", "bfloat16"] = "highest"
    """Of matrix products: float32; TF32 on a GPU that has it; or bfloat16, with float32 for all else."""
    score: Literal["auto", "success", "best-proof"] = "auto"
    """How candidates are scored; auto takes the better of the two on the valid split."""
    resume: bool = False
    """Go on from the checkpoint in the folder; all other settings are those of its config.json."""
    overwrite: bool = False
    """Start anew in a folder that holds a run."""
    json: str | None = None
    """Also write the results as JSON to this file, or - for standard output."""
    prover: ProverTaskConfig = field(default_factory=ProverTaskConfig)
    ppo: PPOConfig = _DEFAULT.ppo
    n_validations: int = _DEFAULT.n_validations
    """Looks at the valid split while training; the best params are kept."""
    n_validation_queries: int = _DEFAULT.n_validation_queries
    """Valid queries ranked at each."""
    max_nonfinite_updates: int = _DEFAULT.max_nonfinite_updates
    """Updates in a row with a loss or gradient that is not finite, after which the run stops."""
    cache_dir: Path | None = None
    """Where compiled code and mined rules are kept for the next run; by default the user's own caches."""
    log_compiles: bool = False
    """Show what compilers and graphs do: recordings, skips, recompiles and why, moved state, times."""

    def run(self) -> int:
        """Train, judge, show; the exit status."""
        if self.cache_dir is not None:  # compilers read these once, when they are loaded
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.cache_dir.absolute() / "inductor")
            os.environ["TRITON_CACHE_DIR"] = str(self.cache_dir.absolute() / "triton")
        import torch

        from funcppo.experiment import training
        from funcppo.runtime.monitor import Monitor

        start, console = time.perf_counter(), terminal.make_console(self.json == "-")
        run = self._prepare(console)
        torch.set_float32_matmul_precision("high" if run.run_config.precision == "high" else "highest")
        dataset = run.task.dataset
        console.print(
            f"{dataset.name}: {dataset.n_constants} entities, {dataset.n_predicates} relations, "
            f"{len(dataset.train)} train / {len(dataset.valid)} valid / {len(dataset.test)} test, "
            f"{len(dataset.rules)} rules, height {run.task.max_height}, score {run.score}"
        )
        terminal.print_notes(console, run.notes)
        if not len(dataset.test):
            console.print("note: no test split, so nothing will be judged", style="dim")
        with Monitor() as monitor:
            with console.status("making the training step ready"):
                captured, how = training.prepare_train_step(run)
            monitor.record_capture(captured)
            terminal.print_notes(console, [how])
            run, finished = self._learn(run, captured, monitor, console)
        if not finished:
            update = int(run.state.train_state.update)
            console.print(
                f"stopped after update {update}; `funcppo train --resume --out {self.out}` goes on from there"
            )
            return 130
        results = _results(run, time.perf_counter() - start)
        results["seconds_in_all"] = time.perf_counter() - start  # judging too
        write_json(str(self.out / training.RESULTS_FILE), results)
        write_json(self.json, results)
        _show(run, results, console)
        console.print(f"done in {results['seconds_in_all']:.0f} s: {self.out}")
        return 0

    def _prepare(self, console: Console) -> Run:
        import torch

        from funcppo.experiment import training
        from funcppo.runtime.compile import STRATEGIES

        holds_run = (self.out / training.CONFIG_FILE).exists()
        if self.resume:
            stored = training.read_config(self.out)
            if stored.dataset != absolute_or_name(self.dataset):
                raise ValueError(f"{self.out}: holds a run on {stored.dataset}, want {self.dataset}")
            return training.prepare_run(stored, self.out, resume=True)
        if holds_run and not self.overwrite:
            raise ValueError(f"{self.out}: holds a run already: want --resume, --overwrite or another folder")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: PyTorch sees no CUDA device here")
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(RunConfig) if hasattr(self, f.name)}
        config = RunConfig(
            **given | {"dataset": absolute_or_name(self.dataset), "rules": self.rules and absolute_or_name(self.rules)}
        )
        if config.strategy not in ("auto", *STRATEGIES):
            raise ValueError(f"strategy {config.strategy!r}: want auto, {', '.join(STRATEGIES)}")
        config = self._with_rules(config, console)
        run = training.prepare_run(config, self.out, resume=False)
        self.out.mkdir(parents=True, exist_ok=True)
        for name in (training.CHECKPOINT_FILE, training.METRICS_FILE, training.RESULTS_FILE):
            (self.out / name).unlink(missing_ok=True)
        training.write_config(config, self.out)
        return run

    def _with_rules(self, config: RunConfig, console: Console) -> RunConfig:
        """The run with mined rules, kept in its folder, where the data set has none."""
        from funcppo import data
        from funcppo.atomic_io import write_atomically
        from funcppo.experiment import rule_cache

        if config.rules is not None or len((dataset := data.load(config.dataset)).rules):
            return config
        with console.status("mining rules") as status:
            told = lambda stage: status.update(f"mining rules: {stage}")
            mined, how = rule_cache.get_or_mine_rules(dataset, MiningConfig(), config.device, told, self.cache_dir)
        terminal.print_notes(console, [how])
        self.out.mkdir(parents=True, exist_ok=True)
        kept = self.out / "rules.tsv"
        write_atomically(kept, lambda file: file.write(mined.read_bytes()))
        return dataclasses.replace(config, rules=str(kept))

    def _learn(
        self, run: Run, captured: CapturedStep[TrainState, Metrics], monitor: Monitor, console: Console
    ) -> tuple[Run, bool]:
        """The run after its last update or a Ctrl-C, and whether it was the former."""
        from funcppo.experiment import training

        asked: list[int] = []
        watched = _Watch(monitor, console, self.log_compiles)
        before = signal.signal(signal.SIGINT, lambda *_: _interrupt(asked))
        n_updates = run.cfg.ppo.n_updates
        try:
            with terminal.progress_bar(console) as bar:
                task = bar.add_task("training", total=n_updates, completed=int(run.state.train_state.update), note="")
                for after, numbers in training.train(run, self.out, captured, lambda: bool(asked), monitor):
                    run = after
                    watched.look(run.state.train_state, numbers)
                    best = f"best valid {ranking.selection_metric(run.task)} {float(run.state.best_valid_metric):.4f}"
                    note = f"return {numbers['episode_return']:.3f}  {best}"
                    bar.update(task, completed=int(run.state.train_state.update), note=note)
        finally:
            signal.signal(signal.SIGINT, before)
        return run, int(run.state.train_state.update) >= n_updates


def absolute_or_name(name: str) -> str:
    """A path such that the run can be gone on with from anywhere; the name itself of an embedded data set."""
    return str(Path(name).absolute()) if Path(name).exists() else name


class _Watch:
    """Tells once when the training step is compiled or recorded again; with --watch, all that the monitor counts."""

    def __init__(self, monitor: Monitor, console: Console, aloud: bool) -> None:
        self.monitor, self.console, self.aloud = monitor, console, aloud
        self.report: dict[str, Any] = {}
        self.first = True

    def look(self, state: TrainState, numbers: dict[str, float]) -> None:
        """Compare with what was last seen."""
        if self.first:
            self.first = False
            self.monitor.end_warmup()
            self.monitor.watch_addresses(state)
        warning, moved = self.monitor.warning(), self.monitor.moved_leaves(state)
        if warning:
            self.console.print(f"warning: {warning}", style="yellow", markup=False)
        if moved:
            self.console.print(f"warning: moved in memory: {', '.join(moved)}", style="yellow", markup=False)
            self.monitor.watch_addresses(state)
        if numbers["n_nonfinite_minibatches"]:
            line = f"warning: {numbers['n_nonfinite_minibatches']:.0f} minibatches skipped: loss or gradient not finite"
            self.console.print(line, style="yellow")
        if not self.aloud:
            return
        report = self.monitor.report()
        counts = {k: v for k, v in report.items() if not k.endswith("_ms")}
        if counts != self.report:
            self.report = counts
            self.console.print("watch: " + ", ".join(f"{k} {_short(v)}" for k, v in report.items()), markup=False)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value) if value != "" else "none"


def _interrupt(asked: list[int]) -> None:
    if asked:
        raise KeyboardInterrupt
    asked.append(1)


def _results(run: Run, seconds: float) -> dict[str, Any]:
    """Test quality of the untrained baselines, the untrained policy and the learned one."""
    import torch

    from funcppo.evaluation import ranking
    from funcppo.evaluation.ranking import RankingProtocol
    from funcppo.experiment import training
    from funcppo.prover import task as prover_task

    ready, state = run.task, run.state.train_state
    scores: dict[str, Any] = {}
    test, how = ready.dataset.test, RankingProtocol(sides=ranking.ranked_sides(ready))
    if len(test):
        names = [f"exists@{ready.max_height}", "max-confidence", "noisy-or"]
        for name in names:
            ranked = ranking.rank_split(ready, test, scorers.make_untrained_scorer(ready, name), how)
            scores[name] = ranking.summarise_ranking(
                ranked, list(ready.dataset.predicates), with_auc=ready.is_countries
            )
        scores[f"{run.score}, untrained"] = training.evaluate_policy(run, training.initial_params(run), test, how)
        scores[f"{run.score}, trained"] = training.evaluate_policy(run, run.state.best_params, test, how)
    return {
        "dataset": run.run_config.dataset,
        "rules": len(ready.dataset.rules),
        "height": ready.max_height,
        "score": run.score,
        "seed": run.run_config.seed,
        "steps": int(state.update) * run.run_config.ppo.n_envs * run.run_config.ppo.n_steps,
        "best_update": int(run.state.best_update),
        "best_valid": float(run.state.best_valid_metric),
        "false_negatives": prover_task.false_negative_rate(ready),
        "test": scores,
        "seconds": seconds,  # until training ended, validation included
        "notes": list(run.notes),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": run.run_config.device,
    }


def _show(run: Run, results: dict[str, Any], console: Console) -> None:
    import torch

    from funcppo.evaluation import explain, scorers
    from funcppo.logic import proof

    dataset = run.task.dataset
    if results["test"]:
        how = "tails among the five regions" if run.task.is_countries else "filtered, all entities, both sides"
        console.print(terminal.metrics_table(f"test ({how}, expected ties)", results["test"]))
    terminal.print_notes(console, scorers.graph_fallback_notes(run.evaluate_step))
    if (share := results["false_negatives"]) is not None:
        console.print(f"note: of the provable negatives, {share:.1%} are true in valid or test", style="dim")
    if int(run.state.best_update) == 0:
        console.print("note: no update ranked valid better than the untrained policy, which was kept", style="dim")
    split = dataset.test if len(dataset.test) else dataset.train
    for atom in split[:20]:
        found = explain.most_probable_proof(run.task, run.cfg, run.state.best_params, torch.from_numpy(atom).long())
        if found is not None:
            console.print("a proof:")
            names = (lambda a: format_atom(dataset, a), lambda r: format_rule(dataset, dataset.rules[r]))
            console.print(proof.to_text(found, *names), markup=False)
            return
    console.print("none of the first 20 queries has a proof", style="dim")
