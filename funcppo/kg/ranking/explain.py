"""Why an answer holds and why it has its score: checked proofs, and the terms that add up to a score.

`most_probable_proof` gives the proof that a policy finds most probable, with the probability of each choice;
`smallest_proofs` gives proofs of the smallest height without a policy. Both check proofs before they return.

`explain_answer` gives the place of an answer among the candidates of its question with the terms of its score, counts
over known facts which `funcppo check` recounts; `other_facts` gives that of scores by rules.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.config import Config
from funcppo.core.files import Json
from funcppo.core.types import I64
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import (
    format_atom,
    format_rule,
    free_variable,
    proof_names,
)
from funcppo.kg.graph.text import format_name
from funcppo.kg.logic import derive, proof, prove
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derive import Questions
from funcppo.kg.logic.joins import RowBudget
from funcppo.kg.logic.kb import HEAD, SIDE_NAMES, other_side
from funcppo.kg.logic.proof import Atom, Proof
from funcppo.kg.logic.prove import (
    BestProofs,
    Choice,
    Clauses,
    Limits,
    QueryResult,
)
from funcppo.kg.logic.row_index import (
    int_list,
    true_rows,
    unique_rows_with_inverse,
)
from funcppo.kg.ranking import scoring
from funcppo.kg.scores import evidence
from funcppo.kg.scores.evidence import EvidenceConfig
from funcppo.kg.scores.learned import WeighedRule
from funcppo.kg.scores.score import Score, Term
from funcppo.kg.search import env as prover_env
from funcppo.kg.search.beam import score_candidates
from funcppo.kg.search.env import EnvState, World
from funcppo.kg.search.network import Params
from funcppo.kg.search.task import ProverTask, inference_world

# rows that the joins make for the proof of a known fact
MAX_FACT_PROOF_ROWS = 30_000_000
# rules, and relations with facts of the candidate, that are printed
MAX_PRINTED = 5


def most_probable_proof(
    task: ProverTask,
    cfg: Config,
    params: Params,
    atom: Tensor,
    beam: int = 256,
    clauses: Clauses | None = None,
) -> Proof | None:
    """Return the policy's most probable proof of a ground atom; None if its beam search finds none.

    Args:
      atom: [W].
      beam: partial proofs kept.
      clauses: of the task, for many atoms; None to read them for this one.
    """
    atom = atom.to(task.device)
    clauses = clauses or Clauses(task.kb, task.sizes)
    if task.fact_selection == "oracle":
        return _prove_by_rule(task, cfg, params, atom, clauses)
    built = _prove_by_search(task, cfg, params, atom, clauses, beam)
    identity = task.object_identity
    return built and prove.checked(clauses, built, identity, task.max_height)


def smallest_proofs(
    task: ProverTask, atoms: I64[Tensor, "n W"]
) -> list[Proof | None]:
    """Return a proof of smallest height for each atom; None where there is none. A fact is proved from other facts.

    Args:
      atoms: ground.
    """
    clauses = Clauses(task.kb, task.sizes)
    return [
        prove_from_other_facts(task, atom, sys.maxsize, clauses).proof
        for atom in atoms
    ]


def prove_from_other_facts(
    task: ProverTask,
    atom: Tensor,
    max_rows: int,
    clauses: Clauses | None = None,
) -> QueryResult:
    """Prove or refute a ground atom up to the task's height; the atom itself does not count as a fact.

    Args:
      atom: [W].
      max_rows: rows that the joins may make; more end in the verdict unknown.
      clauses: of the task, for many atoms; None to read them for this one.
    """
    clauses = clauses or Clauses(task.kb, task.sizes)
    return prove.prove_ground(clauses, _to_tuple(atom), _limits(task, max_rows))


def best_proofs(
    task: ProverTask, atom: Tensor, max_rows: int, k: int
) -> BestProofs:
    """Return the k most probable proofs of a ground atom up to the task's height; arguments are those above."""
    limits = _limits(task, max_rows)
    clauses = Clauses(task.kb, task.sizes)
    confidences = prove.count_confidences(
        clauses, task.dataset.is_program, limits
    )
    return prove.best_proofs(clauses, _to_tuple(atom), limits, k, confidences)


