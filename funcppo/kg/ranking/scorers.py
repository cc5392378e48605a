"""Scorers: functions from candidates to the log-odds of their scores.

`make_policy_scorer` scores by a trained policy, with a beam search or directly by the rules that derive a candidate
(`needs_search` says which). `make_untrained_scorer` scores by rule confidences alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from funcppo.config import Config
from funcppo.core.files import shorten
from funcppo.core.types import F64
from funcppo.kg.logic import consequences, derivability, derive, joins
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.consequences import Derivations
from funcppo.kg.logic.derive import Questions, make_label
from funcppo.kg.logic.kb import KnowledgeBase
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking.ranking import Scorer, ScorerBySide
from funcppo.kg.scores import baselines, other_facts
from funcppo.kg.search.beam_search import (
    ScoreName,
    SearchConfig,
    SearchResult,
    log_odds,
)
from funcppo.kg.search.env import World
from funcppo.kg.search.network import Params
from funcppo.kg.search.slot_scheduler import (
    ChunkLoader,
    ProgressCallback,
    ScoringRun,
    SearchStep,
    evaluate_step,
    ignore_progress,
    init_scheduler,
    score_by_rules,
    score_by_width,
    width_schedule,
)
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
    ReplayMode,
    TreeFunction,
    are_trees_demanded,
)
from funcppo.runtime.host_transfer import AsyncReadback, prefetch
from funcppo.runtime.reasons import ReasonCode

# Of log scores: sums of tens of terms, each rounded to float32.
SEARCH_TOLERANCE = 1e-4
# Ends the name of a score to which evidence is added: whether the candidate has other
# facts of the asked relation (`prover.other_facts`).
OTHER_FACTS = "-other-facts"


class ScoredCallback(Protocol):
    """Receives the outcome of each call of a policy scorer."""

    def __call__(
        self,
        result: SearchResult | None,
        active_row_steps: int,
        row_steps: int,
        /,
    ) -> None:
        """Receive the outcome of a call.

        Args:
          result: None where there was no search.
          active_row_steps: rows that held a partial proof, summed over steps; without a search the candidates.
          row_steps: all rows, summed over steps; without a search the candidates and their padding.
        """
        ...


class HalvedCallback(Protocol):
    """Receives the settings of a search that is smaller than before."""

    def __call__(self, cfg: SearchConfig, /) -> None:
        """Receive the settings."""
        ...


class _RuleScores(NamedTuple):
    """Scores computed without a search."""

    log_odds: Tensor  # [L]
    n_computed: int  # scores computed, those of padding included


class RuleScore(Protocol):
    """A score of atoms from their derivations."""

    def __call__(
        self,
        kb: KnowledgeBase,
        derivations: Iterable[Derivations],
        n_atoms: int,
        /,
    ) -> Tensor: ...


def make_search_step(
    device: torch.device | str, *, compiled: bool = False
) -> SearchStep:
    """`evaluate_step` as it runs on a device.

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
    """Compile a search step for the widths that a search begins with, and compare it with the eager one.

    Args:
      sample: some candidates, at least one.
      step: what `make_search_step` returns.

    Raises:
      EquivalenceError: it is fast and wrong.
      Exception: whatever the compiler raises.
    """
    from funcppo.runtime.equivalence import check_output

    world = inference_world(task)
    atoms = sample.to(task.kb.facts.device)
    for width in width_schedule(cfg):
        n = min(len(atoms), width.chunk_size)
        padding = atoms.new_zeros((width.chunk_size + 1 - n, atoms.shape[1]))
        chunk = torch.cat([atoms[:n], padding]).to(torch.int32)

        # Only the compiled one may overwrite the state that it is given.
        state = init_scheduler(width, chunk)
        expected = state
        for _ in range(width.max_depth):
            expected = evaluate_step(width, world, params, chunk, expected)
        actual = init_scheduler(width, chunk)
        for _ in range(width.max_depth):
            actual = step(width, world, params, chunk, actual)
        check_output(
            actual.results.log_score[:n],
            expected.results.log_score[:n],
            SEARCH_TOLERANCE,
        )


