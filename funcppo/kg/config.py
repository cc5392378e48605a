"""Settings of knowledge graphs: of learning from questions and by proof search, and of a whole run.

The command line offers them as options, such as `--questions.*` and `--prover.*`. `RunConfig` is everything that a run
depends on; `write_config` and `read_config` are its file. This module imports no PyTorch, so that the command line
starts fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Self, TypedDict

from funcppo.config import PPOConfig, Schedule
from funcppo.core import files
from funcppo.core.settings import (
    CONFIG_FILE,
    METRICS_FILE,
    DeviceChoice,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    Share,
    Size,
    UnitInterval,
    check_fields,
    from_json,
)
from funcppo.kg.graph.triples import DEFAULT_CONFIG, DataConfig

# Bounds that are not set, in a run of the default time; `kg.run.budget` has those of longer runs.
MAX_FIRINGS = 10_000_000
MAX_VALID_FIRINGS = 4_000_000
# Questions of a gradient step of the listwise fit; where there are few, 256 of these make too few steps.
BATCH_SIZE, SMALL_BATCH_SIZE, FEW_QUESTIONS = 256, 128, 12_800


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionConfig:
    """Settings of which evidence is weighed, which questions are asked, and with which candidates."""

    links: bool = True
    """Weigh the facts that link a candidate to the question's entity. Some benchmarks never link a pair twice, which
    these facts give away. Default: on."""
    embedding: bool | Literal["auto"] = "auto"
    """Weigh a prior of each candidate by link embeddings (--embedding.*), which proves nothing. auto: if that ranks the
    valid split better by more than two standard errors, and there is time to train them."""
    bellman_ford: bool | Literal["auto"] = "auto"
    """Weigh a prior of each candidate by a Bellman-Ford network over the known facts (--bellman-ford.*), which proves
    nothing. auto: if that ranks the valid split better by more than two standard errors, and there is time to train
    it."""
    odds_power: PositiveFloat = 2.0
    """Weight of the log-odds of a rule's confidence that training starts with. With 1 the odds of the rules that derive
    a candidate are added; the larger it is, the less other rules add to the best one."""
    no_proof: FiniteFloat | Literal["auto"] | None = "auto"
    """Log-odds in place of the rules of an entity that none derives: all other evidence then ranks it, without a proof.
    None: such entities rank last, in no order. auto: what ranks the valid split best, None without a gain of more than
    two standard errors."""
    left_out: Literal["auto", "fact", "pair"] = "auto"
    """What is unknown while a training question is answered. fact: its own fact; pair: all facts between its two
    entities; auto: pair if no pair of the valid split is linked by a known fact, otherwise fact."""
    max_questions: Size | None = None
    """Number of questions to learn from, drawn from those of all known facts. Default: as many as the time of the run
    and questions.max_firings allow."""
    max_firings: Size | None = None
    """Number of firings (a candidate and a rule that derives it) to hold, about 40 bytes each. Four links count as
    one. Default: 10 million, and as many more for each 300 seconds that --seconds adds."""
    max_valid_firings: Size | None = None
    """Number of firings of the valid queries that every validation ranks, which are fewer where all have more. Default:
    4 million, and as many more for each 300 seconds that --seconds adds; on a GPU at least 64 million."""
    n_best: Size = 60
    """Number of candidates of each training question that are its best by rule confidences (noisy-or@3)."""
    n_sampled: Size = 30
    """Number of candidates of each training question that are sampled from its other ones."""
    max_size_quantile: UnitInterval = 0.995
    """Questions with more firings than this share of the questions are left out, so that batches stay small."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalty:
    """Gaussian priors of the weights of evidence, in the listwise loss."""

    rule_weight: NonNegativeFloat = 1e-4
    """Weight of the sum of squares of the weights of rules, in the listwise loss."""
    link_weight: NonNegativeFloat = 1e-4
    """Weight of the sum of squares of the weights of links, in the listwise loss."""
    feature_deviation: PositiveFloat = 0.125
    """Prior standard deviation of the other weights (of the counts of rules, of own degrees, of being linked at all)
    about where they start. Unlike the sums of squares it counts less where there are more questions."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListwiseConfig:
    """Settings of the listwise fit."""

    n_epochs: Size = 8
    """Number of passes over the questions, where the time of the run suffices."""
    batch_size: Size | None = None
    """Number of questions of a gradient step. Default: 256, or 128 where there are fewer than 12,800."""
    max_batch_firings: Size = 4_000_000
    """Maximum number of firings whose gradients are computed at once, about 300 bytes each: a larger batch is computed
    in parts. `funcppo train` lowers it where its memory is small (--memory)."""
    learning_rate: NonNegativeFloat = 0.02
    """Initial learning rate of Adam, which falls to 0 along a line; 0 fits nothing."""
    penalty: Penalty = field(default_factory=Penalty)
    """Gaussian priors of the weights of evidence."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


