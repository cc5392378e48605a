"""Inputs of scores: the rules that a task holds or derives, the evidence of questions, the search of a policy.

`score_atoms` gives the log-odds of atoms as answers on a side by any score. A score that reads the evidence of
questions has it collected for what it scores; `score_collected` reads evidence that `query_evidence` collected once.
`PolicyScore` is the score by a trained policy that proves candidates; `make_search_step` gives the step of its search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo.config import Config
from funcppo.core.files import Json
from funcppo.core.types import F64, I32, I64, Bool
from funcppo.kg.graph.dataset import training_part
from funcppo.kg.logic import (
    derive,
    fixpoint,
    row_index,
)
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derive import (
    DerivabilityIndex,
    GroundingWork,
    Questions,
    make_label,
    open_questions,
)
from funcppo.kg.logic.fixpoint import Derivations, LeastModel
from funcppo.kg.logic.kb import TAIL, KBSizes, KnowledgeBase, other_side
from funcppo.kg.logic.row_index import (
    select_rows,
    true_rows,
    unique_rows_with_inverse,
)
from funcppo.kg.scores import evidence
from funcppo.kg.scores.evidence import Evidence, EvidenceConfig, FactIndex
from funcppo.kg.scores.score import (
    Candidates,
    Need,
    OtherFactCounts,
    Score,
    count_other_facts_of,
    is_derived_within,
)
from funcppo.kg.search.beam import (
    ProgressCallback,
    ScoreName,
    ScoringRun,
    SearchConfig,
    SearchResult,
    SearchStep,
    evaluate_step,
    ignore_progress,
    init_scheduler,
    log_odds,
    score_by_rules,
    score_candidates,
)
from funcppo.kg.search.env import World
from funcppo.kg.search.network import Params
from funcppo.kg.search.task import (
    PhaseCallback,
    ProverTask,
    ignore_phase,
    inference_world,
    is_unproved_fact,
    with_answers,
    with_other_facts,
)
from funcppo.runtime import memory
from funcppo.runtime.capture import (
    CapturedStep,
    GraphedStep,
    TreeFunction,
    are_trees_demanded,
)
from funcppo.runtime.memory import AsyncReadback, prefetch

# Each collection of evidence solves every rule's body, so it ranks at least as many queries.
MIN_CHUNK_QUERIES = 256


class TaskCandidates(Candidates):
    """Candidates whose derivations and counts come from a task."""

    def __init__(
        self, task: ProverTask, atoms: I32[Tensor, "L W"], side: int
    ) -> None:
        """Set the task, distinct atoms in lexicographic order, and the side that they answer."""
        self.kb, self.atoms, self.index = (
            task.kb,
            atoms,
            task.derivability_index,
        )
        self._task, self._side = task, side

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.atoms)

    def derivations(self) -> Iterable[Derivations]:
        """Yield the rules that derive each candidate; a known fact is derived from other facts."""
        task = self._task
        if task.answers_plan is not None and derives_by_question(task):
            return derive.iter_derivations(
                task.answers_plan,
                task.kb,
                self.atoms.long().to(task.device),
                self._side,
                object_identity=task.object_identity,
            )
        if task.max_height == 1 and task.derivability_index is not None:
            return derive.iter_indexed_derivations(
                task.derivability_index, task.sizes, self.atoms
            )
        return fixpoint.iter_derivations(
            task.kb, task.sizes, task.least_model, task.max_height, self.atoms
        )

    def derived_within(self, height: int) -> Bool[Tensor, "L"]:
        """Return whether T_P derives each candidate within a height; a known fact is derived from other facts."""
        is_derived = is_derived_within(self.least_model(), height, self.atoms)
        is_unproved = is_unproved_fact(self._task, self.atoms)
        return is_derived & ~is_unproved.to(is_derived.device)

    def training_rules(self) -> tuple[KnowledgeBase, KBSizes]:
        """Return the facts of train alone, and the rules with their confidences over them."""
        dataset = self._task.dataset
        part = training_part(dataset)
        if part is dataset:
            return self.kb, self._task.sizes
        kb, sizes = kbase.from_dataset(part)
        identity = self._task.object_identity
        counts = fixpoint.count_rules(kb, sizes, object_identity=identity)
        smoothing = self._task.cfg.smoothing
        assert smoothing != "auto", "a task has what was chosen"
        return fixpoint.with_confidence(kb, counts, smoothing), sizes

    def least_model(self) -> LeastModel:
        """Return what T_P derives; of a task that holds no answers, those of the candidates' queries."""
        return with_answers(self._task, self.atoms, (TAIL,)).least_model

    def labels(self) -> I64[Tensor, "L"]:
        """Return each candidate's label: its relation and the side that it answers."""
        atoms = self.atoms.long().to(self.kb.facts.device)
        return make_label(atoms[:, 0], self._side)

    def other_fact_counts(self) -> OtherFactCounts:
        """Return the task's counts of other facts; count them if the task has none."""
        return _count_other_facts(self._task)

    def n_other_facts(self) -> I64[Tensor, "L"]:
        """Count, for each candidate, the other facts of its relation with the same entity on the asked side."""
        return count_other_facts_of(
            self.kb,
            self._task.sizes,
            self.other_fact_counts().degrees,
            self.atoms.long().to(self.kb.facts.device),
            self._side,
        )


