"""Rules from data: candidates from the paths that close facts, their counts, and which of them to keep.

With pairs(r) the distinct heads that rule r derives from the facts,

    body_pairs = |pairs(r)|                     support = |pairs(r) and facts|
    confidence = support / body_pairs           head coverage = support / facts of the head's predicate
    circular   = facts among them that r derives only from bodies which hold the fact itself
    leave-one-out confidence = (support - circular) / (body_pairs - circular)
    PCA confidence = support / |{(x, y) in pairs(r) : the head's predicate has a fact (x, y')}|

Rules are ranked by smoothed confidence, (support - circular) / (body_pairs - circular + SMOOTHING), which trusts few
examples less, and where counts are estimated by two standard errors less than that. Every fact then votes for the best
rule that derives it from other facts, each rule taken as if the fact were unknown, and the shorter one of two equals. A
rule without a vote is redundant: wherever it is right, another one is, with no less confidence. This asks more than
that a longer rule beat the shorter ones that it contains.

Sources: Galárraga et al. 2013, AMIE; Lajus et al. 2020, AMIE 3 (head coverage, PCA confidence); Meilicke et al. 2019,
AnyBURL (rules with constants; smoothing by a number of unseen wrong predictions).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcppo import random
from funcppo.mining import constant_rules, path_rules, paths
from funcppo.mining.config import MiningConfig
from funcppo.mining.constant_rules import ConstantRules
from funcppo.mining.path_rules import DeadlineCheck
from funcppo.mining.paths import EdgeIndex
from funcppo.types import F64, I32, I64

SMOOTHING_COUNT = 5.0
MAX_RULE_ATOMS = 4  # of the longest rule
ProgressCallback = Callable[[str], None]  # told what is done next


class MinedRules(NamedTuple):
    """Rules and what was counted of them."""

    labels: I64[Tensor, "R 4"]  # labels of the head, from X, and of the body's steps from X; -1 for none
    end_constants: I64[Tensor, "R 2"]  # the constants that the head and a body of one step end in; 0 for a variable
    support: F64[Tensor, "R"]
    circular_support: F64[Tensor, "R"]
    body_pairs: F64[Tensor, "R"]
    pca_pairs: F64[Tensor, "R"]
    head_facts: F64[Tensor, "R"]
    std_error: F64[Tensor, "R"]  # standard error of the confidence; 0 where all counts but the PCA pairs are exact
    pca_std_error: F64[Tensor, "R"]  # of the PCA confidence; infinite where the sample does not tell


class Votes(NamedTuple):
    """The best rules of each fact so far, facts in order, the best rule of each first."""

    fact: I64[Tensor, "V"]
    rule: I64[Tensor, "V"]
    score: F64[Tensor, "V"]
    score_threshold: F64[Tensor, "N"]  # what a rule's score must pass to be among the best of a fact


class CandidateRules(NamedTuple):
    """Rules above the thresholds, and the pairs of a fact and a rule that derives it from others."""

    rules: MinedRules
    fact: I64[Tensor, "n"]
    rule: I64[Tensor, "n"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MiningResult:
    """What was found, and how completely; a value of the host."""

    rules: MinedRules  # in descending order of smoothed confidence
    n_candidates: int  # rules above the thresholds, redundant ones included
    notes: tuple[str, ...]  # what was sampled or left out, one line each
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _MiningContext:
    steps: EdgeIndex
    predicate: Tensor  # of each fact
    head_facts: Tensor  # facts of each label
    draw: Tensor  # a number in [0, 1) for each fact, and for each entity
    cfg: MiningConfig
    expired: DeadlineCheck


def mine_rules(
    facts: I32[Tensor, "N W"],
    n_predicates: int,
    n_constants: int,
    cfg: MiningConfig,
    progress: ProgressCallback = lambda _: None,
) -> MiningResult:
    """The rules of a graph that are not redundant.

    Facts of other than two arguments are passed over. The result depends on facts, settings and seed alone, unless
    `cfg.seconds` ends the search early; then a note says so.
    """
    begin = time.perf_counter()
    expired = lambda: cfg.time_limit is not None and time.perf_counter() - begin > cfg.time_limit
    two = (facts[:, 2] > 0) & (facts[:, 3:] == 0).all(1) if facts.shape[1] > 2 else torch.zeros_like(facts[:, 0] > 0)
    binary = facts[two][:, :3].long() if facts.shape[1] > 2 else facts.new_zeros((0, 3)).long()
    notes = [] if two.all() else [f"{int((~two).sum())} facts have other than two arguments and were passed over"]
    graph = _build_context(binary, n_predicates, n_constants, cfg, expired)
    least = torch.zeros_like(graph.predicate, dtype=torch.float64)
    vote = Votes(graph.predicate[:0], graph.predicate[:0], least[:0], least)
    kept, n_kept, n_candidates = [_none(facts.device)], 0, 0
    for found in _stages(graph, notes, progress) if len(binary) else ():
        vote, voted = _elect(vote, found, n_kept, cfg.votes_per_fact)
        kept.append(_rows(found.rules, voted))
        n_kept, n_candidates = n_kept + len(voted), n_candidates + len(found.rules.support)
    progress("counting the rules that are kept")
    rules = _with_pca_pairs(graph, _best_first(kept, vote))
    notes += [f"stopped after {cfg.time_limit:g} seconds: another machine may find other rules"] if expired() else []
    n_estimated = int(((rules.std_error > 0) | (rules.pca_std_error > 0)).sum())
    notes += [f"{n_estimated} rules have estimated counts, with a standard error"] if n_estimated else []
    return MiningResult(rules=rules, n_candidates=n_candidates, notes=tuple(notes), seconds=time.perf_counter() - begin)


def confidence(rules: MinedRules) -> F64[Tensor, "R"]:
    """support / body_pairs."""
    return rules.support / rules.body_pairs.clamp_min(1)


def leave_one_out_confidence(rules: MinedRules) -> F64[Tensor, "R"]:
    """(support - circular) / (body_pairs - circular)."""
    return (rules.support - rules.circular_support) / (rules.body_pairs - rules.circular_support).clamp_min(1)


def smoothed_confidence(rules: MinedRules) -> F64[Tensor, "R"]:
    """(support - circular) / (body_pairs - circular + SMOOTHING), less two standard errors where it is estimated."""
    plain = (rules.support - rules.circular_support) / (rules.body_pairs - rules.circular_support + SMOOTHING_COUNT)
    return (plain - 2 * rules.std_error).clamp_min(0)


def held_out_smoothed_confidence(rules: MinedRules) -> F64[Tensor, "R"]:
    """The smoothed confidence as it would be were one of the facts that the rule derives not known."""
    hits, pairs = rules.support - rules.circular_support - 1, rules.body_pairs - rules.circular_support - 1
    return (hits / (pairs + SMOOTHING_COUNT) - 2 * rules.std_error).clamp_min(0)


def rule_atoms(rules: MinedRules, n_constants: int) -> I64[Tensor, "R 4 3"]:
    """Head and body as ids; variables are numbered from C + 1 in the order of their occurrence."""
    x = torch.full_like(rules.support, n_constants + 1, dtype=torch.int64)
    length, with_constant = (rules.labels[:, 1:] >= 0).sum(1), rules.end_constants[:, 0] > 0
    last = torch.where(with_constant, rules.end_constants[:, 0], x + 1)
    stop = torch.where(
        with_constant, torch.where(rules.end_constants[:, 1] > 0, rules.end_constants[:, 1], x + 1), last
    )
    rows = [_atom(rules.labels[:, 0], x, last)]
    for j in range(1, MAX_RULE_ATOMS):
        begin = x if j == 1 else x + j
        rows.append(_atom(rules.labels[:, j], begin, torch.where(length == j, stop, x + j + 1)))
    return torch.stack(rows, 1)


def _atom(label: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """The fact that a step of a label walks along; 0 for label -1."""
    back, predicate = label % 2 == 1, torch.div(label, 2, rounding_mode="floor") + 1
    row = torch.stack([predicate, torch.where(back, target, source), torch.where(back, source, target)], 1)
    return torch.where(label[:, None] >= 0, row, 0)


def _build_context(
    binary: Tensor, n_predicates: int, n_constants: int, cfg: MiningConfig, expired: DeadlineCheck
) -> _MiningContext:
    ids = torch.arange(max(len(binary), n_constants + 1), device=binary.device)
    n_facts = torch.bincount(binary[:, 0], minlength=n_predicates + 1)[1:].double()
    return _MiningContext(
        steps=paths.build_edge_index(binary, n_predicates, n_constants),
        predicate=binary[:, 0],
        head_facts=n_facts.repeat_interleave(2),
        draw=random.uniform(random.fold_in(random.key(cfg.seed, binary.device), ids), ()),
        cfg=cfg,
        expired=expired,
    )


def _none(device: torch.device) -> MinedRules:
    count = torch.zeros(0, dtype=torch.float64, device=device)
    label = torch.zeros((0, MAX_RULE_ATOMS), dtype=torch.int64, device=device)
    return MinedRules(label, label[:, :2], *[count] * (len(MinedRules._fields) - 2))


def _rows(rules: MinedRules, which: Tensor) -> MinedRules:
    return MinedRules(*(column[which] for column in rules))


def _elect(vote: Votes, found: CandidateRules, n_kept: int, n_votes: int) -> tuple[Votes, Tensor]:
    """The votes after some more rules, and which of these got one; they are numbered from `n_kept`."""
    score = held_out_smoothed_confidence(found.rules)[found.rule]
    better = (score > vote.score_threshold[found.fact]).nonzero().squeeze(1)
    fact = torch.cat([vote.fact, found.fact[better]])
    rule = torch.cat([vote.rule, found.rule[better] + n_kept])
    score = torch.cat([vote.score, score[better]])
    order = torch.sort(score, descending=True, stable=True).indices
    order = order[torch.sort(fact[order], stable=True).indices]
    fact, rule, score = fact[order], rule[order], score[order]
    first = torch.searchsorted(fact, fact)
    place = torch.arange(len(fact), device=fact.device) - first
    chosen = place < n_votes
    full = place == n_votes - 1
    least = torch.zeros_like(vote.score_threshold).scatter(0, fact[full], score[full])
    fact, rule, score = fact[chosen], rule[chosen], score[chosen]
    voted = torch.unique(rule[rule >= n_kept]) - n_kept
    numbered = torch.where(rule >= n_kept, n_kept + torch.searchsorted(voted, rule - n_kept), rule)
    return Votes(fact, numbered, score, least), voted


def _best_first(kept: list[MinedRules], vote: Votes) -> MinedRules:
    """The rules with a vote in the end."""
    every = MinedRules(*(torch.cat(same) for same in zip(*kept)))
    rules = _rows(every, torch.unique(vote.rule))
    return _rows(rules, torch.sort(smoothed_confidence(rules), descending=True, stable=True).indices)


def _stages(graph: _MiningContext, notes: list[str], progress: ProgressCallback) -> Iterator[CandidateRules]:
    """The rules above the thresholds, the shorter ones first."""
    for length in range(1, graph.cfg.max_length + 1):
        progress(f"paths of length {length}")
        yield _path_stage(graph, length, notes)
        if length == 1 and graph.cfg.constants:
            progress("rules with constants")
            for rules in constant_rules.find_constant_rules(graph.steps, graph.cfg.min_support):
                yield _constant_stage(graph, rules)
                if graph.expired():
                    notes.append("rules with constants: stopped before all were looked at")
                    break


def _path_stage(graph: _MiningContext, length: int, notes: list[str]) -> CandidateRules:
    steps, cfg = graph.steps, graph.cfg
    draws = graph.draw[: len(graph.predicate)], graph.draw[: steps.n_entity_ids]
    found, share, told = path_rules.find_path_rules(
        steps, graph.predicate, length, cfg.min_support, cfg.max_rows, draws[0], graph.expired
    )
    bodies, which = torch.unique(found.body_labels, dim=0, return_inverse=True)
    pairs = path_rules.count_body_pairs(steps, bodies, cfg.max_rows, draws[1], graph.expired)
    count, error = (column[which] for column in pairs)
    seen = (found.support * share).clamp_min(1)  # closing facts that were really seen
    spread = torch.sqrt((1 - share) / seen + (error / count.clamp_min(1)) ** 2)
    n_lost = int(error.isinf().sum())
    told += [f"{n_lost} rules left out, as a sample of their pairs does not tell their confidence"] if n_lost else []
    notes.extend(f"length {length}: {line}" for line in told)
    head = 2 * found.head_predicate - 2
    rules = MinedRules(
        labels=pad(torch.cat([head[:, None], found.body_labels], 1), (0, MAX_RULE_ATOMS - 1 - length), value=-1),
        end_constants=torch.zeros((len(head), 2), dtype=torch.int64, device=head.device),
        support=found.support,
        circular_support=found.circular_support,
        body_pairs=torch.maximum(count, found.support),
        pca_pairs=torch.zeros_like(count),
        head_facts=graph.head_facts[head],
        std_error=found.support / count.clamp_min(1) * spread,
        pca_std_error=torch.zeros_like(count),
    )
    return _above(cfg, CandidateRules(rules, found.fact, found.rule))


def _constant_stage(graph: _MiningContext, found: ConstantRules) -> CandidateRules:
    rules = MinedRules(
        labels=pad(torch.stack([found.head_label, found.body_label], 1), (0, MAX_RULE_ATOMS - 2), value=-1),
        end_constants=torch.stack([found.head_constant, found.body_constant], 1),
        support=found.support,
        circular_support=found.circular_support,
        body_pairs=found.body_pairs,
        pca_pairs=torch.zeros_like(found.body_pairs),
        head_facts=graph.head_facts[found.head_label],
        std_error=torch.zeros_like(found.body_pairs),
        pca_std_error=torch.zeros_like(found.body_pairs),
    )
    return _above(graph.cfg, CandidateRules(rules, found.fact, found.rule))


def _above(cfg: MiningConfig, found: CandidateRules) -> CandidateRules:
    """The rules of enough confidence, and what they derive."""
    good = (
        leave_one_out_confidence(found.rules) - 2 * found.rules.std_error >= cfg.min_confidence
    )  # an infinite error fails
    rows = good[found.rule]
    return CandidateRules(_rows(found.rules, good), found.fact[rows], (torch.cumsum(good, 0) - 1)[found.rule[rows]])


def _with_pca_pairs(graph: _MiningContext, rules: MinedRules) -> MinedRules:
    """The rules with their PCA pairs; their share of error and that of the confidence add up as squares."""
    steps, cfg, total = graph.steps, graph.cfg, torch.zeros_like(rules.support)
    unsure = rules.std_error / confidence(rules).clamp_min(1e-9)
    constant = rules.end_constants[:, 0] > 0
    lengths = (rules.labels[:, 1:] >= 0).sum(1)
    chosen = constant.nonzero().squeeze(1)
    walk, ends = rules.labels[chosen], rules.end_constants[chosen]
    total = total.scatter(0, chosen, constant_rules.count_pca_pairs(steps, walk[:, 0], walk[:, 1], ends[:, 1]))
    for length in range(1, MAX_RULE_ATOMS):
        chosen = ((lengths == length) & ~constant).nonzero().squeeze(1)
        if len(chosen):
            walk, exact, draw = rules.labels[chosen], rules.std_error[chosen] == 0, graph.draw[: steps.n_entity_ids]
            count = path_rules.count_pca_pairs(steps, walk[:, 0], walk[:, 1 : 1 + length], exact, cfg.max_rows, draw)
            total = total.scatter(0, chosen, count.total)
            unsure = unsure.scatter(0, chosen, torch.hypot(unsure[chosen], count.std_error / count.total.clamp_min(1)))
    pairs = torch.maximum(total, rules.support)
    return rules._replace(pca_pairs=pairs, pca_std_error=rules.support / pairs.clamp_min(1) * unsure)
