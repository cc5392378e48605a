"""The most probable proof that a policy finds of one atom, with the probability of each choice."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from funcppo import problem
from funcppo.config import Config
from funcppo.envs import prover
from funcppo.evaluate import score_candidates
from funcppo.logic import derivations, fixpoint, outlook, proof, replay
from funcppo.logic.proof import Proof
from funcppo.problem import Problem


def best_proof(
    ready: Problem, cfg: Config, params: Any, atom: Tensor, beam: int = 256, table: replay.Program | None = None
) -> Proof | None:
    """The policy's most probable proof of a ground atom, checked; None where its beam finds none.

    Args:
      beam: partial proofs kept.
      table: what `program` returns, where many atoms are asked for.
    """
    fixed, atom = problem.fixed_world(ready), atom.to(ready.kb.facts.device)
    table = table or program(ready)
    if ready.facts == "found":
        built = _by_rule(ready, cfg, fixed, params, atom, table)
    else:
        built = _by_search(ready, cfg, fixed, params, atom, table, beam)
    if built is None:
        return None
    _check(ready, built, table)
    return built


def program(ready: Problem) -> replay.Program:
    """The facts and rules that proofs are built from and checked against."""
    return replay.program(ready.kb.facts.tolist(), ready.kb.rules.tolist(), ready.sizes.n_constants)


def smallest_proof(ready: Problem, atom: Tensor, table: replay.Program) -> Proof | None:
    """A proof of the smallest height of an atom that T_P derives, checked; None for any other, and for a fact."""
    if int(fixpoint.contains(ready.model, atom.long())) < 1:
        return None
    derive = lambda goal: derivations.derivation(ready.kb, ready.sizes, ready.model, goal)
    built = replay.from_model(table, derive, tuple(int(t) for t in atom.tolist()), leave_one_out=False)
    _check(ready, built, table)
    return built


def _check(ready: Problem, built: Proof, table: replay.Program) -> None:
    """Errors: AssertionError when a proof does not hold, which no input may cause."""
    wrong = proof.check(
        built,
        table.known,
        table.rules,
        n_constants=table.n_constants,
        max_height=ready.max_height,
        leave_one_out=True,
        object_identity=ready.model.object_identity,
    )
    if wrong:
        raise AssertionError(f"the prover built a proof that does not hold: {wrong[0]}")


def _by_search(
    ready: Problem, cfg: Config, fixed: prover.World, params: Any, atom: Tensor, table: replay.Program, beam: int
) -> Proof | None:
    """The most probable proof that the beam finds."""
    how = problem.evaluation(ready, cfg, "success", slots=1, beam=beam, rows=beam, window=1)
    found = score_candidates(how, fixed, params, atom[None].to(torch.int32))[0]
    if not int(found.length[0]):
        return None
    codes = found.trace[0, : int(found.length[0])].tolist()
    choices = _with_probabilities(cfg, fixed, params, atom, codes)
    return replay.from_trace(table, tuple(int(t) for t in atom.tolist()), choices)


def _by_rule(
    ready: Problem, cfg: Config, fixed: prover.World, params: Any, atom: Tensor, table: replay.Program
) -> Proof | None:
    """The most probable rule that derives the atom, over facts that prove its body."""
    env, agent = cfg.env, cfg.agent
    state = prover.start(env.cfg, fixed, atom[None].to(torch.int32), torch.tensor([True], device=atom.device))
    policy = torch.softmax(agent.apply(agent.cfg, fixed, params, env.observe(env.cfg, fixed, state)).logits, -1)[0, :-1]
    proving = outlook.derives(fixed.outlook, ready.sizes, state.query, state.successors.rule)[0]
    if not proving.any():
        return None
    slot = int(torch.where(proving, policy, -1.0).argmax())
    goal, rule = tuple(atom.tolist()), int(state.successors.rule[0, slot])
    body = derivations.body(ready.kb, ready.sizes, ready.model, goal, rule, height=1)
    built = replay.from_model(table, lambda _: (rule, body or ()), goal, leave_one_out=True)
    root = dataclasses.replace(built.nodes[0], probability=float(policy[slot]))
    return Proof(nodes=(root, *built.nodes[1:]))


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
