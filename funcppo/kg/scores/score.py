"""Scores of candidates: the evidence that each reads, the log-odds that it gives, and why.

A `Score` is a value. `log_odds` reads what is known of some candidates (`Candidates`), `explain` lists what adds to the
score of one of them, and `+` adds scores. `parse` makes a score of a name; `register` gives `parse` a new name, which
the programs' help and errors then name, and which new runs try on valid if `tried` says so:

    class Mean(Score):
        def log_odds(self, found): ...

    register("mean", "mean", lambda match: Mean(match.string), "of the confidences", tried=("mean",))

A score that `funcppo check` can compute again defines `recount` too, in plain Python.

A score p from 0 to 1 is given as its log-odds, log(p / (1 - p)), in float64: they keep apart what is near 0 and what is
near 1, however many rules derive an atom. They are -inf for 0 and +inf for 1; atoms that a rule of confidence 1 derives
are certain, and equal, whatever other rules derive them.

Other facts: `log_likelihood_ratios` weighs whether a candidate has other facts of the asked relation on the asked side.

Of some relations an entity has one fact, of others many: who has a known birthplace has no second one, a country where
one city lies has others too. Two shares say how much that tells about a candidate of a question:

    a = (facts whose entity on that side has another fact of the relation there + 1) / (facts of the relation + 2)
    b = (sum_r c_r w_r + 1) / (sum_r c_r n_r + 2),    r a rule of the relation, of confidence c_r

n_r counts the atoms that rule r derives from the facts and that are no facts, w_r those of them whose entity has a fact
of the relation on that side. The evidence is a likelihood ratio, added to the log-odds of a score:

    log(a / b) if the candidate has another fact, log((1 - a) / (1 - b)) if it has none

All are counts over known facts. The candidate's own fact never counts, known or not, so that all candidates of a
question are treated alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from funcppo.core.files import shorten
from funcppo.core.types import F32, F64, I32, I64, Bool
from funcppo.kg.logic import fixpoint, row_index
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derive import (
    DerivabilityIndex,
    LeftOut,
    Questions,
    make_label,
)
from funcppo.kg.logic.fixpoint import (
    Consequences,
    CountCallback,
    Derivations,
    LeastModel,
    ignore_progress,
    iter_consequences,
)
from funcppo.kg.logic.joins import UNBOUNDED, RowBudget
from funcppo.kg.logic.kb import (
    HEAD,
    TAIL,
    KBSizes,
    KnowledgeBase,
    rule_confidence,
)
from funcppo.kg.logic.row_index import int_list, row_numbers
from funcppo.kg.scores import evidence
from funcppo.kg.scores.evidence import Degrees, Evidence, FactIndex

# -- combinations of confidences

# above, the terms of second order in 1 - p are below 1e-13
_NEAR_CERTAIN_LOG_ODDS = 30.0


def max_confidence(
    kb: KnowledgeBase, derivations: Iterable[Derivations], n_atoms: int
) -> F64[Tensor, "L"]:
    """Compute the largest confidence of the rules that derive each atom, as log-odds.

    Args:
      derivations: by some rules at a time, in any order.
      n_atoms: L, the length of the list that `Derivations.atom_row` refers to.

    Returns:
      [L]; -inf for an atom that no rule derives.
    """
    confidence = rule_confidences(kb)
    best = confidence.new_zeros(n_atoms, dtype=torch.float64)
    for part in derivations:
        best = best.scatter_reduce(
            0,
            part.atom_row,
            confidence[part.rule],
            "amax",
        )
    return torch.logit(best)


def noisy_or(
    kb: KnowledgeBase,
    derivations: Iterable[Derivations],
    n_atoms: int,
    power: float = 1.0,
) -> F64[Tensor, "L"]:
    """Compute the noisy-or of the rules that derive each atom, as log-odds.

        (1 - prod_r (1 - confidence(r)^power))^(1 / power)

    At power 1 this is the probability that some rule is right, if rules were independent. Rules mined from one graph
    are not independent: a larger power makes several of them count less together, down to the largest confidence.

    Args:
      derivations: by some rules at a time, in any order.
      n_atoms: L, the length of the list that `Derivations.atom_row` refers to.

    Returns:
      [L]; -inf for an atom that no rule derives.
    """
    # -log prod_r (1 - confidence^power), a sum of positive numbers: its order of summation moves the last digits only.
    neg_log_wrong_of_rule = -torch.log1p(-(rule_confidences(kb) ** power))
    neg_log_wrong = neg_log_wrong_of_rule.new_zeros(
        n_atoms, dtype=torch.float64
    )
    for part in derivations:
        neg_log_wrong = neg_log_wrong.scatter_add(
            0,
            part.atom_row,
            neg_log_wrong_of_rule[part.rule],
        )

    return _log_odds(neg_log_wrong, power)


def _log_odds(
    neg_log_wrong: F64[Tensor, "L"], power: float
) -> F64[Tensor, "L"]:
    """Compute the log-odds of (1 - exp(-neg_log_wrong))^(1 / power)."""
    # Of the product alone; then of the root, 1 - p^(1 / power) = (1 - p) / power to 13 digits where p is near 1.
    log_odds = neg_log_wrong + torch.log(-torch.expm1(-neg_log_wrong))
    log_root = torch.nn.functional.logsigmoid(log_odds) / power
    log_complement = torch.where(
        log_odds > _NEAR_CERTAIN_LOG_ODDS,
        -log_odds - math.log(power),
        torch.log(-torch.expm1(log_root)),
    )
    return log_root - log_complement


def noisy_or_of_best(
    kb: KnowledgeBase,
    derivations: Iterable[Derivations],
    n_atoms: int,
    n_best: int,
    power: float = 1.0,
) -> F64[Tensor, "L"]:
    """Compute the noisy-or of the `n_best` most confident rules that derive each atom, as log-odds.

    Rules that derive an atom after many others add little but repeat what those say.

    Args:
      derivations: by some rules at a time, in any order.
      n_atoms: L, the length of the list that `Derivations.atom_row` refers to.
      n_best: how many rules count for an atom.
      power: as in `noisy_or`.

    Returns:
      [L]; -inf for an atom that no rule derives.

    Source: Betz et al. 2024, "PyClause: Simple and efficient rule handling for knowledge graphs" (noisy-or top-h).
    """
    confidence = rule_confidences(kb)
    by_confidence = torch.argsort(confidence, descending=True, stable=True)
    place = by_confidence.argsort()

    # The rules of a confidence above 0 of the first atom, of the second, ..., the most confident first.
    base = max(len(confidence), 1)
    keys = [place[:0]]
    for part in derivations:
        is_counted = confidence[part.rule] > 0
        row, rule = part.atom_row[is_counted], part.rule[is_counted]
        keys.append(row * base + place[rule])
    key = row_index.sort_values(torch.cat(keys))
    row = key // base
    number = row_numbers(key)
    is_best = number - torch.searchsorted(row, row) < n_best
    best = Derivations(row[is_best], by_confidence[key % base][is_best])
    return noisy_or(kb, [best], n_atoms, power)


def is_derived_within(
    model: LeastModel, max_height: int, atoms: I32[Tensor, "L W"]
) -> Bool[Tensor, "L"]:
    """Return whether T_P derives each atom within `max_height` steps."""
    height = fixpoint.atom_height(model, atoms.long())
    return (height >= 0) & (height <= max_height)


def rule_confidences(kb: KnowledgeBase) -> F64[Tensor, "R"]:
    """Compute `rule_confidence` in float64, so that 1 - confidence keeps its precision too."""
    return rule_confidence(
        kb._replace(
            support=kb.support.to(torch.float64),
            body_pairs=kb.body_pairs.to(torch.float64),
        )
    )


def to_log_odds(log_probability: F32[Tensor, "..."]) -> F64[Tensor, "..."]:
    """Compute log(p / (1 - p)) from log p, as exact as the leading digits of log p."""
    # Rounding can leave the logarithm of a sum of probabilities slightly above 0.
    log_p = log_probability.to(torch.float64).clamp_max(0.0)
    return log_p - torch.log(-torch.expm1(log_p))


# -- other facts


class OtherFactCounts(NamedTuple):
    """Counts that the shares are computed from, by label (a predicate and a side, see `make_label`) and by rule."""

    degrees: Degrees
    n_facts: I64[Tensor, "B"]  # facts of each label
    # facts among them whose entity has another one in the label
    n_facts_with: I64[Tensor, "B"]
    # atoms that each rule derives and that are no facts; 0 for rules whose heads have not two arguments
    n_derived: I64[Tensor, "R"]
    # atoms among them whose head, and whose tail, has a fact of the relation there
    n_derived_with: I64[Tensor, "R 2"]


class OtherFactShares(NamedTuple):
    """Shares of facts, and of derived atoms, whose entity has another fact of the relation on that side, by label."""

    of_facts: F64[Tensor, "B"]
    of_derived: F64[Tensor, "B"]  # of what the rules derive beside the facts


def count_other_facts(
    kb: KnowledgeBase,
    sizes: KBSizes,
    *,
    object_identity: bool = False,
    budget: RowBudget = UNBOUNDED,
    progress: CountCallback = ignore_progress,
) -> OtherFactCounts:
    """Count facts and derived atoms with other facts, one rule at a time so that only its atoms are in memory.

    Args:
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      budget: bounds the rows that the joins make.
      progress: is called after each rule that is applied.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    heads = kb.rules[kb.rule_ids_by_predicate, 0]
    is_binary = kbase.is_binary(heads)
    rule_ids = kb.rule_ids_by_predicate[is_binary]
    consequences = iter_consequences(
        kb,
        sizes,
        rule_ids=int_list(rule_ids),
        object_identity=object_identity,
        budget=budget,
        progress=progress,
    )
    of_rule = zip(int_list(heads[is_binary, 0]), consequences, strict=True)
    rows = [rule_ids.new_zeros((0, 3))]
    for predicate, group in groupby(of_rule, key=itemgetter(0)):
        has_fact = _has_fact(kb, sizes, predicate)
        rows += [_count_derived(part, has_fact) for _, part in group]
    table = rule_ids.new_zeros((sizes.n_rules, 3))
    table = table.index_add(0, rule_ids, torch.cat(rows))

    degrees = evidence.count_degrees(kb, sizes)
    label = degrees.key % evidence.n_labels(sizes)
    zero = label.new_zeros(evidence.n_labels(sizes))
    several = torch.where(degrees.n_facts > 1, degrees.n_facts, 0)
    return OtherFactCounts(
        degrees=degrees,
        n_facts=zero.index_add(0, label, degrees.n_facts),
        n_facts_with=zero.index_add(0, label, several),
        n_derived=table[:, 0],
        n_derived_with=table[:, 1:],
    )