def search_captures(
    step: SearchStep | None,
) -> Sequence[CapturedStep[Any, Any]]:
    """How calls of a search step have been captured so far; empty where there is no step, or nothing to capture."""
    return step.captures() if isinstance(step, GraphedStep) else ()


class SearchReplay(NamedTuple):
    """How the steps of a search were replayed."""

    replay_mode: ReplayMode  # "none" where no call replayed a CUDA graph
    # How often a capture fell back, by code; the sentences are `graph_fallback_notes`.
    fallback_codes: dict[ReasonCode, int]


def search_replay(step: SearchStep | None) -> SearchReplay:
    """How calls of a search step were replayed so far."""
    if isinstance(step, TreeFunction):
        # what PyTorch does not record is counted by the monitor
        return SearchReplay(
            "cuda-graph-trees" if step.is_called else "none", {}
        )
    modes: set[ReplayMode] = set()
    codes: dict[ReasonCode, int] = {}
    for captured in search_captures(step):
        modes.add(captured.replay_mode)
        code = captured.fallback_code
        if code is not None:
            codes[code] = codes.get(code, 0) + 1
    replayed = sorted(modes - {"none"})
    return SearchReplay(replayed[0] if replayed else "none", codes)


def graph_fallback_notes(step: SearchStep | None) -> list[str]:
    """Reasons why CUDA-graph replay of a search step fell back to eager execution; empty if it did not."""
    reasons = step.fallback_reasons() if isinstance(step, GraphedStep) else []
    return [
        f"steps of a search were not replayed as a CUDA graph: {reason}"
        for reason in reasons
    ]


def ignore_outcome(
    result: SearchResult | None, active_row_steps: int, row_steps: int, /
) -> None:
    """Record nothing of a scorer's work."""


def ignore_halving(cfg: SearchConfig, /) -> None:
    """Do not tell of a search that is smaller than before."""


def make_policy_scorer(
    cfg: SearchConfig,
    task: ProverTask,
    params: Params,
    step: SearchStep,
    on_progress: ProgressCallback = ignore_progress,
    on_scored: ScoredCallback = ignore_outcome,
    on_halved: HalvedCallback = ignore_halving,
) -> Scorer:
    """Make the scorer of a policy.

    Where a search does not fit into memory, it and all later ones have half the slots; scores do not depend on them.

    Candidates may be on another device than the policy: they come to its device chunk by chunk, and their scores go
    back.

    Args:
      cfg: its `score` says which score of the policy.
      step: what `make_search_step` returns, or another way to run `evaluate_step`; not called where there is no search.
      on_progress: called with the number of candidates started, and of all.
      on_scored: called once for each call of the scorer.
      on_halved: called whenever memory was exceeded.
    """
    world = inference_world(task)
    load_chunks = partial(prefetch, device=task.kb.facts.device)
    search = _ShrinkingSearch(cfg, step, on_halved)

    def score(atoms: Tensor, /) -> Tensor:
        if needs_search(task, cfg):
            run = search.run(
                lambda widths: score_by_width(
                    widths,
                    world,
                    params,
                    atoms,
                    step,
                    on_progress,
                    load_chunks,
                    make_readback=AsyncReadback,
                )
            )
            on_scored(run.results, run.active_row_steps, run.row_steps)
            return log_odds(cfg, run.results).to(atoms.device)

        atoms_world = with_derivations(task, atoms)
        scores, n_computed = _score_chunks_by_rules(
            cfg,
            atoms_world,
            params,
            atoms,
            on_progress,
            load_chunks,
        )
        on_scored(None, len(atoms), n_computed)
        return scores.to(atoms.device)

    return score


