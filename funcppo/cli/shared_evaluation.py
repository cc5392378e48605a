"""An evaluation that several processes share: each ranks windows of the split, and rank 0 writes their records."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from funcppo.cli.common import JsonObject
from funcppo.cli.evaluation_setup import EvaluationSetup
from funcppo.runtime import distributed
from funcppo.runtime.distributed import Processes

# PyTorch takes seconds to import, and --help does not wait for it.
if TYPE_CHECKING:
    import numpy as np

    from funcppo.kg.ranking.result_log import Record


def check_same_setup(
    processes: Processes, setup: EvaluationSetup, device: str
) -> None:
    """Check that all processes rank the same data with the same scores on the same kind of GPU.

    Raises:
      ValueError: one does not; the message names it.
    """
    gpu = distributed.gpu_facts(device)
    processes.check_equal("setup", setup.log_settings | gpu)


def iter_queries(
    processes: Processes,
    setup: EvaluationSetup,
    split: np.ndarray,
    rows: np.ndarray,
    is_done: Collection[int],
    on_ranked: Callable[[list[Record]], object] = lambda records: None,
) -> Iterator[list[Record]]:
    """Rank the windows that this process takes; on rank 0, yield the records of all queries in the order of `rows`.

    What the other processes counted and noted is added to the setup.

    Args:
      split: atoms [n, W].
      rows: of all queries of the evaluation.
      is_done: rows of the queries that have records already, which are not yielded again.
      on_ranked: receives the records of each query that this process has ranked.
    """
    import numpy as np

    from funcppo.kg.ranking import evaluator as evaluation
    from funcppo.kg.ranking.policy_score import graph_fallback_notes
    from funcppo.runtime import memory

    # A window is ranked whole, so that its records do not depend on what is done.
    done = np.array(sorted(is_done), dtype=rows.dtype)
    windows = [
        window
        for window in evaluation.plan_windows(setup.evaluator, split, rows)
        if not np.isin(window, done).all()
    ]

    def rank(task: int) -> bytes:
        before = setup.search_stats.counts()
        records = evaluation.rank_window(setup.evaluator, split, windows[task])
        for query in records:
            on_ranked(query)
        after = setup.search_stats.counts()
        stats = {name: after[name] - before[name] for name in after}
        result = {
            "rank": processes.rank,
            "records": records,
            "stats": stats,
            "notes": graph_fallback_notes(setup.search_step),
            "peak_bytes": memory.peak_bytes(setup.device),
        }
        return json.dumps(result, ensure_ascii=False).encode()

    for block in processes.iter_results("window", len(windows), rank):
        result = json.loads(block)
        if result["rank"] != processes.rank:
            _add_result(setup, result)
        for records in result["records"]:
            if records[0]["query_row"] not in is_done:
                yield records


def _add_result(setup: EvaluationSetup, result: JsonObject) -> None:
    """Add what another process counted and noted."""
    setup.search_stats.add_counts(result["stats"])
    for note in result["notes"]:
        line = f"rank {result['rank']}: {note}"
        if line not in setup.notes:
            setup.notes.append(line)
    setup.peer_peak_bytes.append(result["peak_bytes"])
