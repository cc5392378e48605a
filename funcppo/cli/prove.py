"""`funcppo prove`: one query and its proof, its answers, or why there are none."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeAlias

import numpy as np

from funcppo.cli.common import (
    JsonObject,
    WorkDisplay,
    bounded,
    fixpoint_progress,
    open_dataset,
    print_notes,
    print_text,
    write_json,
    write_output,
)
from funcppo.cli.options import HIDDEN, Opt, TargetOptions
from funcppo.core.host import Deadline
from funcppo.core.settings import (
    INT32_MAX,
    PositiveFloat,
    PositiveInt,
    Range,
)
from funcppo.kg.config import ProverTaskConfig, read_config
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import (
    Query,
    comparison_tests,
    describe_failures,
    format_atom,
    proof_names,
    read_query,
)
from funcppo.kg.graph.text import escape_unprintable

# PyTorch takes seconds to import, and --help is not to wait for it
if TYPE_CHECKING:
    from funcppo.kg.logic.proof import Proof
    from funcppo.kg.logic.prove import Answers, QueryResult
    from funcppo.kg.run.run import Run

RAISE_LIMITS = (
    "--seconds, --set max_atoms=N and --set max_rows=N are the limits"
)

GUIDE_SHARE = 0.25  # of --seconds, for the search by a guide
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

    Exit status: 0 proved, 1 refuted (no proof exists, within --height if given), 2 bad input, 3 unknown (a limit,
    --seconds, max_atoms or max_rows, was reached without a proof, or before the list of --all was complete).
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        'funcppo prove runs/s1 "locatedIn(france, europe)"',
        'funcppo prove family.tsv "ancestor(ann, X)" --rules rules.txt',
    )

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
    """Maximum number of goals and answers to hold, about 300 bytes each; if there is no proof before, the verdict is
    unknown."""
    max_rows: Annotated[PositiveInt, HIDDEN] = 300_000_000
    """Maximum number of rows that the joins may make, a few minutes of work; if there is no proof before, the verdict
    is unknown."""
    seconds: PositiveFloat = 300.0
    """Time limit of the search for proofs and of building them, in seconds; without a proof before, the verdict is
    unknown."""
    guide: Annotated[str | None, Opt("RUN")] = None
    """Run of `funcppo train --learner guide` (or proofs), whose policy says which rules and facts to try first for a
    query without variables, in a quarter of --seconds. What it does not prove then is proved or refuted without it.
    Default: none."""
    proofs: PositiveInt | None = None
    """Show the most probable proofs of a query without variables, this many, each different in a rule or a fact; the
    probability of a proof is the product of the confidences of its rules, and 1 in a program. Default: one proof."""
    dot: bool = False
    """Print the proof as a Graphviz graph in place of the text. Default: off."""

    def run(self) -> int:
        """Answer the query and print the result; return 0 if proved, 1 if refuted, 3 if unknown.

        Returns:
          The exit status.
        """
        self.prepare()
        query = read_query(
            open_dataset(self.target, self.rules, self.data, self.load_graph()),
            self.query,
        )
        if query.variables and (self.dot or self.proofs):
            option = "--dot" if self.dot else "--proofs"
            raise ValueError(
                f"query {self.query!r}: expected no variables for {option}, which shows proofs of one atom"
            )
        from funcppo.kg.logic.prove import Answers

        options = self._with_settings_of_run()
        deadline = Deadline(at=time.monotonic() + self.seconds)
        with bounded(None):
            facts, guided = options._find_facts(
                query, deadline.share(GUIDE_SHARE)
            )
            found = options._evaluate(query, facts, deadline)
        if isinstance(found, Answers):
            result, text = options._list_answers(query, found)
        else:
            result, text = options._prove(query, found)
        result |= guided
        write_json(self.json, result)
        if self.json != "-":
            (write_output if self.dot else print_text)(text)
        # The answer comes first; an error stands alone.
        notes = [*query.notes, *query.dataset.notes]
        print_notes(notes, most=3)
        return {"proved": 0, "refuted": 1, "unknown": 3}[result["verdict"]]

    def _with_settings_of_run(self) -> Prove:
        """Return the options with the height and object identity of the run, if the target is one."""
        if not self.is_run:
            return self
        prover = read_config(Path(self.target)).prover
        return dataclasses.replace(
            self,
            height=prover.max_height if self.height is None else self.height,
            object_identity=self.object_identity
            or prover.object_identity is True,
        )

    def _open_run(self) -> Run | None:
        """Open the trained run; None if the target is no run, or was trained for other proofs."""
        if not self.is_run:
            return None

        from funcppo.kg.run.run import find_checkpoint

        with WorkDisplay("opening the run") as status:
            run = self.open_run(status.update)
        print_notes(find_checkpoint(Path(self.target))[1])
        if run.task.is_guide:
            return None
        if self.object_identity and not run.task.cfg.object_identity:
            return None
        if self.height is not None and self.height < run.task.max_height:
            return None
        return run

    def _extent(self, found: Answers) -> JsonObject:
        """Return the JSON fields that say how far the query was evaluated."""
        return {
            "max_height": self.height,
            "object_identity": self.object_identity,
            "n_atoms_after_step": list(found.n_atoms_after_step),
            "complete": found.complete,
            "fixpoint": found.reached_fixpoint,
            "stop_reason": found.stop_reason,
            "stop_code": found.stop_code,
            "fixpoint_seconds": round(found.seconds, 3),
        }

    def _evaluate(
        self, query: Query, facts: list[Atom], deadline: Deadline
    ) -> Answers | QueryResult:
        """Solve a query with variables, or prove one without, from some facts alone if these suffice."""
        from funcppo.kg.logic import kb, prove
        from funcppo.kg.logic.fixpoint import Verdict
        from funcppo.kg.logic.joins import RowBudget
        from funcppo.kg.search.guide import prove_from

        solve = prove.solve if query.variables else prove.prove_ground
        with fixpoint_progress() as progress:
            clauses = prove.Clauses(
                *kb.from_dataset(query.dataset),
                comparisons=comparison_tests(query.dataset),
            )
            limits = prove.Limits(
                max_height=self.height,
                max_atoms=self.max_atoms,
                object_identity=self.object_identity,
                budget=RowBudget(self.max_rows, deadline=deadline),
                progress=progress,
            )
            atom = tuple(query.atom.tolist())
            if facts:
                found = prove_from(clauses, facts, atom, limits)
                if found.verdict is Verdict.PROVED:
                    return found
            return solve(clauses, atom, limits)

    def _find_facts(
        self, query: Query, deadline: Deadline
    ) -> tuple[list[Atom], JsonObject]:
        """Return facts from which the search of the guide proves a query, none without a proof; and its JSON fields."""
        if self.guide is None:
            return [], {}
        if query.variables or self.proofs:
            raise ValueError(
                f"--guide: expected a query without variables, and no --proofs, got {self.query!r}"
            )
        from funcppo.kg.answers import find_guided_facts
        from funcppo.kg.run.run import open_run

        with WorkDisplay("opening the guide") as status:
            run = open_run(
                Path(self.guide), on_phase=status.update, graph=query.dataset
            )
        if run.learner is None:
            raise ValueError(
                f"--guide {self.guide}: expected a run of --learner guide or proofs, got one of questions"
            )
        atom = tuple(query.atom.tolist())
        facts, n_steps = find_guided_facts(
            run, query.dataset, atom, self.height, deadline
        )
        return facts, {"guide_steps": n_steps, "guide_found": bool(facts)}

    # -- a query without variables

    def _prove(
        self, query: Query, found: QueryResult
    ) -> tuple[JsonObject, str]:
        """Return the JSON and the text of a proof, or of why there is none."""
        from funcppo.kg.logic import proof, prove

        dataset, atom = query.dataset, tuple(query.atom.tolist())
        shown = dataset.shown  # the text has labels, where there are any
        result = _describe_verdict(dataset, atom, found)
        best, lines = _best_proof(
            self._open_run() if found.proof else None, atom, found, result
        )
        failed, n_matching = (), 0
        if best:
            result["proof"] = jsonlib.loads(
                proof.to_json(best, *proof_names(dataset))
            )
        else:
            # At height 0 no rule is applied.
            failed, n_matching = prove.failed_rules(
                found.answers, atom, n_rules=0 if self.height == 0 else 5
            )
        described = partial(
            describe_failures, rules=failed, key="unsatisfied_goals"
        )
        result |= {
            "failed_rules": described(dataset),
            **self._extent(found.answers),
        }

        formats = proof_names(shown)[:2]
        told = result | {"query": formats[0](np.array(atom))}
        drawn = [best] if best else []
        if best:
            lines.insert(1, proof.to_text(best, *formats).rstrip("\n"))
            if self.proofs:
                drawn, lines = self._most_probable(
                    dataset, found, lines, result
                )
        if self.dot:
            text = "".join(proof.to_dot(x, *formats) for x in drawn)
            return result, text or "digraph proof {\n}\n"
        if not best and not found.is_fact and found.answers.complete:
            told |= {"failed_rules": described(shown)}
            lines = _explain_refutation(told, n_matching, dataset)
        return result, "\n".join([_headline(told, n_matching), *lines])

    def _most_probable(
        self,
        dataset: Dataset,
        found: QueryResult,
        others: list[str],
        result: JsonObject,
    ) -> tuple[Sequence[Proof], list[str]]:
        """Return the most probable proofs, and them as lines of text; they are added to the result.

        Args:
          others: lines to return instead if a limit comes before the first proof.
        """
        from funcppo.kg.logic import prove
        from funcppo.kg.ranking import explain

        tables = found.answers.tables
        clauses, limits = tables.clauses, tables.limits
        confidences = prove.count_confidences(
            clauses, dataset.is_program, limits
        )
        best = prove.best_proofs(
            clauses, tables.query, limits, self.proofs or 1, confidences
        )
        result |= explain.best_proofs_json(dataset, best)
        lines = [] if best.proofs else others
        for i, (proof, p) in enumerate(zip(best.proofs, best.probabilities), 1):
            text = explain.proof_text(dataset, proof).rstrip("\n")
            lines += ["", f"proof {i}, probability {p:.4g}:", text]
        if len(best.proofs) < (self.proofs or 1):
            reason = "there are no other proofs"
            if best.stop_reason:
                reason = f"{best.stop_reason} ({RAISE_LIMITS})"
            lines += ["", reason]
        return best.proofs, lines

    # -- a query with variables

    def _list_answers(
        self, query: Query, found: Answers
    ) -> tuple[JsonObject, str]:
        """Return the JSON and the text of the answers, sorted by a run's score, or by height without one."""
        dataset, atom = query.dataset, tuple(query.atom.tolist())
        heights = found.heights
        score, values = self._score_answers(dataset, atom, sorted(heights))

        def order(row: Atom) -> tuple[float, float]:
            # An answer whose height is not known comes last.
            height = heights[row]
            return -values.get(row, 0.0), math.inf if height is None else height

        # The ids of variables follow those of constants, by first occurrence; a variable `_...` has no name.
        places = [
            (atom.index(variable, 1), name)
            for variable, name in enumerate(
                query.variables, dataset.n_constants + 1
            )
            if not name.startswith("_")
        ]
        answers: list[JsonObject] = []
        listed = sorted(sorted(heights), key=order)[: None if self.all else 10]
        for row in listed:
            answer = _answer(dataset, row, heights[row], places)
            answers.append(answer | ({"score": values[row]} if score else {}))

        # One answer proves the query, unless all are asked for and a limit was reached.
        verdict = "refuted" if found.complete else "unknown"
        if heights and (found.complete or not self.all):
            verdict = "proved"
        result = {
            "query": self.query,
            "verdict": verdict,
            "n_answers": len(heights),  # found; these are all if `complete`
            "answers": answers,
            "score": score,
            **self._extent(found),
        }
        rows = [format_atom(dataset.shown, np.array(row)) for row in listed]
        told = [x | {"atom": text} for x, text in zip(answers, rows)]
        return result, _answers_text(result | {"answers": told})

    def _score_answers(
        self, dataset: Dataset, query: Atom, atoms: list[Atom]
    ) -> tuple[str | None, dict[Atom, float]]:
        """Return the name of a trained run's score and its value for each answer.

        None and no values without a run, for other than one variable of two arguments, or if the run was trained for
        other proofs.
        """
        variables = [term > dataset.n_constants for term in query[1:]]
        is_ranked = dataset.arities[query[0] - 1] == 2 and sum(variables) == 1
        run = self._open_run() if is_ranked else None
        if run is None:
            return None, {}
        import torch

        from funcppo.kg.answers import Answerer
        from funcppo.kg.run.subject import run_subject

        answerer = Answerer(run_subject(run))
        table = torch.tensor(atoms).view(-1, len(query))
        values = answerer.score(table, 1 + variables.index(True))
        return answerer.subject.score.name, dict(zip(atoms, values))


