"""Questions, and a selection of them."""

import torch

from funcppo.kg.logic.derive import Questions, select_questions


def test_a_selection_takes_the_same_rows_of_every_column():
    questions = Questions(*torch.arange(20).view(4, 5))
    rows = torch.tensor([4, 1])
    assert [c.tolist() for c in select_questions(questions, rows)] == [
        [4, 1],
        [9, 6],
        [14, 11],
        [19, 16],
    ]
    part = select_questions(questions, slice(2, 4))
    assert part.entity.tolist() == [12, 13]
