"""The most probable proof that a policy finds of one atom, with the probability of each choice."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from funcppo.config import Config
from funcppo.evaluation import scorers
from funcppo.evaluation.slot_scheduler import score_candidates
from funcppo.logic import derivability, derivations, fixpoint, proof, proof_builder
from funcppo.logic.proof import Proof
from funcppo.prover import env as prover_env
from funcppo.prover import task as prover_task
from funcppo.prover.task import ProverTask


def most_probable_proof(
    task: ProverTask,
    cfg: Config,
    params: Any,
    atom: Tensor,
    beam: int = 256,
    program: proof_builder.Program | None = None,
) -> Proof | None:
    """The policy's most probable proof of a ground atom, checked; None where its beam finds none.

    Args:
      beam: partial proofs kept.
      table: what `program` returns, where many atoms are asked for.
    """
    fixed, atom = prover_task.inference_world(task), atom.to(task.kb.facts.device)
    program = program or build_program(task)
    if task.fact_selection == "oracle":
        built = _by_rule(task, cfg, fixed, params, atom, program)
    else:
        built = _by_search(task, cfg, fixed, params, atom, program, beam)
    if built is None:
        return None
    _check(task, built, program)
    return built


def build_program(task: ProverTask) -> proof_builder.Program:
    """The facts and rules that proofs are built from and checked against."""
    return proof_builder.make_program(task.kb.facts.tolist(), task.kb.rules.tolist(), task.sizes.n_constants)


def smallest_proof(task: ProverTask, atom: Tensor, program: proof_builder.Program) -> Proof | None:
    """A proof of the smallest height of an atom that T_P derives, checked; None for any other, and for a fact."""
    if int(fixpoint.atom_height(task.least_model, atom.long())) < 1:
        return None
    derive = lambda goal: derivations.find_derivation(task.kb, task.sizes, task.least_model, goal)
    built = proof_builder.from_model(program, derive, tuple(int(t) for t in atom.tolist()), leave_one_out=False)
    _check(task, built, program)
    return built


def _check(ready: ProverTask, built: Proof, table: proof_builder.Program) -> None:
    """Errors: AssertionError when a proof does not hold, which no input may cause."""
    wrong = proof.check_proof(
        built,
        table.fact_set,
        table.rules,
        n_constants=table.n_constants,
        max_height=ready.max_height,
        leave_one_out=True,
        object_identity=ready.least_model.object_identity,
    )
    if wrong:
        raise AssertionError(f"the prover built a proof that does not hold: {wrong[0]}")


def _by_search(
    ready: ProverTask,
    cfg: Config,
    fixed: prover_env.World,
    params: Any,
    atom: Tensor,
    table: proof_builder.Program,
    beam: int,
) -> Proof | None:
    """The most probable proof that the beam finds."""
    how = scorers.search_config(ready, cfg, "success", slots=1, beam=beam, rows_per_step=beam, chunk_size=1)
    found = score_candidates(how, fixed, params, atom[None].to(torch.int32))[0]
    if not int(found.proof_length[0]):
        return None
    codes = found.trace[0, : int(found.proof_length[0])].tolist()
    choices = _with_probabilities(cfg, fixed, params, atom, codes)
    return proof_builder.from_trace(table, tuple(int(t) for t in atom.tolist()), choices)


def _by_rule(
    ready: ProverTask, cfg: Config, fixed: prover_env.World, params: Any, atom: Tensor, table: proof_builder.Program
) -> Proof | None:
    """The most probable rule that derives the atom, over facts that prove its body."""
    env, agent = cfg.env, cfg.agent
    state = prover_env.initial_state(
        env.cfg, fixed, atom[None].to(torch.int32), torch.tensor([True], device=atom.device)
    )
    policy = torch.softmax(agent.apply(agent.cfg, fixed, params, env.observe(env.cfg, fixed, state)).logits, -1)[0, :-1]
    proving = derivability.rule_derives(fixed.derivability_index, ready.sizes, state.query, state.successors.rule)[0]
    if not proving.any():
        return None
    slot = int(torch.where(proving, policy, -1.0).argmax())
    goal, rule = tuple(atom.tolist()), int(state.successors.rule[0, slot])
    body = derivations.find_ground_body(ready.kb, ready.sizes, ready.least_model, goal, rule, height=1)
    built = proof_builder.from_model(table, lambda _: (rule, body or ()), goal, leave_one_out=True)
    root = dataclasses.replace(built.nodes[0], probability=float(policy[slot]))
    return Proof(nodes=(root, *built.nodes[1:]))


def _with_probabilities(
    cfg: Config, fixed: prover_env.World, params: Any, atom: Tensor, codes: list[int]
) -> list[proof_builder.Choice]:
    """Each choice of a trace, as ("rule" or "fact", id, probability)."""
    env, agent, choices = cfg.env, cfg.agent, []
    state = prover_env.initial_state(
        env.cfg, fixed, atom[None].to(torch.int32), torch.tensor([True], device=atom.device)
    )
    for code in codes:
        out = agent.apply(agent.cfg, fixed, params, env.observe(env.cfg, fixed, state))
        ids = state.successors.rule if code >= 0 else state.successors.fact
        slot = (ids == (code if code >= 0 else -1 - code)).int().argmax(1)
        probability = float(torch.softmax(out.logits, -1)[0, int(slot)])
        choices.append(("rule" if code >= 0 else "fact", code if code >= 0 else -1 - code, probability))
        state, _ = env.step_functional(env.cfg, fixed, state, slot, torch.zeros((1, 2), dtype=torch.int64))
    return choices