def _has_fact(
    kb: KnowledgeBase, sizes: KBSizes, predicate: int
) -> Bool[Tensor, "2 C1"]:
    """Return whether each entity is the head, and whether it is the tail, of some fact of a relation."""
    start, stop = int_list(kb.fact_offsets[predicate : predicate + 2])
    arguments = kb.facts[start:stop, HEAD : TAIL + 1].long().T
    none = kb.facts.new_zeros((2, sizes.n_constants + 1), dtype=torch.bool)
    return none.scatter(1, arguments, True)


def _count_derived(
    part: Consequences, has_fact: Bool[Tensor, "2 C1"]
) -> I64[Tensor, "1 3"]:
    """Count a rule's derived atoms that are no facts, and those among them whose head, or tail, has a fact."""
    new = part.atoms[part.fact < 0].long()
    with_head = has_fact[0, new[:, HEAD]].sum()
    with_tail = has_fact[1, new[:, TAIL]].sum()
    n_new = torch.full_like(with_head, len(new))
    return torch.stack([n_new, with_head, with_tail])[None]


def other_fact_shares(
    kb: KnowledgeBase, counts: OtherFactCounts
) -> OtherFactShares:
    """Compute the shares a and b of each label.

    Args:
      kb: with the supports and body pairs that confidences are computed from.
    """
    confidence = rule_confidences(kb)
    predicate = kb.rules[:, 0, 0].long()
    zero = torch.zeros_like(counts.n_facts, dtype=torch.float64)
    n_all, n_with = zero, zero
    for place, side in enumerate((HEAD, TAIL)):
        label = make_label(predicate, side)
        with_fact = confidence * counts.n_derived_with[:, place]
        n_all = n_all.index_add(0, label, confidence * counts.n_derived)
        n_with = n_with.index_add(0, label, with_fact)
    # One with and one without are added to each, so that no share is 0 or 1.
    return OtherFactShares(
        of_facts=(counts.n_facts_with + 1) / (counts.n_facts.double() + 2),
        of_derived=(n_with + 1) / (n_all + 2),
    )


