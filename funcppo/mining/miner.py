"""Mine rules from the facts of a graph: candidates, their counts, and which of them to keep.

With pairs(r) the distinct heads that rule r derives from the facts,

    body_pairs = |pairs(r)|                     support = |pairs(r) and facts|
    confidence = support / body_pairs           head coverage = support / facts of the head's predicate
    circular   = facts among them that r derives only from bodies which hold the fact itself
    leave-one-out confidence = (support - circular) / (body_pairs - circular)
    PCA confidence = support / |{(x, y) in pairs(r) : the head's predicate has a fact (x, y')}|

Rules are ranked by smoothed confidence, (support - circular) / (body_pairs - circular + SMOOTHING_COUNT), which trusts
few examples less; where counts are estimated, by two standard errors less than that. Every fact then votes for the best
rule that derives it from other facts, each rule counted as if the fact were unknown; of two equal rules the shorter
one gets the vote. A rule without a vote is redundant: wherever it is right, another rule is, with no less confidence.
This asks more than that a longer rule beat the shorter ones that it contains.

`mine_rules` is the entry point.

Sources: Galárraga et al. 2013, AMIE; Lajus et al. 2020, AMIE 3 (head coverage, PCA confidence); Meilicke et al. 2019,
AnyBURL (rules with constants; smoothing by a number of unseen wrong predictions).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcppo import random
from funcppo.mining import constant_rules, path_rules, paths
from funcppo.mining.config import MAX_PATH_LENGTH, MiningConfig
from funcppo.mining.constant_rules import ConstantRules
from funcppo.mining.path_rules import DeadlineCheck
from funcppo.mining.paths import EdgeIndex
from funcppo.types import F32, F64, I32, I64

SMOOTHING_COUNT = 5.0  # wrong pairs added to the counts of each rule
MAX_RULE_ATOMS = MAX_PATH_LENGTH + 1  # atoms of the longest rule, head included


class ProgressCallback(Protocol):
    """Receives a line that says what is done next."""

    def __call__(self, message: str, /) -> object: ...


class MinedRules(NamedTuple):
    """Rules and their counts."""

    # label of the head, from X, and labels of the body's edges, from X; -1 for none
    labels: I64[Tensor, "R 4"]
    # constants that the head and a body of one edge end in; 0 for a variable
    end_constants: I64[Tensor, "R 2"]
    support: F64[Tensor, "R"]
    circular_support: F64[Tensor, "R"]
    body_pairs: F64[Tensor, "R"]
    pca_pairs: F64[Tensor, "R"]
    head_facts: F64[Tensor, "R"]
    # standard error of the confidence; 0 where all counts but the PCA pairs are exact
    std_error: F64[Tensor, "R"]
    # of the PCA confidence; infinite where the sample is too small to tell
    pca_std_error: F64[Tensor, "R"]


class _Votes(NamedTuple):
    """The best rules of each fact so far, facts in order, the best rule of each first."""

    fact: I64[Tensor, "V"]
    rule: I64[Tensor, "V"]
    score: F64[Tensor, "V"]
    # what a rule's score must exceed to be among the best of a fact
    score_threshold: F64[Tensor, "N"]


class _CandidateRules(NamedTuple):
    """Rules above the thresholds, and the pairs of a fact and a rule that derives it from others."""

    rules: MinedRules
    fact: I64[Tensor, "n"]
    rule: I64[Tensor, "n"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MiningResult:
    """The rules that were mined, and how completely."""

    rules: MinedRules  # in descending order of smoothed confidence
    n_candidates: int  # rules above the thresholds, redundant ones included
    notes: tuple[str, ...]  # what was sampled or left out, one line each
    seconds: float  # wall time


@dataclass(frozen=True, kw_only=True, slots=True)
class _MiningContext:
    """What every stage reads."""

    edges: EdgeIndex
    predicate: I64[Tensor, "N"]  # of each fact
    head_facts: F64[Tensor, "L"]  # number of facts of each label
    fact_priority: F32[Tensor, "N"]  # a random number in [0, 1) for each fact
    # a random number in [0, 1) for each entity
    entity_priority: F32[Tensor, "C1"]
    cfg: MiningConfig
    deadline_passed: DeadlineCheck


def mine_rules(
    facts: I32[Tensor, "N W"],
    n_predicates: int,
    n_constants: int,
    cfg: MiningConfig,
    progress: ProgressCallback = lambda _: None,
) -> MiningResult:
    """Mine the rules of a graph that are not redundant.

    Facts that do not have two arguments are left out and counted in a note. The result depends on facts, settings and
    seed alone, unless `cfg.time_limit` ends the search early; then a note says so.

    Args:
      facts: [predicate, argument...], padded with 0.
      progress: called with a line before each stage.

    Returns:
      MiningResult, its rules by descending smoothed confidence.
    """
    begin = time.perf_counter()

    def deadline_passed() -> bool:
        return (
            cfg.time_limit is not None
            and time.perf_counter() - begin > cfg.time_limit
        )

    binary, notes = _binary_facts(facts)
    context = _make_context(
        binary, n_predicates, n_constants, cfg, deadline_passed
    )

    # Let the facts vote on the candidates of each stage.
    no_threshold = torch.zeros_like(context.predicate, dtype=torch.float64)
    votes = _Votes(
        context.predicate[:0],
        context.predicate[:0],
        no_threshold[:0],
        no_threshold,
    )
    kept = [_no_rules(facts.device)]
    n_kept = n_candidates = 0
    for candidates in (
        _iter_stages(context, notes, progress) if len(binary) else ()
    ):
        votes, elected = _vote(votes, candidates, n_kept, cfg.votes_per_fact)
        kept.append(_select(candidates.rules, elected))
        n_kept += len(elected)
        n_candidates += len(candidates.rules.support)

    progress("counting the rules that are kept")
    rules = _with_pca_pairs(context, _sort_elected(kept, votes))
    if deadline_passed():
        notes.append(
            f"stopped after {cfg.time_limit:g} seconds: another machine may find other rules"
        )
    n_estimated = int(((rules.std_error > 0) | (rules.pca_std_error > 0)).sum())
    if n_estimated:
        notes.append(
            f"{n_estimated} rules have estimated counts, with a standard error"
        )
    seconds = time.perf_counter() - begin
    return MiningResult(
        rules=rules,
        n_candidates=n_candidates,
        notes=tuple(notes),
        seconds=seconds,
    )


def confidence(rules: MinedRules) -> F64[Tensor, "R"]:
    """support / body_pairs."""
    return rules.support / rules.body_pairs.clamp_min(1)


def leave_one_out_confidence(rules: MinedRules) -> F64[Tensor, "R"]:
    """(support - circular) / (body_pairs - circular)."""
    support = rules.support - rules.circular_support
    return support / (rules.body_pairs - rules.circular_support).clamp_min(1)


def smoothed_confidence(rules: MinedRules) -> F64[Tensor, "R"]:
    """(support - circular) / (body_pairs - circular + SMOOTHING_COUNT), less two standard errors if estimated."""
    support = rules.support - rules.circular_support
    smoothed = support / (
        rules.body_pairs - rules.circular_support + SMOOTHING_COUNT
    )
    return (smoothed - 2 * rules.std_error).clamp_min(0)


def held_out_smoothed_confidence(rules: MinedRules) -> F64[Tensor, "R"]:
    """The smoothed confidence if one of the facts that the rule derives were unknown."""
    support = rules.support - rules.circular_support - 1
    pairs = rules.body_pairs - rules.circular_support - 1
    return (
        support / (pairs + SMOOTHING_COUNT) - 2 * rules.std_error
    ).clamp_min(0)


def rule_atoms(rules: MinedRules, n_constants: int) -> I64[Tensor, "R 4 3"]:
    """Head and body of each rule as ids; variables are numbered from C + 1 in the order of their occurrence."""
    x = torch.full_like(rules.support, n_constants + 1, dtype=torch.int64)
    y = x + 1
    length = (rules.labels[:, 1:] >= 0).sum(1)

    # The head ends in Y or a constant. A path body ends in Y, a body beside a constant in its own constant or in Y.
    head_constant, body_constant = rules.end_constants.unbind(1)
    has_constant = head_constant > 0
    head_end = torch.where(has_constant, head_constant, y)
    constant_body_end = torch.where(body_constant > 0, body_constant, y)
    body_end = torch.where(has_constant, constant_body_end, head_end)

    atoms = [_edge_atom(rules.labels[:, 0], x, head_end)]
    for j in range(1, MAX_RULE_ATOMS):
        source = x if j == 1 else x + j
        target = torch.where(length == j, body_end, x + j + 1)
        atoms.append(_edge_atom(rules.labels[:, j], source, target))
    return torch.stack(atoms, 1)


def _edge_atom(label: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """The atom that an edge of a label walks along; 0 for label -1."""
    is_backward = label % 2 == 1
    predicate = torch.div(label, 2, rounding_mode="floor") + 1
    first = torch.where(is_backward, target, source)
    second = torch.where(is_backward, source, target)
    atom = torch.stack([predicate, first, second], 1)
    return torch.where(label[:, None] >= 0, atom, 0)


def _binary_facts(facts: Tensor) -> tuple[Tensor, list[str]]:
    """The facts with two arguments, and a note on the others if there are any."""
    if facts.shape[1] > 2:
        is_binary = (facts[:, 2] > 0) & (facts[:, 3:] == 0).all(1)
        binary = facts[is_binary][:, :3].long()
    else:
        is_binary = torch.zeros_like(facts[:, 0] > 0)
        binary = facts.new_zeros((0, 3)).long()
    if is_binary.all():
        return binary, []
    return binary, [
        f"{int((~is_binary).sum())} facts do not have two arguments and were left out"
    ]


def _make_context(
    binary: Tensor,
    n_predicates: int,
    n_constants: int,
    cfg: MiningConfig,
    deadline_passed: DeadlineCheck,
) -> _MiningContext:
    ids = torch.arange(max(len(binary), n_constants + 1), device=binary.device)
    priority = random.uniform(
        random.fold_in(random.key(cfg.seed, binary.device), ids), ()
    )
    n_facts = torch.bincount(binary[:, 0], minlength=n_predicates + 1)[
        1:
    ].double()
    return _MiningContext(
        edges=paths.build_edge_index(binary, n_predicates, n_constants),
        predicate=binary[:, 0],
        head_facts=n_facts.repeat_interleave(2),
        fact_priority=priority[: len(binary)],
        entity_priority=priority[: n_constants + 1],
        cfg=cfg,
        deadline_passed=deadline_passed,
    )


def _no_rules(device: torch.device) -> MinedRules:
    count = torch.zeros(0, dtype=torch.float64, device=device)
    label = torch.zeros((0, MAX_RULE_ATOMS), dtype=torch.int64, device=device)
    return MinedRules(
        label, label[:, :2], *[count] * (len(MinedRules._fields) - 2)
    )


def _select(rules: MinedRules, rows: Tensor) -> MinedRules:
    """Some of the rules, by a mask or by rows."""
    return MinedRules(*(column[rows] for column in rules))


def _vote(
    votes: _Votes, candidates: _CandidateRules, n_kept: int, votes_per_fact: int
) -> tuple[_Votes, Tensor]:
    """The votes after some more candidates, and which of these got one; they are numbered from `n_kept`."""
    # Only pairs above the fact's threshold can change its vote.
    score = held_out_smoothed_confidence(candidates.rules)[candidates.rule]
    better = (
        (score > votes.score_threshold[candidates.fact]).nonzero().squeeze(1)
    )
    fact = torch.cat([votes.fact, candidates.fact[better]])
    rule = torch.cat([votes.rule, candidates.rule[better] + n_kept])
    score = torch.cat([votes.score, score[better]])

    # By fact, then by descending score; stable, so that of equal rules the earlier, shorter one is first.
    order = torch.sort(score, descending=True, stable=True).indices
    order = order[torch.sort(fact[order], stable=True).indices]
    fact = fact[order]
    rule = rule[order]
    score = score[order]

    # The first `votes_per_fact` of each fact win; the last of them sets the threshold.
    position = torch.arange(len(fact), device=fact.device) - torch.searchsorted(
        fact, fact
    )
    is_last = position == votes_per_fact - 1
    threshold = torch.zeros_like(votes.score_threshold).scatter(
        0, fact[is_last], score[is_last]
    )
    wins = position < votes_per_fact
    fact = fact[wins]
    rule = rule[wins]
    score = score[wins]

    # Number the new rules that won consecutively.
    is_new = rule >= n_kept
    elected = torch.unique(rule[is_new]) - n_kept
    number = torch.where(
        is_new, n_kept + torch.searchsorted(elected, rule - n_kept), rule
    )
    return _Votes(fact, number, score, threshold), elected


def _sort_elected(kept: list[MinedRules], votes: _Votes) -> MinedRules:
    """The rules that have a vote in the end, by descending smoothed confidence."""
    every = MinedRules(*(torch.cat(columns) for columns in zip(*kept)))
    rules = _select(every, torch.unique(votes.rule))
    return _select(
        rules,
        torch.sort(
            smoothed_confidence(rules), descending=True, stable=True
        ).indices,
    )


def _iter_stages(
    context: _MiningContext, notes: list[str], progress: ProgressCallback
) -> Iterator[_CandidateRules]:
    """Yield the rules above the thresholds, shorter ones first; append to `notes` what was left out."""
    for length in range(1, context.cfg.max_length + 1):
        progress(f"paths of length {length}")
        yield _path_candidates(context, length, notes)
        if length == 1 and context.cfg.constants:
            progress("rules with constants")
            for rules in constant_rules.find_constant_rules(
                context.edges, context.cfg.min_support
            ):
                yield _constant_candidates(context, rules)
                if context.deadline_passed():
                    notes.append(
                        "rules with constants: stopped before all heads were searched"
                    )
                    break


def _path_candidates(
    context: _MiningContext, length: int, notes: list[str]
) -> _CandidateRules:
    """The path rules of one length above the thresholds."""
    cfg = context.cfg
    edges = context.edges
    found, fraction, search_notes = path_rules.find_path_rules(
        edges,
        context.predicate,
        length,
        cfg.min_support,
        cfg.max_rows,
        context.fact_priority,
        context.deadline_passed,
    )
    bodies, body_of_rule = torch.unique(
        found.body_labels, dim=0, return_inverse=True
    )
    estimate = path_rules.count_body_pairs(
        edges,
        bodies,
        cfg.max_rows,
        context.entity_priority,
        context.deadline_passed,
    )
    pairs = estimate.total[body_of_rule]
    pairs_error = estimate.std_error[body_of_rule]

    # The relative errors of support and of body pairs add up as squares; `n_seen` counts facts of the sample that the
    # rule derives.
    n_seen = (found.support * fraction).clamp_min(1)
    relative_error = torch.sqrt(
        (1 - fraction) / n_seen + (pairs_error / pairs.clamp_min(1)) ** 2
    )
    n_unknown = int(pairs_error.isinf().sum())
    if n_unknown:
        search_notes.append(
            f"{n_unknown} rules left out: a sample of their pairs does not tell their confidence"
        )
    notes.extend(f"length {length}: {line}" for line in search_notes)

    head_label = 2 * found.head_predicate - 2
    labels = torch.cat([head_label[:, None], found.body_labels], 1)
    rules = MinedRules(
        labels=pad(labels, (0, MAX_RULE_ATOMS - 1 - length), value=-1),
        end_constants=torch.zeros(
            (len(head_label), 2), dtype=torch.int64, device=head_label.device
        ),
        support=found.support,
        circular_support=found.circular_support,
        body_pairs=torch.maximum(pairs, found.support),
        pca_pairs=torch.zeros_like(pairs),
        head_facts=context.head_facts[head_label],
        std_error=found.support / pairs.clamp_min(1) * relative_error,
        pca_std_error=torch.zeros_like(pairs),
    )
    return _above_min_confidence(
        cfg, _CandidateRules(rules, found.fact, found.rule)
    )


def _constant_candidates(
    context: _MiningContext, found: ConstantRules
) -> _CandidateRules:
    """The rules with constants above the thresholds; their counts are exact."""
    labels = torch.stack([found.head_label, found.body_label], 1)
    zeros = torch.zeros_like(found.body_pairs)
    rules = MinedRules(
        labels=pad(labels, (0, MAX_RULE_ATOMS - 2), value=-1),
        end_constants=torch.stack(
            [found.head_constant, found.body_constant], 1
        ),
        support=found.support,
        circular_support=found.circular_support,
        body_pairs=found.body_pairs,
        pca_pairs=zeros,
        head_facts=context.head_facts[found.head_label],
        std_error=zeros,
        pca_std_error=zeros,
    )
    return _above_min_confidence(
        context.cfg, _CandidateRules(rules, found.fact, found.rule)
    )


def _above_min_confidence(
    cfg: MiningConfig, candidates: _CandidateRules
) -> _CandidateRules:
    """The rules of enough confidence, and the facts that they derive."""
    # An infinite standard error fails.
    lower_bound = (
        leave_one_out_confidence(candidates.rules)
        - 2 * candidates.rules.std_error
    )
    is_kept = lower_bound >= cfg.min_confidence
    rows = is_kept[candidates.rule]
    new_number = torch.cumsum(is_kept, 0) - 1
    return _CandidateRules(
        rules=_select(candidates.rules, is_kept),
        fact=candidates.fact[rows],
        rule=new_number[candidates.rule[rows]],
    )


def _with_pca_pairs(context: _MiningContext, rules: MinedRules) -> MinedRules:
    """The rules with their PCA pairs; relative errors of PCA pairs and of the confidence add up as squares."""
    edges = context.edges
    total = torch.zeros_like(rules.support)
    relative_error = rules.std_error / confidence(rules).clamp_min(1e-9)

    # Rules with constants: exact.
    has_constant = rules.end_constants[:, 0] > 0
    chosen = has_constant.nonzero().squeeze(1)
    labels = rules.labels[chosen]
    body_constant = rules.end_constants[chosen, 1]
    count = constant_rules.count_pca_pairs(
        edges, labels[:, 0], labels[:, 1], body_constant
    )
    total = total.scatter(0, chosen, count)

    # Path rules, length by length: exact where their other counts are.
    length_of_rule = (rules.labels[:, 1:] >= 0).sum(1)
    for length in range(1, MAX_RULE_ATOMS):
        chosen = (
            ((length_of_rule == length) & ~has_constant).nonzero().squeeze(1)
        )
        if not len(chosen):
            continue
        labels = rules.labels[chosen]
        estimate = path_rules.count_pca_pairs(
            edges,
            labels[:, 0],
            labels[:, 1 : 1 + length],
            rules.std_error[chosen] == 0,
            context.cfg.max_rows,
            context.entity_priority,
        )
        total = total.scatter(0, chosen, estimate.total)
        pca_error = estimate.std_error / estimate.total.clamp_min(1)
        relative_error = relative_error.scatter(
            0, chosen, torch.hypot(relative_error[chosen], pca_error)
        )

    pairs = torch.maximum(total, rules.support)
    return rules._replace(
        pca_pairs=pairs,
        pca_std_error=rules.support / pairs.clamp_min(1) * relative_error,
    )