def _limits(task: ProverTask, max_rows: int) -> Limits:
    """Return the limits of a proof in a task."""
    return Limits(
        max_height=task.max_height,
        max_atoms=task.cfg.max_atoms,
        object_identity=task.object_identity,
        budget=RowBudget(max_rows),
    )


def proof_by_rule(
    task: ProverTask,
    atom: Tensor,
    rule: int,
    probability: float | None,
    clauses: Clauses,
) -> Proof | None:
    """Return the checked proof of an atom [W] by one application of a rule to facts; see `prove.proof_by_rule`."""
    identity = task.object_identity
    return prove.proof_by_rule(
        clauses, _to_tuple(atom), rule, identity, probability
    )


def _prove_by_search(
    task: ProverTask,
    cfg: Config,
    params: Params,
    atom: Tensor,
    clauses: Clauses,
    beam: int,
) -> Proof | None:
    """Return the most probable proof that a beam search finds, with the policy's probabilities; None without one."""
    world = inference_world(task)
    search = scoring.search_config(
        task,
        cfg,
        "success",
        slots=1,
        beam=beam,
        rows_per_step=beam,
        chunk_size=1,
    )
    found = score_candidates(search, world, params, atom[None].to(torch.int32))
    n_choices = int(found.results.proof_length[0])
    if not n_choices:
        return None

    # The choices are followed in the environment.
    choices: list[Choice] = []
    state = _initial_state(cfg, world, atom[None])
    for choice_id in found.results.trace[0, :n_choices].tolist():
        is_rule, successors = choice_id >= 0, state.successors
        kind = "rule" if is_rule else "fact"
        clause = choice_id if is_rule else -1 - choice_id
        slots = successors.rule if is_rule else successors.fact
        action = (slots == clause).int().argmax(1)
        policy = _choice_probabilities(cfg, world, params, state)[0]
        choices.append((kind, clause, float(policy[int(action)])))
        unused_key = torch.zeros((1, 2), dtype=torch.int64)
        state, _ = cfg.env.step_functional(
            cfg.env.cfg, world, state, action, unused_key
        )
    return prove.from_trace(clauses, _to_tuple(atom), choices)


def _prove_by_rule(
    task: ProverTask,
    cfg: Config,
    params: Params,
    atom: Tensor,
    clauses: Clauses,
) -> Proof | None:
    """Return the proof by the most probable rule that derives the atom; None if no rule derives it."""
    world = inference_world(task)
    state = _initial_state(cfg, world, atom[None])
    policy = _choice_probabilities(cfg, world, params, state)[0]
    derives = derive.rule_derives(
        world.derivability_index,
        task.sizes,
        state.query,
        state.successors.rule,
    )[0]
    if not derives.any():
        return None
    slot = int(torch.where(derives, policy, -1.0).argmax())
    rule = int(state.successors.rule[0, slot])
    return proof_by_rule(task, atom, rule, float(policy[slot]), clauses)


def _initial_state(cfg: Config, world: World, atoms: Tensor) -> EnvState:
    """Return the environment's state at the start of a proof of each atom [B, W]."""
    is_positive = torch.ones_like(atoms[:, 0], dtype=torch.bool)
    return prover_env.initial_state(
        cfg.env.cfg, world, atoms.to(torch.int32), is_positive
    )


def _choice_probabilities(
    cfg: Config, world: World, params: Params, state: EnvState
) -> Tensor:
    """Compute the policy's probability of each successor [B, S]."""
    observation = cfg.env.observe(cfg.env.cfg, world, state)
    output = cfg.agent.apply(cfg.agent.cfg, world, params, observation)
    return torch.softmax(output.logits, -1)[:, :-1]


def _to_tuple(atom: Tensor) -> Atom:
    """Return the atom as a tuple of integers."""
    return tuple(int_list(atom))


# -- what a score is made of


class Explanation(NamedTuple):
    """Rank of an answer among the candidates of its query, and the terms that add up to its score."""

    predicate: int
    side: int  # the argument that is asked for
    given: int  # the other argument
    candidate: int
    is_fact: bool  # known, and left out of all counts
    score: float
    probability: float  # among the candidates of the question
    place: int  # of the candidate by score, from 1
    n_candidates: int  # that the rules derive and that are not known answers
    terms: tuple[Term, ...]  # which add up to the score

    def of_kind(self, kind: str) -> list[Term]:
        """Return the terms of a kind."""
        return [term for term in self.terms if term.kind == kind]

    @property
    def rules(self) -> tuple[WeighedRule, ...]:
        """Return the rules that derive the candidate, the largest share first."""
        return self.of_kind("rules")[0].detail


