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

from funcppo.cli import show, write_json
from funcppo.config import MineConfig, PPOConfig, ProverSettings, RunConfig
from funcppo.data import show_atom, show_rule

if TYPE_CHECKING:  # PyTorch takes seconds to import, and --help is not to wait for it
    from funcppo.runtime.capture import Captured
    from funcppo.runtime.monitor import Monitor
    from funcppo.train_step import Metrics, TrainState
    from funcppo.training import Run

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
    prover: ProverSettings = field(default_factory=ProverSettings)
    ppo: PPOConfig = _DEFAULT.ppo
    validations: int = _DEFAULT.validations
    """Looks at the valid split while training; the best params are kept."""
    valid_queries: int = _DEFAULT.valid_queries
    """Valid queries ranked at each."""
    patience: int = _DEFAULT.patience
    """Updates in a row with a loss or gradient that is not finite, after which the run stops."""
    cache_dir: Path | None = None
    """Where compiled code and mined rules are kept for the next run; by default the user's own caches."""
    watch: bool = False
    """Show what compilers and graphs do: recordings, skips, recompiles and why, moved state, times."""

    def run(self) -> int:
        """Train, judge, show; the exit status."""
        if self.cache_dir is not None:  # compilers read these once, when they are loaded
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.cache_dir.absolute() / "inductor")
            os.environ["TRITON_CACHE_DIR"] = str(self.cache_dir.absolute() / "triton")
        import torch

        from funcppo import training
        from funcppo.runtime.monitor import Monitor

        start, console = time.perf_counter(), show.console(self.json == "-")
        run = self._prepare(console)
        torch.set_float32_matmul_precision("high" if run.run.precision == "high" else "highest")
        dataset = run.problem.dataset
        console.print(
            f"{dataset.name}: {dataset.n_constants} entities, {dataset.n_predicates} relations, "
            f"{len(dataset.train)} train / {len(dataset.valid)} valid / {len(dataset.test)} test, "
            f"{len(dataset.rules)} rules, height {run.problem.max_height}, score {run.score}"
        )
        show.notes(console, run.notes)
        if not len(dataset.test):
            console.print("note: no test split, so nothing will be judged", style="dim")
        with Monitor() as monitor:
            with console.status("making the training step ready"):
                captured, how = training.strategy(run)
            monitor.captured(captured)
            show.notes(console, [how])
            run, finished = self._learn(run, captured, monitor, console)
        if not finished:
            update = int(run.saved.state.update)
            console.print(
                f"stopped after update {update}; `funcppo train --resume --out {self.out}` goes on from there"
            )
            return 130
        results = _results(run, time.perf_counter() - start)
        results["seconds_in_all"] = time.perf_counter() - start  # judging too
        write_json(str(self.out / training.RESULTS), results)
        write_json(self.json, results)
        _show(run, results, console)
        console.print(f"done in {results['seconds_in_all']:.0f} s: {self.out}")
        return 0

    def _prepare(self, console: Console) -> Run:
        import torch

        from funcppo import training
        from funcppo.runtime.compile import RUNGS

        holds_run = (self.out / training.CONFIG).exists()
        if self.resume:
            stored = training.read_config(self.out)
            if stored.dataset != located(self.dataset):
                raise ValueError(f"{self.out}: holds a run on {stored.dataset}, want {self.dataset}")
            return training.prepare(stored, self.out, resume=True)
        if holds_run and not self.overwrite:
            raise ValueError(f"{self.out}: holds a run already: want --resume, --overwrite or another folder")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: PyTorch sees no CUDA device here")
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(RunConfig) if hasattr(self, f.name)}
        config = RunConfig(**given | {"dataset": located(self.dataset), "rules": self.rules and located(self.rules)})
        if config.strategy not in ("auto", *RUNGS):
            raise ValueError(f"strategy {config.strategy!r}: want auto, {', '.join(RUNGS)}")
        config = self._with_rules(config, console)
        run = training.prepare(config, self.out, resume=False)
        self.out.mkdir(parents=True, exist_ok=True)
        for name in (training.CHECKPOINT, training.METRICS, training.RESULTS):
            (self.out / name).unlink(missing_ok=True)
        training.write_config(config, self.out)
        return run

    def _with_rules(self, config: RunConfig, console: Console) -> RunConfig:
        """The run with mined rules, kept in its folder, where the data set has none."""
        from funcppo import data, mining
        from funcppo.checkpoint import write_atomically

        if config.rules is not None or len((dataset := data.load(config.dataset)).rules):
            return config
        with console.status("mining rules") as status:
            told = lambda stage: status.update(f"mining rules: {stage}")
            mined, how = mining.cached(dataset, MineConfig(), config.device, told, self.cache_dir)
        show.notes(console, [how])
        self.out.mkdir(parents=True, exist_ok=True)
        kept = self.out / "rules.tsv"
        write_atomically(kept, lambda file: file.write(mined.read_bytes()))
        return dataclasses.replace(config, rules=str(kept))

    def _learn(
        self, run: Run, captured: Captured[TrainState, Metrics], monitor: Monitor, console: Console
    ) -> tuple[Run, bool]:
        """The run after its last update or a Ctrl-C, and whether it was the former."""
        from funcppo import training

        asked: list[int] = []
        watched = _Watch(monitor, console, self.watch)
        before = signal.signal(signal.SIGINT, lambda *_: _interrupt(asked))
        n_updates = run.cfg.ppo.n_updates
        try:
            with show.progress(console) as bar:
                task = bar.add_task("training", total=n_updates, completed=int(run.saved.state.update), note="")
                for after, numbers in training.learn(run, self.out, captured, lambda: bool(asked), monitor):
                    run = after
                    watched.look(run.saved.state, numbers)
                    best = f"best valid {training.selects(run.problem)} {float(run.saved.best_valid):.4f}"
                    note = f"return {numbers['return']:.3f}  {best}"
                    bar.update(task, completed=int(run.saved.state.update), note=note)
        finally:
            signal.signal(signal.SIGINT, before)
        return run, int(run.saved.state.update) >= n_updates


