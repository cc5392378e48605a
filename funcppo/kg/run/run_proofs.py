"""Proofs of atoms by the policy of a run, and the evidence that it weighs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.types import I64
from funcppo.kg.logic.proof import Proof
from funcppo.kg.logic.proof_builder import Program
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import evidence_explanation, evidence_ranking, explain
from funcppo.kg.ranking.evidence_explanation import Explanation, Weights
from funcppo.kg.run.question_run import QuestionSetup
from funcppo.kg.run.run import Run
from funcppo.kg.scores import aggregation
from funcppo.kg.scores.aggregation import Params


class BestRule(NamedTuple):
    """The rule that adds most to the score of an answer."""

    rule: int
    share: float  # of all that its rules add up to


def most_probable_proof(
    run: Run,
    atom: Tensor,
    program: Program | None = None,
    explanation: Explanation | None = None,
) -> Proof | None:
    """The proof of a ground atom that a run finds most probable; None if it finds none.

    A run that learns from questions takes the rule with the largest share, as an answer about the tail.

    Args:
      atom: [W].
      program: what `explain.build_program` returns; None builds it for this call.
      explanation: of the atom as an answer about the tail, if it is there already.
    """
    program = program or explain.build_program(run.task)
    if run.questions is None:
        return explain.most_probable_proof(
            run.task, run.cfg, run.state.best_params, atom, program=program
        )
    explanation = explanation or explain_answer(run, atom, TAIL)
    if explanation is None:
        return None
    best = explanation.rules[0]
    return explain.proof_by_rule(run.task, program, atom, best.rule, best.share)


def most_probable_proofs(
    run: Run, atoms: I64[Tensor, "n W"], program: Program
) -> list[Proof | None]:
    """The proof that a run finds most probable of each of some atoms, as `most_probable_proof` gives it."""
    if run.questions is None:
        return [most_probable_proof(run, atom, program) for atom in atoms]
    proofs: list[Proof | None] = []
    facts = explain.facts_on_host(run.task)
    for atom, best in zip(atoms, _best_rules(run, atoms)):
        if best is None:
            proofs.append(None)
            continue
        built = explain.proof_by_rule(
            run.task, program, atom, best.rule, best.share, facts
        )
        proofs.append(built)
    return proofs


def _best_rules(run: Run, atoms: I64[Tensor, "n W"]) -> list[BestRule | None]:
    """The rule with the largest share of each atom as an answer about its tail; None where no rule derives it."""
    setup = run.questions
    assert setup is not None, "the run learns from questions"
    base = run.task.sizes.n_constants + 1
    atoms = atoms.long()
    wanted = (atoms[:, 0] * base + atoms[:, HEAD]) * base + atoms[:, TAIL]
    params = _score_params(run, setup)
    best: dict[int, BestRule] = {}

    for questions, part in evidence_ranking.query_evidence(
        run.task, setup.facts, atoms, TAIL
    ):
        prefix = questions.predicate * base + questions.entity
        key = prefix[part.question] * base + part.entity
        amounts = aggregation.firing_amounts(
            setup.policy.aggregation,
            setup.aggregation,
            params,
            aggregation.whole(part),
        )
        for row in (
            torch.isin(key, wanted.to(key.device)).nonzero().squeeze(1).tolist()
        ):
            firings = slice(*part.firing_offsets[row : row + 2].tolist())
            share = amounts[firings] / amounts[firings].sum()
            first = int(share.argmax())
            rule = int(part.rule[firings][first])
            best |= {int(key[row]): BestRule(rule, float(share[first]))}
    return [best.get(key) for key in wanted.tolist()]


def _score_params(run: Run, setup: QuestionSetup) -> Params:
    """The weights of evidence, on its device."""
    device = setup.facts.degree.device
    return tree.map(lambda x: x.to(device), run.state.best_params.score)


def explain_answer(run: Run, atom: Tensor, side: int) -> Explanation | None:
    """The evidence of an atom as an answer about one side; None if no rule derives it, or the run weighs none."""
    setup = run.questions
    if setup is None:
        return None
    left_out = run.run_config.questions.left_out
    assert left_out != "auto", "a stored run has what it chose"
    weights = Weights(
        facts=setup.facts,
        cfg=setup.policy.aggregation,
        world=setup.aggregation,
        params=_score_params(run, setup),
        left_out=left_out,
    )
    return evidence_explanation.explain_answer(run.task, weights, atom, side)
