"""Settings of learning from questions: which evidence is weighed, which questions are asked, and the listwise fit.

The command line offers them as `--questions.*` and `--listwise.*`; this module imports no PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from funcppo.core.settings import (
    NonNegativeFloat,
    PositiveFloat,
    Size,
    UnitInterval,
    check_fields,
)

# Bounds that are not set, in a run of the default time; `kg.run.budget` has those of longer runs.
LISTING_SECONDS = 60.0
MAX_FIRINGS = 10_000_000
MAX_VALID_FIRINGS = 4_000_000
MAX_LISTWISE_STEPS = 600
EMBEDDING_SECONDS = 60.0
N_NETWORK_STEPS = 1000
NETWORK_SECONDS = 600.0
# Questions of a gradient step of the listwise fit; where there are few, 256 of these make too few steps.
BATCH_SIZE, SMALL_BATCH_SIZE, FEW_QUESTIONS = 256, 128, 12_800


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionConfig:
    """Which evidence is weighed, which questions are asked, and with which candidates."""

    links: bool = True
    """Weigh the facts that link a candidate to the question's entity. Some benchmarks never link a pair twice, which
    these facts give away. Default: on."""
    degrees: bool | Literal["auto"] = "auto"
    """Weigh the degrees of a candidate in every relation. auto: if that ranks the valid split better."""
    walks: bool | Literal["auto"] = "auto"
    """Weigh the probability of a random walk along the body of a rule, where that is a path, in place of the share of
    its groundings. auto: if that ranks the valid split better by more than two standard errors."""
    embedding: bool | Literal["auto"] = "auto"
    """Weigh a prior of each candidate by link embeddings (--embedding.*), which proves nothing. auto: if that ranks the
    valid split better by more than two standard errors, and there is time to train them."""
    bellman_ford: bool | Literal["auto"] | None = None
    """Weigh a prior of each candidate by a Bellman-Ford network over the known facts (--bellman-ford.*), which proves
    nothing. auto: if that ranks the valid split better by more than two standard errors, and there is time to train it.
    Default: auto if --seconds is more than 300, otherwise False, because it may take as long as all else together."""
    odds_power: PositiveFloat | Literal["auto"] = "auto"
    """Weight of the log-odds of a rule's confidence that training starts with. With 1 the odds of the rules that derive
    a candidate are added; the larger it is, the less other rules add to the best one. auto: of 1, 2 and 3 the one that
    ranks the valid split best; 1 without that split."""
    left_out: Literal["auto", "fact", "pair"] = "auto"
    """What is unknown while a training question is answered. fact: its own fact; pair: all facts between its two
    entities; auto: pair if no pair of the valid split is linked by a known fact, otherwise fact."""
    max_questions: Size | None = None
    """Number of questions to learn from, drawn from those of all known facts. Default: as many as questions.seconds
    and questions.max_firings allow."""
    seconds: PositiveFloat | None = None
    """Time to collect evidence in, in seconds, if questions.max_questions is not given. Default: a fifth of the time
    of the run (--seconds), at least 60."""
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
    degree_weight: NonNegativeFloat = 1e-5
    """Weight of the sum of squares of the weights of degrees, in the listwise loss."""
    feature_deviation: PositiveFloat = 0.125
    """Prior standard deviation of the other weights (of the counts of rules, of own degrees, of being linked at all)
    about where they start. Unlike the sums of squares it counts less where there are more questions."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListwiseConfig:
    """Settings of the listwise fit that PPO starts from."""

    n_epochs: Size = 8
    """Number of passes over the questions; the epoch that ranks the valid split best is kept."""
    max_steps: Size | None = None
    """Maximum number of gradient steps in all; epochs beyond are left out, but not the first one. Default: 600, and as
    many more for each 300 seconds that --seconds adds."""
    max_gradients: PositiveFloat | None = None
    """Maximum number of gradients of firings and links, over the fits with and without degrees; epochs beyond are left
    out, but not the first one. A fit with walks after them has as many epochs. Default: 1e8 on a CPU and 1.6e9 on a
    GPU, and as many more for each 300 seconds that --seconds adds."""
    batch_size: Size | None = None
    """Number of questions of a gradient step. Default: 256, or 128 where there are fewer than 12,800."""
    max_batch_firings: Size = 4_000_000
    """Maximum number of firings whose gradients are computed at once, about 300 bytes each: a larger batch, and a
    larger minibatch of PPO, is computed in parts. `funcppo train` lowers it where its memory is small (--memory)."""
    learning_rate: NonNegativeFloat = 0.02
    """Initial learning rate of Adam, which falls to 0 along a line; with 0 PPO starts from the rule confidences."""
    penalty: Penalty = field(default_factory=Penalty)
    """Gaussian priors of the weights of evidence."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


def batch_size(cfg: ListwiseConfig, n_questions: int) -> int:
    """How many of all questions a gradient step of the listwise fit takes."""
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
    """Passes over the facts."""
    seconds: PositiveFloat | None = None
    """Seconds that training may take, by a count of its work: epochs beyond are left out, and all of it where too few
    are left. Default: a fifth of the time of the run (--seconds), at least 60."""
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
    n_steps: Size | None = None
    """Gradient steps of a network. Default: 1,000, and as many more for each 300 seconds that --seconds adds."""
    seconds: PositiveFloat | None = None
    """Seconds that training and the priors of all questions may take, by a count of the work: steps beyond are left
    out, and all of it where too few are left. questions.bellman_ford=on makes all steps. Default: twice the time
    of the run (--seconds), at least 600."""
    batch_size: Size = 32
    """Questions of a gradient step."""
    learning_rate: PositiveFloat = 5e-3
    """Initial learning rate of Adam, which falls to 0 along a line."""
    dropped: UnitInterval = 0.2
    """Share of the known facts that a step leaves out of the graph beside those that are asked for."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)
