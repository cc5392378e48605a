"""The most probable proof that a policy finds of one atom, with the probability of each choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcppo import problem
from funcppo.config import Config
from funcppo.envs import prover
from funcppo.evaluate import score_candidates
from funcppo.logic import proof, replay
from funcppo.logic.proof import Proof
from funcppo.problem import Problem


def best_proof(ready: Problem, cfg: Config, params: Any, atom: Tensor, beam: int = 256) -> Proof | None:
    """The policy's most probable proof of a ground atom, checked; None where its beam finds none.

    Args:
      beam: partial proofs kept.
    """
    how = problem.evaluation(ready, cfg, "success", slots=1, beam=beam, rows=beam, window=1)
    fixed = problem.fixed_world(ready)
    found = score_candidates(how, fixed, params, atom[None].to(torch.int32))[0]
    if not int(found.length[0]):
        return None
    codes = found.trace[0, : int(found.length[0])].tolist()
    table = replay.program(ready.kb.facts.tolist(), ready.kb.rules.tolist(), ready.sizes.n_constants)
    choices = _with_probabilities(cfg, fixed, params, atom, codes)
    built = replay.from_trace(table, tuple(int(t) for t in atom.tolist()), choices)
    wrong = proof.check(
        built,
        table.known,
        table.rules,
        n_constants=table.n_constants,
        max_height=ready.max_height,
        leave_one_out=True,
    )
    if wrong:
        raise AssertionError(f"the prover built a proof that does not hold: {wrong[0]}")
    return built


def _with_probabilities(
    cfg: Config, fixed: prover.World, params: Any, atom: Tensor, codes: list[int]
) -> list[replay.Choice]:
    """Each choice of a trace, as ("rule" or "fact", id, probability)."""
    env, agent, choices = cfg.env, cfg.agent, []
    state = prover.start(env.cfg, fixed, atom[None].to(torch.int32), torch.tensor([True], device=atom.device))
    for code in codes:
        out = agent.apply(agent.cfg, fixed, params, env.observe(env.cfg, fixed, state))
        ids = state.successors.rule if code >= 0 else state.successors.fact
        slot = (ids == (code if code >= 0 else -1 - code)).int().argmax(1)
        probability = float(torch.softmax(out.logits, -1)[0, int(slot)])
        choices.append(("rule" if code >= 0 else "fact", code if code >= 0 else -1 - code, probability))
        state, _ = env.step_functional(env.cfg, fixed, state, slot, torch.zeros((1, 2), dtype=torch.int64))
    return choices
