"""`funcppo prove`: one query, and its proof, its answers or why there are none."""

from __future__ import annotations

import json as jsonlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from tyro.conf import FlagCreatePairsOff, Positional, arg

from funcppo.cli import write_json
from funcppo.cli.target import fixpoint_progress, is_run_folder, open_dataset
from funcppo.data import Dataset, format_atom, format_rule, parse_query
from funcppo.data.lexer import tokenize_line
from funcppo.prover.config import ProverTaskConfig

if TYPE_CHECKING:
    from funcppo.logic.fixpoint import LeastModel
    from funcppo.logic.kb import KBSizes, KnowledgeBase
    from funcppo.logic.proof import Proof

MAX_PRINTED_ANSWERS = 10  # answers shown when not all are asked for
MAX_FAILED_RULES = 5  # rules that fail
EXIT_STATUS = {"proved": 0, "refuted": 1, "unknown": 3}


@dataclass(frozen=True, kw_only=True)
class Prove:
    """Prove a query from facts and rules: print its proof, its answers, or why there is none.

    Exit status: 0 proved, 1 refuted (no proof exists, within --height if given), 2 bad input, 3 unknown (the budget
    ended the search, or the list that --all asks for).

    A query without variables never counts as a fact while it is proved: of a known fact it is said that it is stated,
    and its proof from other facts is shown if there is one. A trained run shows its policy's most probable proof. The
    answers of a query with variables (names that start with a capital or `_`) are what is stated and what is derived.
    """

    target: Annotated[Positional[str], arg(metavar="TARGET")]
    """Folder of a training run or of a data set, .pl program, or embedded name such as countries_s3."""
    query: Annotated[Positional[str], arg(metavar="QUERY")]
    """One atom, such as "locatedIn(france, europe)" or "locatedIn(X, europe)"; 'in quotes' a name is no variable."""
    rules: Annotated[str | None, arg(metavar="FILE")] = None
    """Rule file to use in place of the target's own."""
    height: Annotated[int | None, arg(metavar="N")] = None
    """Most rule applications on a branch of the proof; by default any number."""
    all: Annotated[bool, FlagCreatePairsOff] = False
    """List all answers of a query with variables, not the first few."""
    object_identity: Annotated[bool, FlagCreatePairsOff] = False
    """Different variables of a rule bind different constants, as AnyBURL counts."""
    max_atoms: Annotated[int, arg(metavar="N")] = ProverTaskConfig().max_atoms
    """Derived atoms to hold at most; beyond, the query is unknown."""
    format: Literal["text", "json", "dot"] = "text"
    """How the result is printed; dot is a Graphviz graph of the proof."""
    json: Annotated[str | None, arg(metavar="FILE|-")] = None
    """Write the result as JSON to this file, or to standard output in place of the text for `-`."""

    def run(self) -> int:
        """Ask, print, and return the exit status."""
        if self.height is not None and self.height < 0:
            raise ValueError(f"--height {self.height}: want 0 or more")
        if self.max_atoms < 1:
            raise ValueError(f"--budget {self.max_atoms}: want 1 or more")
        dataset = open_dataset(self.target, self.rules)
        atom = tuple(int(t) for t in parse_query(dataset, self.query))
        names = _variables(self.query)
        _warn_of_variables(dataset, names)
        if names and self.format == "dot":
            raise ValueError(f"query {self.query!r}: want no variables for --format dot, which draws one proof")
        result, shown = _open(self, dataset, atom, names) if names else _ground(self, dataset, atom)
        if self.json != "-":
            write_json("-", result) if self.format == "json" else sys.stdout.write(shown)
        write_json(self.json, result)
        return EXIT_STATUS[result["verdict"]]


def _variables(query: str) -> list[str]:
    """The names of the variables in order of first occurrence; every `_` is another one."""
    found = [token.text for token in tokenize_line(query)[1:] if token.kind == "variable"]
    return list(dict.fromkeys(name if name != "_" else f"_{i}" for i, name in enumerate(found)))


def _warn_of_variables(dataset: Dataset, names: list[str]) -> None:
    """Tell of entities that are spelt like variables."""
    for name in set(names) & set(dataset.entities):
        print(f"note: {name} is a variable here; the entity is '{name}', in single quotes", file=sys.stderr)