class QuestionCandidates(Candidates):
    """Candidates of questions with their collected evidence; a fact that no question leaves out may derive itself."""

    def __init__(self, task: ProverTask, evidence: Evidence) -> None:
        """Set the evidence, which was collected from the facts of the task."""
        self.kb, self.evidence = task.kb, evidence
        self._task = task

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.evidence.entity)

    def derivations(self) -> Iterable[Derivations]:
        """Return the rules that derive each candidate."""
        n_firings = self.evidence.firing_offsets.diff()
        row = torch.repeat_interleave(n_firings)
        return [Derivations(row, self.evidence.rule)]

    def derived_within(self, height: int) -> Bool[Tensor, "L"]:
        """Return True for every candidate: a rule derives each of them from facts."""
        return torch.ones_like(self.evidence.entity, dtype=torch.bool)

    def labels(self) -> I64[Tensor, "L"]:
        """Return each candidate's label: its relation and the side that it answers."""
        return self.evidence.label[self.evidence.question]

    def other_fact_counts(self) -> OtherFactCounts:
        """Return the task's counts of other facts; count them if the task has none."""
        return _count_other_facts(self._task)

    def n_other_facts(self) -> I64[Tensor, "L"]:
        """Return, per candidate, the number of other facts of its relation with the same entity on the asked side."""
        return self.evidence.own_degree


def _count_other_facts(task: ProverTask) -> OtherFactCounts:
    """Return the task's counts of other facts; count them if the task has none."""
    counts = with_other_facts(task).other_facts
    assert counts is not None, "they are counted"
    return counts


class QuestionEvidence(NamedTuple):
    """Distinct questions on one side, ascending by predicate and entity, with their evidence."""

    questions: Questions
    evidence: Evidence


class AnswerScores(NamedTuple):
    """Answers on one side with their log-odds, ascending by question and entity."""

    atom: I32[Tensor, "n W"]
    log_odds: F64[Tensor, "n"]


# -- scores of atoms


def is_by_side(task: ProverTask, score: Score) -> bool:
    """Return whether a score is computed separately for each side of an atom."""
    by_question = "rules" in score.needs and derives_by_question(task)
    return score.is_by_side or by_question


def with_score_counts(
    task: ProverTask, score: Score, on_phase: PhaseCallback = ignore_phase
) -> ProverTask:
    """Return the task with the counts of other facts if a score reads them, else the task as it is.

    Args:
      on_phase: receives how many rules are applied.
    """
    if "other-facts" in score.needs:
        return with_other_facts(task, on_phase)
    return task