def explain_answer(
    task: ProverTask, score: Score, atom: Tensor, side: int
) -> Explanation | None:
    """Explain the score of an atom as an answer on one side, term by term; None if no rule derives the atom.

    Args:
      task: of height 1.
      score: one that reads the evidence of questions.
      atom: ground and of two arguments [W]; a known fact is left out of all counts.
    """
    assert score.facts is not None, "the score reads evidence"
    predicate, answer = int(atom[0]), int(atom[side])
    given = int(atom[other_side(side)])
    is_fact = bool(kbase.contains(task.kb, task.sizes, atom.to(task.device)))
    question = predicate, side, given, answer if is_fact else 0
    columns = torch.tensor(question, device=task.device)[:, None]

    (found,) = evidence.iter_evidence(
        task.kb,
        task.sizes,
        score.facts,
        Questions(*columns),
        EvidenceConfig(
            left_out=score.left_out,
            object_identity=task.object_identity,
            with_facts=False,
        ),
    )
    rows = true_rows(found.entity == answer).tolist()
    if not rows:
        return None
    (row,) = rows
    candidates = scoring.QuestionCandidates(task, found)
    scores = score.log_odds(candidates).double()
    return Explanation(
        predicate=predicate,
        side=side,
        given=given,
        candidate=answer,
        is_fact=is_fact,
        score=float(scores[row]),
        probability=float(torch.softmax(scores, 0)[row]),
        place=1 + int((scores > scores[row]).sum()),
        n_candidates=len(scores),
        terms=tuple(score.explain(candidates, row)),
    )


def explanation_json(dataset: Dataset, explanation: Explanation) -> Json:
    """Return the rules and the terms of a score as JSON values, with the data set's names; a term has a text."""
    e = explanation
    return {
        "question": _atom_text(
            dataset, e.predicate, e.side, free_variable(dataset), e.given
        ),
        "candidate": proof_names(dataset).format_term(e.candidate),
        "is_fact": e.is_fact,
        "score": e.score,
        "probability": e.probability,
        "place": e.place,
        "n_candidates": e.n_candidates,
        "rules": [
            rule._asdict()
            | {"rule_text": format_rule(dataset, dataset.rules[rule.rule])}
            for rule in e.rules
        ],
        "terms": [
            {
                "kind": term.kind,
                "log_odds": term.log_odds,
                "text": _term_text(dataset, e, term),
            }
            for term in e.terms
            if term.log_odds or term.kind not in ("embedding", "bellman-ford")
        ],
    }


def explanation_lines(dataset: Dataset, explanation: Explanation) -> list[str]:
    """Format the rules and the terms of a score as lines of text, of each kind the first ones."""
    found = explanation_json(dataset.shown, explanation)
    score = torch.tensor(explanation.score, dtype=torch.float64)
    lines = [
        f"as an answer to {found['question']}: place {found['place']} of "
        f"{_count(found['n_candidates'], 'candidate')}, probability {found['probability']:.3f}, log-odds "
        f"{found['score']:+.2f} (score {float(torch.sigmoid(score)):.4f}), the sum of:"
    ]
    for kind, group in itertools.groupby(found["terms"], itemgetter("kind")):
        terms = list(group)
        for term in terms[:MAX_PRINTED]:
            lines.append(f"  {term['log_odds']:+.2f}  {term['text']}")
        if rest := terms[MAX_PRINTED:]:
            weight = sum(term["log_odds"] for term in rest)
            lines.append(f"  {weight:+.2f}  by {_count(len(rest), 'other')}")
        if kind == "rules":
            lines += _rule_lines(found["rules"])
    return lines