def _describe_verdict(
    dataset: Dataset, atom: Atom, found: QueryResult
) -> JsonObject:
    """Return the JSON fields of the verdict; a known fact counts as proved."""
    derived_verdict = found.verdict.name.lower()
    verdict = "proved" if found.is_fact else derived_verdict
    height = 0 if found.is_fact else found.height
    is_proved = verdict == "proved"
    answers = [_answer(dataset, atom, height, [])] if is_proved else []
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


def _best_proof(
    run: Run | None, atom: Atom, found: QueryResult, result: JsonObject
) -> tuple[Proof | None, list[str]]:
    """Choose a run's most probable proof, or without a run that of T_P; return it and lines to print beside it.

    The run's evidence is added to the result.
    """
    lines = [""] if found.proof else []
    result |= {"proof": None, "proof_by": "T_P" if found.proof else None}
    if run is None:
        return found.proof, lines

    import torch

    from funcppo.kg.answers import explain_answer, most_probable_proof
    from funcppo.kg.ranking import explain, ranking
    from funcppo.kg.run.subject import describe_default_score

    query = torch.tensor(atom)
    best = most_probable_proof(run, query)
    if best is None:
        return found.proof, lines
    result["proof_by"] = "policy"
    lines = [
        "the policy's most probable proof; p: the probability with which it chooses the step:"
        if run.questions is None
        else "the proof by the rule that weighs most; p: its share in the weight of all rules that derive the answer:"
    ]
    dataset = run.task.dataset
    for side in reversed(ranking.ranked_sides(run.task)):
        weighed = explain_answer(run, query, side)
        if weighed:
            fields = explain.explanation_json(dataset, weighed)
            result.setdefault("evidence", []).append(fields)
            lines += explain.explanation_lines(dataset, weighed)
    if run.default_score != run.score:
        lines.append(describe_default_score(run))
    return best, lines


