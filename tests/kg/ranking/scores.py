"""Scores for tests: of atoms by name, and by any function of atoms."""

from collections.abc import Callable

from torch import Tensor

from funcppo.kg.logic.kb import TAIL
from funcppo.kg.ranking import scoring
from funcppo.kg.scores.score import Candidates, Score, parse
from funcppo.kg.search.task import ProverTask


def score_by_name(
    task: ProverTask, name: str, atoms: Tensor, side: int = TAIL
) -> Tensor:
    """The log-odds of atoms as answers about a side."""
    return scoring.score_atoms(task, parse(name), atoms, side)


class FunctionScore(Score):
    """A score that a function gives atoms."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], name: str = "function"
    ) -> None:
        super().__init__(name)
        self.function = function

    def log_odds(self, found: Candidates) -> Tensor:
        return self.function(found.atoms)
