"""`funcppo train`: train a prover on a knowledge graph."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self

from tyro.conf import arg

from funcppo.cli.common import (
    GraphsChoice,
    Interrupt,
    JsonObject,
    check_overwrites,
    debug_mode,
    defer_interrupt,
    graphs_allowed,
    metrics_exported,
    option_name,
    select_device,
    set_caches,
    set_threads,
    write_json,
)
from funcppo.cli.console import (
    make_console,
    metrics_table,
    print_notes,
    show_status,
)
from funcppo.cli.evaluation_setup import default_memory_limit, parse_memory
from funcppo.cli.file_lock import lock_folder
from funcppo.cli.mine import check_mining_memory
from funcppo.cli.options import (
    DataOptions,
    DatasetArgument,
    DeviceOption,
    JsonOutput,
    LoggerNames,
    MetricsFile,
    MetricsPort,
    OptionalFile,
)
from funcppo.cli.target import data_files, debug_files
from funcppo.config import PPOConfig
from funcppo.core import files
from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.settings import (
    CONFIG_FILE,
    METRICS_FILE,
    PositiveFloat,
    PositiveInt,
    iter_differences,
    write_config,
)
from funcppo.kg.mining.config import MiningConfig
from funcppo.kg.run.config import (
    CHECKPOINT_FILE,
    MINED_RULES_FILE,
    PREVIOUS_CHECKPOINT_FILE,
    RESULTS_FILE,
    RUN_FILES,
    Note,
    RunConfig,
    read_config,
    read_settings,
)
from funcppo.kg.scores.question_config import (
    BellmanFordConfig,
    EmbeddingConfig,
    ListwiseConfig,
    QuestionConfig,
)
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.logs import check_loggers, open_loggers
from funcppo.runtime import distributed
from funcppo.runtime.distributed import Processes

# PyTorch takes seconds to import, and --help does not wait for it.
if TYPE_CHECKING:
    from rich.console import Console

    from funcppo.kg.graph.dataset import Dataset
    from funcppo.kg.logic.proof import Proof
    from funcppo.kg.run.budget import RunTime
    from funcppo.kg.run.rule_files import RuleFile
    from funcppo.kg.run.run import Run
    from funcppo.kg.run.telemetry import Exporter
    from funcppo.kg.run.training import Peers
    from funcppo.kg.run.validation import Calibration, SampledMetrics
    from funcppo.kg.search.task import PhaseCallback
    from funcppo.runtime.capture import CapturedStep
    from funcppo.runtime.compile import StrategyRecord
    from funcppo.runtime.monitor import Monitor
    from funcppo.train_step import Metrics, TrainState

# of the derivations that can be held, those that mined rules may plan for
HOLDABLE_SHARE = 0.5
MAX_PROOF_QUERIES = 20  # queries that are searched for a proof to print
_DEFAULT = RunConfig(dataset="")
_MINING = MiningConfig()


class _TrainingResult(NamedTuple):
    """Where training ended."""

    run: Run
    is_finished: bool  # False after an interrupt
    exit_status: int  # of the interrupt
    strategy: StrategyRecord


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a prover on a knowledge graph with PPO and write the run to a folder.

    RUN receives config.json, metrics.jsonl (one line per update), checkpoint.npz and results.json. Ctrl-C or
    SIGTERM saves a checkpoint after the current update, a second one ends at once; --resume continues bit for bit.

    Exit status: 0 trained, 2 bad input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """

    dataset: DatasetArgument = ""
    """Data set: embedded name (countries_s1, countries_s2, countries_s3, family_tree:PEOPLE:SEED, clans:PEOPLE:SEED),
    a folder with train.txt, a file of triples (.txt, .tsv, .csv or .nt), or a Prolog program FILE.pl. (required
    unless --resume)"""
    out: Annotated[Path, arg(metavar="RUN")]
    """Folder that the run is written to; created if it is missing."""
    config: OptionalFile = None
    """Read settings from FILE: the config.json of a run, or YAML with the same names, some or all of them. Options of
    the command line win. Default: no file."""
    rules: OptionalFile = _DEFAULT.rules
    """Rule file to use instead of the data set's own rules. Default: the data set's rules; if it has none, rules are
    mined first."""
    data: DataOptions = _DEFAULT.data
    """How files of triples are read and split."""
    steps: PositiveInt | None = _DEFAULT.steps
    """Total number of environment steps, over all environments; rounded up to whole rollouts. Default: 120,000, or
    fewer where a run that learns from questions would take much longer than a minute for them. With --resume a larger
    number extends the run: its schedules and validations then span the new total, so that a learning rate that had
    fallen rises again."""
    seconds: Annotated[PositiveFloat | None, arg(metavar="SECONDS")] = (
        _DEFAULT.seconds
    )
    """Time limit of the whole run in seconds, from reading the data to the ranking of test; None for no limit. It is
    divided over the phases: what does not fit is sampled or left out, and a note counts it. Work that an option of its
    own sets (--steps, --questions.max-questions, --listwise.max-gradients) is done whole and does not count. The
    counts of rules that are given, and the index of what they derive, are made whole too, with progress. With
    --resume, of what is left to do."""
    seed: int = _DEFAULT.seed
    """Random seed of the initial weights, the training queries and the actions."""
    device: DeviceOption = "cpu"
    """Device to train on: cpu, cuda, or cuda:N for GPU number N."""
    threads: int = _DEFAULT.threads
    """Number of CPU threads of an operation, which the last bits of results depend on. The tensors of a small graph
    are slower on two threads than on one."""
    strategy: Literal["auto", "one-graph", "forward", "eager"] = "auto"
    """How the training step is executed. one-graph: a minibatch update (forward, loss, backward, clipping, Adam)
    compiled as one graph; forward: forward pass and loss compiled, backward pass by autograd, fused Adam; eager:
    nothing of the update compiled; auto: eager for a run too short to repay compilation (on a GPU by the time of an
    update, which is measured), otherwise the first of these that works and matches eager."""
    graphs: GraphsChoice = "auto"
    """Replay the training step, and the search of validations, as CUDA graphs on a GPU. auto: where they can be
    recorded; off: never, to rule them out; trees: those that PyTorch records of compiled functions (mode
    reduce-overhead), to compare with; manual: always, and it is an error where one cannot be recorded."""
    precision: Literal["highest", "high", "bfloat16"] = _DEFAULT.precision
    """Precision of matrix products. highest: float32; high: TF32 where the GPU has it; bfloat16: bfloat16 inputs, all
    else float32."""
    learner: Literal["auto", "questions", "proofs"] = _DEFAULT.learner
    """What PPO learns from. questions: which candidate that the rules derive is the answer, by the evidence for and
    against each (height 1 only); proofs: which rules and facts prove an atom; auto: questions at height 1, otherwise
    proofs."""
    score: Literal["auto", "success", "best-proof"] = _DEFAULT.score
    """How a policy that learns from proofs scores a candidate. success: probability that its search ends in a proof;
    best-proof: probability of its most probable proof; auto: the one with the better ranking on the valid split."""
    rule_score: str = _DEFAULT.rule_score
    """Score by rule confidences that the policy is compared with: max-confidence, noisy-or or noisy-or@P, with
    -other-facts at its end or not. Default: auto, the best of those without on the valid split."""
    resume: bool = False
    """Continue from the checkpoint in RUN with the settings in its config.json; only --steps may be given another
    value. Default: off."""
    overwrite: bool = False
    """Start a new run in a folder that already holds one, replacing its files. Default: off."""
    json: JsonOutput = None
    """Also write the results as JSON to FILE; - writes them to standard output in place of the text. Default: only
    RUN/results.json."""
    early_stop_validations: PositiveInt | None = _DEFAULT.early_stop_validations
    """End training after this many validations in a row without a better result on valid. Default: train to the last
    update."""
    n_validations: int = _DEFAULT.n_validations
    """Number of evaluations on the valid split during training; the parameters with the best result are kept."""
    n_validation_queries: PositiveInt | None = _DEFAULT.n_validation_queries
    """Number of valid queries ranked at each validation, a random sample. Default: all of valid where the run learns
    from questions, 1,000 where it learns from proofs; a note says where fewer are ranked because more would compute
    too much."""
    checkpoint_every: Annotated[PositiveFloat, arg(metavar="SECONDS")] = 60.0
    """Save a checkpoint after the update that ends this many seconds after the last one; validations save too. It does
    not change the result."""
    max_nonfinite_updates: int = _DEFAULT.max_nonfinite_updates
    """Stop the run after this many consecutive updates with a non-finite loss or gradient."""
    mining_seconds: Annotated[PositiveFloat, arg(metavar="SECONDS")] = (
        _MINING.seconds
    )
    """Time limit of mining in seconds, if the data set has no rules; as --seconds of `funcppo mine`."""
    memory: Annotated[str | None, arg(metavar="BYTES")] = None
    """Memory limit of this process, or of the GPU: a number of bytes or with a unit, such as 2GB or 512MiB. All phases
    plan the parts in which they compute within it, and a note says which are smaller for it. A process that is about to
    exceed a limit that is set ends with an error and keeps its last checkpoint. Default: three quarters of what is
    free."""
    cache_dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder for compiled code and mined rules, reused by later runs. Default: $XDG_CACHE_HOME/funcppo."""
    metrics_port: MetricsPort = None
    """Serve metrics in Prometheus' format at http://127.0.0.1:PORT/metrics while the program runs. Of several processes
    the n-th of a host serves at PORT + n, from 0 on. Default: not served."""
    metrics_file: MetricsFile = None
    """Write the same metrics to FILE, every second or at the next update after it, as the textfile collector of the
    node exporter reads them. Default: no file."""
    log: LoggerNames = ()
    """Where the metrics of each update go beside RUN/metrics.jsonl: csv writes RUN/metrics.csv, tensorboard
    RUN/tensorboard, wandb logs to Weights & Biases (WANDB_MODE=offline: to RUN/wandb); several may be given. Default:
    nowhere."""
    debug: bool = False
    """Run as a bug report needs it: compile and record nothing, wait for each kernel, use deterministic algorithms,
    print tracebacks, and say what to attach. It does not change the settings of the run. Default: off."""
    log_compiles: bool = False
    """Print compilations, recompilations and their reasons, CUDA-graph captures and fallbacks, moved buffers and times
    (ms). Default: off."""
    questions: QuestionConfig = _DEFAULT.questions
    """Evidence and questions of a run that learns from questions."""
    embedding: EmbeddingConfig = _DEFAULT.embedding
    """Settings of link embeddings, a prior of the candidates of a run that learns from questions."""
    bellman_ford: BellmanFordConfig = _DEFAULT.bellman_ford
    """Settings of a Bellman-Ford network, another prior of these candidates."""
    listwise: ListwiseConfig = _DEFAULT.listwise
    """Settings of the listwise fit that PPO starts from, of a run that learns from questions."""
    prover: ProverTaskConfig = _DEFAULT.prover
    """Settings of the proof search and of the prover network."""
    ppo: PPOConfig = _DEFAULT.ppo
    """Settings of proximal policy optimisation (PPO)."""

    def run(self) -> int:
        """Train, evaluate on the test split, and print the results.

        Returns:
          The exit status.
        """
        if not self.dataset:
            raise ValueError(
                "DATASET: expected a data set, got none (see --help)"
            )
        set_caches(self.cache_dir)
        processes = distributed.current_processes()
        if processes is not None and not processes.is_main:
            with (
                graphs_allowed(self.graphs, self.device),
                metrics_exported(self.metrics_port, None, "train") as exporter,
            ):
                return self._assist(processes, exporter)
        check_loggers(self.log)
        self._check_outputs()
        with (
            lock_folder(self.out),
            debug_mode(self.debug, debug_files(self.out)),
            graphs_allowed(self.graphs, self.device),
            self._memory_limited(),
            metrics_exported(
                self.metrics_port, self.metrics_file, "train"
            ) as exporter,
        ):
            self._check_strategy()
            status = self._run(exporter)
            if exporter and status == 0:
                exporter.telemetry.finish()
            return status

    def _check_strategy(self) -> None:
        """Check that the strategy is not refused, before any work; --debug uses none."""
        from funcppo.runtime.compile import check_available

        if not self.debug:
            check_available(self.strategy)

    @property
    def _memory_limit(self) -> int:
        """The bytes that the run may take."""
        if self.memory is None:
            return default_memory_limit(self.device)
        return parse_memory(self.memory)

    @contextmanager
    def _memory_limited(self) -> Iterator[None]:
        """Let the process allocate no more than --memory meanwhile, where that is set."""
        from funcppo.kg.run import budget

        limit = None if self.memory is None else self._memory_limit
        with budget.within_memory(limit, self.device):
            yield

    def _run(self, exporter: Exporter | None) -> int:
        """Train in a folder that no other process writes to; the exit status."""
        from funcppo.kg.run import run_build
        from funcppo.kg.run.budget import RunTime

        start = time.perf_counter()
        run_time = RunTime(self.seconds, device=self.device)
        console = make_console(self.json == "-")
        set_threads(self._run_config().threads)
        run = self._open_run(console, run_time)
        _print_run(console, run)
        with show_status(console, "listing questions") as status:
            run = run_build.with_training_data(run, status.update)

        trained = self._train(run, console, exporter, run_time)
        if not trained.is_finished:
            self._print_interrupted(console)
            return trained.exit_status

        try:
            results = _evaluate(
                trained.run, time.perf_counter() - start, console, run_time
            )
            results |= {
                "strategy": dataclasses.asdict(trained.strategy),
                "graphs": self.graphs,
            }
        except KeyboardInterrupt:
            self._print_interrupted(console)
            raise
        results["total_seconds"] = time.perf_counter() - start
        write_json(str(self.out / RESULTS_FILE), results)
        write_json(self.json, results)
        _print_results(
            trained.run, results, console, run_time.until(run_time.TEST)
        )
        console.print(f"done in {results['total_seconds']:.0f} s: {self.out}")
        return 0

    def _open_run(self, console: Console, run_time: RunTime) -> Run:
        """The run, new or at its checkpoint, whose files all processes may read from now on."""
        with show_status(console, "reading data") as status:
            on_phase = _tell_others(status.update)
            run = (
                self._resume_run(on_phase)
                if self._has_run_to_resume()
                else self._start_run(console, on_phase, run_time)
            )
        processes = distributed.current_processes()
        if processes is not None:
            processes.share("run", True)
        return run

    def _assist(self, processes: Processes, exporter: Exporter | None) -> int:
        """Make updates of a part of the run that rank 0 trains; the exit status."""
        from funcppo.kg.run import run_build, run_start, training
        from funcppo.runtime.monitor import Monitor

        # Rank 0 has written the run, with the settings that it chose and the state to go on from.
        processes.share("run")
        config = read_config(self.out)
        set_threads(config.threads)
        select_device(config.device)
        training.set_matmul_precision(config)
        run = run_start.prepare_run(config, self.out, resume=True)
        run = run_build.with_training_data(run, for_validation=False)
        peers = training.connect(processes, run)
        with defer_interrupt(), Monitor() as monitor:
            captured, record = training.prepare_train_step(run, peers=peers)
            if exporter is None:
                training.assist(captured, peers)
                return 0
            monitor.record_capture(captured)
            _describe_run(exporter, monitor, run, record, captured)
            _assist_counted(exporter, run, captured, peers)
        return 0

    def _print_interrupted(self, console: Console) -> None:
        """Print what the checkpoint holds, and how to continue from it."""
        from funcppo.kg.run.run import saved_update

        words = ("funcppo", "train", self.dataset, "--out", str(self.out))
        command = f"{shlex.join(words)} --resume"
        console.print(
            f"interrupted after update {saved_update(self.out)}; `{command}` continues"
        )

    def _check_outputs(self) -> None:
        """Check the files to write, before any work. Mined rules are written only where no rules are read."""
        run_files = [
            ("--out", self.out / name)
            for name in RUN_FILES
            if name != MINED_RULES_FILE
        ]
        outputs = [
            *run_files,
            ("--json", self.json),
            ("--metrics-file", self.metrics_file),
        ]
        check_overwrites(outputs, data_files(self.dataset, self.rules))

    def _resume_run(self, on_phase: PhaseCallback) -> Run:
        """The run in the folder, where its checkpoint left it."""
        from funcppo.kg.run import run_start
        from funcppo.kg.run.run import repair_checkpoint, save_checkpoint

        stored = read_config(self.out)
        config = self._extend(stored)
        self._check_shards(config)
        select_device(config.device)
        damage_notes = repair_checkpoint(self.out)
        run = run_start.prepare_run(
            config, self.out, resume=True, on_phase=on_phase
        )
        notes = [
            *damage_notes,
            *self._remove_stale_parts(),
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

    def _extend(self, stored: RunConfig) -> RunConfig:
        """The stored settings with the steps of the command line, the only setting that may differ.

        Raises:
          ValueError: another differs, or the steps are fewer.
        """
        given = self._run_config()
        changes: list[str] = []
        for name, old, new in iter_differences(stored, given):
            if name not in ("steps", "seconds", "ppo.n_updates"):
                option = "DATASET" if name == "dataset" else option_name(name)
                changes.append(f"{option}: expected {old}, got {new}")
        if changes:
            raise ValueError(
                f"{self.out}: a run is resumed with its own settings: {'; '.join(changes)}"
            )
        if (given.steps or 0) < (stored.steps or 0):
            raise ValueError(
                f"{self.out}: --steps: expected {stored.steps} or more, to extend the run, got {given.steps}"
            )
        return dataclasses.replace(
            stored, steps=given.steps, seconds=given.seconds
        )

    def _has_run_to_resume(self) -> bool:
        """Whether --resume finds a run; a supervisor gives it from the start, and a run that was ended before its first
        files is begun anew.

        Raises:
          ValueError: DATASET is missing, which only a stored run can say.
        """
        if not self.resume:
            return False
        is_stored = (self.out / CONFIG_FILE).is_file()
        if not is_stored and not self.dataset:
            read_config(self.out)  # raises what is missing
        return is_stored

    def stored_options(self) -> Train | None:
        """The options of the run to resume or of --config; None without them."""
        if self.resume and (self.overwrite or self.config):
            other = "--overwrite" if self.overwrite else "--config"
            raise ValueError(f"--resume, {other}: expected one of them")
        if self._has_run_to_resume():
            stored = read_config(self.out)
        elif self.config:
            base = dataclasses.replace(_DEFAULT, dataset=self.dataset)
            stored = read_settings(Path(self.config), base)
        else:
            return None
        return self.with_settings(stored)

    def with_settings(self, run_config: RunConfig) -> Self:
        """The program with the settings of a run as its options."""
        settings = {
            field.name: getattr(run_config, field.name)
            for field in dataclasses.fields(RunConfig)
        }
        return dataclasses.replace(self, **settings)

    def _check_shards(self, config: RunConfig) -> None:
        """Raise ValueError if several processes cannot share the shards of the run."""
        n, n_shards = max(1, distributed.launched_size()), config.ppo.n_shards
        if n_shards % n:
            raise ValueError(
                f"--ppo.n-shards: expected a multiple of the {n} processes, got {n_shards}"
            )

    def _start_run(
        self, console: Console, on_phase: PhaseCallback, run_time: RunTime
    ) -> Run:
        """A new run at its start, with its config in the folder and without the files of an earlier run."""
        from funcppo.kg.run import run_start

        if (self.out / CONFIG_FILE).exists() and not self.overwrite:
            raise ValueError(
                f"{self.out}: holds a run already: expected --resume, --overwrite or another folder"
            )
        select_device(self.device)
        config = self._run_config()
        self._check_shards(config)
        mined, mining_notes = self._mine_rules(
            config, console, on_phase, run_time
        )
        run_time.end_phase("mining")
        if mined is not None:
            config = dataclasses.replace(config, rules=str(mined))
        run = run_start.prepare_run(
            config,
            self.out,
            resume=False,
            on_phase=on_phase,
            run_time=run_time,
            memory_limit=self._memory_limit,
        )

        notes = [*mining_notes, *self._remove_stale_parts()]
        if self.resume:
            notes.append(f"{self.out}: held no run to resume: a new one")
        run = _with_details(run, notes)
        if mined is not None:
            rules = str((self.out / MINED_RULES_FILE).absolute())
            config = dataclasses.replace(run.run_config, rules=rules)
            run = dataclasses.replace(run, run_config=config)
        self._write_start(run, mined)
        return run

    def _write_start(self, run: Run, mined: Path | None) -> None:
        """Write the files of a new run, which replace those of an earlier one when all of them are written.

        Args:
          mined: the rule file to copy into the folder; None if there is none.
        """
        from funcppo.kg.run.run import save_checkpoint

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

    def _remove_stale_parts(self) -> list[str]:
        """Remove what killed processes left half-written in the folder, which is locked; a note for each."""
        names = files.remove_stale_parts(self.out, RUN_FILES)
        for path in sorted(self.out.glob("start-*.part")):
            shutil.rmtree(path)
            names.append(path.name)
        return [f"removed {name}, left by a killed process" for name in names]

    def _run_config(self) -> RunConfig:
        """The settings of the run; paths are absolute, so that it can be resumed from any folder."""
        settings = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(RunConfig)
        }
        settings["dataset"] = absolute_or_name(self.dataset)
        settings["rules"] = self.rules and absolute_or_name(self.rules)
        return RunConfig(**settings)

    def _mine_rules(
        self,
        config: RunConfig,
        console: Console,
        on_phase: PhaseCallback,
        run_time: RunTime,
    ) -> tuple[Path | None, list[str]]:
        """The file of mined rules if no rules are set and the data set has none, else None; and notes on the choice.

        Args:
          run_time: of the choice of settings, half may go to comparing the rules of several mining settings.
        """
        from funcppo.kg.graph import loaders
        from funcppo.kg.run import budget, choices

        if config.rules is not None:
            return None, []
        dataset = loaders.load(config.dataset, cfg=config.data)
        if len(dataset.rules):
            return None, []

        limit = check_mining_memory(
            dataset, self.memory, "--memory", config.device
        )
        planned, _ = budget.plan_settings(config, len(dataset.facts), limit)
        mined: dict[str, RuleFile] = {}
        notes: list[str] = []
        candidates = choices.candidate_configs(dataset, self._seconds_of_mining)
        for name, cfg in candidates.items():
            try:
                mined[name] = self._mine(
                    dataset, cfg, planned, console, on_phase
                )
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
            on_phase,
            run_time.until(run_time.CHOICE).share(0.5),
        )
        file = mined[chosen]
        notes += [note] if note else []
        print_notes(console, [*notes, file.message, *file.notes])
        return file.path, notes

    def _mine(
        self,
        dataset: Dataset,
        cfg: MiningConfig,
        planned: RunConfig,
        console: Console,
        on_phase: PhaseCallback,
    ) -> RuleFile:
        """The file of the rules that are mined by some settings, of those that can be held.

        Args:
          planned: settings of the run that fit its memory.

        Raises:
          ValueError: the facts support no rule.
        """
        from funcppo.kg.graph import loaders
        from funcppo.kg.run import rule_files
        from funcppo.kg.search import task

        def show_mining(stage: str, done: float, total: float) -> None:
            on_phase(
                f"mining rules: {stage}", round(done), round(total) or None
            )

        mined = rule_files.get_or_mine_rules(
            dataset,
            cfg,
            planned.device,
            show_mining,
            lambda line: print_notes(console, [f"mining rules: {line}"]),
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

    @property
    def _seconds_of_mining(self) -> float:
        """The time limit of mining: a share of that of the run."""
        from funcppo.kg.run.budget import RunTime

        if self.seconds is None:
            return self.mining_seconds
        return min(self.mining_seconds, RunTime.MINING * self.seconds)

    def _train(
        self,
        run: Run,
        console: Console,
        exporter: Exporter | None,
        run_time: RunTime,
    ) -> _TrainingResult:
        """Train until the last update, the end of the time or an interrupt; these take effect after an update."""
        from funcppo import logs
        from funcppo.kg.run import training
        from funcppo.runtime.monitor import Monitor

        training.set_matmul_precision(run.run_config)
        is_bounded = self.steps is None
        deadline = run_time.until(run_time.PPO) if is_bounded else NO_DEADLINE
        with Monitor() as monitor:
            log = logs.read_header(self.out / METRICS_FILE)
            captured, record, peers = _prepare_train_step(
                _with_eager_strategy(run) if self.debug else run,
                monitor,
                console,
                log.get("strategy"),
                deadline,
            )
            _write_header(run, self.out, record, self.graphs)
            if exporter:
                _describe_run(exporter, monitor, run, record, captured)
            logger = _CompileLogger(
                monitor, console, self.log_compiles, exporter
            )

            rows = logs.read(self.out / METRICS_FILE)
            settings = dataclasses.asdict(run.run_config)
            with (
                open_loggers(self.log, self.out, rows, settings) as loggers,
                show_status(console, "training", deadline) as status,
                defer_interrupt() as interrupt,
            ):
                updates = training.train(
                    run,
                    self.out,
                    captured,
                    lambda: interrupt.requested or deadline.is_over,
                    monitor,
                    partial(_tell_others(status.update), "validating"),
                    self.checkpoint_every,
                    exporter and exporter.telemetry,
                    loggers,
                    peers,
                )
                # A repeated signal ends the update or validation in progress.
                with suppress(KeyboardInterrupt):
                    for run, numbers in updates:
                        logger.report_changes(run.state.train_state, numbers)
                        update = int(run.state.train_state.update)
                        status.update(
                            "training",
                            update,
                            run.cfg.ppo.n_updates,
                            note=_training_note(run, numbers),
                        )
        run_time.end_phase("training", is_set=not is_bounded)
        return _end_training(run, console, interrupt, deadline.is_over, record)


def _with_details(run: Run, texts: Sequence[str]) -> Run:
    """The run with more notes for results.json and a verbose screen."""
    notes = [Note("detail", text) for text in texts]
    return dataclasses.replace(run, notes=(*run.notes, *notes))


def _with_eager_strategy(run: Run) -> Run:
    """The run with nothing to compile, whatever strategy it is trained by."""
    config = dataclasses.replace(run.run_config, strategy="eager")
    return dataclasses.replace(run, run_config=config)


def _tell_others(on_phase: PhaseCallback) -> PhaseCallback:
    """The callback, which also tells the processes that wait, if there are some, how far this one is."""
    processes = distributed.current_processes()
    if processes is None:
        return on_phase

    def tell(
        text: str,
        done: int = 0,
        total: int | None = None,
        deadline: Deadline = NO_DEADLINE,
        /,
    ) -> None:
        processes.report(f"{text} {done} of {total}" if total else text)
        on_phase(text, done, total, deadline)

    return tell


def _end_training(
    run: Run,
    console: Console,
    interrupt: Interrupt,
    is_over: bool,
    record: StrategyRecord,
) -> _TrainingResult:
    """Where training ended.

    Args:
      is_over: its time is.
    """
    from funcppo.kg.run import training

    # An interrupt may have left out the last validation.
    is_finished = is_over or training.is_finished(run)
    is_finished = is_finished and not interrupt.requested
    if is_finished:
        run = _with_late_note(run, console)
    return _TrainingResult(run, is_finished, interrupt.exit_status, record)


def _with_late_note(run: Run, console: Console) -> Run:
    """The run with a note on where its time ended training, if it did; printed."""
    from funcppo.kg.run import training

    if training.is_finished(run):
        return run
    note = (
        f"the time of the run (--seconds) ended training after update {int(run.state.train_state.update)} of "
        f"{run.cfg.ppo.n_updates}; --resume continues"
    )
    print_notes(console, [note])
    return dataclasses.replace(run, notes=(*run.notes, Note("cut", note)))


def _early_stop_note(run: Run) -> str:
    """Where early stopping ended a run, and why."""
    return (
        f"stopped early after update {int(run.state.train_state.update)} of {run.cfg.ppo.n_updates}: "
        f"none of the last {run.run_config.early_stop_validations} validations was better than that of update "
        f"{int(run.state.best_update)} (--early-stop-validations)"
    )


def _assist_counted(
    exporter: Exporter,
    run: Run,
    captured: CapturedStep[TrainState, Metrics],
    peers: Peers,
) -> None:
    """Make the updates of this process's shards; the metrics record them."""
    from funcppo.kg.run import training

    telemetry = exporter.telemetry
    n_env_steps = run.cfg.ppo.n_envs * run.cfg.ppo.n_steps

    def count_update(seconds: float) -> None:
        telemetry.record_shared_update(seconds, n_env_steps)
        exporter.refresh()

    training.assist(
        captured, peers, count_update, telemetry.record_shared_checkpoint
    )
    telemetry.finish()