class _ShrinkingSearch:
    """The settings of a search, whose slots are halved where memory does not suffice."""

    def __init__(
        self, cfg: SearchConfig, step: SearchStep, on_halved: HalvedCallback
    ) -> None:
        """Begin with the given settings."""
        self._cfg = cfg
        self._step = step
        self._on_halved = on_halved

    def run(
        self, search: Callable[[Sequence[SearchConfig]], ScoringRun]
    ) -> ScoringRun:
        """The outcome of a search over ascending widths.

        Raises:
          RuntimeError: the smallest search does not fit either.
        """
        while True:
            try:
                return search(width_schedule(self._cfg))
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


def _halve_search(cfg: SearchConfig) -> SearchConfig | None:
    """A search with half the slots, rows and candidates; None if it has one slot."""
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
    """Whether a score depends on more than the rules that derive a candidate.

    It does not where the oracle selects facts, nor for `best-proof` at height 1, which counts no choice of facts.
    """
    follows_from_rules = task.fact_selection == "oracle" or (
        task.max_height == 1 and cfg.score == "best-proof"
    )
    return not follows_from_rules


def with_derivations(task: ProverTask, atoms: Tensor) -> World:
    """The task's world with a derivability index of these atoms, if the index of all atoms was too large to build.

    Args:
      atoms: distinct, in lexicographic order.
    """
    world = inference_world(task)
    if task.derivability_index is not None:
        return world
    kb = task.kb
    index = derivability.build_derivability_index_for_atoms(
        kb,
        task.sizes,
        task.least_model,
        atoms.to(kb.facts.device),
    )
    return world._replace(derivability_index=index)


def make_untrained_scorer(task: ProverTask, name: str) -> Scorer | ScorerBySide:
    """Make a scorer that needs no training; one for each side where queries derive answers, or other facts count.

    Args:
      task: with the counts of `with_score_counts`, or they are made here.
      name: `exists@H`, or a name that `rule_score` takes, with `-other-facts` at its end or not.

    Raises:
      ValueError: another name.
    """
    base, reads_other_facts = split_other_facts(name)
    if reads_other_facts:
        task = with_other_facts(task)
        scorer = make_untrained_scorer(task, base)
        return add_other_facts(task, scorer)
    return _make_scorer_without_endings(task, name)


def _make_scorer_without_endings(
    task: ProverTask, name: str
) -> Scorer | ScorerBySide:
    """The scorer of `make_untrained_scorer` by a name without endings."""
    kind, _, number = name.partition("@")
    if kind == "exists" and re.fullmatch("[0-9]{1,9}", number):
        return partial(_score_existence, task, int(number))
    score = rule_score(name)
    if derives_by_question(task):
        head = partial(_score_answers, task, score, HEAD)
        tail = partial(_score_answers, task, score, TAIL)
        return ScorerBySide(head=head, tail=tail)
    return partial(_score_derivations, task, score)


def split_other_facts(name: str) -> tuple[str, bool]:
    """The name of a score without the ending other-facts, and whether it had it.

    Raises:
      ValueError: the score has no variant with other facts, or the ending twice.
    """
    if not name.endswith(OTHER_FACTS):
        return name, False
    base = name.removesuffix(OTHER_FACTS)
    if base.endswith(OTHER_FACTS):
        raise ValueError(f"score {shorten(name)}: expected {OTHER_FACTS} once")
    if base.startswith("exists@"):
        raise ValueError(
            f"score {shorten(name)}: {shorten(base)} has no variant {OTHER_FACTS}"
        )
    return base, True


def variant_with_other_facts(name: str) -> str | None:
    """The name of a score with the ending other-facts; None if it has it, or has no such variant."""
    if name.endswith(OTHER_FACTS) or name.startswith("exists@"):
        return None
    return f"{name}{OTHER_FACTS}"


def has_other_facts(name: str) -> bool:
    """Whether a score reads the other facts of a candidate."""
    return split_other_facts(name)[1]