def _world(dataset: Dataset) -> tuple[KnowledgeBase, KBSizes]:
    from funcppo.logic import kb

    return kb.build(dataset.facts, dataset.rules, n_constants=dataset.n_constants, n_predicates=dataset.n_predicates)


# -- a query without variables


def _ground(asked: Prove, dataset: Dataset, atom: tuple[int, ...]) -> tuple[dict[str, Any], str]:
    """The result as JSON, and as it is printed."""
    from funcppo.logic import proof, query_answering

    with fixpoint_progress() as progress:
        kb, sizes = _world(dataset)
        found = query_answering.prove_ground(
            kb,
            sizes,
            atom,
            max_height=asked.height,
            max_atoms=asked.max_atoms,
            object_identity=asked.object_identity,
            progress=progress,
        )
    by_policy = _by_policy(asked, atom) if found.proof else None
    shown = by_policy or found.proof
    names = (
        (lambda goal: format_atom(dataset, np.array(goal))),
        (lambda rule: format_rule(dataset, dataset.rules[rule])),
    )
    missing, n_matching = ([], 0) if shown else _missing(asked, dataset, kb, sizes, found.model, atom)
    derivable = found.verdict.name.lower()
    verdict = "proved" if found.is_fact else derivable
    height = 0 if found.is_fact else found.height
    result = {
        "query": format_atom(dataset, np.array(atom)),
        "verdict": verdict,
        "is_fact": found.is_fact,
        "derivable": derivable,  # from other facts
        "height": found.height,  # of that derivation
        "n_answers": int(verdict == "proved"),
        "answers": [_answer(dataset, atom, height, [])] if verdict == "proved" else [],
        "proof": jsonlib.loads(proof.to_json(shown, *names)) if shown else None,
        "proof_by": None if not shown else "policy" if by_policy else "T_P",
        "missing": missing,
        **_extent(asked, found.model),
    }
    if asked.format == "dot":
        return result, proof.to_dot(shown, *names) if shown else "digraph proof {\n}\n"
    lines = [_headline(result, n_matching)]
    if shown:
        lines += ["the policy's most probable proof, p of each choice:" if by_policy else ""]
        lines += [proof.to_text(shown, *names).rstrip("\n")]
    elif not found.is_fact:
        lines += _why_not(missing, n_matching)
    return result, "\n".join(lines) + "\n"


def _by_policy(asked: Prove, atom: tuple[int, ...]) -> Proof | None:
    """The most probable proof of a trained run, None where there is no run or it looks elsewhere."""
    if not is_run_folder(asked.target):
        return None
    import torch

    from funcppo.evaluation import explain
    from funcppo.experiment import training

    run = training.open_run(Path(asked.target))
    if asked.object_identity and not run.task.cfg.object_identity:
        return None
    if asked.height is not None and asked.height < run.task.max_height:
        return None
    return explain.most_probable_proof(run.task, run.cfg, run.state.best_params, torch.tensor(atom))


def _headline(result: dict[str, Any], n_matching: int) -> str:
    query, derivable, steps = result["query"], result["derivable"], len(result["atoms"]) - 1
    within = _within(None if result["fixpoint"] or not n_matching else result["max_height"]) + _identity(result)
    fixpoint = f" (fixpoint after {steps} {'step' if steps == 1 else 'steps'}, {result['atoms'][-1]:,} atoms)"
    ending = {
        "proved": f"at height {result['height']}{_identity(result)}",
        "refuted": f"no proof exists{within}{fixpoint if result['fixpoint'] and n_matching else ''}",
        "unknown": f"no proof{_within(steps + 1)}{_identity(result)}; {result['stopped']} (--budget raises it)",
    }[derivable]
    if not result["is_fact"]:
        return f"{derivable}: {query}: {ending}"
    derived = "also derived from other facts" if derivable == "proved" else "from other facts"
    return f"proved: {query}: stated as a fact; {derived}, {ending}"


def _within(max_height: int | None) -> str:
    return "" if max_height is None else f" within height {max_height}"


def _identity(result: dict[str, Any]) -> str:
    return " with different constants for different variables" if result["object_identity"] else ""


