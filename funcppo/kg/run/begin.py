"""Begin a training run in its folder, or resume it: mined rules, settings that are chosen, and the first files.

The folder is locked by the caller. Notes on what was chosen are in the run, and `on_notes` receives those on mining as
they come.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from funcppo import logs
from funcppo.core import files
from funcppo.core.settings import (
    CONFIG_FILE,
    METRICS_FILE,
    iter_differences,
    write_config,
)
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.mining.config import MiningConfig
from funcppo.kg.run import budget, choices, rule_files, run_start
from funcppo.kg.run.budget import RunTime
from funcppo.kg.run.config import (
    CHECKPOINT_FILE,
    MINED_RULES_FILE,
    PREVIOUS_CHECKPOINT_FILE,
    RESULTS_FILE,
    RUN_FILES,
    Note,
    RunConfig,
    read_config,
)
from funcppo.kg.run.rule_files import RuleFile
from funcppo.kg.run.run import (
    Run,
    last_logged_update,
    repair_checkpoint,
    save_checkpoint,
)
from funcppo.kg.search import task
from funcppo.kg.search.task import PhaseCallback
from funcppo.runtime import distributed

# of the derivations that can be held, those that mined rules may plan for
HOLDABLE_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Begin:
    """How a run begins.

    Attributes:
      config: its settings, with absolute paths.
      out: its folder.
      memory_limit: bytes that it may take.
      mining_seconds: time limit of mining.
      cache_dir: where mined rules are kept; None for the default.
      on_phase: receives what is being done.
      on_notes: receives notes on mining as they come.
    """

    config: RunConfig
    out: Path
    memory_limit: int
    mining_seconds: float
    cache_dir: Path | None
    on_phase: PhaseCallback
    on_notes: Callable[[Sequence[Note]], object]

    def start(
        self, run_time: RunTime, *, overwrite: bool, was_resumed: bool
    ) -> Run:
        """Return a new run at its start, with its config in the folder and without the files of an earlier run.

        Args:
          overwrite: files of an earlier run may be replaced.
          was_resumed: --resume was given, and there was no run.

        Raises:
          ValueError: there is an earlier run, a setting does not fit, or the facts support no rule.
        """
        if (self.out / CONFIG_FILE).exists() and not overwrite:
            raise ValueError(
                f"{self.out}: holds a run already: expected --resume, --overwrite or another folder"
            )
        config = self.config
        _check_shards(config)
        mined, mining_notes = self._mine_rules(run_time)
        run_time.end_phase("mining")
        if mined is not None:
            config = dataclasses.replace(config, rules=str(mined))
        run = run_start.prepare_run(
            config,
            self.out,
            resume=False,
            on_phase=self.on_phase,
            run_time=run_time,
            memory_limit=self.memory_limit,
        )

        notes = [*mining_notes, *_remove_stale_parts(self.out)]
        if was_resumed:
            notes.append(f"{self.out}: held no run to resume: a new one")
        run = _with_details(run, notes)
        if mined is not None:
            rules = str((self.out / MINED_RULES_FILE).absolute())
            config = dataclasses.replace(run.run_config, rules=rules)
            run = dataclasses.replace(run, run_config=config)
        self._write_start(run, mined)
        return run

    def resume(self) -> Run:
        """Return the run in the folder, where its checkpoint left it.

        Raises:
          ValueError: settings other than the steps and the time differ, or the steps are fewer.
        """
        stored = read_config(self.out)
        config = check_continues(stored, self.config, self.out)
        _check_shards(config)
        damage_notes = repair_checkpoint(self.out)
        run = run_start.prepare_run(
            config, self.out, resume=True, on_phase=self.on_phase
        )
        notes = [
            *damage_notes,
            *_remove_stale_parts(self.out),
            *_truncate_metrics(run, self.out),
        ]
        is_extended = (config.steps or 0) > (stored.steps or 0)
        if is_extended:
            notes.append(
                f"extended after update {int(run.state.train_state.update)} from {stored.steps:,} to {config.steps:,} "
                "steps: schedules and validations span the new total"
            )
        run = _with_details(run, notes)

        # Results of fewer steps are no longer those of the run.
        if is_extended:
            save_checkpoint(run, self.out)
            write_config(run.run_config, self.out)
            (self.out / RESULTS_FILE).unlink(missing_ok=True)
        return run

    def _write_start(self, run: Run, mined: Path | None) -> None:
        """Write the files of a new run, which replace those of an earlier one when all of them are written.

        Args:
          mined: the rule file to copy into the folder; None if there is none.
        """
        with tempfile.TemporaryDirectory(
            dir=self.out, prefix="start-", suffix=".part"
        ) as name:
            folder = Path(name)
            if mined is not None:
                with files.named_errors(self.out / MINED_RULES_FILE):
                    shutil.copyfile(mined, folder / MINED_RULES_FILE)
            save_checkpoint(run, folder)
            write_config(run.run_config, folder)

            # A folder with a config is a run, so the config is the first to go and the last to come.
            for name in (
                CONFIG_FILE,
                METRICS_FILE,
                RESULTS_FILE,
                PREVIOUS_CHECKPOINT_FILE,
            ):
                (self.out / name).unlink(missing_ok=True)
            for name in (MINED_RULES_FILE, CHECKPOINT_FILE, CONFIG_FILE):
                if (folder / name).exists():
                    (folder / name).replace(self.out / name)
        files.sync_folder(self.out)

    def _mine_rules(self, run_time: RunTime) -> tuple[Path | None, list[str]]:
        """The file of mined rules if no rules are set and the data set has none, else None; and notes on the choice.

        Args:
          run_time: of the choice of settings, half may go to comparing the rules of several mining settings.
        """
        config = self.config
        if config.rules is not None:
            return None, []
        dataset = loaders.load(config.dataset, cfg=config.data)
        if len(dataset.rules):
            return None, []

        rule_files.check_memory(dataset, self.memory_limit, config.device)
        planned, _ = budget.plan_settings(
            config, len(dataset.facts), self.memory_limit
        )
        mined: dict[str, RuleFile] = {}
        notes: list[str] = []
        candidates = choices.candidate_configs(dataset, self.mining_seconds)
        for name, cfg in candidates.items():
            try:
                mined[name] = self._mine(dataset, cfg, planned)
            except ValueError as error:
                notes.append(f"mining defaults of {name}: {error}")
                if len(notes) == len(candidates):
                    raise

        chosen, note = choices.choose_rules(
            {
                name: loaders.with_rule_file(dataset, file.path)
                for name, file in mined.items()
            },
            planned.prover,
            self.on_phase,
            run_time.until(run_time.CHOICE).share(0.5),
        )
        file = mined[chosen]
        notes += [note] if note else []
        told = [Note("detail", text) for text in (*notes, *file.notes)]
        self.on_notes([Note("rules", file.message), *told])
        return file.path, notes

    def _mine(
        self,
        dataset: Dataset,
        cfg: MiningConfig,
        planned: RunConfig,
    ) -> RuleFile:
        """The file of the rules that are mined by some settings, of those that can be held.

        Args:
          planned: settings of the run that fit its memory.

        Raises:
          ValueError: the facts support no rule.
        """

        def show_mining(stage: str, done: float, total: float) -> None:
            self.on_phase(
                f"mining rules: {stage}", round(done), round(total) or None
            )

        mined = rule_files.get_or_mine_rules(
            dataset,
            cfg,
            planned.device,
            show_mining,
            lambda line: self.on_notes(
                [Note("detail", f"mining rules: {line}")]
            ),
            self.cache_dir,
        )
        max_derivations = (
            task.MAX_DERIVATIONS_PER_ATOM * planned.prover.max_atoms
        )
        return rule_files.keep_holdable(
            mined,
            loaders.with_rule_file(dataset, mined.path),
            HOLDABLE_SHARE * max_derivations,
        )


def check_continues(
    stored: RunConfig, given: RunConfig, out: Path
) -> RunConfig:
    """The stored settings with the steps of the command line, the only setting that may differ.

    Raises:
      ValueError: another differs, or the steps are fewer.
    """
    changes: list[str] = []
    for name, old, new in iter_differences(stored, given):
        if name not in ("steps", "seconds", "ppo.n_updates"):
            changes.append(f"{name}: expected {old}, got {new}")
    if changes:
        raise ValueError(
            f"{out}: a run is resumed with its own settings: {'; '.join(changes)}"
        )
    if (given.steps or 0) < (stored.steps or 0):
        raise ValueError(
            f"{out}: --steps: expected {stored.steps} or more, to extend the run, got {given.steps}"
        )
    return dataclasses.replace(stored, steps=given.steps, seconds=given.seconds)


def _check_shards(config: RunConfig) -> None:
    """Raise ValueError if several processes cannot share the shards of the run."""
    n, n_shards = max(1, distributed.launched_size()), config.ppo.n_shards
    if n_shards % n:
        raise ValueError(
            f"--set ppo.n_shards: expected a multiple of the {n} processes, got {n_shards}"
        )


def _remove_stale_parts(out: Path) -> list[str]:
    """Remove what killed processes left half-written in the folder, which is locked; a note for each."""
    names = files.remove_stale_parts(out, RUN_FILES)
    for path in sorted(out.glob("start-*.part")):
        shutil.rmtree(path)
        names.append(path.name)
    return [f"removed {name}, left by a killed process" for name in names]


def _with_details(run: Run, texts: Sequence[str]) -> Run:
    """The run with more notes for results.json and a verbose screen."""
    notes = [Note("detail", text) for text in texts]
    return dataclasses.replace(run, notes=(*run.notes, *notes))


def _truncate_metrics(run: Run, folder: Path) -> list[str]:
    """Make the metrics log end where the checkpoint does; notes on what it had lost."""
    last_update = last_logged_update(run)
    return logs.truncate(folder / METRICS_FILE, last_update)