def located(name: str) -> str:
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
            self.monitor.settle()
            self.monitor.watch(state)
        warning, moved = self.monitor.warning(), self.monitor.moved(state)
        if warning:
            self.console.print(f"warning: {warning}", style="yellow", markup=False)
        if moved:
            self.console.print(f"warning: moved in memory: {', '.join(moved)}", style="yellow", markup=False)
            self.monitor.watch(state)
        if numbers["skipped"]:
            line = f"warning: {numbers['skipped']:.0f} minibatches skipped: loss or gradient not finite"
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

    from funcppo import problem, protocol, training
    from funcppo.protocol import Protocol

    ready, state = run.problem, run.saved.state
    scores: dict[str, Any] = {}
    test, how = ready.dataset.test, Protocol(sides=training.sides(ready))
    if len(test):
        names = [f"exists@{ready.max_height}", "max-confidence", "noisy-or"]
        for name in names:
            ranked = problem.rank(ready, test, problem.untrained_scorer(ready, name), how)
            scores[name] = protocol.summarise(ranked, list(ready.dataset.predicates), with_auc=ready.regions)
        scores[f"{run.score}, untrained"] = training.judge(run, training.untrained(run), test, how)
        scores[f"{run.score}, trained"] = training.judge(run, run.saved.best, test, how)
    return {
        "dataset": run.run.dataset,
        "rules": len(ready.dataset.rules),
        "height": ready.max_height,
        "score": run.score,
        "seed": run.run.seed,
        "steps": int(state.update) * run.run.ppo.n_envs * run.run.ppo.n_steps,
        "best_update": int(run.saved.best_update),
        "best_valid": float(run.saved.best_valid),
        "false_negatives": problem.false_negatives(ready),
        "test": scores,
        "seconds": seconds,  # until training ended, validation included
        "notes": list(run.notes),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": run.run.device,
    }


def _show(run: Run, results: dict[str, Any], console: Console) -> None:
    import torch

    from funcppo import explain, scoring
    from funcppo.logic import proof

    dataset = run.problem.dataset
    if results["test"]:
        how = "tails among the five regions" if run.problem.regions else "filtered, all entities, both sides"
        console.print(show.results_table(f"test ({how}, expected ties)", results["test"]))
    show.notes(console, scoring.not_replayed(run.evaluate_step))
    if (share := results["false_negatives"]) is not None:
        console.print(f"note: of the provable negatives, {share:.1%} are true in valid or test", style="dim")
    if int(run.saved.best_update) == 0:
        console.print("note: no update ranked valid better than the untrained policy, which was kept", style="dim")
    split = dataset.test if len(dataset.test) else dataset.train
    for atom in split[:20]:
        found = explain.best_proof(run.problem, run.cfg, run.saved.best, torch.from_numpy(atom).long())
        if found is not None:
            console.print("a proof:")
            names = (lambda a: show_atom(dataset, a), lambda r: show_rule(dataset, dataset.rules[r]))
            console.print(proof.text(found, *names), markup=False)
            return
    console.print("none of the first 20 queries has a proof", style="dim")