def log_likelihood_ratios(shares: OtherFactShares) -> F64[Tensor, "B 2"]:
    """Compute the log-likelihood ratio by label, for a candidate without (column 0) and with other facts (column 1)."""
    a, b = shares
    without = torch.log1p(-a) - torch.log1p(-b)
    return torch.stack([without, torch.log(a) - torch.log(b)], 1)


def count_other_facts_of(
    kb: KnowledgeBase,
    sizes: KBSizes,
    degrees: Degrees,
    atoms: I64[Tensor, "n W"],
    side: int,
) -> I64[Tensor, "n"]:
    """Count, for each atom, the facts other than itself that share its relation and its entity on a side."""
    label = make_label(atoms[:, 0], side)
    degree = evidence.find_degrees(degrees, sizes, atoms[:, side], label)
    return degree - kbase.contains(kb, sizes, atoms).long()


# -- scores as values

# What a score reads: the rules that derive a candidate, whether T_P does within a height, other facts of the candidate,
# the evidence of its question, or the candidate itself, for a search.
Need = Literal["rules", "heights", "other-facts", "questions", "search"]
# ends the name of a score that counts other facts too
OTHER_FACTS = "-other-facts"


class Term(NamedTuple):
    """Part of the score of a candidate."""

    kind: str  # such as "rules", "fact" or "other-facts"
    log_odds: float  # that it adds
    detail: Any = None  # the counts behind it