def _limits_text(height: int | None, object_identity: bool) -> str:
    """Format the bounds of proofs as a part of a sentence."""
    within = "" if height is None else f" within height {height}"
    return within + (" under object identity" if object_identity else "")


def _headline(result: JsonObject, n_matching: int) -> str:
    """Format the verdict on one line."""
    verdict, identity = result["derived_verdict"], result["object_identity"]
    if verdict == "proved":
        reason = f"at height {result['height']}{_limits_text(None, identity)}"
    elif verdict == "refuted":
        is_limited = n_matching > 0 and not result["fixpoint"]
        height = result["max_height"] if is_limited else None
        reason = f"no proof exists{_limits_text(height, identity)}"
    else:
        limits = _limits_text(None, identity)
        reason = (
            f"no proof so far{limits}; {result['stop_reason']} ({RAISE_LIMITS})"
        )

    if not result["is_fact"]:
        return f"{verdict}: {result['query']}: {reason}"
    also = "also derived " if verdict == "proved" else ""
    return f"proved: {result['query']}: stated as a fact; {also}from other facts, {reason}"


def _explain_refutation(
    result: JsonObject, n_matching: int, dataset: Dataset
) -> list[str]:
    """Format lines on the rules that match an unproved query."""
    failed = result["failed_rules"]
    if not len(dataset.rules):
        return ["it is not stated, and there are no rules"]
    if not n_matching:
        return ["it is not stated, and no rule's head matches it"]
    lines: list[str] = []
    for row in failed:
        goals = ", ".join(row["unsatisfied_goals"])
        lines.append(f"rule {row['rule']}: {row['rule_text']}")
        lines.append(f"    nothing derived satisfies {goals}")
    n_more = n_matching - len(failed)
    if n_more and failed:
        heads = (
            "rules whose heads match"
            if n_more > 1
            else "rule whose head matches"
        )
        lines.append(f"... and {n_more} more {heads} it")
    return lines