def score_atoms(
    task: ProverTask,
    score: Score,
    atoms: I32[Tensor, "n W"],
    side: int,
    on_progress: ProgressCallback = ignore_progress,
    answers: AnswerScores | None = None,
) -> F64[Tensor, "n"]:
    """Compute the log-odds of each atom as an answer on a side; -inf for a score of 0.

    A known fact is scored by the other facts. The result is on the device of the atoms.

    Args:
      task: with the counts of `with_score_counts`, or they are made here.
      atoms: distinct, in lexicographic order.
      side: 0 for a score that is the same for all sides.
      on_progress: called with the number of questions whose evidence is collected, and of all.
      answers: what `score_answers` returns for these atoms and this side, if it is there already.
    """
    if "questions" in score.needs and score.facts is None:
        return score_without_rules(score, atoms.long(), side)
    if score.facts is None:
        found = TaskCandidates(task, atoms, side)
        return score.log_odds(found).double().to(atoms.device)
    on_device = atoms.long().to(task.device)
    is_fact = kbase.contains(task.kb, task.sizes, on_device)
    is_other = (~is_fact).to(atoms.device)
    others = atoms[is_other]
    if answers is None:
        answers = score_answers(task, score, others, side, on_progress)
    found = _find_scores(task, answers, score, others, side)
    scores = torch.zeros(len(atoms), dtype=found.dtype, device=atoms.device)
    scores = scores.masked_scatter(is_other, found)
    if is_fact.any():
        own = _score_facts(task, score, on_device[is_fact], side)
        scores = scores.masked_scatter(~is_other, own.to(atoms.device))
    return scores


def score_answers(
    task: ProverTask,
    score: Score,
    queries: I32[Tensor, "n W"],
    side: int,
    on_progress: ProgressCallback = ignore_progress,
) -> AnswerScores:
    """Score all answers that rules derive for the questions that atoms ask about one side.

    Args:
      score: one that reads the evidence of questions.

    Other arguments are those of `score_atoms`.
    """
    assert score.facts is not None, "the score reads evidence"
    parts = query_evidence(task, score.facts, queries, side)
    n_questions = len(open_questions(queries, side).entity)

    def iter_parts() -> Iterator[QuestionEvidence]:
        n_done = 0
        on_progress(n_done, n_questions)
        for part in parts:
            yield part
            n_done += len(part.questions.entity)
            on_progress(n_done, n_questions)

    return _score_parts(task, iter_parts(), score)


def _score_facts(
    task: ProverTask, score: Score, facts: I64[Tensor, "n W"], side: int
) -> F64[Tensor, "n"]:
    """Compute the log-odds of known facts as answers on a side; each question leaves its own fact out of the facts."""
    assert score.facts is not None, "the score reads evidence"
    cfg = EvidenceConfig(
        left_out=score.left_out,
        object_identity=task.object_identity,
        with_facts=False,
    )
    scores = [facts.new_zeros(0, dtype=torch.float64)]
    for part in evidence.iter_evidence(
        task.kb,
        task.sizes,
        score.facts,
        derive.own_questions(facts, side),
        cfg,
    ):
        values = score.log_odds(QuestionCandidates(task, part)).double()
        # Row -1, of an answer that no rule derives, is the added one.
        values = torch.nn.functional.pad(values, (0, 1), value=-torch.inf)
        scores.append(values[part.answer])
    found = torch.cat(scores)
    missing = true_rows(torch.isneginf(found))
    if score.ranks_all and len(missing):
        unproved = evidence.answers_alone(
            task.kb,
            task.sizes,
            score.facts,
            derive.own_questions(facts[missing], side),
            cfg,
        )
        candidates = QuestionCandidates(task, unproved)
        values = score.log_odds_without_rules(candidates)
        found = found.index_copy(0, missing, values)
    return found


def score_collected(
    task: ProverTask,
    parts: Iterable[QuestionEvidence],
    score: Score,
    atoms: I32[Tensor, "n W"],
    side: int,
) -> F64[Tensor, "n"]:
    """Compute the log-odds of atoms from evidence of their questions; -inf where no rule derives one.

    A score that ranks all entities gives the others log-odds too.

    Args:
      parts: what `query_evidence` yields for these atoms and this side.
    """
    answers = _score_parts(task, parts, score)
    return _find_scores(task, answers, score, atoms, side)


def _score_parts(
    task: ProverTask, parts: Iterable[QuestionEvidence], score: Score
) -> AnswerScores:
    """Score all candidates that evidence lists."""
    atoms = [task.kb.facts[:0]]
    scores = [torch.zeros(0, dtype=torch.float64, device=atoms[0].device)]
    for part in parts:
        questions, found = part
        listed = found.question, found.entity
        atoms.append(derive.candidate_atoms(questions, *listed, task.sizes))
        values = score.log_odds(QuestionCandidates(task, found))
        scores.append(values.double())
    return AnswerScores(torch.cat(atoms), torch.cat(scores))