class OtherFactsDetail(NamedTuple):
    """Counts and shares behind the term of other facts."""

    n_facts: (
        int  # other facts of the relation, of the candidate on the asked side
    )
    # of the facts of the relation, and of what its rules derive beside them, those that have other facts there
    share_of_facts: float
    share_of_derived: float


class Candidates:
    """Distinct candidates as answers on one side, with inputs of scores; a subclass provides those that it has."""

    kb: KnowledgeBase  # facts, and rules with their confidences
    atoms: I32[Tensor, "L W"]  # the candidates, in lexicographic order
    evidence: Evidence  # of their questions
    # the rules that derive each atom, where an index holds them
    index: DerivabilityIndex | None = None

    def __len__(self) -> int:
        """Return the number of candidates L."""
        raise NotImplementedError

    def derivations(self) -> Iterable[Derivations]:
        """Return the rules that derive each candidate; a known fact is derived from other facts."""
        raise NotImplementedError

    def derived_within(self, height: int) -> Bool[Tensor, "L"]:
        """Return whether T_P derives each candidate within a height; a known fact is derived from other facts."""
        raise NotImplementedError

    def training_rules(self) -> tuple[KnowledgeBase, KBSizes]:
        """Return the facts of train alone, and the rules with their confidences over them."""
        raise NotImplementedError

    def least_model(self) -> LeastModel:
        """Return what T_P derives, the candidates among it."""
        raise NotImplementedError

    def labels(self) -> I64[Tensor, "L"]:
        """Return each candidate's label (relation and side that it answers), see `make_label`."""
        raise NotImplementedError

    def other_fact_counts(self) -> OtherFactCounts:
        """Return counts of candidates with other facts, by relation and side."""
        raise NotImplementedError

    def n_other_facts(self) -> I64[Tensor, "L"]:
        """Return, per candidate, the number of other facts of its relation with the same entity on the asked side."""
        raise NotImplementedError


