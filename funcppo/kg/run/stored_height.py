"""The height of a run whose config.json holds none: it was chosen anew whenever the run was opened.

It is the smallest height that proves nearly as much of the valid split as the greatest one.
"""

from __future__ import annotations

import dataclasses

import torch

from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.logic import fixpoint
from funcppo.kg.logic import kb as kbase
from funcppo.kg.run.config import RunConfig

HEIGHTS = (1, 2, 3)
# a greater height must prove more than this share of valid in addition
MIN_HEIGHT_GAIN = 0.005


def with_stored_height(run_config: RunConfig, dataset: Dataset) -> RunConfig:
    """Return the settings of a stored run with the height that it was trained with.

    Args:
      run_config: as in config.json.
      dataset: the run's.
    """
    settings = run_config.prover
    if settings.max_height is not None:
        return run_config

    kb, sizes = kbase.from_dataset(dataset)
    model = fixpoint.least_model(
        kb,
        sizes,
        max_height=max(HEIGHTS),
        max_atoms=settings.max_atoms,
        object_identity=settings.object_identity is True,
    )

    # the shares of valid triples that are derivable within each height
    n_steps = len(model.n_atoms_after_step) - 1
    shares = [0.0]
    if n_steps and len(dataset.valid):
        valid = torch.from_numpy(dataset.valid).long()
        atom_height = fixpoint.atom_height(model, valid)
        shares = [
            float(((atom_height >= 0) & (atom_height <= height)).float().mean())
            for height in HEIGHTS[:n_steps]
        ]

    # the least height that is nearly as good as the best
    height = 1 + next(
        i
        for i, share in enumerate(shares)
        if share >= max(shares) - MIN_HEIGHT_GAIN
    )
    return dataclasses.replace(
        run_config, prover=dataclasses.replace(settings, max_height=height)
    )