def with_score_counts(
    task: ProverTask, name: str, on_phase: PhaseCallback = ignore_phase
) -> ProverTask:
    """The task with the counts of other facts, if the score of this name reads them.

    Args:
      on_phase: receives how many rules are applied.
    """
    return with_other_facts(task, on_phase) if has_other_facts(name) else task


def add_other_facts(
    task: ProverTask, scorer: Scorer | ScorerBySide
) -> ScorerBySide:
    """The scorer with what the other facts of each candidate say added to its log-odds.

    Args:
      task: with the counts of other facts.
    """
    added = partial(
        _score_with_other_facts, task, other_facts_table(task), scorer
    )
    return ScorerBySide(head=partial(added, HEAD), tail=partial(added, TAIL))


def other_facts_table(task: ProverTask) -> F64[Tensor, "B 2"]:
    """What is added to the log-odds of a candidate by label, if it has no other fact and if it has some.

    Args:
      task: with the counts of other facts.
    """
    assert task.other_facts is not None, "the caller counts them"
    shares = other_facts.other_fact_shares(task.kb, task.other_facts)
    return other_facts.log_likelihood_ratios(shares)


def _score_with_other_facts(
    task: ProverTask,
    table: F64[Tensor, "B 2"],
    scorer: Scorer | ScorerBySide,
    side: int,
    atoms: Tensor,
    /,
) -> Tensor:
    """The scores of atoms as answers about a side, with what their other facts say."""
    assert task.other_facts is not None, "the caller counts them"
    if isinstance(scorer, ScorerBySide):
        scorer = scorer.of(side)
    log_odds = scorer(atoms)
    atoms = atoms.long().to(table.device)
    n_others = other_facts.count_other_facts_of(
        task.kb, task.sizes, task.other_facts.degrees, atoms, side
    )
    added = table[make_label(atoms[:, 0], side), (n_others > 0).long()]
    return log_odds + added.to(log_odds.device)


def derives_by_question(task: ProverTask) -> bool:
    """Whether the rules that derive an atom are found by its question, because no derivations are held."""
    return task.answers_plan is not None and task.derivability_index is None


def rule_score(name: str) -> RuleScore:
    """Return the score of atoms from the confidences of the rules that derive them.

    Args:
      name: `max-confidence`, or `noisy-or`, of the N most confident rules with `-top-N` after it, and of
        confidences to the power P with `@P` at its end.

    Raises:
      ValueError: another name.
    """
    kind, _, number = name.partition("@")
    if name == "max-confidence":
        return baselines.max_confidence
    top = re.fullmatch(r"noisy-or(?:-top-([1-9]\d{0,3}))?", kind)
    is_power = re.fullmatch(r"[1-9]\d?(\.\d+)?", number)
    if top and (is_power or kind == name):
        power = float(number or 1)
        if top[1] is None:
            return partial(baselines.noisy_or, power=power)
        return partial(
            baselines.noisy_or_of_best, n_best=int(top[1]), power=power
        )
    names = "success, best-proof, greedy, exists@H, max-confidence, noisy-or, noisy-or@P, noisy-or-top-N"
    raise ValueError(
        f"score {shorten(name)}: expected {names} or noisy-or-top-N@P, N from 1 to 9999, P from 1 to 99; at its end "
        f"{OTHER_FACTS} or not"
    )


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
    """The settings of a search for a task's candidates; the sizes are those of `SearchConfig`.

    Args:
      beam: ignored for `greedy`, whose beam is 1.
    """
    return SearchConfig(
        resolve=cfg.env.cfg.resolve,
        agent=cfg.agent,
        score=score,
        max_depth=task.cfg.max_depth,
        slots=slots,
        beam=1 if score == "greedy" else beam,
        rows_per_step=rows_per_step,
        chunk_size=chunk_size,
        refill=True,
    )


