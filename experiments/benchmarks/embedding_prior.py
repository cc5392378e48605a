"""What a prior by link embeddings adds to the rules that derive a candidate, and what cross-fitting is worth.

    python experiments/benchmarks/embedding_prior.py --data DIR --only kinships --rules FILE

Rows: the listwise fit of the evidence without a prior; with the prior of models that have not seen the fact of a
training question (cross-fitted); with that of the model that has seen all facts (in-sample); and the embeddings alone,
which rank all entities and prove nothing. The epoch of a fit is chosen by MRR on valid, and so is the prior used in a
run; the gain over the first row has its standard error, queries paired. Test is ranked once, after all choices.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks import question_results
from experiments.benchmarks.question_results import Problem, say
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import describe_machine
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import load
from funcppo.kg.logic.question_types import LeftOut
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import evidence_ranking, rank_metrics, ranking
from funcppo.kg.ranking.evidence_ranking import EvidenceScore, QuestionEvidence
from funcppo.kg.run import embedding_training, question_run, question_training
from funcppo.kg.run.question_training import TrainingQuestions
from funcppo.kg.scores import evidence, link_embedding
from funcppo.kg.scores.link_embedding import Params
from funcppo.kg.scores.question_config import EmbeddingConfig, QuestionConfig

SETS = ("kinships", "nations", "umls", "family")
EMBEDDING = EmbeddingConfig()


class Outcome(NamedTuple):
    """Reciprocal ranks of a method, both sides of each query."""

    method: str
    valid: Tensor
    test: Tensor
    weight: float  # of the prior, the mean over labels
    seconds: float


def main() -> None:
    """Fit and rank the sets that are asked for, and add their rows to the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "embedding_prior.json"
    )
    parser.add_argument("--only", choices=SETS, required=True)
    parser.add_argument("--rules", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    start = time.perf_counter()
    dataset = load(str(args.data / args.only), rules=str(args.rules))
    problem = question_results.prepare(dataset, "cpu")
    test = question_results.collect_evidence(
        problem.task, problem.facts, dataset.test
    )
    common = {
        "set": args.only,
        "n_rules": len(dataset.rules),
        "rules_sha256": hashlib.sha256(args.rules.read_bytes()).hexdigest()[
            :16
        ],
        "embedding": asdict(EMBEDDING),
    }
    for seed in range(args.seeds):
        say(start, f"{args.only}: seed {seed}")
        outcomes = run_seed(problem, dataset, test, seed, start)
        rows = [
            common | {"seed": seed} | describe(outcome, outcomes[0])
            for outcome in outcomes
        ]
        record: dict[str, Any] = {"rows": []}
        if args.out.exists():
            record = json.loads(args.out.read_text())
        key = (args.only, seed)
        others = [r for r in record["rows"] if (r["set"], r["seed"]) != key]
        write_record(args.out, {"rows": others + rows})


def describe(outcome: Outcome, plain: Outcome) -> dict[str, Any]:
    """The numbers of a row.

    Args:
      plain: the fit without a prior.
    """
    gain = outcome.valid - plain.valid
    return {
        "method": outcome.method,
        "valid_mrr": float(outcome.valid.mean()),
        "valid_gain": float(gain.mean()),
        "valid_gain_error": float(gain.std()) / len(gain) ** 0.5,
        "test_mrr": float(outcome.test.mean()),
        "mean_prior_weight": outcome.weight,
        "seconds": round(outcome.seconds, 1),
        "machine": describe_machine("cpu"),
    }


def run_seed(
    problem: Problem,
    dataset: Dataset,
    test: dict[int, list[QuestionEvidence]],
    seed: int,
    start: float,
) -> list[Outcome]:
    """All methods of one seed."""
    linked = question_run.share_of_linked(problem.task, dataset.valid)
    left_out: LeftOut = "fact" if linked > 0 else "pair"
    cfg = QuestionConfig(left_out=left_out)
    collected = question_training.collect_questions(
        problem.task, problem.facts, cfg, seed, uses_degrees=False
    )
    say(start, collected.notes[0])
    clock = time.perf_counter()
    embedding = embedding_training.train(
        problem.task, EMBEDDING, left_out, seed, "cpu"
    )
    training = time.perf_counter() - clock
    say(start, f"link embeddings trained in {training:.0f} s")

    outcomes = [fit("rules", problem, collected, test, seed)]
    weighed = question_results.with_options(collected, uses_embedding=True)
    embedded = problem._replace(valid=add_priors(problem.valid, embedding))
    test = add_priors(test, embedding)
    for method, models in {
        "cross-fitted": embedding,
        "in-sample": seen_by_all(embedding),
    }.items():
        listed = evidence.with_prior(collected.world.evidence, models, left_out)
        world = collected.world._replace(evidence=listed)
        outcome = fit(
            f"rules, prior {method}",
            embedded,
            weighed._replace(world=world),
            test,
            seed,
        )
        outcomes.append(outcome._replace(seconds=outcome.seconds + training))
    outcomes.append(
        Outcome(
            "embeddings alone",
            rank_all(dataset, problem.valid_queries, embedding),
            rank_all(dataset, dataset.test, embedding),
            0.0,
            training,
        )
    )
    for outcome in outcomes:
        say(start, f"{outcome.method}: valid {outcome.valid.mean():.4f}")
    return outcomes


def seen_by_all(embedding: Params) -> Params:
    """The model that has seen all facts in the place of each."""
    return Params(*(x[-1:].expand_as(x) for x in embedding))


def add_priors(
    parts: dict[int, list[QuestionEvidence]], embedding: Params
) -> dict[int, list[QuestionEvidence]]:
    """The evidence of queries with their priors."""
    return {
        side: [
            part._replace(
                evidence=evidence.with_prior(part.evidence, embedding, "fact")
            )
            for part in of_side
        ]
        for side, of_side in parts.items()
    }


def fit(
    method: str,
    problem: Problem,
    collected: TrainingQuestions,
    test: dict[int, list[QuestionEvidence]],
    seed: int,
) -> Outcome:
    """The listwise fit at the epoch that ranks valid best."""
    fitted, params, _ = question_results.fit(problem, collected, seed, "")
    weight = params.score.prior_weight
    return Outcome(
        method,
        rank(problem, problem.valid_queries, problem.valid, fitted.score),
        rank(problem, problem.task.dataset.test, test, fitted.score),
        float(weight[2:].mean()) if len(weight) else 0.0,
        fitted.seconds,
    )


def rank(
    problem: Problem,
    queries: np.ndarray,
    parts: dict[int, list[QuestionEvidence]],
    score: EvidenceScore,
) -> Tensor:
    """Reciprocal ranks of queries by a score of their evidence."""
    scorer = evidence_ranking.make_scorer_of(problem.task, parts, score)
    protocol = ranking.RankingProtocol(sides=question_results.SIDES)
    ranked = ranking.rank_split(problem.task, queries, scorer, protocol)
    return rank_metrics.expected_reciprocal_ranks(ranked.counts)


def rank_all(
    dataset: Dataset, queries: np.ndarray, embedding: Params
) -> Tensor:
    """Reciprocal ranks of queries among all entities by embeddings, filtered."""
    true = np.concatenate([dataset.train, dataset.valid, dataset.test])
    true = torch.from_numpy(true).long()
    entity = torch.arange(1, dataset.n_constants + 1)
    ranks: list[float] = []
    for side in (HEAD, TAIL):
        for atom in torch.from_numpy(queries).long():
            given, answer = atom[HEAD + TAIL - side], int(atom[side])
            label = evidence.make_label(atom[:1], side).expand_as(entity)
            model = torch.full_like(entity, link_embedding.n_models(embedding))
            scores = link_embedding.prior(
                embedding, model - 1, label, given.expand_as(entity), entity
            )
            is_same = (true[:, 0] == atom[0]) & (
                true[:, HEAD + TAIL - side] == given
            )
            value = float(scores[answer - 1])
            scores[true[is_same, side] - 1] = -torch.inf
            above, equal = (scores > value).sum(), (scores == value).sum()
            ranks.append(1 + int(above) + int(equal) / 2)
    return 1.0 / torch.tensor(ranks, dtype=torch.float64)


if __name__ == "__main__":
    main()