def _find_scores(
    task: ProverTask,
    answers: AnswerScores,
    score: Score,
    atoms: I32[Tensor, "n W"],
    side: int,
) -> F64[Tensor, "n"]:
    """Return the log-odds of atoms that are among scored answers; of others -inf, or what a score of all entities says.

    Args:
      answers: on the side, ascending by question and entity.
    """
    base = task.sizes.n_constants + 1
    given = other_side(side)

    def keys_of(atoms: Tensor) -> Tensor:
        atoms = atoms.long()
        return (atoms[:, 0] * base + atoms[:, given]) * base + atoms[:, side]

    wanted = keys_of(atoms).to(answers.log_odds.device)
    place, is_listed = row_index.binary_search(keys_of(answers.atom), wanted)
    values = torch.nn.functional.pad(answers.log_odds, (0, 1), value=-torch.inf)
    found = values[torch.where(is_listed, place, -1)].to(atoms.device)
    if score.ranks_all:
        missing = true_rows(torch.isneginf(found))
        others = score_without_rules(score, atoms[missing].long(), side)
        found = found.index_copy(0, missing, others)
    return found


def score_without_rules(
    score: Score, atoms: I64[Tensor, "n W"], side: int
) -> F64[Tensor, "n"]:
    """Compute the log-odds of atoms that no rule derives, by a score that ranks all entities."""
    _, row = unique_rows_with_inverse(atoms[:, [0, other_side(side)]])
    found = atoms.new_zeros(len(atoms), dtype=torch.float64)
    asked = open_questions(atoms, side)
    for start in range(0, len(asked.entity), 256):
        some = select_rows(asked, slice(start, start + 256))
        values = score.log_odds_of_all(some).to(found.device)
        of_chunk = true_rows((row >= start) & (row < start + 256))
        entity = atoms[of_chunk, side] - 1
        found[of_chunk] = values[row[of_chunk] - start, entity]
    return found


# -- evidence of questions


def query_evidence(
    task: ProverTask,
    facts: FactIndex,
    atoms: Tensor,
    side: int,
    work: GroundingWork | None = None,
) -> Iterator[QuestionEvidence]:
    """Yield the evidence of the distinct questions that atoms ask about one side, chunk by chunk.

    Args:
      facts: of the task's knowledge base.
      atoms: ground and of two arguments [n, W].
      work: counts the work; None not to count it.
    """
    queries = atoms.long().to(task.device)
    questions = open_questions(queries, side)
    start = 0
    for part in evidence.iter_evidence(
        task.kb,
        task.sizes,
        facts,
        questions,
        EvidenceConfig(object_identity=task.object_identity),
        work,
    ):
        stop = start + len(part.label)
        chunk = select_rows(questions, slice(start, stop))
        yield QuestionEvidence(chunk, part)
        start = stop


# -- derivations of a task


def derives_by_question(task: ProverTask) -> bool:
    """Return whether each question derives its own answers, because the task holds no index of derivations."""
    return task.answers_plan is not None and task.derivability_index is None


# -- the score of a policy


# Receives the outcome of a call of a policy's score: the results, None where there was no search; rows that held a
# partial proof, summed over steps; and all rows, summed over steps. Without a search the rows are candidates, and with
# their padding.
ScoredCallback = Callable[[SearchResult | None, int, int], object]


def make_search_step(
    device: torch.device | str, *, compiled: bool = False
) -> SearchStep:
    """Return `evaluate_step` for a device: compiled if asked for, and replayed as a CUDA graph on a GPU.

    On a GPU, where launching kernels takes longer than running them, it replays a CUDA graph.

    Args:
      compiled: compile it as one graph, by Inductor; it is compiled in any case where graphs of compiled functions are
        asked for.
    """
    step: SearchStep = evaluate_step
    if compiled or are_trees_demanded():
        from funcppo.runtime.compile import compile_function

        step = compile_function(evaluate_step)
    is_gpu = torch.device(device).type == "cuda"
    if is_gpu and not are_trees_demanded():
        return GraphedStep(step)
    return step