class Score:
    """Score of candidates, given as log-odds."""

    needs: frozenset[Need] = frozenset({"rules"})
    # the least height of T_P that the score can be asked at
    min_height: int = 1
    # other facts may be added to it
    takes_other_facts: bool = True
    # `log_odds_of_all` knows every entity; it ranks those that no rule derives among the others
    knows_all: bool = False
    ranks_all: bool = False
    # `recount` computes it from confidences, and counts of other facts
    has_recount: bool = False
    # what the evidence of questions is collected from and what a question leaves out, where the score reads it
    facts: FactIndex | None = None
    left_out: LeftOut = "fact"

    def __init__(self, name: str) -> None:
        """Set the name that results show."""
        self.name = name

    def __repr__(self) -> str:
        """Return the score's name."""
        return self.name

    def __add__(self, other: Score) -> Score:
        """Return the score whose log-odds are the sum of both scores' log-odds."""
        return _Sum(self, other)

    def log_odds(self, found: Candidates) -> Tensor:
        """Compute the log-odds of each candidate's score, [L]."""
        raise NotImplementedError

    def log_odds_of_all(self, questions: Questions) -> F64[Tensor, "Q E"]:
        """Compute the log-odds of every entity as an answer that no rule derives, where the score `knows_all`."""
        raise NotImplementedError

    def log_odds_without_rules(self, found: Candidates) -> F64[Tensor, "L"]:
        """Compute the log-odds of candidates as answers that no rule derives, where the score reads their evidence."""
        raise NotImplementedError

    def explain(self, found: Candidates, row: int) -> list[Term]:
        """Return the terms that add to a candidate's score, beside the rules of its proof."""
        return []

    def recount(self, confidences: Sequence[float]) -> float:
        """Compute a candidate's log-odds, without other facts, from the confidences of the rules that derive it.

        It is written to be read and shares no code with `log_odds`.
        """
        raise NotImplementedError

    @property
    def is_by_side(self) -> bool:
        """Return whether an atom's score as an answer on its head may differ from its score on its tail."""
        return bool(self.needs & {"other-facts", "questions"})


class _Sum(Score):
    """Sum of two scores."""

    def __init__(self, first: Score, second: Score) -> None:
        is_ending = second.name.startswith("-")
        super().__init__(
            first.name + ("" if is_ending else " + ") + second.name
        )
        self._parts = first, second
        self.needs = first.needs | second.needs
        self.min_height = max(first.min_height, second.min_height)
        self.takes_other_facts = "other-facts" not in self.needs
        self.has_recount = first.has_recount and second.has_recount
        self.facts = first.facts or second.facts
        self.left_out = first.left_out

    def log_odds(self, found: Candidates) -> Tensor:
        """Return the sum of both scores' log-odds."""
        first, second = (part.log_odds(found) for part in self._parts)
        return first + second.to(first.device)

    def explain(self, found: Candidates, row: int) -> list[Term]:
        """Return the terms of both scores."""
        return [
            term for part in self._parts for term in part.explain(found, row)
        ]

    def recount(self, confidences: Sequence[float]) -> float:
        """Return the sum of both scores."""
        return sum(part.recount(confidences) for part in self._parts)


# -- scores by rules


class MaxConfidence(Score):
    """Largest confidence of a rule that derives a candidate."""

    has_recount = True

    def log_odds(self, found: Candidates) -> F64[Tensor, "L"]:
        """Compute the log-odds of the largest confidence."""
        return max_confidence(found.kb, found.derivations(), len(found))

    def recount(self, confidences: Sequence[float]) -> float:
        """Compute the log-odds of the largest confidence."""
        best = max(confidences, default=0.0)
        if best in (0.0, 1.0):
            return math.inf if best else -math.inf
        return math.log(best) - math.log1p(-best)


class NoisyOr(Score):
    """Noisy-or of the rules that derive a candidate, see `noisy_or`."""

    has_recount = True

    def __init__(
        self, name: str, power: float = 1.0, n_best: int | None = None
    ) -> None:
        """Set the power of the confidences and how many rules count; None for all."""
        super().__init__(name)
        self._power, self._n_best = power, n_best

    def log_odds(self, found: Candidates) -> F64[Tensor, "L"]:
        """Compute the log-odds of the noisy-or."""
        arguments = found.kb, found.derivations(), len(found)
        if self._n_best is None:
            return noisy_or(*arguments, power=self._power)
        return noisy_or_of_best(
            *arguments, n_best=self._n_best, power=self._power
        )

    def recount(self, confidences: Sequence[float]) -> float:
        """Compute the log-odds of (1 - prod_r (1 - confidence(r)^P))^(1 / P) of the N largest confidences."""
        best = sorted(confidences, reverse=True)[: self._n_best]
        if not best or best[0] in (0.0, 1.0):
            return math.inf if best and best[0] else -math.inf

        # The product is exp(-exponent): it is far too small for a float where many rules agree.
        power = self._power
        exponent = math.fsum(-math.log1p(-(c**power)) for c in best)
        if exponent > 500.0:
            return exponent + math.log(power)
        log_score = _log_complement(exponent) / power
        return log_score - _log_complement(-log_score)