def _describe_run(
    exporter: Exporter,
    monitor: Monitor,
    run: Run,
    record: StrategyRecord,
    captured: CapturedStep[TrainState, Metrics],
) -> None:
    """Tell the metrics what runs, and how."""
    exporter.monitor = monitor
    telemetry = exporter.telemetry
    telemetry.describe(
        "run",
        program="train",
        dataset=run.task.dataset.name,
        device=record.device,
        strategy=record.strategy,
        replay=record.replay_mode,
        precision=run.run_config.precision,
    )
    telemetry.record_strategy(record, captured)
    exporter.refresh(at_once=True)


def _training_note(run: Run, numbers: dict[str, float]) -> str:
    """The mean return of an update, and the best metric on valid so far."""
    from funcppo.kg.ranking.ranking import selection_metric

    note = f"return {numbers['episode_return']:.3f}"
    if len(run.task.dataset.valid):
        best = float(run.state.best_valid_metric)
        note += f"  best valid {selection_metric(run.task)} {best:.4f}"
    return note


def _truncate_metrics(run: Run, folder: Path) -> list[str]:
    """Make the metrics log end where the checkpoint does; notes on what it had lost."""
    from funcppo import logs
    from funcppo.kg.run.run import last_logged_update

    last_update = last_logged_update(run)
    return logs.truncate(folder / METRICS_FILE, last_update)


