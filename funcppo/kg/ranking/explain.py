"""Proofs of single atoms, checked before they are returned.

`most_probable_proof` gives the proof that a policy finds most probable, with the probability of each choice;
`smallest_proof` gives a proof of the smallest height without a policy, `smallest_proofs` those of many atoms. All build
proofs from a `Program`, which `build_program` makes once for many atoms.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.config import Config
from funcppo.core.types import F32, I64
from funcppo.kg.logic import derivability, fixpoint, proof, prove
from funcppo.kg.logic.fixpoint import FactTable
from funcppo.kg.logic.joins import RowBudget
from funcppo.kg.logic.proof import Atom, Proof
from funcppo.kg.logic.prove import Choice, Program, QueryResult
from funcppo.kg.logic.row_index import unique_rows_with_inverse
from funcppo.kg.logic.triple_index import TAIL
from funcppo.kg.ranking import scorers
from funcppo.kg.search import env as prover_env
from funcppo.kg.search.env import EnvState, World
from funcppo.kg.search.network import Params
from funcppo.kg.search.slot_scheduler import score_candidates
from funcppo.kg.search.task import ProverTask, inference_world

# rows that the joins make for the proof of a known fact
MAX_FACT_PROOF_ROWS = 30_000_000


def most_probable_proof(
    task: ProverTask,
    cfg: Config,
    params: Params,
    atom: Tensor,
    beam: int = 256,
    program: Program | None = None,
) -> Proof | None:
    """The policy's most probable proof of a ground atom, or None if its beam finds none.

    Args:
      atom: [W].
      beam: partial proofs kept.
      program: what `build_program` returns; None builds it for this call.
    """
    world = inference_world(task)
    atom = atom.to(task.kb.facts.device)
    program = program or build_program(task)
    if task.fact_selection == "oracle":
        built = _prove_by_rule(task, cfg, world, params, atom, program)
    else:
        built = _prove_by_search(task, cfg, world, params, atom, program, beam)
    if built is not None:
        _check_proof(task, built, program)
    return built


class RuleChoices(NamedTuple):
    """Rules that atoms can be resolved with, of all atoms together."""

    rule: I64[Tensor, "n"]
    probability: F32[Tensor, "n"]  # that the policy chooses it


def rule_choices(
    task: ProverTask, cfg: Config, params: Params, atoms: I64[Tensor, "B W"]
) -> RuleChoices:
    """The rules that a policy may choose as the last step of a proof of each atom, with their probabilities.

    Args:
      atoms: ground.
    """
    world = inference_world(task)
    with torch.no_grad():
        state = _initial_state(cfg, world, atoms.to(task.kb.facts.device))
        policy = _choice_probabilities(cfg, world, params, state)
    is_rule = state.successors.mask & (state.successors.rule >= 0)
    return RuleChoices(state.successors.rule[is_rule].long(), policy[is_rule])


def build_program(task: ProverTask) -> Program:
    """The facts and rules that proofs are built from and checked against."""
    return prove.make_program(
        task.kb.facts.tolist(),
        task.kb.rules.tolist(),
        task.sizes.n_constants,
    )


def smallest_proof(
    task: ProverTask, atom: Tensor, program: Program
) -> Proof | None:
    """A proof of the smallest height of an atom, of a fact from other facts; None if there is none.

    Args:
      atom: ground, [W].
      program: what `build_program` returns.
    """
    if task.answers_plan is not None:
        return smallest_proofs(task, atom[None], program)[0]
    height = int(fixpoint.atom_height(task.least_model, atom.long()))
    if height < 0:
        return None
    if height == 0:
        return prove_from_other_facts(task, atom, MAX_FACT_PROOF_ROWS).proof
    derive = partial(
        prove.find_derivation, task.kb, task.sizes, task.least_model
    )
    built = prove.from_model(
        program,
        derive,
        _to_tuple(atom),
        leave_one_out=False,
    )
    _check_proof(task, built, program)
    return built


def smallest_proofs(
    task: ProverTask, atoms: I64[Tensor, "n W"], program: Program
) -> list[Proof | None]:
    """A proof of the smallest height of each of some atoms, as `smallest_proof` gives it.

    Where each query derives its own answers, the rules that derive all of the atoms are found together.
    """
    if task.answers_plan is None:
        return [smallest_proof(task, atom, program) for atom in atoms]

    proofs: list[Proof | None] = []
    facts = facts_on_host(task)
    for atom, rule in zip(atoms, _first_rules(task, atoms)):
        if _to_tuple(atom) in program.fact_set:
            built = prove_from_other_facts(task, atom, MAX_FACT_PROOF_ROWS)
            proofs.append(built.proof)
        elif rule is None:
            proofs.append(None)
        else:
            goal = _to_tuple(atom)
            built = _apply_rule(task, facts, program, goal, rule, None)
            _check_proof(task, built, program)
            proofs.append(built)
    return proofs


def _first_rules(
    task: ProverTask, atoms: I64[Tensor, "n W"]
) -> list[int | None]:
    """The first rule in file order that derives each atom from facts; None where none does.

    Args:
      task: each query derives its own answers.
    """
    none = task.sizes.n_rules
    distinct, place = unique_rows_with_inverse(atoms.long())
    first = torch.full((len(distinct),), none, device=task.kb.facts.device)
    for row, rule in scorers.iter_answer_derivations(task, TAIL, distinct):
        first = first.scatter_reduce(0, row, rule, "amin")
    rules = first[place.to(first.device)].tolist()
    return [rule if rule < none else None for rule in rules]


def prove_from_other_facts(
    task: ProverTask, atom: Tensor, max_rows: int
) -> QueryResult:
    """Prove or refute a ground atom, which does not count as a fact in its own proof, up to the height of a task.

    Args:
      atom: [W].
      max_rows: rows that the joins may make.

    Raises:
      RowBudgetExceeded: they make more.
    """
    return prove.prove_ground(
        task.kb,
        task.sizes,
        tuple(atom.tolist()),
        max_height=task.max_height,
        max_atoms=task.cfg.max_atoms,
        object_identity=task.least_model.object_identity,
        budget=RowBudget(max_rows),
    )


def _check_proof(task: ProverTask, built: Proof, program: Program) -> None:
    """Check a proof against the program.

    Raises:
      AssertionError: the proof does not hold, which no input may cause.
    """
    errors = proof.check_proof(
        built,
        program.fact_set,
        program.rules,
        n_constants=program.n_constants,
        max_height=task.max_height,
        leave_one_out=True,
        object_identity=task.least_model.object_identity,
    )
    if errors:
        raise AssertionError(f"expected a proof that holds, got {errors[0]}")


def _prove_by_search(
    task: ProverTask,
    cfg: Config,
    world: World,
    params: Params,
    atom: Tensor,
    program: Program,
    beam: int,
) -> Proof | None:
    """The most probable proof that a beam search finds."""
    search = scorers.search_config(
        task,
        cfg,
        "success",
        slots=1,
        beam=beam,
        rows_per_step=beam,
        chunk_size=1,
    )
    result = score_candidates(
        search, world, params, atom[None].to(torch.int32)
    ).results
    n_choices = int(result.proof_length[0])
    if not n_choices:
        return None
    choice_ids = result.trace[0, :n_choices].tolist()
    choices = _with_probabilities(cfg, world, params, atom, choice_ids)
    return prove.from_trace(program, _to_tuple(atom), choices)


def _prove_by_rule(
    task: ProverTask,
    cfg: Config,
    world: World,
    params: Params,
    atom: Tensor,
    program: Program,
) -> Proof | None:
    """The most probable rule that derives the atom, over facts that satisfy its body."""
    state = _initial_state(cfg, world, atom[None])
    policy = _choice_probabilities(cfg, world, params, state)[0]
    derives = derivability.rule_derives(
        world.derivability_index,
        task.sizes,
        state.query,
        state.successors.rule,
    )[0]
    if not derives.any():
        return None

    slot = int(torch.where(derives, policy, -1.0).argmax())
    rule = int(state.successors.rule[0, slot])
    return _apply_rule(
        task,
        facts_on_host(task),
        program,
        _to_tuple(atom),
        rule,
        float(policy[slot]),
    )


def proof_by_rule(
    task: ProverTask,
    program: Program,
    atom: Tensor,
    rule: int,
    probability: float,
    facts: FactTable | None = None,
) -> Proof:
    """The proof of an atom by one application of a rule to facts, which derives it.

    Args:
      atom: [W].
      probability: of the rule among those that derive the atom.
      facts: what `facts_on_host` returns; None copies them for this call.
    """
    built = _apply_rule(
        task,
        facts or facts_on_host(task),
        program,
        _to_tuple(atom),
        rule,
        probability,
    )
    _check_proof(task, built, program)
    return built


def facts_on_host(task: ProverTask) -> FactTable:
    """The facts where the many small joins of single proofs do not wait for a GPU."""
    kb = task.kb._replace(facts=task.kb.facts.cpu())
    identity = task.least_model.object_identity
    return fixpoint.fact_table(kb, task.sizes, identity)


def _apply_rule(
    task: ProverTask,
    facts: FactTable,
    program: Program,
    goal: Atom,
    rule: int,
    probability: float | None,
) -> Proof:
    """The proof by a rule over facts that satisfy its body."""
    body = prove.find_ground_body(
        task.kb,
        task.sizes,
        facts,
        goal,
        rule,
        height=1,
    )

    def derive_root(_: Atom) -> tuple[int, tuple[Atom, ...]]:
        return rule, body or ()

    # The body consists of facts, so the root is the only goal that is derived.
    built = prove.from_model(program, derive_root, goal, leave_one_out=True)
    root, *leaves = built.nodes
    root = dataclasses.replace(root, probability=probability)
    return Proof(nodes=(root, *leaves))


def _with_probabilities(
    cfg: Config,
    world: World,
    params: Params,
    atom: Tensor,
    choice_ids: list[int],
) -> list[Choice]:
    """The choices of a trace, ("rule" or "fact", id, probability), by following it in the environment."""
    choices: list[Choice] = []
    state = _initial_state(cfg, world, atom[None])
    for choice_id in choice_ids:
        is_rule = choice_id >= 0
        kind = "rule" if is_rule else "fact"
        clause = choice_id if is_rule else -1 - choice_id
        slot_clauses = (
            state.successors.rule if is_rule else state.successors.fact
        )
        action = (slot_clauses == clause).int().argmax(1)
        policy = _choice_probabilities(cfg, world, params, state)[0]
        probability = float(policy[int(action)])
        choices.append(Choice(kind, clause, probability))

        unused_key = torch.zeros((1, 2), dtype=torch.int64)
        state, _ = cfg.env.step_functional(
            cfg.env.cfg,
            world,
            state,
            action,
            unused_key,
        )
    return choices


def _initial_state(cfg: Config, world: World, atoms: Tensor) -> EnvState:
    """The environment's state before the proofs of atoms, [B, W]."""
    return prover_env.initial_state(
        cfg.env.cfg,
        world,
        atoms.to(torch.int32),
        torch.ones(len(atoms), dtype=torch.bool, device=atoms.device),
    )


def _choice_probabilities(
    cfg: Config, world: World, params: Params, state: EnvState
) -> Tensor:
    """The policy's probability of each successor, [B, S]."""
    observation = cfg.env.observe(cfg.env.cfg, world, state)
    output = cfg.agent.apply(cfg.agent.cfg, world, params, observation)
    return torch.softmax(output.logits, -1)[:, :-1]


def _to_tuple(atom: Tensor) -> Atom:
    """The atom as plain integers."""
    return tuple(int(term) for term in atom.tolist())