def _score_chunks_by_rules(
    cfg: SearchConfig,
    world: World,
    params: Params,
    atoms: Tensor,
    on_progress: ProgressCallback,
    load_chunks: ChunkLoader,
) -> _RuleScores:
    """Score candidates chunk by chunk without a search."""
    scores = [world.kb.support.new_zeros(0, dtype=torch.float64)]
    n_scored, n_computed = 0, 0
    on_progress(0, len(atoms))
    for part in load_chunks(atoms, cfg.chunk_size):
        # The last chunk is padded to a power of two, so that few different shapes are run.
        size = min(cfg.chunk_size, 1 << (len(part) - 1).bit_length())
        padding = part.new_zeros((size - len(part), part.shape[1]))
        scores.append(
            score_by_rules(cfg, world, params, torch.cat([part, padding]))[
                : len(part)
            ]
        )

        n_scored += len(part)
        n_computed += size
        on_progress(n_scored, len(atoms))
    return _RuleScores(log_odds=torch.cat(scores), n_computed=n_computed)


def _score_existence(task: ProverTask, height: int, atoms: Tensor, /) -> Tensor:
    """Score 1 for atoms that T_P derives within a height, else 0."""
    task = with_answers(task, atoms, (TAIL,))
    log_odds = baselines.exists(task.least_model, height, atoms)
    return log_odds.masked_fill(is_unproved_fact(task, atoms), -torch.inf)


def _score_derivations(
    task: ProverTask, score: RuleScore, atoms: Tensor, /
) -> Tensor:
    """Score atoms by their derivations."""
    derivations = iter_task_derivations(task, atoms)
    return score(task.kb, derivations, len(atoms))


def _score_answers(
    task: ProverTask, score: RuleScore, side: int, atoms: Tensor, /
) -> Tensor:
    """Score atoms as answers about a side, by the derivations that their questions have."""
    derivations = iter_answer_derivations(task, side, atoms)
    return score(task.kb, derivations, len(atoms))


def iter_answer_derivations(
    task: ProverTask, side: int, atoms: Tensor
) -> Iterator[Derivations]:
    """The rules that derive each atom, a fact from other facts, found by the questions about a side.

    Args:
      task: one that `derives_by_question`.
      atoms: of two arguments, distinct, in lexicographic order.
    """
    plan, kb, sizes = task.answers_plan, task.kb, task.sizes
    assert plan is not None, "each query derives its own answers"
    atoms = atoms.long().to(kb.facts.device)
    atom_index = kbase.index_sorted_atoms(
        atoms, sizes.n_predicates, sizes.n_constants
    )
    is_fact = kbase.contains(kb, sizes, atoms)

    # A fact is left out of the facts for a question of its own.
    facts = atoms[is_fact]
    own = Questions(
        predicate=facts[:, 0],
        side=torch.full_like(facts[:, 0], side),
        entity=facts[:, HEAD + TAIL - side],
        left_out=facts[:, side],
    )
    others = derive.open_questions(atoms[~is_fact], side)
    for questions in (others, own):
        for chunk, firings in derive.iter_firing_chunks(
            plan,
            questions,
            object_identity=task.least_model.object_identity,
        ):
            left_out = chunk.left_out[firings.question]
            fired = derive.fired_atoms(chunk, firings, sizes).long()
            row = kbase.find_atoms(atom_index, sizes, fired)
            is_asked = torch.where(
                is_fact[row], left_out == firings.candidate, left_out == 0
            )
            is_listed = (row >= 0) & is_asked
            yield Derivations(row[is_listed], firings.rule[is_listed])


def iter_task_derivations(
    task: ProverTask, atoms: Tensor
) -> Iterator[Derivations]:
    """The rules that derive each atom, a fact from other facts: from the index where it holds them, else by joins.

    Args:
      atoms: distinct, in lexicographic order.
    """
    if task.max_height == 1 and task.derivability_index is not None:
        return derivability.iter_indexed_derivations(
            task.derivability_index,
            task.sizes,
            atoms,
            joins.MAX_CHUNK_ROWS,
        )
    return consequences.iter_derivations(
        task.kb,
        task.sizes,
        task.least_model,
        task.max_height,
        atoms,
    )