def _write_header(
    run: Run, folder: Path, record: StrategyRecord, graphs: GraphsChoice
) -> None:
    """Write to the first line of the metrics log how the updates after it are computed."""
    from funcppo import logs
    from funcppo.kg.run.run import last_logged_update

    header = {**logs.run_header(record), "graphs": graphs}
    logs.truncate(folder / METRICS_FILE, last_logged_update(run), header)


def absolute_or_name(name: str) -> str:
    """Return the absolute path of a file or folder that exists, or else the name itself: that of an embedded set."""
    path = Path(name)
    return str(path.absolute()) if path.exists() else name


def _print_run(console: Console, run: Run) -> None:
    """Print what the run trains on, and the notes on it."""
    dataset = run.task.dataset
    console.print(
        f"{dataset.name}: {dataset.n_constants} entities, {dataset.n_predicates} relations, "
        f"{len(dataset.train)} train / {len(dataset.valid)} valid / {len(dataset.test)} test, "
        f"{len(dataset.rules)} rules, height {run.task.max_height}, score {run.score}"
    )
    print_notes(console, run.notes)
    if not len(dataset.test):
        hint = " (--split-ratios holds triples out)"
        note = "no test split; the test evaluation is skipped"
        print_notes(console, [note + ("" if dataset.is_program else hint)])


