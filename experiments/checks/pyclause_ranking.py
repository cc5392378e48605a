"""Claim: a rule file in AnyBURL's format ranks the same in PyClause and in funcppo.

    python experiments/checks/pyclause_ranking.py ../shared/data/umls --pyclause-python /path/to/bin/python

Rules are read from --rules, a file in AnyBURL's format, or mined by funcppo and written so. Both sides take the counts
of the file, confidence = right predictions / (predictions + unseen), apply rules once, to the train triples, variables
bound to different entities, and rank all entities, filtered by all splits. Compared are:

- the score of each candidate. PyClause's `maxplus` gives the largest confidence, `noisyor` the noisy-or. Scores are
  compared in funcppo's steps of log-odds up to a bound, above which a double next to 1 keeps too few digits.
- MRR and Hits@k of these scores, candidates of equal score in random order (expected). PyClause itself breaks ties, by
  the other rules (maxplus) and then by the frequency of the entity: `mrr_in_its_order` is the MRR of its own order,
  an answer that no rule predicts counting 0.
- the order of PyClause's `maxplus`: that of the confidences in the recount may tie where PyClause's frequencies
  decide, and never contradicts it.
- the predictions and right predictions of each rule, counted by PyClause from the facts and by funcppo under object
  identity.

Exit status: 1 where anything differs, with the first differences of each kind and the kind of their rules; 3, after one
line, where PyClause cannot be imported (it is not on PyPI; its README says how to build it, into an environment of its
own if need be). PyClause applies rules with constants under a weaker object identity, by its source: in `h(X,c) <=
b(X,d)` X may be d when it ranks, in `h(X,c) <= b(X,A)` A may be X or c. Rules without constants must agree.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.provenance import current_commit, describe_machine
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import load
from funcppo.kg.graph.readers import read_clauses
from funcppo.kg.graph.writers import format_rule_clause, rule_clauses
from funcppo.kg.logic import consequences
from funcppo.kg.logic.joins import RowBudget
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.mining.config import MiningConfig
from funcppo.kg.ranking import ranking, recount
from funcppo.kg.ranking.ranking import (
    Ranking,
    RankingProtocol,
    Scorer,
    ScorerBySide,
)
from funcppo.kg.ranking.scorers import (
    iter_task_derivations,
    make_untrained_scorer,
)
from funcppo.kg.run import rule_files
from funcppo.kg.run.rule_files import count_mined_rules
from funcppo.kg.scores.baselines import rule_confidences
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import ProverTask, build_task, known_triples

WORKER = Path(__file__).with_name("pyclause_worker.py")
EXIT_WITHOUT_PYCLAUSE = 3
SCORES = ("max-confidence", "noisy-or")
METRICS = ("mrr", "hits@1", "hits@3", "hits@10")
SETTINGS = ProverTaskConfig(max_height=1, smoothing=None, object_identity=True)
MAX_LOG_ODDS = 20.0  # where a double of a probability keeps 7 digits of 1 - p
MAX_STEPS_APART = 1  # scores that are equal may round to neighbouring steps
MAX_METRIC_DIFFERENCE = 1e-9
MAX_PRINTED = 3

Record = dict[str, Any]


class RuleFile(NamedTuple):
    """The rules of a file that the data set knows, and what the file says of them."""

    path: Path
    texts: list[str]
    counts: np.ndarray  # int [R 2]: predictions and right predictions


def main() -> int:
    """Compare, print and record; the exit status."""
    args = parse_arguments()
    import_check = run_worker(args.pyclause_python)
    if import_check.returncode:
        print(import_check.stderr.strip().splitlines()[-1], file=sys.stderr)
        return EXIT_WITHOUT_PYCLAUSE
    with tempfile.TemporaryDirectory() as scratch:
        row = compare(args, Path(scratch))

    print(json.dumps(row, indent=1))
    if args.out is not None:
        record = json.loads(args.out.read_text()) if args.out.exists() else {}
        record.setdefault("files", {})[row["name"]] = row
        record["machine"] = describe_machine()
        write_record(args.out, record)
    return int(is_different(row))


def parse_arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dataset", type=Path, help="folder with train.txt")
    parser.add_argument(
        "--rules", type=Path, help="file of AnyBURL (default: mine rules)"
    )
    parser.add_argument(
        "--constants", action="store_true", help="mine constants too"
    )
    parser.add_argument("--split", choices=("valid", "test"), default="test")
    parser.add_argument(
        "--unseen", type=int, default=5, help="wrong predictions added"
    )
    parser.add_argument(
        "--pyclause-python",
        default=sys.executable,
        help="Python that can import PyClause (default: this one)",
    )
    parser.add_argument("--out", type=Path, help="record to complete")
    return parser.parse_args()


def compare(args: argparse.Namespace, scratch: Path) -> Record:
    """What both programs say of a rule file."""
    rules_path = args.rules or mine(args.dataset, args.constants, scratch)
    dataset = load(args.dataset, rules_path)
    rule_file = read_counts(dataset, rules_path)
    job = make_job(dataset, rule_file, args.split, args.unseen, scratch)
    theirs = ask_pyclause(args.pyclause_python, job, scratch)

    task = build_task(dataset, SETTINGS)
    row: Record = {
        "name": f"{args.dataset.name}, {args.rules.name if args.rules else 'mined'}",
        "split": args.split,
        "unseen": args.unseen,
        "rules": len(rule_file.texts),
        "rules_with_constants": int(has_constant(dataset).sum()),
        "counts": compare_counts(task, rule_file, theirs["counts"]),
        "scores": {},
        "commit": current_commit(),
    }
    task = with_file_counts(task, rule_file, args.unseen)
    row["max_plus"] = compare_order(task, theirs["rankings"]["max-confidence"])
    queries = getattr(dataset, args.split)
    for name in SCORES:
        row["scores"][name] = compare_scores(
            task, queries, name, theirs["rankings"][name]
        )
    return row


def mine(folder: Path, constants: bool, scratch: Path) -> Path:
    """A file of AnyBURL with rules that funcppo mines and counts under object identity."""
    path = scratch / "mined.txt"
    mined = rule_files.mine_dataset(
        load(folder, facts_only=True), MiningConfig(constants=constants)
    )
    counted = count_mined_rules(
        mined.dataset, mined.statistics, RowBudget(sys.maxsize)
    )
    rule_files.write_rule_file(
        path, counted.dataset, counted.statistics, "AnyBURL"
    )
    return path


def read_counts(dataset: Dataset, path: Path) -> RuleFile:
    """The counts in a file of the rules that a data set took from it."""
    text = path.read_text()
    lines = text.split("\n")
    clauses = iter(read_clauses(text, str(path), "AnyBURL").clauses)
    texts, counts = [], []
    for rule in rule_clauses(dataset):
        rule_text = format_rule_clause(rule, "AnyBURL")

        # The data set leaves rules out, but keeps their order.
        clause = next(clauses)
        while not clause.body or rule_text != format_rule_clause(
            clause, "AnyBURL"
        ):
            clause = next(clauses)
        predictions, right, *_ = lines[clause.line - 1].split("\t")
        texts.append(rule_text)
        counts.append((int(predictions), int(right)))
    return RuleFile(path, texts, np.array(counts, np.int64).reshape(-1, 2))


def make_job(
    dataset: Dataset,
    rule_file: RuleFile,
    split: str,
    unseen: int,
    scratch: Path,
) -> Record:
    """What PyClause is asked for; its files of triples are written."""
    other = "valid" if split == "test" else "test"
    triples = {
        "train": dataset.facts,
        "filter": getattr(dataset, other),
        "target": getattr(dataset, split),
    }
    job: Record = {
        "rules": str(rule_file.path),
        "rule_texts": rule_file.texts,
        "unseen": unseen,
        "scores": SCORES,
        "n_entities": len(dataset.entities),
    }
    for name, atoms in triples.items():
        path = scratch / f"{name}.txt"
        lines = ["\t".join(names(dataset, atom)) for atom in atoms]
        path.write_text("".join(line + "\n" for line in lines))
        job[name] = str(path)
    return job


def names(dataset: Dataset, atom: np.ndarray) -> tuple[str, str, str]:
    """Head, relation and tail of an atom, by name."""
    relation, head, tail = atom.tolist()
    return (
        dataset.entities[head - 1],
        dataset.predicates[relation - 1],
        dataset.entities[tail - 1],
    )


def run_worker(
    python: str, *arguments: Path
) -> subprocess.CompletedProcess[str]:
    """Run the half that imports PyClause."""
    command = [python, str(WORKER), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def ask_pyclause(python: str, job: Record, scratch: Path) -> Record:
    """What PyClause makes of a job.

    Raises:
      SystemExit: PyClause refuses it, with the end of what it says.
    """
    job_file, result_file = scratch / "job.json", scratch / "result.json"
    job_file.write_text(json.dumps(job))
    ended = run_worker(python, job_file, result_file)
    if ended.returncode:
        raise SystemExit(f"PyClause ended with an error: {ended.stderr[-500:]}")
    return json.loads(result_file.read_text())


def with_file_counts(
    task: ProverTask, rule_file: RuleFile, unseen: int
) -> ProverTask:
    """The task with confidences from the counts of the file."""
    predictions, right = torch.from_numpy(rule_file.counts).unbind(1)
    dtype = task.kb.support.dtype
    kb = task.kb._replace(
        support=right.to(dtype), body_pairs=(predictions + unseen).to(dtype)
    )
    return replace(task, kb=kb)


def has_constant(dataset: Dataset) -> np.ndarray:
    """bool [R]: whether a rule names a constant."""
    arguments = dataset.rules[:, :, 1:]
    is_constant = (arguments > 0) & (arguments <= dataset.n_constants)
    return is_constant.any((1, 2))


def compare_counts(
    task: ProverTask, rule_file: RuleFile, theirs: list[list[int]]
) -> Record:
    """The counts of PyClause against those of funcppo under object identity."""
    counts = consequences.count_rules(task.kb, task.sizes, object_identity=True)
    ours = torch.stack([counts.body_pairs, counts.support], dim=1).numpy()
    differs = (ours != np.array(theirs).reshape(-1, 2)).any(1)
    constants = has_constant(task.dataset)
    return {
        "different": int(differs.sum()),
        "different_without_constants": int((differs & ~constants).sum()),
        "first": [
            f"{rule_file.texts[i]}: {ours[i].tolist()} here, {theirs[i]} there"
            for i in np.flatnonzero(differs)[:MAX_PRINTED]
        ],
        "file_differs_from_both": int(
            ((rule_file.counts != ours).any(1) & ~differs).sum()
        ),
    }


def compare_scores(
    task: ProverTask, queries: np.ndarray, name: str, lists: Record
) -> Record:
    """The scores and ranks of PyClause's lists of candidates against those of funcppo."""
    scorer = make_untrained_scorer(task, name)
    assert not isinstance(scorer, ScorerBySide)  # derivations are held
    ours = rank(task, queries, ScorerBySide(scorer, scorer))
    theirs = rank(task, queries, list_scorer(task.dataset, lists))

    # A difference could overflow: the score 0 is the least integer but one.
    apart = (ours.listed_score > theirs.listed_score + MAX_STEPS_APART) | (
        theirs.listed_score > ours.listed_score + MAX_STEPS_APART
    )
    same_ranks = (ours.counts.n_better == theirs.counts.n_better) & (
        ours.counts.n_equal == theirs.counts.n_equal
    )
    return {
        "funcppo": summarise(task, ours),
        "pyclause": summarise(task, theirs),
        "mrr_in_its_order": mrr_in_order(task.dataset, queries, lists),
        "candidates": len(apart),
        "different_scores": int(apart.sum()),
        "only_in_pyclause": count_only_there(task.dataset, ours, lists),
        "queries": len(same_ranks),
        "different_ranks": int((~same_ranks).sum()),
    }


