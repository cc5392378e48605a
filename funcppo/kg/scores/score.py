"""Scores of candidates: the evidence that each reads, the log-odds that it gives, and why.

A `Score` is a value. `log_odds` reads what is known of some candidates (`Candidates`), `explain` lists what adds to the
score of one of them, and `+` adds scores. `parse` makes a score of a name; `register` gives `parse` a new name, which
the programs' help and errors then name, and which new runs try on valid if `tried` says so:

    class Mean(Score):
        def log_odds(self, found): ...

    register("mean", "mean", lambda match: Mean(match.string), "of the confidences", tried=("mean",))

A score that `funcppo check` can compute again defines `recount` too, in plain Python.

A score p from 0 to 1 is given as its log-odds, log(p / (1 - p)): -inf for 0 and +inf for 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from funcppo.core.files import shorten
from funcppo.core.types import F64, I32, I64, Bool
from funcppo.kg.logic.derive import DerivabilityIndex, LeftOut, Questions
from funcppo.kg.logic.fixpoint import Derivations
from funcppo.kg.logic.kb import KnowledgeBase
from funcppo.kg.scores import rules
from funcppo.kg.scores.evidence import Evidence, FactIndex
from funcppo.kg.scores.rules import OtherFactCounts

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
    # it tells candidates that no rule derives apart
    scores_unprovable: bool = False
    # `log_odds_of_all` knows every entity; it ranks those that no rule derives among the others
    knows_all: bool = False
    ranks_all: bool = False
    # `recount` computes it from confidences, and counts of other facts
    has_recount: bool = False
    # log-odds of the score up to which an answer is not proved
    proof_threshold: float = -torch.inf
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
        self.scores_unprovable = first.scores_unprovable
        self.has_recount = first.has_recount and second.has_recount
        self.proof_threshold = first.proof_threshold
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
        return rules.max_confidence(found.kb, found.derivations(), len(found))

    def recount(self, confidences: Sequence[float]) -> float:
        """Compute the log-odds of the largest confidence."""
        best = max(confidences, default=0.0)
        if best in (0.0, 1.0):
            return math.inf if best else -math.inf
        return math.log(best) - math.log1p(-best)


class NoisyOr(Score):
    """Noisy-or of the rules that derive a candidate, see `rules.noisy_or`."""

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
            return rules.noisy_or(*arguments, power=self._power)
        return rules.noisy_or_of_best(
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


class OtherFacts(Score):
    """Log-likelihood ratio of a candidate with, or without, other facts of the asked relation; see `rules`."""

    needs: frozenset[Need] = frozenset({"other-facts"})
    has_recount = True

    def log_odds(self, found: Candidates) -> F64[Tensor, "L"]:
        """Compute the logarithm of the likelihood ratio of each candidate."""
        counts = found.other_fact_counts()
        shares = rules.other_fact_shares(found.kb, counts)
        table = rules.log_likelihood_ratios(shares)
        return table[found.labels(), (found.n_other_facts() > 0).long()]

    def explain(self, found: Candidates, row: int) -> list[Term]:
        """Return the ratio of a candidate with the counts and shares behind it."""
        counts = found.other_fact_counts()
        shares = rules.other_fact_shares(found.kb, counts)
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
        f"{forms}; H, N and P from 1, P to 99; at its end {OTHER_FACTS} or not (all but exists@H and those of a "
        f"trained run){without}"
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