def _prepare_train_step(
    run: Run,
    monitor: Monitor,
    console: Console,
    earlier: JsonObject | None,
    deadline: Deadline,
) -> tuple[CapturedStep[TrainState, Metrics], StrategyRecord, Peers | None]:
    """Compile and capture the training step as the run's strategy asks for, or as was measured at its start.

    Returns:
      The step, how it is computed, and the processes that share it.
    """
    from funcppo import compiled_step
    from funcppo.kg.run import training

    processes = distributed.current_processes()
    peers = training.connect(processes, run) if processes else None
    with show_status(console, "preparing the training step"):
        captured, record = training.prepare_train_step(
            run, earlier, peers, deadline
        )
    monitor.record_capture(captured)
    print_notes(console, [compiled_step.describe_strategy(record)])
    return captured, record, peers


class _CompileLogger:
    """Prints once if the training step is compiled or captured again; all that the monitor counts, with --log-compiles.

    Attributes:
      log_compiles: whether to print the monitor's counts whenever they change.
      counts: the monitor's counts when they were last printed.
    """

    def __init__(
        self,
        monitor: Monitor,
        console: Console,
        log_compiles: bool,
        exporter: Exporter | None = None,
    ) -> None:
        self.monitor = monitor
        self.exporter = exporter
        self.console = console
        self.log_compiles = log_compiles
        self.counts: JsonObject = {}
        self.is_first_update = True

    def report_changes(
        self, state: TrainState, numbers: dict[str, float]
    ) -> None:
        """Print what has changed since the last update.

        Args:
          state: the training state after an update.
          numbers: metrics of the update.
        """
        if self.is_first_update:
            self.is_first_update = False
            self.monitor.end_warmup()
            self.monitor.watch_addresses(state)
        self._print_warnings(state, numbers)
        if self.log_compiles:
            self._print_counts()
        if self.exporter:
            self.exporter.refresh()

    def _print_warnings(
        self, state: TrainState, numbers: dict[str, float]
    ) -> None:
        """Print warnings on compilations, buffers that have moved, and minibatches that were skipped."""
        warnings = []
        recompilation = self.monitor.warning()
        if recompilation:
            warnings.append(recompilation)

        moved = self.monitor.moved_leaves(state)
        if moved:
            warnings.append(f"moved in memory: {', '.join(moved)}")
            self.monitor.watch_addresses(state)
            if self.exporter:
                self.exporter.telemetry.record_moved_leaves(len(moved))

        n_skipped = numbers["n_nonfinite_minibatches"]
        if n_skipped:
            warnings.append(
                f"{n_skipped:.0f} minibatches skipped: loss or gradient not finite"
            )
        for warning in warnings:
            self.console.print(f"warning: {warning}", style="yellow")

    def _print_counts(self) -> None:
        """Print the monitor's report if a count has changed; times alone always change."""
        report = self.monitor.report()
        counts = {
            name: value
            for name, value in report.items()
            if not name.endswith("_ms")
        }
        if counts == self.counts:
            return
        self.counts = counts
        text = ", ".join(
            f"{name} {_format_value(value)}" for name, value in report.items()
        )
        self.console.print(f"compiles and graphs: {text}")