def _missing(
    asked: Prove, dataset: Dataset, kb: KnowledgeBase, sizes: KBSizes, model: LeastModel, atom: tuple[int, ...]
) -> tuple[list[dict[str, Any]], int]:
    """For the first rules whose heads match an underivable atom, what of the body has no answer; how many match."""
    from funcppo.logic import query_answering

    rules = query_answering.matching_rules(kb, sizes, atom, object_identity=asked.object_identity)
    first = [] if asked.height == 0 else rules[:MAX_FAILED_RULES]
    rows = [(found.rule.id, query_answering.unsatisfied_prefix(model, found)) for found in first]
    return [
        {
            "rule": rule,
            "rule_text": format_rule(dataset, dataset.rules[rule]),
            "no_answer_to": [format_atom(dataset, np.array(goal)) for goal in goals],
        }
        for rule, goals in rows
    ], len(rules)


def _why_not(missing: list[dict[str, Any]], n_matching: int) -> list[str]:
    if not n_matching:
        return ["it is not stated, and no rule's head matches it"]
    lines = []
    for row in missing:
        lines += [
            f"rule {row['rule']}: {row['rule_text']}",
            f"    nothing derived satisfies {', '.join(row['no_answer_to'])}",
        ]
    more = n_matching - len(missing)
    return lines + ([f"... and {more} more rules whose heads match it"] if more and missing else [])


# -- a query with variables


def _open(asked: Prove, dataset: Dataset, atom: tuple[int, ...], names: list[str]) -> tuple[dict[str, Any], str]:
    """The result as JSON, and as it is printed: answers of least height first."""
    from funcppo.logic import fixpoint

    with fixpoint_progress() as progress:
        kb, sizes = _world(dataset)
        model = fixpoint.least_model(
            kb,
            sizes,
            max_height=asked.height,
            max_atoms=asked.max_atoms,
            predicates={atom[0]},
            object_identity=asked.object_identity,
            progress=progress,
        )
    atoms, heights = fixpoint.matching_atoms(model, atom)
    order = heights.argsort(stable=True)[: None if asked.all else MAX_PRINTED_ANSWERS]
    places = [atom.index(dataset.n_constants + 1 + i, 1) for i in range(len(names))]
    named = [(place, name) for place, name in zip(places, names) if not name.startswith("_")]
    rows = zip(atoms[order].tolist(), heights[order].tolist())
    answers = [_answer(dataset, tuple(found), height, named) for found, height in rows]
    n = len(atoms)
    verdict = "proved" if n and (model.complete or not asked.all) else "refuted" if model.complete else "unknown"
    result = {
        "query": asked.query,
        "verdict": verdict,
        "n_answers": n,  # known; all there are when `complete`
        "answers": answers,
        **_extent(asked, model),
    }
    more = "" if model.complete else "at least "
    lines = [
        f"{more}{n:,} {'answer' if n == 1 else 'answers'} to {asked.query}{_within(asked.height)}{_identity(result)}"
    ]
    lines += [f"  {row['atom']}      {'fact' if not row['height'] else _height(row)}" for row in answers]
    lines += [f"  ... and {n - len(answers):,} more (--all lists them)"] if n > len(answers) else []
    lines += [f"unknown beyond: {model.stop_reason}"] if not model.complete else []
    return result, "\n".join(lines) + "\n"


def _height(row: dict[str, Any]) -> str:
    return f"height {row['height']}"


def _answer(
    dataset: Dataset, atom: tuple[int, ...], height: int | None, named: list[tuple[int, str]]
) -> dict[str, Any]:
    """One answer: its text, its arguments, what each named variable is, and the least height of a proof."""
    entity = lambda place: dataset.entities[atom[place] - 1]
    return {
        "atom": format_atom(dataset, np.array(atom)),
        "args": [entity(place) for place in range(1, 1 + dataset.arities[atom[0] - 1])],
        "bindings": {name: entity(place) for place, name in named},
        "height": height,
    }


def _extent(asked: Prove, model: LeastModel) -> dict[str, Any]:
    """How far T_P was taken, for the predicates that the query needs."""
    return {
        "max_height": asked.height,
        "object_identity": asked.object_identity,
        "atoms": list(model.n_atoms_after_step),
        "complete": model.complete,
        "fixpoint": model.reached_fixpoint,
        "stopped": model.stop_reason,
        "seconds": round(model.seconds, 3),
    }
