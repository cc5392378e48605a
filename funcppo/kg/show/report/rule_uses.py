"""What a run makes of its rules before and after learning, over some atoms.

A run that learns from questions weighs every rule that derives a candidate; the odds o that this adds to the candidate
stand for the probability o / (1 + o), which before learning is the confidence of the rule. A run that learns from
proofs chooses a rule to resolve an atom with; its probability is that of the choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.types import F64, I64
from funcppo.kg.graph.rules import format_rule
from funcppo.kg.logic.proof import Proof
from funcppo.kg.ranking import explain, scoring
from funcppo.kg.ranking.ranking import ranked_sides
from funcppo.kg.run import validation
from funcppo.kg.run.run import QuestionSetup, Run
from funcppo.kg.scores import aggregation
from funcppo.kg.show.report.tables import RuleUse

# atoms whose first choices are computed together
CHUNK_ATOMS = 64


class _RuleProbabilities(NamedTuple):
    """Rules with the probabilities that stand for them, before and after learning."""

    rule: I64[Tensor, "n"]
    before: F64[Tensor, "n"]
    after: F64[Tensor, "n"]


def rule_uses(
    run: Run, atoms: I64[Tensor, "n W"], proofs: Sequence[Proof | None]
) -> tuple[RuleUse, ...]:
    """What a run makes of the rules that derive answers to some atoms, in the order of rules; see `uses_by_rule`."""
    return tuple(uses_by_rule(run, atoms, proofs).values())


def uses_by_rule(
    run: Run, atoms: I64[Tensor, "n W"], proofs: Sequence[Proof | None]
) -> dict[int, RuleUse]:
    """What a run makes of the rules that derive answers to some atoms, by the id of the rule, ascending.

    Args:
      atoms: ground and of two arguments.
      proofs: of these atoms, which count the last steps.
    """
    if not len(atoms):
        return {}
    n_rules = len(run.task.dataset.rules)
    sums = torch.zeros(n_rules, 3, dtype=torch.float64)
    parts = (
        _first_choices(run, atoms)
        if run.questions is None
        else _weigh_evidence(run, run.questions, atoms)
    )
    for rule, before, after in parts:
        values = torch.stack([torch.ones_like(before), before, after], 1)
        sums = sums.index_add(0, rule.cpu(), values.cpu())

    kb = run.task.kb
    smoothing = float(run.task.cfg.smoothing or 0.0)
    n_proofs = Counter(proof.nodes[0].rule for proof in proofs if proof)
    uses: dict[int, RuleUse] = {}
    for rule, (n, before, after) in enumerate(sums.tolist()):
        if n or n_proofs[rule]:
            uses[rule] = RuleUse(
                text=format_rule(
                    run.task.dataset, run.task.dataset.rules[rule]
                ),
                support=int(kb.support[rule]),
                body_pairs=float(kb.body_pairs[rule]) - smoothing,
                before=before / max(n, 1),
                after=after / max(n, 1),
                n_firings=int(n),
                n_proofs=n_proofs[rule],
            )
    return uses


def _weigh_evidence(
    run: Run, setup: QuestionSetup, atoms: Tensor
) -> Iterator[_RuleProbabilities]:
    """Yield all firings of the questions that some atoms ask."""
    policies = list(validation.policies(run).values())
    for side in ranked_sides(run.task):
        for _, part in scoring.query_evidence(
            run.task, setup.facts, atoms, side
        ):
            batch = aggregation.whole(part)
            before, after = (
                _as_probability(setup, params, batch)
                for params in (policies[0], policies[-1])
            )
            yield _RuleProbabilities(part.rule.long(), before, after)


def _as_probability(
    setup: QuestionSetup, params: Any, batch: aggregation.Batch
) -> Tensor:
    """The probability that stands for each firing."""
    weights = tree.map(lambda x: x.to(setup.facts.degree.device), params.score)
    with torch.no_grad():
        odds = aggregation.firing_amounts(
            setup.policy.aggregation, setup.aggregation, weights, batch
        )
    return (odds / (1 + odds)).double()


def _first_choices(run: Run, atoms: Tensor) -> Iterator[_RuleProbabilities]:
    """Yield the rules that some atoms can be resolved with first."""
    policies = list(validation.policies(run).values())
    for part in atoms.split(CHUNK_ATOMS):
        choices = [
            explain.rule_choices(run.task, run.cfg, params, part)
            for params in (policies[0], policies[-1])
        ]
        yield _RuleProbabilities(
            choices[0].rule,
            choices[0].probability.double(),
            choices[1].probability.double(),
        )
