"""Mining settings of a tiny dense graph, chosen by how well the rules that each finds rank the valid split.

The defaults of such graphs (`mining.config.default_config`) are not always better than the usual ones. Both are cheap
there, so that both are tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.mining.config import (
    MAX_TINY_FACTS,
    ROWS_PER_SECOND,
    MiningConfig,
)
from funcppo.kg.ranking import settings_choice
from funcppo.kg.run import rule_files
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import PhaseCallback, ignore_phase

# rows of the usual settings, which sample what takes more
USUAL_ROWS = 20 * ROWS_PER_SECOND


class MiningChoice(NamedTuple):
    """Which rules rank valid best."""

    name: str
    note: (
        str  # with the numbers compared; empty if there was nothing to compare
    )


def candidate_configs(
    dataset: Dataset, seconds: float
) -> dict[str, MiningConfig]:
    """The settings to mine by, by name: the defaults of the data set, and the usual ones beside those of a tiny graph.

    Args:
      dataset: without valid triples only its defaults are tried.
      seconds: time limit of mining; the usual settings beside others have half of it.
    """
    defaults = rule_files.mining_config(dataset, seconds=seconds)
    usual = MiningConfig(seconds=seconds)
    is_tiny = len(dataset.facts) <= MAX_TINY_FACTS
    if defaults == usual or not is_tiny or not len(dataset.valid):
        return {"default": defaults}
    return {
        "tiny dense graphs": defaults,
        "other graphs": replace(
            usual, max_rows=USUAL_ROWS, seconds=seconds / 2
        ),
    }


def choose_rules(
    datasets: Mapping[str, Dataset],
    prover: ProverTaskConfig,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
) -> MiningChoice:
    """Choose the rules whose best rule score has the highest MRR on valid; the first ones unless others gain.

    Args:
      datasets: the data set with the rules of each settings, by their name.
      prover: settings of the prover; a height that is open is 1.
      on_phase: receives what is being tried.
      deadline: when the comparison ends; what is not ranked by then is not chosen.
    """
    first = next(iter(datasets))
    if len(datasets) == 1:
        return MiningChoice(first, "")

    mrr: dict[str, float] = {}
    for i, (name, dataset) in enumerate(datasets.items()):
        choice = settings_choice.choose_settings(
            dataset,
            replace(prover, max_height=prover.max_height or 1),
            on_phase=on_phase,
            deadline=deadline.share(1 / (len(datasets) - i)),
        )
        if not choice.trials:
            reason = f"{name}: {choice.notes[0]}"
            return MiningChoice(
                first,
                f"mining defaults of {first} taken, not compared on valid: {reason}",
            )
        mrr[name] = max(trial.mrr for trial in choice.trials)

    best = max(mrr, key=lambda name: mrr[name])
    if mrr[best] <= mrr[first] + settings_choice.MIN_GAIN:
        best = first
    listing = ", ".join(
        f"those of {name} {value:.4f} ({len(datasets[name].rules):,} rules)"
        for name, value in mrr.items()
    )
    return MiningChoice(
        best,
        f"mining defaults of {best} chosen: MRR of the best rule score on valid: {listing}",
    )