def batch_size(cfg: ListwiseConfig, n_questions: int) -> int:
    """Return the number of questions of a gradient step of the listwise fit."""
    if cfg.batch_size is not None:
        return cfg.batch_size
    return SMALL_BATCH_SIZE if n_questions < FEW_QUESTIONS else BATCH_SIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingConfig:
    """Settings of link embeddings (ComplEx), a prior of what rules derive."""

    rank: Size = 32
    """Number of complex dimensions of a vector."""
    n_folds: Size = 4
    """Parts of the facts. The prior of a training question is that of embeddings which have not seen the part that its
    fact is in; one model more sees all facts."""
    n_epochs: Size = 30
    """Passes over the facts, where the time of the run suffices."""
    batch_size: Size = 512
    """Questions of a gradient step."""
    learning_rate: PositiveFloat = 0.03
    """Initial learning rate of Adam, which falls to 0 along a line."""
    penalty: NonNegativeFloat = 0.02
    """Factor of the N3 penalty, the cubed moduli of the vectors of a link."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class BellmanFordConfig:
    """Settings of a Bellman-Ford network, a prior of what rules derive."""

    width: Size = 32
    """Numbers of the state of an entity."""
    n_layers: Size = 4
    """Number of facts of the longest path that it sees."""
    n_steps: Size = 1000
    """Gradient steps of a network, where the time of the run suffices; a larger one makes more with the time left."""
    batch_size: Size = 32
    """Questions of a gradient step."""
    learning_rate: PositiveFloat = 5e-3
    """Initial learning rate of Adam, which falls to 0 along a line."""
    dropped: UnitInterval = 0.2
    """Share of the known facts that a step leaves out of the graph beside those that are asked for."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