def compare_order(task: ProverTask, lists: Record) -> Record:
    """Neighbours in PyClause's lists that the recount orders the other way round, and those that it tells apart."""
    dataset = task.dataset
    entity_id = {name: i for i, name in enumerate(dataset.entities, 1)}
    relation_id = {name: i for i, name in enumerate(dataset.predicates, 1)}
    n_pairs, n_apart, n_contradicted = 0, 0, 0
    for direction, relation, source, candidates in iter_lists(lists):
        atoms = []
        for candidate in candidates:
            head, _, tail = triple(direction, relation, source, candidate)
            atoms.append(
                (relation_id[relation], entity_id[head], entity_id[tail])
            )
        table = torch.tensor(atoms, dtype=torch.int32).view(-1, 3)
        in_order, row = torch.unique(table, dim=0, return_inverse=True)
        scores = order_candidates(task, in_order)[row]
        n_pairs += max(len(scores) - 1, 0)
        n_apart += int((scores[1:] != scores[:-1]).sum())
        n_contradicted += int((scores[1:] > scores[:-1]).sum())
    return {
        "neighbours": n_pairs,
        "apart": n_apart,
        "contradicted": n_contradicted,
    }


def order_candidates(task: ProverTask, atoms: Tensor) -> Tensor:
    """The place of each atom by its largest confidence, ties by the second largest, and so on; -inf without a rule."""
    confidence = rule_confidences(task.kb).tolist()
    own: dict[recount.Atom, list[float]] = {(i,): [] for i in range(len(atoms))}
    for part in iter_task_derivations(task, atoms):
        for i, rule in zip(part.atom_row.tolist(), part.rule.tolist()):
            own[(i,)].append(confidence[rule])
    order = recount.order_by_confidences(own)
    return torch.tensor([order[key] for key in own])