def compile_search_step(
    cfg: SearchConfig,
    task: ProverTask,
    params: Params,
    sample: Tensor,
    step: SearchStep,
) -> None:
    """Compile a search step, and check its scores against the eager step's.

    Args:
      sample: some candidates, at least one.
      step: what `make_search_step` returns.

    Raises:
      EquivalenceError: it is fast and wrong.
      Exception: whatever the compiler raises.
    """
    from funcppo.runtime.compile import check_output

    world = inference_world(task)
    n = min(len(sample), cfg.chunk_size)
    atoms = sample[:n].to(task.device)
    padding = atoms.new_zeros((cfg.chunk_size + 1 - n, atoms.shape[1]))
    chunk = torch.cat([atoms, padding]).to(torch.int32)

    # Only the compiled one may overwrite the state that it is given.
    expected = actual = init_scheduler(cfg, chunk)
    for _ in range(cfg.max_depth):
        expected = evaluate_step(cfg, world, params, chunk, expected)
    for _ in range(cfg.max_depth):
        actual = step(cfg, world, params, chunk, actual)
    check_output(
        actual.results.log_score[:n],
        expected.results.log_score[:n],
        1e-4,  # of sums of tens of terms, each rounded to float32
    )


def search_captures(
    step: SearchStep | None,
) -> Sequence[CapturedStep[Any, Any]]:
    """Return the CUDA-graph captures of a search step so far; empty without a step or where nothing is captured."""
    return step.captures() if isinstance(step, GraphedStep) else ()


def search_replay(step: SearchStep | None) -> Json:
    """Return as JSON values how calls of a search step were replayed so far, and how often captures fell back, by code.

    `replay_mode` is "none" where no call replayed a CUDA graph; `graph_fallback_notes` has the sentences of the codes.
    """
    if isinstance(step, TreeFunction):
        # what PyTorch does not record is counted by the monitor
        modes = ["cuda-graph-trees"] * step.is_called
    else:
        modes = sorted(
            {x.replay_mode for x in search_captures(step)} - {"none"}
        )
    codes = Counter(
        x.fallback_code
        for x in search_captures(step)
        if x.fallback_code is not None
    )
    return {
        "replay_mode": modes[0] if modes else "none",
        "fallback_codes": dict(codes),
    }


def graph_fallback_notes(step: SearchStep | None) -> list[str]:
    """Return why CUDA-graph replay of a search step fell back to eager execution; empty if it did not."""
    reasons = step.fallback_reasons() if isinstance(step, GraphedStep) else []
    return [
        f"steps of a search were not replayed as a CUDA graph: {reason}"
        for reason in reasons
    ]