def _answers_text(result: JsonObject) -> str:
    """Format the answers of a query as lines."""
    n_answers = result["n_answers"]
    at_least = "" if result["complete"] else "at least "
    noun = "answer" if n_answers == 1 else "answers"
    limits = _limits_text(result["max_height"], result["object_identity"])
    order = f", by the score {result['score']}" if result["score"] else ""
    query = escape_unprintable(result["query"])
    lines = [f"{at_least}{n_answers:,} {noun} to {query}{limits}{order}"]

    for answer in result["answers"]:
        height = answer["height"]
        source = f"height {height}" if height else "fact"
        if height is None:
            source = "derived"
        score = f"  score {answer['score']:.4f}" if "score" in answer else ""
        lines.append(f"  {answer['atom']}      {source}{score}")
    n_more = n_answers - len(result["answers"])
    if n_more:
        lines.append(f"  ... and {n_more:,} more (--all lists them)")
    if not result["complete"]:
        lines.append(f"{result['stop_reason']} ({RAISE_LIMITS})")
    return "\n".join(lines)


def _answer(
    dataset: Dataset,
    atom: Atom,
    height: int | None,
    places: Sequence[tuple[int, str]],
) -> JsonObject:
    """Return an answer as JSON: its atom, arguments, values of named variables and least height of a proof.

    Args:
      places: place in the atom and name of each variable.
    """
    arity = dataset.arities[atom[0] - 1]
    args = [dataset.entity_name(constant) for constant in atom[1 : 1 + arity]]
    return {
        "atom": format_atom(dataset, np.array(atom)),
        "args": args,
        "bindings": {name: args[place - 1] for place, name in places},
        "height": height,
    }