def _log_complement(exponent: float) -> float:
    """Compute log(1 - exp(-exponent)) for a positive exponent, to the last digits at both ends."""
    if exponent > 1.0:
        return math.log1p(-math.exp(-exponent))
    return math.log(-math.expm1(-exponent))


class Exists(Score):
    """Score of 1 for candidates that T_P derives within a height, else 0."""

    needs: frozenset[Need] = frozenset({"heights"})
    takes_other_facts = False

    def __init__(self, name: str, height: int) -> None:
        """Set the height up to which T_P is asked."""
        super().__init__(name)
        self.min_height = height

    def log_odds(self, found: Candidates) -> F64[Tensor, "L"]:
        """Return +inf for derived candidates, -inf for all others."""
        is_derived = found.derived_within(self.min_height)
        infinity = torch.full_like(is_derived, torch.inf, dtype=torch.float64)
        return torch.where(is_derived, infinity, -infinity)


class ProofProduct(Score):
    """Largest product of rule confidences along a proof of a candidate within a height.

    For the relation of a pair, confidences count the derived heads whose pair some fact links: an asked pair is linked.
    What stories of held-out triples tell is known, and links none of the pairs that they ask: only train is counted.
    """

    needs: frozenset[Need] = frozenset({"heights"})
    takes_other_facts = False

    def __init__(self, name: str, height: int, *, linked: bool) -> None:
        """Set the maximum height of a proof, and whether only heads with a linked pair count."""
        super().__init__(name)
        self.min_height = height
        self._linked = linked
        self._held: tuple[LeastModel, F64[Tensor, "n"]] | None = None

    def log_odds(self, found: Candidates) -> F64[Tensor, "L"]:
        """Compute the log-odds of the product; -inf for candidates without a proof."""
        model = found.least_model()
        if self._held is None or self._held[0] is not model:
            kb = found.kb
            if self._linked:
                of_train = found.training_rules()
                kb = _among_linked(*of_train, model.object_identity)
            products = fixpoint.best_products(
                found.kb,
                model.sizes,
                model,
                rule_confidences(kb),
                self.min_height,
            )
            self._held = model, products
        atoms = found.atoms.long().to(model.atoms.device)
        row = kbase.find_atoms(model.atom_index, model.sizes, atoms)
        product = torch.nn.functional.pad(self._held[1], (0, 1))[row]
        return torch.logit(product).to(found.atoms.device)


def _among_linked(
    kb: KnowledgeBase, sizes: KBSizes, object_identity: bool
) -> KnowledgeBase:
    """Return the knowledge base whose body pairs leave out heads of two entities that no fact links."""
    base = sizes.n_constants + 1
    facts = kbase.binary_atoms(kb.facts).long()
    linked = row_index.unique_values(facts[:, HEAD] * base + facts[:, TAIL])
    n_pairs = kb.body_pairs.double()
    for part in iter_consequences(kb, sizes, object_identity=object_identity):
        atoms = part.atoms.long()
        is_pair = kbase.is_binary(atoms)
        atoms, rule = atoms[is_pair], part.rule[is_pair]
        code = atoms[:, HEAD] * base + atoms[:, TAIL]
        rule = rule[~row_index.binary_search(linked, code).found]
        n_pairs = n_pairs.index_add(0, rule, -torch.ones_like(rule).double())
    return kb._replace(body_pairs=n_pairs)