def rank(
    task: ProverTask, queries: np.ndarray, scorers: ScorerBySide
) -> Ranking:
    """Rank by scores below the bound; both sides, all entities."""

    def bounded(scorer: Scorer, atoms: Tensor, /) -> Tensor:
        return scorer(atoms).clamp_max(MAX_LOG_ODDS)

    head, tail = (partial(bounded, scorer) for scorer in scorers)
    protocol = RankingProtocol(sides=(HEAD, TAIL))
    return ranking.rank_split(task, queries, ScorerBySide(head, tail), protocol)


def list_scorer(dataset: Dataset, lists: Record) -> ScorerBySide:
    """The scorer that looks candidates up in PyClause's lists; one that is in none scores 0."""

    def score(direction: str, atoms: Tensor, /) -> Tensor:
        by_query = {
            (relation, source): dict(candidates)
            for relation, queries in lists[direction].items()
            for source, candidates in queries.items()
        }
        probabilities = []
        for atom in atoms.numpy():
            head, relation, tail = names(dataset, atom)
            source, candidate = (
                (tail, head) if direction == "head" else (head, tail)
            )
            candidates = by_query.get((relation, source), {})
            probabilities.append(candidates.get(candidate, 0.0))
        return torch.logit(torch.tensor(probabilities, dtype=torch.float64))

    return ScorerBySide(
        head=partial(score, "head"), tail=partial(score, "tail")
    )