def _format_value(value: object) -> str:
    """A count, time or reason of the monitor as text."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return "none" if value == "" else str(value)


def _evaluate(
    run: Run, training_seconds: float, console: Console, run_time: RunTime
) -> JsonObject:
    """The contents of results.json, without the total time.

    Args:
      training_seconds: time until training ended, validation included.
    """
    from funcppo import logs
    from funcppo.kg.run import training, validation
    from funcppo.kg.search.task import false_negative_rate

    task = run.task
    ppo = run.run_config.ppo
    n_updates = int(run.state.train_state.update)
    n_all = len(task.dataset.test)
    with show_status(console, "ranking valid, other facts counted"):
        run, variant, more = validation.choose_other_facts(
            run, run_time.until(run_time.TEST).share(0.2)
        )
    calibrated = _calibrate(run, console, run_time)
    notes = [*_end_notes(run, calibrated), *more]
    print_notes(console, notes)
    notes = [*run.notes, *notes]

    rule_scores = [run.run_config.rule_score]
    if variant is not None:
        rule_scores.append(variant)
    temperature = calibrated and calibrated.temperature
    test = _test_metrics(run, rule_scores, console, run_time, temperature)
    run_time.end_phase("ranking of test")
    if test.n_queries < n_all:
        notes.append(Note("cut", _sample_note(test.n_queries, n_all)))
        print_notes(console, notes[-1:])
    return {
        "dataset": run.run_config.dataset,
        "rules": len(task.dataset.rules),
        "height": task.max_height,
        "learner": run.run_config.learner,
        "score": run.score,
        "default_score": run.default_score,
        "default_score_reason": run.default_score_reason,
        "rule_score": run.run_config.rule_score,
        "rule_valid_metric": run.rule_metric,
        "seed": run.run_config.seed,
        "steps": n_updates * ppo.n_envs * ppo.n_steps,
        "stopped_early": training.stopped_early(run),
        "best_update": int(run.state.best_update),
        "best_valid_metric": float(run.state.best_valid_metric)
        if len(task.dataset.valid)
        else None,
        "false_negative_rate": false_negative_rate(task),
        "test": test.metrics,
        "n_test_queries": test.n_queries,
        "test_is_sample": test.n_queries < n_all,
        "calibration": _describe_calibration(calibrated, test),
        "seconds_limit": run.run_config.seconds,
        "seconds": training_seconds,
        "phase_seconds": run_time.phases,
        "phase_peak_bytes": run_time.peak_bytes,
        "notes": notes,
        "versions": logs.package_versions(),
        "device": run.run_config.device,
    }


def _end_notes(run: Run, calibrated: Calibration | None) -> list[Note]:
    """What is said of a run that has ended, before test is ranked."""
    from funcppo.kg.run import training
    from funcppo.kg.run.subject import describe_default_score

    notes: list[Note] = []
    if training.stopped_early(run):
        notes.append(Note("detail", _early_stop_note(run)))
    if run.default_score_reason != "not-compared":
        notes.append(Note("answers", describe_default_score(run)))
    if calibrated is None and len(run.task.dataset.valid):
        note = "no temperature is chosen on valid: there was no time for it (--seconds)"
        notes.append(Note("cut", note))
    return notes


def _calibrate(
    run: Run, console: Console, run_time: RunTime
) -> Calibration | None:
    """The temperature that valid chooses, in at most a half of the time that is left for the ranking of test."""
    from funcppo.kg.run import validation

    deadline = run_time.until(run_time.TEST).share(0.5)
    with show_status(console, "calibrating on valid") as status:
        return validation.calibrate(run, deadline, status.update)


def _describe_calibration(
    calibrated: Calibration | None, test: SampledMetrics
) -> JsonObject:
    """How far probabilities can be read as chances, on valid and on test, before training and after it."""
    from funcppo.kg.ranking import calibration

    splits = {"valid": calibrated.bins if calibrated else {}, "test": test.bins}
    found: JsonObject = {
        "temperature": calibrated.temperature if calibrated else None
    }
    for split, bins in splits.items():
        found[split] = {
            state: calibration.to_json(counted)
            for state, counted in bins.items()
        }
    return found


def _sample_note(n_queries: int, n_all: int) -> str:
    """Why test has no metrics, or those of a part of its queries."""
    if not n_queries:
        return (
            f"test: none of {n_all:,} queries is ranked: no time was left (--seconds; `funcppo evaluate` "
            "ranks all)"
        )
    return (
        f"test: the metrics are those of a random sample, {n_queries:,} of {n_all:,} queries: all would take "
        "too long (--seconds; `funcppo evaluate` ranks all)"
    )


def _test_metrics(
    run: Run,
    rule_scores: Sequence[str],
    console: Console,
    run_time: RunTime,
    temperature: float | None,
) -> SampledMetrics:
    """Metrics on queries of the test split of the untrained scores, of the untrained policy and of the trained one.

    Args:
      rule_scores: ranked beside those that always are.
      temperature: that valid has chosen; None for none.
    """
    from funcppo.kg.ranking import ranking
    from funcppo.kg.run import validation

    task = run.task
    test = task.dataset.test
    if not len(test):
        return validation.SampledMetrics({}, 0, {})
    protocol = ranking.RankingProtocol(sides=ranking.ranked_sides(task))

    n_candidates = ranking.estimate_candidates(task, test, protocol)
    work = f"test: {len(test):,} queries, about {n_candidates:,} candidates to score"
    print_notes(console, [work])
    names = (
        f"exists@{task.max_height}",
        "max-confidence",
        "noisy-or",
        *rule_scores,
    )
    with show_status(console, "ranking test") as status:
        return validation.evaluate_within(
            run,
            test,
            protocol,
            list(dict.fromkeys(names)),
            run_time.until(run_time.TEST),
            status.update,
            temperature,
        )


def _default_row(run: Run) -> str:
    """The row of the results table whose score ranks answers."""
    is_policy = run.default_score == run.score
    return f"{run.score}, trained" if is_policy else run.default_score


def _print_results(
    run: Run, results: JsonObject, console: Console, deadline: Deadline
) -> None:
    """Print the table of test metrics, notes, and a proof."""
    from funcppo.kg.ranking import policy_score

    if results["test"]:
        candidates = (
            "tails among the five regions"
            if run.task.is_countries
            else "filtered, all entities, both sides"
        )
        n_queries = results["n_test_queries"]
        split = "test"
        if results["test_is_sample"]:
            interval = results["test"][list(results["test"])[-1]].get(
                "mrr_interval", [0.0, 1.0]
            )
            split = (
                f"random sample of test: {n_queries:,} queries, 95 % interval of the last MRR "
                f"{interval[0]:.4f} to {interval[1]:.4f}"
            )
        console.print(
            metrics_table(
                f"{split} ({candidates}, expected ties)",
                results["test"],
                _default_row(run),
            )
        )

    notes = policy_score.graph_fallback_notes(run.search_step)
    rate = results["false_negative_rate"]
    if rate is not None:
        notes.append(
            f"false-negative rate of provable negatives: {rate:.1%} (true in valid or test)"
        )
    if int(run.state.best_update) == 0:
        start = (
            "the weights that it started from"
            if run.questions
            else "the untrained policy"
        )
        notes.append(
            f"no update of PPO ranked valid better than {start}, whose parameters are kept"
            if int(run.state.train_state.update)
            else f"no update of PPO was made: 'trained' is {start}"
        )
    print_notes(console, notes)
    with show_status(console, "looking for a proof to print"):
        _print_proof(run, console, deadline)


def _print_proof(run: Run, console: Console, deadline: Deadline) -> None:
    """Print the longest of the policy's most probable proofs of the first queries, of those that there is time for."""
    from funcppo.kg.graph.rules import proof_names
    from funcppo.kg.logic import proof

    longest, n_searched = _longest_proof(run, deadline)
    if longest is None:
        console.print(
            f"none of the first {n_searched} queries has a proof",
            style="dim",
        )
        return
    console.print("a proof:")
    names = proof_names(run.task.dataset)
    console.print(proof.to_text(longest, names.format_atom, names.format_rule))


def _longest_proof(run: Run, deadline: Deadline) -> tuple[Proof | None, int]:
    """The longest of the most probable proofs of the first queries, or None; and how many queries were searched."""
    import torch

    from funcppo.kg.answers import most_probable_proof
    from funcppo.kg.ranking import explain

    dataset = run.task.dataset
    split = dataset.test if len(dataset.test) else dataset.train
    program = explain.build_program(run.task)
    longest: Proof | None = None
    n_searched = 0
    for row in split[:MAX_PROOF_QUERIES]:
        if n_searched and deadline.is_over:
            break
        n_searched += 1
        candidate = most_probable_proof(
            run, torch.from_numpy(row).long(), program
        )
        if candidate is None:
            continue
        if longest is None or len(candidate.nodes) > len(longest.nodes):
            longest = candidate
    return longest, n_searched
