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
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from funcppo.core.files import shorten
from funcppo.core.types import F32, F64, I32, Bool
from funcppo.kg.logic import fixpoint, row_index
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derive import (
    DerivabilityIndex,
    LeftOut,
    Questions,
)
from funcppo.kg.logic.fixpoint import (
    Derivations,
    LeastModel,
    iter_consequences,
)
from funcppo.kg.logic.kb import (
    HEAD,
    TAIL,
    KBSizes,
    KnowledgeBase,
    rule_confidence,
)
from funcppo.kg.scores.evidence import Evidence, FactIndex

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
    best = torch.zeros(n_atoms, dtype=torch.float64, device=confidence.device)
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
    neg_log_wrong = torch.zeros(
        n_atoms, dtype=torch.float64, device=neg_log_wrong_of_rule.device
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


# -- scores as values

# What a score reads: the rules that derive a candidate, whether T_P does within a height, the evidence of its question,
# or the candidate itself, for a search.
Need = Literal["rules", "heights", "questions", "search"]


class Term(NamedTuple):
    """Part of the score of a candidate."""

    kind: str  # such as "rules" or "fact"
    log_odds: float  # that it adds
    detail: Any = None  # the counts behind it


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


class Score:
    """Score of candidates, given as log-odds."""

    needs: frozenset[Need] = frozenset({"rules"})
    # the least height of T_P that the score can be asked at
    min_height: int = 1
    # `log_odds_of_all` knows every entity; it ranks those that no rule derives among the others
    knows_all: bool = False
    ranks_all: bool = False
    # `recount` computes it from confidences
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

    def explain(self, found: Candidates, row: int) -> list[Term]:
        """Return the terms that add to a candidate's score, beside the rules of its proof."""
        return []

    def recount(self, confidences: Sequence[float]) -> float:
        """Compute a candidate's log-odds from the confidences of the rules that derive it.

        It is written to be read and shares no code with `log_odds`.
        """
        raise NotImplementedError

    @property
    def is_by_side(self) -> bool:
        """Return whether an atom's score as an answer on its head may differ from its score on its tail."""
        return "questions" in self.needs


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

    def __init__(self, name: str, power: float = 1.0) -> None:
        """Set the power of the confidences."""
        super().__init__(name)
        self._power = power

    def log_odds(self, found: Candidates) -> F64[Tensor, "L"]:
        """Compute the log-odds of the noisy-or."""
        return noisy_or(found.kb, found.derivations(), len(found), self._power)

    def recount(self, confidences: Sequence[float]) -> float:
        """Compute the log-odds of (1 - prod_r (1 - confidence(r)^P))^(1 / P)."""
        best = max(confidences, default=0.0)
        if best in (0.0, 1.0):
            return math.inf if best else -math.inf

        # The product is exp(-exponent): it is far too small for a float where many rules agree.
        power = self._power
        exponent = math.fsum(-math.log1p(-(c**power)) for c in confidences)
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

    def __init__(self, name: str, height: int) -> None:
        """Set the height up to which T_P is asked."""
        super().__init__(name)
        self.min_height = height

    def log_odds(self, found: Candidates) -> F64[Tensor, "L"]:
        """Return +inf for derived candidates, -inf for all others."""
        is_derived = found.derived_within(self.min_height)
        infinity = torch.full_like(is_derived, torch.inf, dtype=torch.float64)
        return torch.where(is_derived, infinity, -infinity)


class LinkedProofProduct(Score):
    """Largest product of rule confidences along a proof of a candidate within a height.

    It is for the relation of a pair: confidences count the derived heads whose pair some fact links, as the asked one.
    What stories of held-out triples tell is known, and links none of the pairs that they ask: only train is counted.
    """

    needs: frozenset[Need] = frozenset({"heights"})

    def __init__(self, name: str, height: int) -> None:
        """Set the maximum height of a proof."""
        super().__init__(name)
        self.min_height = height
        self._held: tuple[LeastModel, F64[Tensor, "n"]] | None = None

    def log_odds(self, found: Candidates) -> F64[Tensor, "L"]:
        """Compute the log-odds of the product; -inf for candidates without a proof."""
        model = found.least_model()
        if self._held is None or self._held[0] is not model:
            kb = _among_linked(*found.training_rules(), model.object_identity)
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
    for form in _FORMS.values():
        if match := form.pattern.fullmatch(name):
            return form.make(match)
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
    return f"{forms}; H and P from 1, P to 99{without}"


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
    "noisy-or, noisy-or@P",
    r"noisy-or(?:@([1-9][0-9]?(?:\.[0-9]+)?))?",
    lambda match: NoisyOr(match.string, float(match[1] or 1)),
    "of confidences to the power P",
    tried=("noisy-or", "noisy-or@2", "noisy-or@3"),
)
register(
    "linked-proof-product@H",
    r"linked-proof-product@([1-9][0-9]{0,8})",
    lambda match: LinkedProofProduct(match.string, int(match[1])),
    "of a best proof, for the relations of pairs",
)
