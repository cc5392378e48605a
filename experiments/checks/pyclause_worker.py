"""Rank and count with PyClause, in an environment that need not hold funcppo: the other half of `pyclause_ranking.py`.

    python pyclause_worker.py                    exit 0 where PyClause can be imported, else one line and exit 3
    python pyclause_worker.py JOB RESULT         do the JSON of JOB, write that of RESULT

All rules are applied, whatever their counts, and all candidates of a query are scored. A rule with a dangling atom
weighs as much as any other. Rules without a body are left out, as funcppo does.

Source: PyClause's documentation (symbolic-kg/PyClause, docs/ and clause/config-default.yaml).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

EXIT_WITHOUT_PYCLAUSE = 3
RULE_TYPES = ("b", "c", "d", "xxc", "xxd")
NO_LIMIT = -1
AGGREGATIONS = {"max-confidence": "maxplus", "noisy-or": "noisyor"}

try:
    from c_clause import Loader, RankingHandler, RulesHandler
    from clause import Options
except ImportError as error:
    print(
        f"expected PyClause (its modules c_clause and clause), got: {error}",
        file=sys.stderr,
    )
    sys.exit(EXIT_WITHOUT_PYCLAUSE)


def main() -> None:
    """Do a job, if there is one."""
    if len(sys.argv) == 1:
        return
    job_file, result_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    loader = load(job)
    result = {
        "rankings": {
            score: rank(loader, job, score) for score in job["scores"]
        },
        "counts": count(loader, job["rule_texts"]),
    }
    result_file.write_text(json.dumps(result))


def load(job: dict[str, Any]) -> Any:
    """A loader that holds the triples and the rules of a job."""
    options = Options()
    for kind in RULE_TYPES:
        options.set(f"loader.{kind}_num_unseen", job["unseen"])
        for limit in ("min_support", "min_preds", "min_conf"):
            options.set(f"loader.{kind}_{limit}", NO_LIMIT)
    for kind in ("b", "c", "d"):
        options.set(f"loader.{kind}_max_length", NO_LIMIT)
    options.set("loader.d_weight", 1)
    options.set("loader.load_zero_rules", False)

    loader = Loader(options=options.get("loader"))
    loader.load_data(
        data=job["train"], filter=job["filter"], target=job["target"]
    )
    loader.load_rules(rules=job["rules"])
    return loader


def rank(loader: Any, job: dict[str, Any], score: str) -> dict[str, Any]:
    """The candidates of each query in PyClause's order, with scores, by direction, relation and known entity."""
    options = Options()
    settings = {
        "aggregation_function": AGGREGATIONS[score],
        "topk": job["n_entities"] + 1,
        "disc_at_least": NO_LIMIT,
        "hard_stop_at": NO_LIMIT,
        "num_top_rules": NO_LIMIT,
        "filter_w_train": True,
        "tie_handling": "frequency",
        "num_threads": 1,
    }
    for name, value in settings.items():
        options.set(f"ranking_handler.{name}", value)
    ranker = RankingHandler(options=options.get("ranking_handler"))
    ranker.calculate_ranking(loader=loader)
    return {
        direction: ranker.get_ranking(direction=direction, as_string=True)
        for direction in ("head", "tail")
    }


def count(loader: Any, rule_texts: list[str]) -> list[list[int]]:
    """Predictions and right predictions of each rule, as PyClause materialises it."""
    options = Options()
    options.set("rules_handler.collect_predictions", False)
    options.set("rules_handler.collect_statistics", True)
    options.set("rules_handler.num_threads", 1)
    handler = RulesHandler(options=options.get("rules_handler"))
    handler.calculate_predictions(rules=rule_texts, loader=loader)
    return [list(row) for row in handler.get_statistics()]


if __name__ == "__main__":
    main()
