"""Settings of a training run, the names of the files in its folder, and config.json itself.

`RunConfig` is everything that a run depends on; `write_config` and `read_config` are its file. This module imports no
PyTorch, so that the command line starts fast.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from funcppo.config import PPOConfig, Schedule
from funcppo.core import files
from funcppo.core.settings import (
    CONFIG_FILE,
    METRICS_FILE,
    DeviceName,
    PositiveFloat,
    PositiveInt,
    Seed,
    check_fields,
    from_json,
    merge_settings,
    parse_yaml,
)
from funcppo.kg.graph.triples import DEFAULT_CONFIG, DataConfig
from funcppo.kg.scores.question_config import (
    BellmanFordConfig,
    EmbeddingConfig,
    ListwiseConfig,
    QuestionConfig,
)
from funcppo.kg.search.config import ProverTaskConfig

# Files in the folder of a run.
CHECKPOINT_FILE = "checkpoint.npz"
PREVIOUS_CHECKPOINT_FILE = "checkpoint.previous.npz"
RESULTS_FILE = "results.json"
MINED_RULES_FILE = "rules.tsv"
RUN_FILES = (
    CONFIG_FILE,
    CHECKPOINT_FILE,
    PREVIOUS_CHECKPOINT_FILE,
    METRICS_FILE,
    RESULTS_FILE,
    MINED_RULES_FILE,
)

NoteKind = Literal["data", "rules", "cut", "answers", "detail"]

# Seconds of choosing settings for a data set that no run is trained on: what `train` has for it at its defaults.
CHOICE_SECONDS = 180.0


class Note(str):
    """A line that a run says about itself, with what it is about.

    Attributes:
      kind: data and rules: what was read and mined; cut: what was left out for time or memory; answers: what ranks
        answers and why; detail: for results.json and a verbose screen alone.
    """

    kind: NoteKind

    def __new__(cls, kind: NoteKind, text: str) -> Self:
        """The text, as a note of a kind."""
        note = super().__new__(cls, text)
        note.kind = kind
        return note

    def __reduce__(self) -> tuple[type[Note], tuple[NoteKind, str]]:
        """What another process makes the note of."""
        return Note, (self.kind, str(self))


_DEFAULT_PROVER = ProverTaskConfig(smoothing="auto", object_identity="auto")
_DEFAULT_QUESTIONS = QuestionConfig()
_DEFAULT_LISTWISE = ListwiseConfig()
_DEFAULT_EMBEDDING = EmbeddingConfig()
_DEFAULT_BELLMAN_FORD = BellmanFordConfig()
_DEFAULT_PPO = PPOConfig(
    n_envs=256,
    n_steps=8,
    n_epochs=2,
    n_minibatches=4,
    learning_rate=1e-3,
    learning_rate_schedule=Schedule(kind="linear"),
    # The entropy is relative to the prior, so this weight limits how far PPO moves the confidences or the listwise fit.
    entropy_coef=0.3,
    # Rewards are of order 1 and the entropy weight is in their unit, so advantages are not normalised.
    advantage_ddof=None,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Settings of one training run; the contents of config.json."""

    dataset: str
    """Data set: an embedded name (countries_s1, countries_s2, countries_s3, family_tree:PEOPLE:SEED,
    clans:PEOPLE:SEED), pykeen:NAME, a folder with train.txt, a file of triples (.txt, .tsv, .csv, .nt or .parquet), or
    a Prolog program FILE.pl. (required unless --resume)"""

    rules: str | None = None
    """Rule file to use instead of the data set's own rules. Default: the data set's rules; if it has none, rules are
    mined first."""

    data: DataConfig = DEFAULT_CONFIG
    """How files of triples are read and split."""

    steps: PositiveInt | None = None
    """Total number of environment steps, over all environments; rounded up to whole rollouts. Default: 120,000, or
    fewer where a run that learns from questions would take much longer than a minute for them. With --resume a larger
    number extends the run: its schedules and validations then span the new total."""

    seconds: PositiveFloat | None = 300.0
    """Time limit of the whole run in seconds, from reading the data to the ranking of test; None for no limit. It is
    divided over the phases: what does not fit is sampled or left out, and a note counts it. What a setting of its own
    bounds (steps, questions.max_questions, listwise.max_gradients) is done whole and does not count."""

    seed: Seed = 0
    """Random seed of the initial weights, the training queries and the actions."""

    device: DeviceName = "cpu"
    """Device to train on: cpu, cuda, or cuda:N for GPU number N."""

    threads: PositiveInt = 1
    """Number of CPU threads of an operation, which the last bits of results depend on. The tensors of a small graph
    are slower on two threads than on one."""

    strategy: Literal["auto", "one-graph", "forward", "eager"] = "auto"
    """How the training step is executed. one-graph: a minibatch update (forward, loss, backward, clipping, Adam)
    compiled as one graph; forward: forward pass and loss compiled, backward pass by autograd, fused Adam; eager:
    nothing of the update compiled; auto: eager for a run too short to repay compilation, otherwise the first of these
    that works and matches eager."""

    precision: Literal["highest", "high", "bfloat16"] = "highest"
    """Precision of matrix products: highest (float32), high (TF32) or bfloat16."""

    learner: Literal["auto", "questions", "proofs"] = "auto"
    """What PPO learns from: questions (which candidate that the rules derive is the answer, by the evidence for and
    against each), proofs (which rules and facts prove an atom), or auto (questions at height 1, otherwise proofs)."""

    score: Literal["auto", "success", "best-proof"] = "auto"
    """How the policy scores a candidate: success, best-proof, or auto (the better of the two on the valid split)."""

    rule_score: str = "auto"
    """Score by rule confidences that the policy is compared with: max-confidence, noisy-or, noisy-or@P, or auto (the
    best of them on the valid split)."""

    n_validations: PositiveInt = 12
    """Number of evaluations on the valid split during training; the best parameters are kept. Where a run learns from
    questions and valid has fewer than 500 triples, the last ones are, unless they rank valid worse than those before
    the first update by more than two standard errors."""

    n_validation_queries: PositiveInt | None = None
    """Number of valid queries ranked at each validation, a random sample; None: all of valid where the run learns from
    questions, 1,000 where it learns from proofs. What a validation may compute bounds both."""

    early_stop_validations: PositiveInt | None = None
    """Number of validations in a row without a better result after which training ends; None: it goes to its last
    update."""

    max_nonfinite_updates: PositiveInt = 5
    """Number of consecutive updates with a non-finite loss or gradient after which the run stops."""

    questions: QuestionConfig = _DEFAULT_QUESTIONS
    """Evidence and questions of a run that learns from questions."""

    embedding: EmbeddingConfig = _DEFAULT_EMBEDDING
    """Settings of link embeddings, a prior of the candidates of a run that learns from questions."""

    bellman_ford: BellmanFordConfig = _DEFAULT_BELLMAN_FORD
    """Settings of a Bellman-Ford network, another prior of these candidates."""

    listwise: ListwiseConfig = _DEFAULT_LISTWISE
    """Settings of the listwise fit that PPO starts from, of a run that learns from questions."""

    prover: ProverTaskConfig = _DEFAULT_PROVER
    """Settings of the proof search and of the prover network."""

    ppo: PPOConfig = _DEFAULT_PPO
    """Settings of proximal policy optimisation (PPO)."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


def read_config(folder: Path) -> RunConfig:
    """Read the config.json of a run.

    Raises:
      ValueError: the folder holds no run, another version of funcppo wrote it, or a field is missing, unknown, of
        another type or out of range.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        found = f"one without {CONFIG_FILE}" if folder.is_dir() else "none"
        raise ValueError(
            f"{folder}: expected a folder that `funcppo train` wrote, got {found}"
        )
    raw = files.parse_object(path, path.read_bytes())
    files.check_format(path, raw.pop(files.FORMAT_KEY, None))
    try:
        return from_json(RunConfig, raw, prefix="")
    except KeyError as error:
        reason = f"expected the settings of a run, got a file without {error}"
        raise ValueError(f"{path}: {reason}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None


def read_settings(path: Path, base: RunConfig) -> RunConfig:
    """Read settings from the config.json of a run, or from a YAML file with the same names, some or all of them.

    Args:
      path: the file; YAML (1.2) unless it ends in .json.
      base: what the file leaves out.

    Raises:
      ValueError: the file is missing or no object, or a setting is unknown, of another type or out of range; the
        message names both.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    raw = (
        files.parse_object(path, text)
        if path.suffix == ".json"
        else parse_yaml(path, text)
    )
    files.check_format(path, raw.pop(files.FORMAT_KEY, files.FORMAT))
    try:
        merged = merge_settings(dataclasses.asdict(base), raw, prefix="")
        return from_json(RunConfig, merged, prefix="")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