class OtherFacts(Score):
    """Log-likelihood ratio of a candidate with, or without, other facts of the asked relation."""

    needs: frozenset[Need] = frozenset({"other-facts"})
    has_recount = True

    def log_odds(self, found: Candidates) -> F64[Tensor, "L"]:
        """Compute the logarithm of the likelihood ratio of each candidate."""
        counts = found.other_fact_counts()
        shares = other_fact_shares(found.kb, counts)
        table = log_likelihood_ratios(shares)
        return table[found.labels(), (found.n_other_facts() > 0).long()]

    def explain(self, found: Candidates, row: int) -> list[Term]:
        """Return the ratio of a candidate with the counts and shares behind it."""
        counts = found.other_fact_counts()
        shares = other_fact_shares(found.kb, counts)
        label = int(found.labels()[row])
        detail = OtherFactsDetail(
            int(found.n_other_facts()[row]),
            float(shares.of_facts[label]),
            float(shares.of_derived[label]),
        )
        return [Term("other-facts", float(self.log_odds(found)[row]), detail)]

    def recount(self, confidences: Sequence[float]) -> float:
        """Return 0: what other facts add does not depend on confidences."""
        return 0.0


# -- names


class _Form(NamedTuple):
    """Form of names of scores."""

    pattern: re.Pattern[str]  # of the whole name
    make: Callable[[re.Match[str]], Score]  # of the match of a name
    about: str
    tried: tuple[str, ...]


# in the order of errors
_FORMS: dict[str, _Form] = {}


def register(
    form: str,
    pattern: str,
    make: Callable[[re.Match[str]], Score],
    about: str = "",
    tried: tuple[str, ...] = (),
) -> None:
    """Register names, matched by a pattern, from which `parse` makes scores.

    Args:
      form: such as "noisy-or@P"; a form of the same text is replaced.
      pattern: a regular expression for the whole name.
      make: gets the match of a name and returns its score.
      about: what the score is, in a few words.
      tried: names of this form that a choice on the valid split compares, the simplest first.
    """
    _FORMS.update({form: _Form(re.compile(pattern), make, about, tried)})


def names_to_try() -> tuple[str, ...]:
    """Return the names that a choice on the valid split compares, the simplest first."""
    return tuple(name for form in _FORMS.values() for name in form.tried)


def parse(name: str, trained: Mapping[str, Score] | None = None) -> Score:
    """Return the score that a name stands for.

    Args:
      trained: scores that a trained run has beside those by rules; None without a run.

    Raises:
      ValueError: there is no such score.
    """
    if trained and name in trained:
        return trained[name]
    base = name.removesuffix(OTHER_FACTS)
    for form in _FORMS.values():
        match = form.pattern.fullmatch(base)
        if match is None:
            continue
        score = form.make(match)
        if base == name:
            return score
        if score.takes_other_facts:
            return score + OtherFacts(OTHER_FACTS)
    raise ValueError(
        f"score {shorten(name)}: expected {describe_names(trained or ())}"
    )


def describe_names(trained: Iterable[str] = ()) -> str:
    """Return all names of scores as text.

    Args:
      trained: those of a trained run.
    """
    known = [
        f"{name} ({form.about})" if form.about else name
        for name, form in _FORMS.items()
    ]
    forms = ", ".join([*trained, *known])
    without = "" if trained else "; a trained run has others"
    return (
        f"{forms}; H, N and P from 1, P to 99; at its end {OTHER_FACTS} or not (not with @H, nor of a trained run)"
        f"{without}"
    )


def _make_noisy_or(match: re.Match[str]) -> Score:
    """Return the noisy-or with the number of rules and the power that its name gives."""
    n_best, power = match.groups()
    return NoisyOr(
        match.string,
        power=float(power or 1),
        n_best=int(n_best) if n_best else None,
    )


register(
    "exists@H",
    r"exists@([1-9][0-9]{0,8})",
    lambda match: Exists(match.string, int(match[1])),
    "1 if derivable within height H",
)
register(
    "max-confidence",
    "max-confidence",
    lambda match: MaxConfidence(match.string),
    tried=("max-confidence",),
)
register(
    "noisy-or, noisy-or@P, noisy-or-top-N, noisy-or-top-N@P",
    r"noisy-or(?:-top-([1-9][0-9]{0,3}))?(?:@([1-9][0-9]?(?:\.[0-9]+)?))?",
    _make_noisy_or,
    "of the N best rules, confidences to the power P",
    tried=("noisy-or", "noisy-or@2", "noisy-or@3"),
)
register(
    "proof-product@H, linked-proof-product@H",
    r"(linked-)?proof-product@([1-9][0-9]{0,8})",
    lambda match: ProofProduct(
        match.string, int(match[2]), linked=bool(match[1])
    ),
    "of a best proof; linked-: for relations",
)