RewardScheme = Literal["proof", "signed", "balanced"]
FactSelection = Literal["policy", "oracle"]
FactSelectionOption = Literal["auto", "policy", "oracle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProverTaskConfig:
    """Settings of the proof search and of the prover network."""

    max_height: Size | None = None
    """Maximum height of a proof: rule applications on one branch. Default: 1, or the next greater one by which rules
    rank the valid split better; heights are tried while that, or the share of valid that rules derive, grows."""

    max_depth: Size = 20
    """Maximum number of resolution steps in one search; beyond it the search counts as not proved."""

    max_successors: Size | None = None
    """Maximum number of successors of a search state; a state with more is marked as overflowed. Default: the largest
    number that can occur, so that none is dropped."""

    reward: RewardScheme = "balanced"
    """Reward of an episode. proof: +1 for proving a positive query; signed: +1 for proving a positive and -1 for
    proving a negative; balanced: +1 for a correct and -1 for a wrong result, where a negative correctly left unproved
    counts 1 / prover.negatives_per_positive."""

    fact_selection: FactSelectionOption = "auto"
    """Who selects the facts of a proof. policy: the policy selects rules and facts; oracle: the policy selects rules,
    and facts come from the precomputed fixpoint (height 1 only); auto: oracle at height 1, otherwise policy."""

    negatives_per_positive: NonNegativeFloat = 1.0
    """Number of negative training queries per positive one."""

    hard_negative_fraction: UnitInterval = 0.0
    """Fraction, 0 to 1, of the negative training queries that are sampled from what the rules derive; the rest are
    uniform corruptions. Many derived negatives may be true facts held out for testing."""

    embed_dim: Size = 32
    """Dimension of the embeddings of constants, predicates and rules."""

    hidden_dim: Size = 64
    """Width of the hidden layers."""

    n_residual_blocks: NonNegativeInt = 0
    """Number of residual blocks applied to the state vector."""

    memory_share: Share = 1.0
    """Share of the largest chunks of firings, and of the evidence of a validation, that are held at once. `funcppo
    train` lowers it where its memory is small (--memory)."""

    max_atoms: PositiveInt = 5_000_000
    """Maximum number of derived atoms (T_P) to hold; if height 1 exceeds it, training uses a sample of the derived
    atoms, and a larger prover.max_height is an error."""

    smoothing: NonNegativeFloat | Literal["auto"] | None = None
    """Pseudo-count of wrong predictions added to each rule's leave-one-out body count before its confidence is
    computed. None: plain counts, without leave-one-out; auto: the one of None, 5 and 20 that ranks the valid split
    best."""

    object_identity: bool | Literal["auto"] = False
    """Bind the variables of a rule to different constants, none of which the rule names (object identity, as AnyBURL
    counts). auto: what ranks the valid split best."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class ProofSettings(NamedTuple):
    """Settings that decide what counts as a proof, and how confidences are counted."""

    max_height: int
    smoothing: float | None
    object_identity: bool


def proof_settings(cfg: ProverTaskConfig) -> ProofSettings:
    """Return the settings of a config in which nothing is left to choose.

    Raises:
      ValueError: a setting is not chosen yet; the message names it.
    """
    if cfg.max_height is None:
        raise ValueError("max_height: expected a height, got none")
    if cfg.smoothing == "auto":
        raise ValueError("smoothing: expected a number or None, got auto")
    if cfg.object_identity == "auto":
        raise ValueError("object_identity: expected true or false, got auto")
    return ProofSettings(cfg.max_height, cfg.smoothing, cfg.object_identity)


# Files in the folder of a run.
CHECKPOINT_FILE = "checkpoint.npz"
PREVIOUS_CHECKPOINT_FILE = f"previous-{CHECKPOINT_FILE}"
RESULTS_FILE = "results.json"
MINED_RULES_FILE = "rules.tsv"
GRAPH_FILE = "graph.npz"
# A new run whose files are all written, within the folder of the run that it replaces.
START_FOLDER = "start.part"
RUN_FILES = (
    CONFIG_FILE,
    GRAPH_FILE,
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
    """Line that a run says about itself, with a kind.

    Attributes:
      kind: data and rules: what was read and mined; cut: what was left out for time or memory; answers: what ranks
        answers and why; detail: for results.json and a verbose screen alone.
    """

    kind: NoteKind

    def __new__(cls, kind: NoteKind, text: str) -> Self:
        """Make a note of a kind from its text."""
        note = super().__new__(cls, text)
        note.kind = kind
        return note

    def __reduce__(self) -> tuple[type[Note], tuple[NoteKind, str]]:
        """Return the arguments from which another process rebuilds the note."""
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
    # The entropy is relative to the prior, so this weight limits how far PPO moves the confidences.
    entropy_coef=0.3,
    # Rewards are of order 1 and the entropy weight is in their unit, so advantages are not normalised.
    advantage_ddof=None,
)


# Rewards of a guide are rare at first, and a larger weight keeps it at the confidences.
GUIDE_ENTROPY = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Settings of one training run; the contents of config.json."""

    dataset: str
    """Data set: an embedded name (countries_s1, countries_s2, countries_s3, family_tree:PEOPLE:SEED,
    clans:PEOPLE:SEED), pykeen:NAME, a folder with train.txt, triples (text, CSV, JSON lines, RDF, Parquet), or
    a Prolog program FILE.pl. (required unless --resume)"""

    rules: str | None = None
    """Rule file to use instead of the data set's own rules. Default: the data set's rules; if it has none, rules are
    mined first."""

    data: DataConfig = DEFAULT_CONFIG
    """How files of triples are read and split."""

    steps: PositiveInt | None = None
    """Total number of environment steps of a run that learns from proofs, over all environments; rounded up to whole
    rollouts. Default: 120,000. With --resume a larger number extends the run: its schedules and validations then span
    the new total."""

    seconds: PositiveFloat | None = 300.0
    """Time limit of the whole run in seconds, from reading the data to the ranking of test; None for no limit. Rules
    rank test before anything is learnt, and what gains most a second is learnt first: what does not fit is sampled or
    left out, and a note counts it. What a setting of its own bounds (steps, questions.max_questions) is done whole."""

    seed: Seed = 0
    """Random seed of the initial weights, the training queries and the actions."""

    device: DeviceChoice = "auto"
    """Device to train on: cpu, cuda, cuda:N for GPU number N, or auto: a GPU where there is one."""

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

    learner: Literal["auto", "questions", "proofs", "guide"] = "auto"
    """What a run learns from: questions (which candidate that the rules derive is the answer, by the evidence for and
    against each), proofs (which rules and facts prove an atom, by PPO), auto (questions at height 1, otherwise proofs),
    or guide (which step to try next in a search for a proof, for funcppo prove --guide; it ranks nothing)."""

    score: Literal["auto", "success", "best-proof"] = "auto"
    """How a policy scores a candidate: success, best-proof, or auto: best-proof, unless the other ranks the valid split
    better by more than two standard errors."""

    rule_score: str = "auto"
    """Score by rule confidences that what is learnt is compared with: max-confidence, noisy-or, noisy-or@P, or auto:
    noisy-or@3, unless others rank the valid split better by more than two standard errors."""

    n_validations: PositiveInt = 12
    """Number of evaluations on the valid split while a run learns from proofs; later parameters are kept where they
    rank it better by more than two standard errors."""

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
    """Settings of the listwise fit, of a run that learns from questions."""

    prover: ProverTaskConfig = _DEFAULT_PROVER
    """Settings of the proof search and of the prover network."""

    ppo: PPOConfig = _DEFAULT_PPO
    """Settings of proximal policy optimisation (PPO)."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class FitOptions(TypedDict, total=False):
    """Settings of `fit` beside its graph, by name: fields of `RunConfig`."""

    steps: int | None
    seconds: float | None
    seed: int
    device: str
    threads: int
    strategy: Literal["auto", "one-graph", "forward", "eager"]
    precision: Literal["highest", "high", "bfloat16"]
    learner: Literal["auto", "questions", "proofs"]
    score: Literal["auto", "success", "best-proof"]
    rule_score: str
    n_validations: int
    n_validation_queries: int | None
    early_stop_validations: int | None
    max_nonfinite_updates: int
    questions: QuestionConfig
    embedding: EmbeddingConfig
    bellman_ford: BellmanFordConfig
    listwise: ListwiseConfig
    prover: ProverTaskConfig
    ppo: PPOConfig


def finish_start(folder: Path) -> None:
    """Move a new run out of `START_FOLDER` over the run that it replaces; continue where a killed process stopped."""
    start = folder / START_FOLDER
    if not (start / CONFIG_FILE).exists():
        return
    for name in (METRICS_FILE, RESULTS_FILE, PREVIOUS_CHECKPOINT_FILE):
        (folder / name).unlink(missing_ok=True)
    # The config comes last: as long as it is in `start`, there is something to move.
    for name in (MINED_RULES_FILE, GRAPH_FILE, CHECKPOINT_FILE, CONFIG_FILE):
        if (start / name).exists():
            (start / name).replace(folder / name)
    start.rmdir()
    files.sync_folder(folder)


def read_config(folder: Path) -> RunConfig:
    """Read the config.json of a run, once it has replaced an earlier one.

    Raises:
      ValueError: the folder holds no run, another version of funcppo wrote it, or a field is missing, unknown, of
        another type or out of range.
    """
    finish_start(folder)
    path = folder / CONFIG_FILE
    if not path.is_file():
        found = f"one without {CONFIG_FILE}" if folder.is_dir() else "none"
        raise ValueError(
            f"{folder}: expected a folder that `funcppo train` wrote, got {found}"
        )
    raw = files.read_object(path)
    files.check_format(path, raw.pop(files.FORMAT_KEY, None))
    try:
        return from_json(RunConfig, raw, prefix="")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None