def _rule_lines(rules: Sequence[Json]) -> list[str]:
    """Format rules with their shares of the rules' weight as lines of text."""
    lines: list[str] = []
    for rule in rules[:MAX_PRINTED]:
        walk = ""
        if rule["walk"] is not None:
            walk = (
                f"; a random walk ends here with probability {rule['walk']:.3g}"
            )
        lines += [
            f"      {rule['share']:6.1%} by rule {rule['rule']}: {rule['rule_text']}",
            f"             right for {rule['support']:,} of {_count(rule['body_pairs'], 'pair')} in train; derives "
            f"this by {_count(rule['n_groundings'], 'grounding')}, {_count(rule['fan_out'], 'candidate')} by "
            f"{rule['n_all_groundings']:,} in all{walk}",
        ]
    if rest := rules[MAX_PRINTED:]:
        others = sum(rule["share"] for rule in rest)
        lines.append(f"      {others:6.1%} by {_count(len(rest), 'other')}")
    return lines


def _term_text(dataset: Dataset, e: Explanation, term: Term) -> str:
    """Describe a term."""
    match term.kind:
        case "rules":
            n, weight = len(e.rules), math.exp(term.log_odds)
            text = "rule derives" if n == 1 else "rules derive"
            return f"{n} {text} it, the log of their weight {weight:.3g}"
        case "fact":
            predicate, place, _ = term.detail
            fact = _atom_text(dataset, predicate, place, e.candidate, e.given)
            return f"{fact} is a fact"
        case "linked":
            given = format_name(proof_names(dataset).format_term(e.given))
            return f"some fact links it to {given}"
        case "own-degree":
            predicate, place = e.predicate, e.side
            n_facts = _count(term.detail, "other fact")
        case "embedding":
            return "prior by link embeddings, which proves nothing"
        case _:
            return "prior by a Bellman-Ford network, which proves nothing"
    relation = format_name(dataset.predicate_name(predicate))
    return f"it is the {SIDE_NAMES[place]} of {n_facts} of {relation}"


def other_facts(
    task: ProverTask, score: Score, atoms: I64[Tensor, "n W"], side: int
) -> list[Json]:
    """Return what other facts of the relation add to each atom as an answer on a side, as JSON values.

    Empty by a score without other facts.

    Args:
      task: with the counts that the score reads.
      atoms: ground and of two arguments, in any order.
    """
    distinct, place = unique_rows_with_inverse(atoms.long())
    candidates = scoring.TaskCandidates(task, distinct.int(), side)
    found: list[Json] = []
    for predicate, row in zip(atoms[:, 0].tolist(), place.tolist()):
        fields: Json = {}
        for term in score.explain(candidates, row):
            fields = {
                "relation": task.dataset.predicate_name(predicate),
                "side": SIDE_NAMES[side],
                **term.detail._asdict(),
                "log_odds": term.log_odds,
            }
        found.append(fields)
    return found


def other_facts_line(fields: Json) -> str:
    """Format what other facts of the relation add to an answer as a line of text."""
    number = f"{fields['n_facts']:,}" if fields["n_facts"] else "no"
    facts = "other fact" if fields["n_facts"] == 1 else "other facts"
    return (
        f"{fields['log_odds']:+.4f} log-odds by other facts: it is the {fields['side']} of {number} {facts} of "
        f"{fields['relation']}; {fields['share_of_facts']:.4f} of its facts have another one there, "
        f"{fields['share_of_derived']:.4f} of what its rules derive beside them"
    )


def proof_json(dataset: Dataset, found: Proof) -> Json:
    """Return a proof as JSON values, with the data set's names."""
    return json.loads(proof.to_json(found, *proof_names(dataset)))


def best_proofs_json(dataset: Dataset, best: BestProofs) -> Json:
    """Return the most probable proofs of an atom as JSON values, with the data set's names."""
    pairs = zip(best.probabilities, best.proofs)
    return {
        "proofs": [
            {"probability": p, "proof": proof_json(dataset, proof)}
            for p, proof in pairs
        ],
        "proofs_stop_reason": best.stop_reason,
    }


def proof_text(dataset: Dataset, found: Proof) -> str:
    """Format a proof as an indented tree."""
    names = proof_names(dataset.shown)
    return proof.to_text(found, names.format_atom, names.format_rule)


def _count(n: int, noun: str) -> str:
    """Format a number with its noun, in the plural unless the number is 1."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _atom_text(
    dataset: Dataset, predicate: int, place: int, term: int, other: int
) -> str:
    """Format an atom of two arguments, with `term` at argument position `place` and `other` at the other position."""
    arguments = (term, other) if place == HEAD else (other, term)
    return format_atom(dataset, (predicate, *arguments))
