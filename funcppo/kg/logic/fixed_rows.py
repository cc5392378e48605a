"""Rows of questions in tables of fixed size: ragged ranges are expanded and equal rows merged without asking the data.

A row belongs to a question, and that of an empty place to the question Q, one more than there are. A stage makes rows;
if those of all questions exceed its capacity, the questions with the fewest rows get theirs, and each of the others has
overflowed: it has no more rows from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import I64, Bool
from funcppo.kg.logic import row_index, sorting


class Stages(NamedTuple):
    """What the stages so far have done with the rows of each question."""

    overflow: Bool[Tensor, "Q1"]
    # of each stage so far, the rows that each question had, or would have had
    demands: tuple[I64[Tensor, "Q1"], ...]


class ExpandedRows(NamedTuple):
    """Pairs of a row and a position that belongs to it, in a table of fixed size."""

    question: I64[Tensor, "K"]  # of the row; Q at an empty place
    row: I64[Tensor, "K"]
    position: I64[Tensor, "K"]  # 0 at an empty place


class MergedRows(NamedTuple):
    """Distinct rows in ascending order, before the empty places."""

    columns: tuple[I64[Tensor, "n"], ...]
    totals: tuple[I64[Tensor, "n"], ...]  # sums over equal rows


def no_stages(n_questions: int, device: torch.device) -> Stages:
    """The state before the first stage."""
    overflow = torch.zeros(n_questions + 1, dtype=torch.bool, device=device)
    return Stages(overflow, ())


def expand(
    stages: Stages,
    capacities: tuple[int, ...] | int,
    question: I64[Tensor, "n"],
    start: I64[Tensor, "n"],
    count: I64[Tensor, "n"],
) -> tuple[Stages, ExpandedRows]:
    """All pairs (row, start[row] + i) with i < count[row], of the questions that fit: one stage.

    Args:
      capacities: rows of each stage, at least 1; a number for as many as the data say there are, up to that.
      question: of each row; Q at an empty place, whose count is not read.
    """
    n_questions = len(stages.overflow) - 1
    count = torch.where(stages.overflow[question], 0, count)
    count = torch.where(question < n_questions, count, 0)
    demand = torch.zeros_like(stages.overflow, dtype=torch.int64)
    demand = demand.index_add(0, question, count)
    if isinstance(capacities, int):
        capacity = max(1, min(int(demand.sum()), capacities))
    else:
        capacity = capacities[len(stages.demands)]

    # The fewer rows a question has, the sooner it gets them.
    ascending, order = torch.sort(demand)
    exceeds = torch.zeros_like(stages.overflow).scatter(
        0, order, ascending.cumsum(0) > capacity
    )
    stages = Stages(stages.overflow | exceeds, (*stages.demands, demand))
    count = torch.where(exceeds[question], 0, count)

    end = count.cumsum(0)
    number = torch.arange(capacity, device=count.device)
    row = torch.searchsorted(end, number, right=True)
    row = row.clamp_max(len(count) - 1)
    is_row = number < end[-1]
    position = start[row] + number - (end - count)[row]
    return stages, ExpandedRows(
        question=torch.where(is_row, question[row], n_questions),
        row=row,
        position=torch.where(is_row, position, 0),
    )


def merge(
    columns: Sequence[I64[Tensor, "n"]],
    bits: Sequence[int],
    values: Sequence[I64[Tensor, "n"]],
    n_questions: int,
) -> MergedRows:
    """Each distinct row once.

    Args:
      columns: the question first.
      bits: how many bits hold any value of each column, `sorting.KEY_BITS` at most in all.
      values: to add over equal rows.
    """
    # Empty places become one last row.
    is_empty = columns[0] >= n_questions
    columns = [columns[0], *(torch.where(is_empty, 0, c) for c in columns[1:])]
    values = [torch.where(is_empty, 0, value) for value in values]
    _, key = row_index.encode_rows(columns, bits)

    key, order = torch.sort(key)
    group = sorting.first_of_run(key).cumsum(0) - 1
    empty = n_questions << sum(bits[1:])
    distinct = torch.full_like(key, empty).scatter(0, group, key)
    totals = [
        torch.zeros_like(key).index_add(0, group, value[order])
        for value in values
    ]
    return MergedRows(row_index.decode_rows(distinct, bits), tuple(totals))
