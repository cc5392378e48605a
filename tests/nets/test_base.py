"""The dense layer."""

from __future__ import annotations

import pytest
import torch

from funcppo.core import random
from funcppo.nets.networks import dense, init_dense


def test_a_dense_layer_by_hand():
    layer = init_dense(random.key(0), 2, 1)._replace(
        weight=torch.tensor([[1.0], [2.0]]), bias=torch.tensor([0.5])
    )
    assert dense(layer, torch.tensor([[3.0, 4.0]])).tolist() == [[11.5]]


def test_a_dense_layer_keeps_the_variance_of_unit_inputs():
    """300 inputs, 300 outputs: within 5 % of `scale` squared."""
    layer = init_dense(random.key(1), 300, 300, scale=0.5)
    assert float(
        dense(layer, random.normal(random.key(2), (500, 300))).var()
    ) == pytest.approx(0.25, rel=0.05)
