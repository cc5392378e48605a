"""`funcppo prove`: one query and its proof, its answers, or why there are none."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

import numpy as np

from funcppo.cli.common import (
    JsonObject,
    WorkDisplay,
    check_overwrites,
    data_files,
    fixpoint_progress,
    is_run_folder,
    open_dataset,
    print_notes,
    set_target_threads,
    write_json,
    write_output,
)
from funcppo.cli.options import HIDDEN, TargetOptions
from funcppo.core.settings import INT32_MAX, PositiveInt, Range
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import (
    format_atom,
    format_rule,
    proof_names,
    read_query,
)
from funcppo.kg.graph.text import escape_unprintable
from funcppo.kg.run.config import read_config
from funcppo.kg.search.config import ProverTaskConfig

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    from torch import Tensor

    from funcppo.kg.logic.fixpoint import LeastModel
    from funcppo.kg.logic.kb import KBSizes, KnowledgeBase
    from funcppo.kg.logic.proof import Proof
    from funcppo.kg.logic.prove import QueryResult
    from funcppo.kg.run.run import Run

MAX_PRINTED_ANSWERS = 10  # answers of a query with variables, without --all
# rules that match a refuted query, in the text and in the JSON
MAX_FAILED_RULES = 5
RAISE_LIMITS = "--set max_atoms=N and --set max_rows=N are the limits"
EXIT_STATUS = {"proved": 0, "refuted": 1, "unknown": 3}
EMPTY_GRAPH = "digraph proof {\n}\n"

# predicate and arguments, padded to the width of the data set
Atom: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Prove(TargetOptions):
    """Prove a query from facts and rules: print its proof, its answers, or why there is none.

    A query without variables never counts as a fact while it is proved. A query that is a known fact is reported as
    stated; its derivation from other facts is shown if one exists. A trained run shows its policy's most probable
    proof. The answers of a query with variables are the stated and the derived ones; those of a trained run to a query
    of two arguments with one variable are ordered by its score (`funcppo predict` leaves out the known ones).

    In a query, ?x, _ and a single capital such as X or Y2 are variables, and a name of the data is that entity, also
    if it starts with a capital; any other name is an error. In the query of a Prolog program, names that start with a
    capital or _ are variables, and nothing holds of a constant that the program does not have. A name in single quotes
    is always an entity.

    Exit status: 0 proved, 1 refuted (no proof exists, within --height if given), 2 bad input, 3 unknown (max_atoms
    or max_rows was reached without a proof, or before the list of --all was complete).
    """

    query: str
    """Atom to prove, such as "locatedIn(france, europe)", "locatedIn(X, europe)" or "'citizen of'(?who, China)"."""
    height: Annotated[int, Range(0, INT32_MAX)] | None = None
    """Maximum height of a proof: rule applications on one branch. Default: that of the run; no limit for a data set."""
    all: bool = False
    """List all answers of a query with variables. Default: the first 10."""
    object_identity: bool = False
    """Bind the variables of a rule to different constants, none of which the rule names (object identity, as AnyBURL
    counts). Default: as the run was trained; off for a data set."""
    max_atoms: Annotated[PositiveInt, HIDDEN] = ProverTaskConfig().max_atoms
    """Maximum number of derived atoms to hold; if it is reached without a proof, the verdict is unknown."""
    max_rows: Annotated[PositiveInt, HIDDEN] = 300_000_000
    """Maximum number of rows that the joins of T_P may make, about two minutes of work; a step that would make more is
    left out, and if there is no proof before it the verdict is unknown."""
    dot: bool = False
    """Print the proof as a Graphviz graph in place of the text. Default: off."""

    def run(self) -> int:
        """Answer the query and print the result.

        Returns:
          The exit status.
        """
        check_overwrites(
            [("--json", self.json)], data_files(self.target, self.rules)
        )
        set_target_threads(self.target, self.threads)
        query = read_query(
            open_dataset(self.target, self.rules, self.data), self.query
        )
        dataset = query.dataset
        atom: Atom = tuple(query.atom.tolist())
        variables = query.variables
        options = self._with_settings_of_run()
        if not variables:
            report = _prove_ground(options, dataset, atom)
        elif self.dot:
            raise ValueError(
                f"query {self.query!r}: expected no variables for --dot, which draws one proof"
            )
        else:
            report = _answer_open(options, dataset, atom, variables)

        write_json(self.json, report.result)
        if self.json != "-":
            write_output(report.text)
        # The answer comes first; an error stands alone.
        print_notes([*dataset.notes, *query.notes])
        return EXIT_STATUS[report.result["verdict"]]

    def _with_settings_of_run(self) -> Prove:
        """The options with the height and object identity of the run, if the target is one."""
        if not is_run_folder(self.target):
            return self
        prover = read_config(Path(self.target)).prover
        return dataclasses.replace(
            self,
            height=prover.max_height if self.height is None else self.height,
            object_identity=self.object_identity
            or prover.object_identity is True,
        )


class _Report(NamedTuple):
    """What is written and printed of a query."""

    result: JsonObject  # the JSON of --json
    text: str  # for standard output


def _fixpoint_fields(options: Prove, model: LeastModel) -> JsonObject:
    """The part of the JSON that says how far T_P was taken, for the predicates that the query needs."""
    return {
        "max_height": options.height,
        "object_identity": options.object_identity,
        "n_atoms_after_step": list(model.n_atoms_after_step),
        "complete": model.complete,
        "fixpoint": model.reached_fixpoint,
        "stop_reason": model.stop_reason,
        "stop_code": model.stop_code,
        "fixpoint_seconds": round(model.seconds, 3),
    }


def _height_text(max_height: int | None) -> str:
    """The bound on the height of a proof as a part of a sentence."""
    return "" if max_height is None else f" within height {max_height}"


def _object_identity_text(result: JsonObject) -> str:
    """Object identity as a part of a sentence."""
    return " under object identity" if result["object_identity"] else ""


# A query without variables.


class _FailedRules(NamedTuple):
    """Why no rule derives an atom."""

    # of the first rules that match: id, text, and the goals of the body without an answer
    rules: list[JsonObject]
    n_matching: int  # rules whose head matches the atom


def _prove_ground(options: Prove, dataset: Dataset, atom: Atom) -> _Report:
    """Prove a query without variables, or find out what is missing."""
    from funcppo.kg.logic import joins, kb, proof, prove

    with fixpoint_progress() as progress:
        knowledge_base, sizes = kb.from_dataset(dataset)
        found = prove.prove_ground(
            knowledge_base,
            sizes,
            atom,
            max_height=options.height,
            max_atoms=options.max_atoms,
            object_identity=options.object_identity,
            progress=progress,
            budget=joins.RowBudget(options.max_rows),
        )

    policy_proof = _policy_proof(options, atom) if found.proof else None
    best_proof = policy_proof.proof if policy_proof else found.proof
    failed = _FailedRules([], 0)
    if best_proof is None:
        failed = _failed_rules(
            options, dataset, knowledge_base, sizes, found.model, atom
        )

    names = proof_names(dataset)
    result = _ground_fields(dataset, atom, found)
    result |= _proof_fields(dataset, policy_proof, found.proof)
    result["failed_rules"] = failed.rules
    result |= _fixpoint_fields(options, found.model)

    if options.dot:
        return _Report(
            result,
            proof.to_dot(best_proof, names.format_atom, names.format_rule)
            if best_proof
            else EMPTY_GRAPH,
        )
    lines = [_headline(result, failed.n_matching)]
    if best_proof:
        lines.append(policy_proof.headline if policy_proof else "")
        lines.append(
            proof.to_text(
                best_proof, names.format_atom, names.format_rule
            ).rstrip("\n")
        )
        lines += policy_proof.evidence_lines if policy_proof else []
    elif not found.is_fact:
        lines += _explain_refutation(failed, len(dataset.rules))
    return _Report(result, "\n".join(lines) + "\n")


def _proof_fields(
    dataset: Dataset, by_policy: _PolicyProof | None, by_model: Proof | None
) -> JsonObject:
    """The part of the JSON that holds the proof, and the evidence that a run weighs."""
    from funcppo.kg.logic import proof

    best = by_policy.proof if by_policy else by_model
    if best is None:
        return {"proof": None, "proof_by": None}
    fields: JsonObject = {
        "proof": jsonlib.loads(proof.to_json(best, *proof_names(dataset))),
        "proof_by": "policy" if by_policy else "T_P",
    }
    if by_policy and by_policy.evidence:
        fields["evidence"] = by_policy.evidence
    return fields


def _ground_fields(
    dataset: Dataset, atom: Atom, found: QueryResult
) -> JsonObject:
    """The part of the JSON that holds the verdict. A known fact is proved, whatever else derives it."""
    derived_verdict = found.verdict.name.lower()
    verdict = "proved" if found.is_fact else derived_verdict
    answers = []
    if verdict == "proved":
        answers.append(
            _answer(dataset, atom, 0 if found.is_fact else found.height, [])
        )
    return {
        "query": format_atom(dataset, np.array(atom)),
        "verdict": verdict,
        "is_fact": found.is_fact,
        # The derivation from other facts, and its height.
        "derived_verdict": derived_verdict,
        "height": found.height,
        "n_answers": len(answers),
        "answers": answers,
    }


class _PolicyProof(NamedTuple):
    """What a trained run says of an atom."""

    proof: Proof
    headline: str  # which proof it is, and what its p is
    evidence_lines: list[str]  # empty if the run weighs none
    evidence: list[JsonObject]


def _policy_proof(options: Prove, atom: Atom) -> _PolicyProof | None:
    """The most probable proof of a trained run; None without a run, or if the run was trained for other proofs."""
    run = _open_run(options)
    if run is None:
        return None

    import torch

    from funcppo.kg.answers import explain_answer, most_probable_proof
    from funcppo.kg.ranking import explain, ranking
    from funcppo.kg.run.subject import describe_default_score

    query = torch.tensor(atom)
    best = most_probable_proof(run, query)
    if best is None:
        return None
    dataset = run.task.dataset
    sides = reversed(ranking.ranked_sides(run.task))
    explanations = [
        explanation
        for side in sides
        if (explanation := explain_answer(run, query, side))
    ]
    default = (
        [] if run.default_score == run.score else [describe_default_score(run)]
    )
    headline = (
        "the policy's most probable proof; p: the probability with which it chooses the step"
        if run.questions is None
        else "the proof by the rule that weighs most; p: its share in the weight of all rules that derive the answer"
    )
    return _PolicyProof(
        best,
        f"{headline}:",
        [
            *(
                line
                for explanation in explanations
                for line in explain.explanation_lines(dataset, explanation)
            ),
            *default,
        ],
        [explain.explanation_json(dataset, e) for e in explanations],
    )


def _open_run(options: Prove) -> Run | None:
    """The trained run of the options; None without a run, or if the run was trained for other proofs."""
    if not is_run_folder(options.target):
        return None

    from funcppo.kg.run.run import find_checkpoint, open_run

    folder = Path(options.target)
    with WorkDisplay("opening the run") as status:
        run = open_run(folder, on_phase=status.update)
    print_notes(find_checkpoint(folder)[1])
    if options.object_identity and not run.task.cfg.object_identity:
        return None
    if options.height is not None and options.height < run.task.max_height:
        return None
    return run


def _failed_rules(
    options: Prove,
    dataset: Dataset,
    knowledge_base: KnowledgeBase,
    sizes: KBSizes,
    model: LeastModel,
    atom: Atom,
) -> _FailedRules:
    """The first rules whose head matches an atom without a proof, each with the goals that nothing satisfies."""
    from funcppo.kg.logic import prove

    # At height 0 no rule is applied.
    failed = prove.failed_rules(
        knowledge_base,
        sizes,
        model,
        atom,
        object_identity=options.object_identity,
        n_rules=0 if options.height == 0 else MAX_FAILED_RULES,
    )
    rules: list[JsonObject] = [
        {
            "rule": rule,
            "rule_text": format_rule(dataset, dataset.rules[rule]),
            "unsatisfied_goals": [
                format_atom(dataset, np.array(goal)) for goal in goals
            ],
        }
        for rule, goals in failed.rules
    ]
    return _FailedRules(rules, failed.n_matching)


def _headline(result: JsonObject, n_matching: int) -> str:
    """The verdict as one line."""
    verdict = result["derived_verdict"]
    if verdict == "proved":
        reason = f"at height {result['height']}{_object_identity_text(result)}"
    elif verdict == "refuted":
        reason = _refutation_text(result, n_matching)
    else:
        next_step = len(result["n_atoms_after_step"])
        limits = _height_text(next_step) + _object_identity_text(result)
        reason = f"no proof{limits}; {result['stop_reason']} ({RAISE_LIMITS})"

    if not result["is_fact"]:
        return f"{verdict}: {result['query']}: {reason}"
    derived = (
        "also derived from other facts"
        if verdict == "proved"
        else "from other facts"
    )
    return f"proved: {result['query']}: stated as a fact; {derived}, {reason}"


def _refutation_text(result: JsonObject, n_matching: int) -> str:
    """That no proof exists, within which limits, and how far T_P was taken if any rule matches."""
    n_atoms = result["n_atoms_after_step"]
    n_steps = len(n_atoms) - 1
    is_limited = n_matching > 0 and not result["fixpoint"]
    limits = _height_text(
        result["max_height"] if is_limited else None
    ) + _object_identity_text(result)

    fixpoint = ""
    if result["fixpoint"] and n_matching:
        steps = "step" if n_steps == 1 else "steps"
        fixpoint = f" (fixpoint after {n_steps} {steps}, {n_atoms[-1]:,} atoms)"
    return f"no proof exists{limits}{fixpoint}"


def _explain_refutation(failed: _FailedRules, n_rules: int) -> list[str]:
    """Lines on the rules that match a query without a proof."""
    if not n_rules:
        return ["it is not stated, and there are no rules"]
    if not failed.n_matching:
        return ["it is not stated, and no rule's head matches it"]

    lines = []
    for row in failed.rules:
        lines.append(f"rule {row['rule']}: {row['rule_text']}")
        lines.append(
            f"    nothing derived satisfies {', '.join(row['unsatisfied_goals'])}"
        )
    n_more = failed.n_matching - len(failed.rules)
    if n_more and failed.rules:
        rules = (
            "rule whose head matches"
            if n_more == 1
            else "rules whose heads match"
        )
        lines.append(f"... and {n_more} more {rules} it")
    return lines


# A query with variables.


def _answer_open(
    options: Prove, dataset: Dataset, atom: Atom, variables: Sequence[str]
) -> _Report:
    """Answer a query with variables; the best by the score of the run come first, or else those of smallest height."""
    from funcppo.kg.logic import fixpoint, joins, kb

    with fixpoint_progress() as progress:
        knowledge_base, sizes = kb.from_dataset(dataset)
        model = fixpoint.least_model(
            knowledge_base,
            sizes,
            max_height=options.height,
            max_atoms=options.max_atoms,
            predicates={atom[0]},
            object_identity=options.object_identity,
            progress=progress,
            budget=joins.RowBudget(options.max_rows),
        )

    rows = fixpoint.matching_rows(model.atoms, atom, sizes.n_constants)
    atoms, heights = model.atoms[rows], model.height[rows]
    n_answers = len(atoms)
    scores = _answer_scores(options, dataset, atom, atoms)
    order = heights.argsort(stable=True)
    if scores is not None:
        order = order[
            scores.values[order].argsort(stable=True, descending=True)
        ]
    if not options.all:
        order = order[:MAX_PRINTED_ANSWERS]

    bindings = _named_places(dataset, atom, variables)
    answers = []
    for row, height in zip(atoms[order].tolist(), heights[order].tolist()):
        answers.append(_answer(dataset, tuple(row), height, bindings))
    if scores is not None:
        for answer, score in zip(answers, scores.values[order].tolist()):
            answer["score"] = score

    result = {
        "query": options.query,
        "verdict": _open_verdict(options, model, n_answers),
        "n_answers": n_answers,  # found; these are all if `complete`
        "answers": answers,
        "score": scores and scores.name,
        **_fixpoint_fields(options, model),
    }
    return _Report(result, _answers_text(options, result))


class _Scores(NamedTuple):
    """The scores of answers by a run."""

    name: str
    values: Tensor


def _answer_scores(
    options: Prove, dataset: Dataset, query: Atom, atoms: Tensor
) -> _Scores | None:
    """The scores of answers by a trained run; None without a run, for other than one variable of two arguments, or
    if the run was trained for other proofs."""
    variables = [term > dataset.n_constants for term in query[1:]]
    is_ranked = dataset.arities[query[0] - 1] == 2 and sum(variables) == 1
    run = _open_run(options) if is_ranked else None
    if run is None:
        return None
    import torch

    from funcppo.kg.answers import Answerer
    from funcppo.kg.run import subject

    scored = subject.run_subject(run)
    scores = Answerer(scored).score(atoms, 1 + variables.index(True))
    return _Scores(scored.score.name, torch.tensor(scores, dtype=torch.float64))


def _named_places(
    dataset: Dataset, atom: Atom, variables: Sequence[str]
) -> list[tuple[int, str]]:
    """The place of the first occurrence of each variable in the atom, with its name; without those named `_...`."""
    places = []
    for i, name in enumerate(variables):
        # The ids of variables follow those of constants, by first occurrence.
        variable = dataset.n_constants + 1 + i
        if not name.startswith("_"):
            places.append((atom.index(variable, 1), name))
    return places


def _open_verdict(options: Prove, model: LeastModel, n_answers: int) -> str:
    """One answer proves the query, unless all are asked for and a limit was reached."""
    if n_answers and (model.complete or not options.all):
        return "proved"
    return "refuted" if model.complete else "unknown"


def _answers_text(options: Prove, result: JsonObject) -> str:
    """The answers of a query as lines."""
    n_answers = result["n_answers"]
    at_least = "" if result["complete"] else "at least "
    noun = "answer" if n_answers == 1 else "answers"
    limits = _height_text(options.height) + _object_identity_text(result)
    order = f", by the score {result['score']}" if result["score"] else ""
    lines = [
        f"{at_least}{n_answers:,} {noun} to {escape_unprintable(options.query)}{limits}{order}"
    ]

    for answer in result["answers"]:
        source = f"height {answer['height']}" if answer["height"] else "fact"
        score = f"  score {answer['score']:.4f}" if "score" in answer else ""
        lines.append(f"  {answer['atom']}      {source}{score}")
    n_more = n_answers - len(result["answers"])
    if n_more:
        lines.append(f"  ... and {n_more:,} more (--all lists them)")
    if not result["complete"]:
        lines.append(f"{result['stop_reason']} ({RAISE_LIMITS})")
    return "\n".join(lines) + "\n"


def _answer(
    dataset: Dataset,
    atom: Atom,
    height: int | None,
    bindings: Sequence[tuple[int, str]],
) -> JsonObject:
    """One answer as JSON: its text, its arguments, the value of each named variable, the least height of a proof.

    Args:
      bindings: place in the atom and name of each variable.
    """
    arity = dataset.arities[atom[0] - 1]
    args = [dataset.entities[constant - 1] for constant in atom[1 : 1 + arity]]
    return {
        "atom": format_atom(dataset, np.array(atom)),
        "args": args,
        "bindings": {name: args[place - 1] for place, name in bindings},
        "height": height,
    }
