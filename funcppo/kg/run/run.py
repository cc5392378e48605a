"""Training run in memory: its settings, its task, the evidence that it weighs, and the state of its checkpoint.

`build_run` makes one before its first update, `resume_run` opens one at its last checkpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor

from funcppo import checkpoint, logs, train_step
from funcppo.config import Config, PPOConfig
from funcppo.core import files, random, tree
from funcppo.core.files import shorten
from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.core.settings import (
    FieldError,
    NonNegativeInt,
    UnitInterval,
    check_value,
)
from funcppo.core.types import F32, F64, I64, Bool
from funcppo.kg.config import (
    CHECKPOINT_FILE,
    GRAPH_FILE,
    MAX_VALID_FIRINGS,
    Note,
    RunConfig,
    read_config,
)
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import (
    Dataset,
    assign_ids,
    index_entities,
    predicate_ids,
)
from funcppo.kg.logic.derive import RulePlan
from funcppo.kg.logic.fixpoint import RuleCounts
from funcppo.kg.logic.resolve import ResolveConfig
from funcppo.kg.logic.row_index import select_rows
from funcppo.kg.ranking import ranking, scoring
from funcppo.kg.ranking.ranking import (
    RankingProtocol,
    random_rows,
    ranked_sides,
)
from funcppo.kg.run import fit
from funcppo.kg.run.budget import Choice
from funcppo.kg.run.fit import QuestionSetup, SplitEvidence
from funcppo.kg.scores import learned, link_embedding, path_network
from funcppo.kg.scores.learned import Params
from funcppo.kg.scores.score import parse
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.beam import ScoreName, SearchStep
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase
from funcppo.runtime import memory
from funcppo.train_step import TrainState

# the row of the results table in which entities that no rule derives are ranked among the others
NO_PROOF_ROW = "+ no proof"
# environment steps of a run that sets none
DEFAULT_STEPS = 120_000
# How the policy of a run may score candidates: one that searches proofs, and one that answers questions.
ProofScore = Literal["success", "best-proof"]
PROOF_SCORES: tuple[ProofScore, ...] = get_args(ProofScore)
EVIDENCE_SCORE: Literal["evidence"] = "evidence"
RunScore = ScoreName | Literal["evidence"]
DefaultScoreReason = Literal[
    "not-compared",
    "policy-not-validated",
    "learnt-ranks-valid-better",
    "learnt-gains-by-chance",
    "rules-gain-by-chance",
]
# A validation by search ranks fewer queries if it would compute more successors than this, by a rough count, but not
# fewer than the minimum.
MAX_VALIDATION_SUCCESSORS = 1_000_000
MIN_VALIDATION_QUERIES = 20
# of a search, before it is tuned for the machine
BEAM_WIDTH = 64
# of a goal of a successor, while successors are computed
BYTES_PER_GOAL = 480


class RunState(NamedTuple):
    """Contents of a checkpoint: the parameters that answer, and those before them."""

    # of PPO; None for a run that learns from questions
    train_state: TrainState | None
    start_params: Any  # the parameters before anything is learnt
    # the weights after each stage that valid kept, the last ones are the best; none of a run that learns from proofs
    steps: tuple[Any, ...]
    best_params: Any
    # their metric on valid: MRR, or AUC-PR for Countries; -1 before any
    best_valid_metric: F32[Tensor, ""]
    # reciprocal ranks of valid by them, of each query and side; without entries before any
    best_ranks: F64[Tensor, "Q"]
    # number of the update that gave them; 0: the initial ones
    best_update: I64[Tensor, ""]
    # without models where candidates have no prior
    embedding: link_embedding.Params
    # of a Bellman-Ford network, which there may not be
    bellman_ford: path_network.Params


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Training run in memory, at its start or at a checkpoint."""

    run_config: RunConfig
    """The settings, as in config.json."""

    task: ProverTask
    """The data set and what is computed from it."""

    learner: Config | None
    """Algorithm, environment and network of PPO; None for a run that learns from questions."""

    score: RunScore
    """How the policy scores candidates."""

    state: RunState
    """Where training stands."""

    notes: tuple[Note, ...]
    """What was chosen by other means than valid or left out, one line each."""

    search_step: SearchStep
    """A step of the search for scores, as it runs on the run's device."""

    n_validation_queries: int
    """How many valid queries a validation ranks."""

    pending_row: logs.Row | None
    """The line of the metrics log that waits for the validation of the present parameters; None if none is due."""

    choices: tuple[Choice, ...] = ()
    """What valid decided before the first update, in order."""

    step_names: tuple[str, ...] = ()
    """The stages that gave the steps of the state, as the results table names them."""

    questions: QuestionSetup | None = None
    """The evidence that a run weighs which learns from questions; None for one that searches proofs."""

    valid_evidence: SplitEvidence | None = None
    """The evidence of the queries of a validation; None where a run searches proofs or is not trained."""

    rule_metric: float | None = None
    """Metric on valid of the rule score that what is learnt is compared with; None where they are not compared."""

    ranked_test: Any = None
    """The `held_out.TestRanking` by rules before anything was learnt; None where the run is not trained."""

    is_learnt_better: bool = True
    """Whether what is learnt ranks valid better than the rule score beyond chance, and ranks answers."""

    @property
    def cfg(self) -> Config:
        """Return algorithm, environment and network of PPO, of a run that learns from proofs."""
        assert self.learner is not None, "the run learns from proofs"
        return self.learner

    @property
    def update(self) -> int:
        """Return the number of updates of PPO so far."""
        state = self.state.train_state
        return 0 if state is None else int(state.update)

    @property
    def n_updates(self) -> int:
        """Return the number of updates of PPO of the whole run."""
        return 0 if self.learner is None else self.learner.ppo.n_updates

    @property
    def validation_interval(self) -> int:
        """Return the number of updates from one validation to the next."""
        return max(1, self.n_updates // self.run_config.n_validations)

    @property
    def stopped_early(self) -> bool:
        """Return whether training ends early because so many validations in a row have not ranked valid better."""
        patience = self.run_config.early_stop_validations
        if patience is None or self.pending_row is not None:
            return False
        if not len(self.task.dataset.valid):
            return False
        interval = self.validation_interval
        best_update = int(self.state.best_update)
        return self.update // interval - best_update // interval >= patience

    @property
    def is_finished(self) -> bool:
        """Return whether the run has made its last update or was stopped early."""
        return self.update >= self.n_updates or self.stopped_early

    @property
    def default_score(self) -> str:
        """Return the name of the score that ranks answers by default.

        It is the rule score unless what is learnt ranks valid better beyond chance, where the two are compared."""
        if self.default_score_reason in (
            "policy-not-validated",
            "learnt-gains-by-chance",
        ):
            return self.run_config.rule_score
        return self.score

    @property
    def default_score_reason(self) -> DefaultScoreReason:
        """Return the reason for the default score."""
        if self.rule_metric is None:
            return "not-compared"
        # The time of the run may end before the first validation.
        if float(self.state.best_valid_metric) < 0:
            return "policy-not-validated"
        if not self.is_learnt_better:
            return "learnt-gains-by-chance"
        if float(self.state.best_valid_metric) < self.rule_metric:
            return "rules-gain-by-chance"
        return "learnt-ranks-valid-better"


# -- before the first update


def build_run(
    run_config: RunConfig,
    dataset: Dataset,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
    plan: RulePlan | None = None,
    counts: RuleCounts | None = None,
    *,
    for_training: bool = True,
) -> Run:
    """Build a run before its first update, without a chosen score and without listed questions.

    Args:
      deadline: of what the rules derive at a height above 1.
      plan: as in `build_task`.
      counts: as in `build_task`.
      for_training: it will be trained or validated, not asked alone.

    Raises:
      ValueError: see `build_task`; or questions are to be learnt from at a height above 1.
    """
    prover, asks = run_config.prover, run_config.learner == "questions"
    if asks and prover.max_height != 1:
        raise ValueError(
            f"learner questions: expected height 1, got {prover.max_height}"
        )
    task = prover_task.build_task(
        dataset,
        prover,
        run_config.device,
        on_phase,
        with_derivations=not asks,
        as_guide=run_config.learner == "guide",
        deadline=deadline,
        plan=plan,
        counts=counts,
    )
    rule_score = parse(run_config.rule_score)
    task = scoring.with_score_counts(task, rule_score, on_phase)
    of_data = frozenset(task.dataset.notes)
    notes = [
        Note("data" if text in of_data else "cut", text) for text in task.notes
    ]

    setup, learner = None, None
    n_queries = run_config.n_validation_queries
    if asks:
        setup = fit.set_up(task, run_config.questions)
        n_queries = min(n_queries or len(dataset.valid), len(dataset.valid))
        state = fitted_state(task, setup, run_config)
    else:
        learner = proof_learner(run_config, task)
        world = prover_task.training_world(task) if for_training else None
        trained = init_train_state(run_config, learner, world)
        state = _state_of(
            trained.update.device,
            train_state=trained,
            start_params=trained.params,
        )
        n_wanted = min(n_queries or 1000, len(dataset.valid))
        n_wanted *= for_training
        n_queries = _count_validation_queries(task, learner, n_wanted)
        if n_queries < n_wanted:
            note = (
                f"a validation ranks {n_queries} of {len(dataset.valid)} valid queries: more would compute over "
                f"{_max_validation_successors(task):,} successors"
            )
            notes.append(Note("cut", note))
    return Run(
        run_config=run_config,
        task=task,
        learner=learner,
        score="best-proof" if setup is None else EVIDENCE_SCORE,
        state=state,
        notes=tuple(notes),
        search_step=scoring.make_search_step(run_config.device),
        n_validation_queries=n_queries,
        pending_row=None if asks else {"update": 0},
        questions=setup,
    )


def ppo_config(run_config: RunConfig) -> PPOConfig:
    """Return PPO's settings with the number of updates that the run's environment steps make."""
    ppo = run_config.ppo
    steps = run_config.steps or DEFAULT_STEPS
    n_updates = math.ceil(steps / (ppo.n_envs * ppo.n_steps))
    return replace(ppo, n_updates=n_updates)


def proof_learner(run_config: RunConfig, task: ProverTask) -> Config:
    """Return the configuration of PPO on proofs, with as many updates as the run's environment steps make."""
    is_rounded = run_config.precision == "bfloat16"
    return prover_task.build_config(
        task,
        ppo_config(run_config),
        matmul_dtype=torch.bfloat16 if is_rounded else None,
    )


def bytes_per_successor(shape: ResolveConfig, n_envs: int) -> int:
    """Estimate the bytes of one successor of each of the searches side by side, while successors are computed."""
    return n_envs * shape.max_goals * BYTES_PER_GOAL


def _check_search_memory(run_config: RunConfig, cfg: Config) -> None:
    """Check that the searches side by side fit into the memory that is free.

    Raises:
      ValueError: their successors do not.
    """
    shape, n_envs = cfg.env.cfg.resolve, cfg.ppo.n_envs
    needed = shape.max_successors * bytes_per_successor(shape, n_envs)
    free = memory.free_bytes(run_config.device)
    if needed > free:
        raise ValueError(
            f"{n_envs} searches of {shape.max_successors:,} successors: expected at most {free / 1e9:.1f} GB, "
            f"got {needed / 1e9:.1f} GB (--set ppo.n_envs=N, prover.max_successors=N)"
        )


def init_train_state(
    run_config: RunConfig, cfg: Config, world: Any
) -> TrainState:
    """Return the training state before the first update; without a world, parameters that are not trained."""
    key = random.key(run_config.seed, run_config.device)
    if world is not None:
        _check_search_memory(run_config, cfg)
        return train_step.init(cfg, world, key)
    params, none = cfg.agent.init(cfg.agent.cfg, key), cast(Any, ())
    update = key.new_zeros((), dtype=torch.int64)
    return TrainState(params, none, none, none, key, update, none)


def _state_of(
    device: torch.device, start_params: Any, **values: Any
) -> RunState:
    """Return a state that no validation has seen, with given values."""
    state = RunState(
        train_state=None,
        start_params=start_params,
        steps=(),
        best_params=start_params,
        best_valid_metric=torch.full((), -1.0, device=device),
        best_ranks=torch.zeros(0, dtype=torch.float64),
        best_update=torch.zeros((), dtype=torch.int64, device=device),
        embedding=link_embedding.without_models(device),
        bellman_ford=path_network.without_network(device),
    )
    return state._replace(**values)


def fitted_state(
    task: ProverTask,
    setup: QuestionSetup,
    run_config: RunConfig,
    steps: Sequence[Params] = (),
) -> RunState:
    """Return the state of a run that learns from questions, with its weights and what gives candidates priors.

    Args:
      steps: weights after each stage that was kept, which are brought into the shapes of the setup.
    """
    untrained = fit.untrained_params(setup)
    wide = tuple(fit.widened(setup, params) for params in steps)
    embedding, network = fit.blank_priors(task, setup.weighed, run_config)
    if setup.weighed.uses_embedding and link_embedding.n_models(
        setup.facts.embedding
    ):
        embedding = setup.facts.embedding
    if setup.facts.network is not None:
        network = setup.facts.network.params
    return _state_of(
        setup.facts.degree.device,
        untrained,
        steps=wide,
        best_params=wide[-1] if wide else untrained,
        embedding=embedding,
        bellman_ford=network,
    )


# -- the queries of a validation


def validation_queries(run: Run) -> np.ndarray:
    """Return the valid queries that every validation ranks, in their order: a fixed random sample."""
    valid = run.task.dataset.valid
    rows = random_rows(len(valid), run.n_validation_queries)
    return valid[np.sort(rows)]


def _count_validation_queries(
    task: ProverTask, cfg: Config, n_wanted: int
) -> int:
    """Return how many valid queries a validation of proofs ranks: `n_wanted`, or fewer to keep within its bound."""
    if not n_wanted or task.is_guide:
        return n_wanted
    valid = task.dataset.valid
    queries = valid[random_rows(len(valid), n_wanted)]
    protocol = RankingProtocol(sides=ranked_sides(task))
    n_candidates = ranking.count_candidates(task, queries, protocol)
    n_successors = cfg.env.cfg.resolve.max_successors
    if task.fact_selection != "oracle":
        n_successors = count_search_successors(n_successors, task.max_height)
    most = _max_validation_successors(task)
    share = most / max(1, n_candidates * n_successors)
    if share >= 1:
        return n_wanted
    return max(int(n_wanted * share), min(MIN_VALIDATION_QUERIES, n_wanted))


def _max_validation_successors(task: ProverTask) -> int:
    """Return how many successors a validation may compute; rules alone take under a microsecond each."""
    factor = 10 if task.fact_selection == "oracle" else 1
    return factor * MAX_VALIDATION_SUCCESSORS


def count_search_successors(max_successors: int, height: int) -> int:
    """Estimate the successors in the search for one candidate: those of its partial proofs, at every step."""
    n_proofs = min(BEAM_WIDTH, max_successors)
    return n_proofs * max_successors * 3 * height  # three steps for a height


def with_valid_evidence(run: Run, seconds: float = math.inf) -> Run:
    """Return the run with the evidence of its validation's queries, of which fewer may be kept.

    Args:
      seconds: that it may take; fewer queries are a setting of the run then.
    """
    setup, valid = run.questions, run.task.dataset.valid
    if setup is None or run.valid_evidence or not len(valid):
        return run
    queries = valid[random_rows(len(valid), run.n_validation_queries)]
    held = run.run_config.questions.max_valid_firings or MAX_VALID_FIRINGS
    max_rows = held * 25  # a minute or less on one core
    max_firings = int(held * run.task.cfg.memory_share)
    n_queries = fit.count_queries_within(
        run.task, setup.facts, queries, max_firings, max_rows, seconds
    )
    config, notes = run.run_config, run.notes
    if n_queries < len(queries):
        # A resumed run validates on the same ones.
        config = replace(config, n_validation_queries=n_queries)
        note = (
            f"a validation ranks {n_queries:,} of {len(valid):,} valid queries: more would have over {max_firings:,} "
            f"firings or {max_rows:,} rows of joins, or take over {seconds:.0f} seconds (--seconds)"
        )
        notes = tuple(dict.fromkeys((*notes, Note("cut", note))))
    run = replace(
        run, run_config=config, notes=notes, n_validation_queries=n_queries
    )
    collected = fit.collect_evidence(
        run.task, setup.facts, validation_queries(run)
    )
    return replace(run, valid_evidence=collected)


# -- the graph of a run


class Alignment(NamedTuple):
    """Ids of training for the ids of another graph; -1 for what training did not have."""

    entity: I64[np.ndarray, "C1"]
    predicate: I64[np.ndarray, "P1"]
    rule: I64[np.ndarray, "R"]


class PresentGraph(NamedTuple):
    """Facts that are there now, with the names and rules of a run."""

    dataset: Dataset
    # of its rules in training; None where they are to be counted
    counts: RuleCounts | None
    trained: Dataset
    # where what the run has learnt belongs; None where nothing has changed
    where: Alignment | None = None


def write_graph(task: ProverTask, folder: Path) -> None:
    """Write names, triples, rules and the counts of rules that a run is trained on to its folder, compressed."""
    dataset = task.dataset
    support, pairs = task.kb.support, task.kb.body_pairs
    pairs = pairs - float(task.cfg.smoothing or 0.0)
    arrays = {
        "support": support.cpu().numpy(),
        "body_pairs": pairs.cpu().numpy(),
    }
    meta: checkpoint.Meta = {files.FORMAT_KEY: files.FORMAT}
    for field in fields(dataset):
        value = getattr(dataset, field.name)
        if isinstance(value, np.ndarray):
            arrays[field.name] = value
        elif field.name != "stored":
            is_names = field.name == "entities"
            meta[field.name] = list(value) if is_names else value
    arrays["__meta__"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    files.write_atomically(
        folder / GRAPH_FILE,
        lambda file: np.savez_compressed(file, **cast(Any, arrays)),
    )


def read_graph(folder: Path) -> tuple[Dataset, RuleCounts]:
    """Return the data set that a run was trained on, and its counts of rules.

    Raises:
      ValueError: their file is missing or damaged.
    """
    arrays, meta = checkpoint.read(folder / GRAPH_FILE)
    del meta[files.FORMAT_KEY]
    support, pairs = (
        torch.from_numpy(arrays.pop(name)).round().long()
        for name in ("support", "body_pairs")
    )
    values: dict[str, Any] = {**meta, **arrays}
    for name in ("entities", "predicates", "arities", "notes"):
        values[name] = tuple(values[name])
    # Where they are not derived from themselves alone: see `with_confidence`.
    counts = RuleCounts(support, pairs, torch.zeros_like(support))
    return Dataset(**values), counts


def present_graph(
    folder: Path,
    graph: Dataset | None = None,
    change: Callable[[Dataset], Dataset] | None = None,
) -> PresentGraph:
    """Return the facts that are there now, with the names, rules and counts of rules of a run.

    Ids of relations are those of training, followed by those of other relations. The entities are those that are there
    now. Rules with entities that are not there are left out.

    Args:
      graph: whose facts they are; None for the data set that the settings of the run name, as it is now, or for the
        facts of training where it is gone.
      change: of the graph before what is held out is ranked; it keeps the facts.

    Raises:
      ValueError: a file cannot be read, or the rules of the run have no relation of the graph.
    """
    config = read_config(folder)
    trained, counts = read_graph(folder)
    is_source, ratios = graph is None, None
    if graph is None:
        graph, ratios = _read_source(config, folder, trained)
    moved, where = _align(trained, graph)
    before = _move(trained, moved, where)
    if ratios is not None:
        moved = _with_split_of(moved, before)
    if change is not None:
        moved, where = _align(trained, change(moved))
        before = _move(trained, moved, where)
    elif _is_same(trained, moved):
        notes = graph.notes if is_source and ratios is None else trained.notes
        notes = tuple(dict.fromkeys((*trained.notes, *notes)))
        return PresentGraph(replace(trained, notes=notes), counts, trained)

    changes = _describe_changes(trained, before, moved)
    notes = [Note("answers", changes)] if changes else []
    moved = replace(moved, notes=(*moved.notes, *notes))
    rows = torch.from_numpy(where.rule)
    counts = select_rows(counts, rows)
    return PresentGraph(moved, counts, trained, where)


def _read_source(
    config: RunConfig, folder: Path, trained: Dataset
) -> tuple[Dataset, str | None]:
    """Return the data set of a run as it is now, with the shares by which training split it; None for no such split.

    It is that of training where it is gone, or has a name and no path.

    Raises:
      ValueError: it cannot be read.
    """
    source = Path(config.dataset)
    if not (source.is_absolute() and source.exists()):
        note = f"{source} is not there: the facts are those of training"
        notes = (*trained.notes, *[note] * source.is_absolute())
        return replace(trained, notes=notes), None
    ratios = config.data.split_ratios
    cfg = replace(config.data, split_ratios=None, split_seed=0)
    try:
        return loaders.load(source, with_rules=False, cfg=cfg), ratios
    except ValueError as error:
        raise ValueError(
            f"{folder}: the run needs its data set {shorten(config.dataset)}, or other facts (--graph): {error}"
        ) from None


def _align(trained: Dataset, graph: Dataset) -> tuple[Dataset, Alignment]:
    """Return a graph with ids of the trained data set and its rules; see `present_graph`."""
    predicates, of_graph = predicate_ids(trained), predicate_ids(graph)
    keys = [*predicates, *sorted(of_graph.keys() - predicates.keys())]
    before, present = index_entities(trained), index_entities(graph)
    entities = [name for name in trained.entities if name in present]
    entities += sorted(name for name in present if name not in before)

    number, number_of_key = assign_ids(entities), assign_ids(keys)
    to_entity = np.array([0, *(number[x] for x in graph.entities)])
    to_predicate = np.array([0, *(number_of_key[x] for x in of_graph)])
    width = max(trained.atom_width, graph.atom_width)
    tables = {
        name: _renumber(getattr(graph, name), to_predicate, to_entity, width)
        for name in ("train", "valid", "test", "facts")
    }
    # The order of lines says nothing; that of held-out triples is their place.
    tables |= {x: np.unique(tables[x], axis=0) for x in ("train", "facts")}
    if graph.known is not None:
        known = graph.known, to_predicate, to_entity, width
        tables["known"] = _renumber(*known)
    if graph.candidates is not None:
        tables["candidates"] = np.sort(to_entity[graph.candidates])

    of_trained = [0, *(number.get(x, 0) for x in trained.entities)]
    rules, kept = _move_rules(trained, of_trained, len(entities), width)
    moved = replace(
        graph,
        predicates=tuple(name for name, _ in keys),
        arities=tuple(arity for _, arity in keys),
        entities=tuple(entities),
        rules=rules,
        rule_weights=trained.rule_weights[kept],
        rule_counts=None,
        labels={**trained.labels, **graph.labels},
        stored=None,
        **tables,
    )
    _check_relations(trained, moved)
    entity = np.array([0, *(before.get(name, -1) for name in entities)])
    predicate = np.array([0, *(predicates.get(key, 0) or -1 for key in keys)])
    return moved, Alignment(entity, predicate, kept)


def _move_rules(
    trained: Dataset, entity: Sequence[int], n_entities: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rules of training by other ids of entities, without those that name one of id 0, and their rows."""
    terms = trained.rules[:, :, 1:]
    # Variables follow the constants.
    n_variables = max(0, int(terms.max(initial=0)) - trained.n_constants)
    variables = n_entities + 1 + np.arange(n_variables)
    to_term = np.concatenate([entity, variables]).astype(np.int64)
    is_there = ((terms == 0) | (to_term[terms] > 0)).all((1, 2))
    same, kept = np.arange(trained.n_predicates + 1), is_there.nonzero()[0]
    return _renumber(trained.rules[kept], same, to_term, width), kept


def _renumber(
    table: np.ndarray, predicate: np.ndarray, term: np.ndarray, width: int
) -> np.ndarray:
    """Return a table of atoms [..., W] with other ids, padded to a width."""
    moved = np.zeros((*table.shape[:-1], width), np.int32)
    moved[..., 0] = predicate[table[..., 0]]
    moved[..., 1 : table.shape[-1]] = term[table[..., 1:]]
    return moved


def _check_relations(trained: Dataset, moved: Dataset) -> None:
    """Raise ValueError unless a rule is left and some rule reads a relation that the graph has."""
    body = trained.rules[:, 1:, 0]
    wanted = set(body[body > 0].tolist())
    if len(moved.rules) and wanted & set(moved.facts[:, 0].tolist()):
        return
    some = _first_names([trained.predicate_name(i) for i in sorted(wanted)])
    raise ValueError(
        f"{moved.name}: expected facts of relations and entities that the rules of the run name ({some}), got none"
    )


def _move(trained: Dataset, moved: Dataset, where: Alignment) -> Dataset:
    """Return the triples of training whose entities another graph has, by its ids."""
    to_entity = np.zeros(trained.n_constants + 1, np.int64)
    is_known = where.entity > 0
    to_entity[where.entity[is_known]] = is_known.nonzero()[0]
    same = np.arange(trained.n_predicates + 1)
    tables: dict[str, Any] = {}
    for name in ("train", "valid", "test", "facts"):
        table = _renumber(
            getattr(trained, name), same, to_entity, moved.atom_width
        )
        arities = np.array([0, *trained.arities])[table[:, 0]]
        kept = (table[:, 1:] > 0).sum(1) == arities
        tables[name] = table[kept]
    return replace(moved, **tables)


def _with_split_of(moved: Dataset, before: Dataset) -> Dataset:
    """Return a graph that was split at random, with the triples held out that training held out."""
    valid, test = (
        table[_is_in(table, moved.facts)]
        for table in (before.valid, before.test)
    )
    is_held_out = _is_in(moved.facts, np.concatenate([valid, test]))
    facts = moved.facts[~is_held_out]
    return replace(moved, train=facts, facts=facts, valid=valid, test=test)


def _is_in(table: np.ndarray, other: np.ndarray) -> Bool[np.ndarray, "n"]:
    """Return which rows of a table another one has."""
    both = np.concatenate([table, other])
    row = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1)
    return np.isin(row[: len(table)], row[len(table) :])


def _is_same(trained: Dataset, moved: Dataset) -> bool:
    """Return whether an aligned graph has the names and triples of training, held-out ones in the same order."""
    names = tuple(trained.entities), trained.predicates
    if names != (moved.entities, moved.predicates):
        return False
    pairs = (
        (np.unique(trained.train, axis=0), moved.train),
        (np.unique(trained.facts, axis=0), moved.facts),
        (trained.valid, moved.valid),
        (trained.test, moved.test),
    )
    return all(np.array_equal(*pair) for pair in pairs)


def _describe_changes(trained: Dataset, before: Dataset, moved: Dataset) -> str:
    """Describe in one line how the facts and names differ from those of training; empty if they are the same."""
    n_same = int(_is_in(moved.facts, before.facts).sum())
    n_new = len(moved.facts) - n_same
    n_gone = len(np.unique(trained.facts, axis=0)) - n_same
    known = index_entities(trained)
    n_entities = sum(name not in known for name in moved.entities)
    added = moved.predicates[trained.n_predicates :]
    n_left_out = len(trained.rules) - len(moved.rules)
    if not (n_new or n_gone or n_entities or added):
        return ""

    parts = [f"facts: {n_new:,} new, {n_gone:,} gone"]
    if n_entities:
        parts.append(f"entities: {n_entities:,} new")
    if added:
        names = _first_names(added)
        parts.append(
            f"relations: {len(added):,} new, which no rule names ({names})"
        )
    if n_left_out:
        parts.append(f"rules: {n_left_out:,} left out for want of an entity")
    return "; ".join([*parts, "rules and weights are those of training"])


def _first_names(names: Sequence[str]) -> str:
    """Format the first three of some names."""
    return ", ".join(map(shorten, names[:3])) + ", ..." * (len(names) > 3)


# -- a run at its checkpoint


def open_run(
    folder: Path,
    device: str = "cpu",
    on_phase: PhaseCallback = ignore_phase,
    graph: Dataset | None = None,
    change: Callable[[Dataset], Dataset] | None = None,
    *,
    recount: bool = False,
) -> Run:
    """Open the run in a folder at its last checkpoint, to ask it about the facts that are there now.

    Args:
      graph: the facts; see `present_graph`.
      change: of what is held out; see `present_graph`.
      recount: count the rules over these facts; their confidences are those of training otherwise.

    Raises:
      ValueError: the folder holds no run, or the graph does not fit it.
    """
    run_config = replace(read_config(folder), device=device)
    on_phase("reading data")
    present = present_graph(folder, graph, change)
    if recount or present.where is None:
        present = present._replace(counts=None)
    return _restore(run_config, folder, present, on_phase)


def resume_run(
    run_config: RunConfig, folder: Path, on_phase: PhaseCallback = ignore_phase
) -> Run:
    """Build the run of the given settings, on the facts of its training, and restore it from its last checkpoint.

    Raises:
      ValueError: the checkpoint does not belong to the facts.
    """
    on_phase("reading data")
    dataset, _ = read_graph(folder)
    present = PresentGraph(dataset, None, dataset)
    return _restore(run_config, folder, present, on_phase)


def _restore(
    run_config: RunConfig,
    folder: Path,
    present: PresentGraph,
    on_phase: PhaseCallback,
) -> Run:
    """Build the run of the given settings on a graph, and restore it from its last checkpoint."""
    path, damage_notes = find_checkpoint(folder)
    arrays, meta = checkpoint.read(path)
    _check_meta(path, meta, run_config.learner == "questions")
    dataset, counts, trained, where = present
    if where is None:
        _check_unchanged(path, meta, run_config, dataset)
    run = build_run(
        run_config,
        dataset,
        on_phase,
        counts=counts,
        for_training=where is None,
    )
    # The state in the shapes of the stored one.
    ranks = torch.zeros(meta["n_ranks"], dtype=torch.float64)
    steps = (run.state.start_params,) * len(meta["step_names"])
    state = run.state._replace(best_ranks=ranks, steps=steps)
    run = replace(run, state=state)
    if where is None:
        state, _ = checkpoint.restore(path, state)
    else:
        state = _move_state(run, arrays, trained, where)

    setup = run.questions
    if setup is not None and link_embedding.n_models(state.embedding):
        setup = fit.with_embedding(setup, state.embedding, "fact")
    if setup is not None and path_network.is_network(state.bellman_ford):
        network = fit.make_network(run.task, state.bellman_ford)
        setup = fit.with_network(setup, network)
    # What reads a run shows the notes on its task.
    task = replace(run.task, notes=(*run.task.notes, *damage_notes))
    return replace(
        run,
        task=task,
        questions=setup,
        score=meta["score"],
        state=state,
        notes=tuple(Note(kind, text) for kind, text in meta["notes"]),
        choices=tuple(Choice(**row) for row in meta.get("choices", ())),
        pending_row=meta["pending_row"],
        step_names=tuple(meta["step_names"]),
        rule_metric=meta["rule_metric"],
        is_learnt_better=meta["is_learnt_better"],
    )


# What the axes of stored parameters count: labels, or as many parts of each (B), shapes of rules (S), rules (R),
# entities (C), terms (T), predicates (P), and the fact and the rules (F).
_AXES: Mapping[str, tuple[str, ...]] = {
    "feature_weight": ("B", "S"),
    "rule_weight": ("", "R"),
    "own_degree_weight": ("B",),
    "linked_weight": ("B",),
    "link_weight": ("B", "B"),
    "prior_weight": ("B",),
    "network_prior_weight": ("B",),
    "embedding.entity": ("", "C"),
    "embedding.label": ("", "B"),
    "bellman_ford.asked": ("B",),
    "bellman_ford.weight": ("", "B"),
    "bellman_ford.weight_by_asked": ("", "", "B"),
    "term_embedding": ("T",),
    "predicate_embedding": ("P",),
    "rule_embedding": ("F",),
}


def _move_state(
    run: Run,
    arrays: Mapping[str, np.ndarray],
    trained: Dataset,
    where: Alignment,
) -> RunState:
    """Return the stored state of a run by the ids of an aligned graph.

    What training did not have has weights of 0; terms and predicates that a policy has not seen have the mean vector
    of those that it has.
    """
    state, rows = run.state, _rows_of_axes(run, trained, where)
    leaves: list[Tensor] = []
    for path, leaf in zip(tree.paths(state), tree.leaves(state)):
        if path.startswith("train_state.") and path != "train_state.update":
            leaves.append(leaf)
            continue
        array = arrays[path]
        name = re.sub(r"^(best_params|start_params|steps\.\d+)\.", "", path)
        for axis, kind in enumerate(_AXES.get(name, ())):
            if kind and array.size:
                row, size = rows[kind], leaf.shape[axis]
                if kind == "T" and run.task.is_guide:
                    row = np.arange(min(size, len(array)))
                elif kind == "T":  # variables follow the constants
                    first, n = trained.n_constants + 1, size - len(row)
                    row = np.append(row, first + np.arange(n))
                    row[row >= len(array)] = -1
                array = _take_rows(array, axis, row, size, kind in "TP")
        leaves.append(torch.from_numpy(array).to(leaf.device))
    return tree.unflatten(state, leaves)


def _take_rows(
    array: np.ndarray, axis: int, row: np.ndarray, size: int, is_mean: bool
) -> np.ndarray:
    """Return the given rows of an axis, or all parts of these where its new size is a multiple of their number.

    Args:
      row: -1 for a row that is not there.
      is_mean: such a row is the mean of all, otherwise 0.
    """
    n_parts = size // max(1, len(row))
    row = (row[:, None] * n_parts + np.arange(n_parts)).reshape(-1)
    taken = array.take(row.clip(0), axis)
    fill = array[1:].mean(0) if is_mean else 0.0
    taken[(*[slice(None)] * axis, row < 0)] = fill
    return taken


def _rows_of_axes(
    run: Run, trained: Dataset, where: Alignment
) -> Mapping[str, np.ndarray]:
    """Return, for each kind of axis, the stored row of each row of an aligned graph; -1 for none."""
    entity, predicate, rule = where
    label = np.where(predicate < 0, -1, 2 * predicate)[:, None] + [0, 1]
    label[predicate < 0] = -1
    shape = np.zeros(1, np.int64)
    if run.questions is not None:
        table = torch.from_numpy(trained.rules)
        before = learned.rule_shapes(table, trained.n_constants).numpy()
        now = run.questions.aggregation.shape.cpu().numpy()
        shape = np.zeros(1 + now.max(), np.int64)
        shape[now] = before[rule]
    return {
        "B": label.reshape(-1),
        "S": shape,
        "R": rule,
        "C": entity,
        "T": entity,
        "P": predicate,
        "F": np.array([0, *(rule + 1)]),
    }


def _check_unchanged(
    path: Path, meta: checkpoint.Meta, run_config: RunConfig, dataset: Dataset
) -> None:
    """Raise ValueError unless the data set is the one that the checkpoint's run was trained on."""
    expected = meta.get("fingerprint")
    if expected != dataset.fingerprint:
        raise ValueError(
            f"{path.parent}: the run was trained on other data than {run_config.dataset}; expected fingerprint "
            f"{expected}, got {dataset.fingerprint} ({len(dataset.train):,} train triples, "
            f"{dataset.n_constants:,} entities, {len(dataset.rules):,} rules)"
        )


def _check_meta(path: Path, meta: checkpoint.Meta, asks: bool) -> None:
    """Raise ValueError unless the checkpoint's metadata has the expected fields and types.

    Args:
      asks: the run learns from questions.
    """
    annotations: dict[str, object] = {
        "score": Literal["evidence"] if asks else ProofScore,
        "is_learnt_better": bool,
        "step_names": tuple[str, ...],
        "n_ranks": NonNegativeInt,
        "notes": tuple[tuple[str, ...], ...],
    }
    if meta.get("rule_metric") is not None:
        annotations["rule_metric"] = UnitInterval
    try:
        for name, annotation in annotations.items():
            check_value(name, annotation, meta.get(name))
        row = meta.get("pending_row")
        if row is not None and not logs.is_row(row):
            raise FieldError("pending_row", "the metrics of an update", row)
    except FieldError as error:
        raise ValueError(f"{path}: {error}") from None


def save_checkpoint(run: Run, folder: Path) -> None:
    """Write the state of a run to its folder, and keep the previous checkpoint."""
    meta = {
        "fingerprint": run.task.dataset.fingerprint,
        "score": run.score,
        "rule_metric": run.rule_metric,
        "is_learnt_better": run.is_learnt_better,
        "step_names": run.step_names,
        "n_ranks": len(run.state.best_ranks),
        "pending_row": run.pending_row,
        "notes": [(note.kind, note) for note in run.notes],
        "choices": [choice._asdict() for choice in run.choices],
    }
    checkpoint.save(folder / CHECKPOINT_FILE, run.state, meta)


def last_logged_update(run: Run) -> int:
    """Return the last update that the metrics log has a complete line for; -1 before the first validation."""
    return run.update if run.pending_row is None else run.update - 1


def saved_update(folder: Path) -> int:
    """Return the number of the last update that the checkpoint of a run holds."""
    path, _ = find_checkpoint(folder)
    return int(checkpoint.read(path)[0].get("train_state.update", 0))


def find_checkpoint(folder: Path) -> tuple[Path, list[str]]:
    """Return the latest readable checkpoint of a run, and a note if it is not the last one written."""
    return checkpoint.find_readable(folder / CHECKPOINT_FILE)


def repair_checkpoint(folder: Path) -> list[str]:
    """Replace a missing or damaged checkpoint by the previous one; return notes on it, empty if nothing was wrong.

    Raises:
      DamagedCheckpointError: neither can be read.
    """
    path, notes = find_checkpoint(folder)
    # Saving would rename the damaged one over the only good one.
    if notes:
        path.replace((folder / CHECKPOINT_FILE).resolve())
    return notes