def summarise(task: ProverTask, ranked: Ranking) -> Record:
    """The headline numbers of a ranking."""
    predicates = list(task.dataset.predicates)
    summary = ranking.summarise_ranking(ranked, predicates, with_auc=False)
    return {name: summary[name] for name in METRICS}


def iter_lists(lists: Record) -> Iterator[tuple[str, str, str, list[str]]]:
    """Direction, relation and known entity of each query, and its candidates, best first."""
    for direction, relations in lists.items():
        for relation, queries in relations.items():
            for source, candidates in queries.items():
                yield (
                    direction,
                    relation,
                    source,
                    [name for name, _ in candidates],
                )


def triple(
    direction: str, relation: str, source: str, candidate: str
) -> tuple[str, str, str]:
    """The triple that a candidate stands for."""
    head, tail = (
        (candidate, source) if direction == "head" else (source, candidate)
    )
    return head, relation, tail


def count_only_there(dataset: Dataset, ours: Ranking, lists: Record) -> int:
    """Candidates that PyClause predicts, that no split holds, and that funcppo does not list."""
    known = np.concatenate([known_triples(dataset), ours.scored_atom.numpy()])
    listed = {names(dataset, atom) for atom in known}
    return sum(
        triple(direction, relation, source, candidate) not in listed
        for direction, relation, source, candidates in iter_lists(lists)
        for candidate in candidates
    )


def mrr_in_order(dataset: Dataset, queries: np.ndarray, lists: Record) -> float:
    """The filtered MRR of PyClause's order; an answer that is in no list counts 0."""
    known = {names(dataset, atom) for atom in known_triples(dataset)}
    reciprocal_rank: dict[tuple[str, tuple[str, str, str]], float] = {}
    for direction, relation, source, candidates in iter_lists(lists):
        n_unknown = 0
        for candidate in candidates:
            predicted = triple(direction, relation, source, candidate)
            reciprocal_rank[direction, predicted] = 1 / (n_unknown + 1)
            n_unknown += predicted not in known
    return float(
        np.mean(
            [
                reciprocal_rank.get((direction, names(dataset, query)), 0.0)
                for query in queries
                for direction in ("head", "tail")
            ]
        )
    )


def is_different(row: Record) -> bool:
    """Whether the programs differ anywhere."""
    if row["counts"]["different"] or row["max_plus"]["contradicted"]:
        return True
    for score in row["scores"].values():
        if score["different_scores"] or score["only_in_pyclause"]:
            return True
        ours, theirs = score["funcppo"], score["pyclause"]
        if any(
            abs(ours[name] - theirs[name]) > MAX_METRIC_DIFFERENCE
            for name in METRICS
        ):
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