class PolicyScore(Score):
    """Score of candidates by a trained policy that proves them: by a beam search, or by the rules alone.

    Where a search does not fit into memory, it and all later ones have half the slots; scores do not depend on them.
    Candidates may be on another device than the policy: they come to its device chunk by chunk, and their scores go
    back.
    """

    needs: frozenset[Need] = frozenset({"search"})
    takes_other_facts = False

    def __init__(
        self,
        cfg: SearchConfig,
        task: ProverTask,
        params: Params,
        step: SearchStep,
        on_progress: ProgressCallback = ignore_progress,
        on_scored: ScoredCallback = lambda *_: None,
        on_halved: Callable[[SearchConfig], object] = lambda _: None,
    ) -> None:
        """Set the policy, its search and the callbacks.

        Args:
          cfg: its `score` says which score of the policy.
          step: what `make_search_step` returns, or another way to run `evaluate_step`; not called where there is no
            search.
          on_progress: called with the number of candidates started, and of all.
          on_scored: called once for each batch of candidates.
          on_halved: called whenever memory was exceeded.
        """
        super().__init__(cfg.score)
        self._cfg, self._task, self._params = cfg, task, params
        self._step = step
        self._on_progress = on_progress
        self._on_scored = on_scored
        self._on_halved = on_halved
        self._load_chunks = partial(prefetch, device=task.device)

    def log_odds(self, found: Candidates) -> F64[Tensor, "L"]:
        """Compute the log-odds of each candidate's score."""
        if needs_search(self._task, self._cfg):
            run = self._search(found.atoms)
            self._on_scored(run.results, run.active_row_steps, run.row_steps)
            return log_odds(self._cfg, run.results)
        world = with_derivations(self._task, found.atoms, found.index)
        return self._score_by_rules(world, found.atoms)

    def _search(self, atoms: Tensor) -> ScoringRun:
        """Search for proofs of the atoms, and return the outcome.

        Raises:
          RuntimeError: the smallest search does not fit into memory.
        """
        world = inference_world(self._task)
        while True:
            try:
                return score_candidates(
                    self._cfg,
                    world,
                    self._params,
                    atoms,
                    self._step,
                    self._on_progress,
                    self._load_chunks,
                    make_readback=AsyncReadback,
                )
            except RuntimeError as error:
                smaller = _halve_search(self._cfg)
                if not memory.is_out_of_memory(error) or smaller is None:
                    raise
            # Outside of the handler, whose traceback holds the tensors of the search.
            self._cfg = smaller
            if isinstance(self._step, GraphedStep):
                self._step.release()
            memory.collect_unused()
            self._on_halved(smaller)

    def _score_by_rules(self, world: World, atoms: Tensor) -> Tensor:
        """Compute the scores of candidates without a search, chunk by chunk."""
        scores = [world.kb.support.new_zeros(0, dtype=torch.float64)]
        n_scored, n_computed = 0, 0
        self._on_progress(0, len(atoms))
        for part in self._load_chunks(atoms, self._cfg.chunk_size):
            # The last chunk is padded to a power of two, so that few different shapes are run.
            size = min(self._cfg.chunk_size, 1 << (len(part) - 1).bit_length())
            padding = part.new_zeros((size - len(part), part.shape[1]))
            chunk = torch.cat([part, padding])
            values = score_by_rules(self._cfg, world, self._params, chunk)
            scores.append(values[: len(part)])

            n_scored += len(part)
            n_computed += size
            self._on_progress(n_scored, len(atoms))
        self._on_scored(None, len(atoms), n_computed)
        return torch.cat(scores)


def _halve_search(cfg: SearchConfig) -> SearchConfig | None:
    """Return a search with half the slots, rows and candidates; None if no slot or too few rows for the beam remain."""
    rows = cfg.rows_per_step // 2
    if cfg.slots == 1 or rows < cfg.beam:
        return None
    chunk_size = max(1, cfg.chunk_size // 2)
    return replace(
        cfg,
        slots=cfg.slots // 2,
        rows_per_step=rows,
        chunk_size=chunk_size,
    )


def needs_search(task: ProverTask, cfg: SearchConfig) -> bool:
    """Return whether the policy's score needs a search, and does not follow from the rules that derive a candidate.

    It does not where the oracle selects facts, nor for `best-proof` at height 1, which counts no choice of facts.
    """
    follows_from_rules = task.fact_selection == "oracle" or (
        task.max_height == 1 and cfg.score == "best-proof"
    )
    return not follows_from_rules


def with_derivations(
    task: ProverTask, atoms: Tensor, index: DerivabilityIndex | None = None
) -> World:
    """Return the task's world, with a derivability index of these atoms if the task holds none.

    Args:
      atoms: distinct, in lexicographic order.
      index: one that holds these atoms; None to build it.
    """
    world = inference_world(task)
    if task.derivability_index is not None:
        return world
    if index is None:
        kb = task.kb
        index = derive.index_atoms(
            kb,
            task.sizes,
            task.least_model,
            atoms.to(kb.facts.device),
        )
    return world._replace(derivability_index=index)


def search_config(
    task: ProverTask,
    cfg: Config,
    score: ScoreName,
    *,
    slots: int,
    beam: int,
    rows_per_step: int,
    chunk_size: int,
) -> SearchConfig:
    """Return the settings of a search for a task's candidates; the sizes are those of `SearchConfig`."""
    return SearchConfig(
        resolve=cfg.env.cfg.resolve,
        agent=cfg.agent,
        score=score,
        max_depth=task.cfg.max_depth,
        slots=slots,
        beam=beam,
        rows_per_step=rows_per_step,
        chunk_size=chunk_size,
    )
