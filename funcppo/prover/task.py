"""From a data set to what is learnt and judged on it: the knowledge base, its model, the configuration, the world."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from funcppo import tree
from funcppo.config import Config, PPOConfig
from funcppo.data import Dataset
from funcppo.logic import derivability, fixpoint, partial_fixpoint, resolve, triple_index
from funcppo.logic import kb as kbase
from funcppo.logic.consequences import with_confidence
from funcppo.logic.derivability import DerivabilityIndex
from funcppo.logic.fixpoint import LeastModel
from funcppo.logic.kb import KBSizes, KnowledgeBase
from funcppo.prover import env as prover_env
from funcppo.prover import network as net
from funcppo.prover.config import ProverTaskConfig

COUNTRIES_REGIONS = ("africa", "americas", "asia", "europe", "oceania")
CANDIDATE_HEIGHTS = (1, 2, 3)  # those tried when the valid split chooses
MAX_DERIVATIONS_PER_ATOM = 20  # derivations held at most, for each atom of the budget
MAX_SAMPLED_ATOMS = 500_000  # atoms drawn to learn from, where T_P is held in part
MIN_HEIGHT_GAIN = 0.005  # a height is high enough once no higher one proves this share of valid more


@dataclass(frozen=True, kw_only=True, slots=True)
class ProverTask:
    """A data set made ready; a value of the host."""

    dataset: Dataset
    cfg: ProverTaskConfig
    kb: KnowledgeBase
    sizes: KBSizes
    least_model: LeastModel  # T_P up to `max_height`
    max_height: int
    derivability_index: DerivabilityIndex | None  # None: too large to hold
    derived_sample: (
        Tensor | None
    )  # derived atoms that are no facts, where the model holds a part of T_P; None: it holds all
    fact_selection: prover_env.FactSelection
    entity_pool: Tensor  # entities that queries are ranked against, ascending
    filter_index: triple_index.FilterIndex  # what candidates are filtered by and looked up in
    is_countries: bool  # the Countries protocol: tails against the five regions
    notes: tuple[str, ...]  # what was chosen or left out, one line each


def build_task(dataset: Dataset, cfg: ProverTaskConfig, device: str = "cpu") -> ProverTask:
    """The problem of a data set, made on the host and moved to the device as a whole.

    What thousands of rules derive is as many small joins, whose sizes the host has to know before the next.

    Errors: ValueError when there are no rules, or T_P passes the budget within the height asked for.
    """
    if not len(dataset.rules):
        raise ValueError(f"{dataset.name}: want rules (rules.txt, --rules FILE, or `funcppo mine`), got none")
    kb, sizes = kbase.build(
        dataset.facts,
        dataset.rules,
        n_constants=dataset.n_constants,
        n_predicates=dataset.n_predicates,
    )
    kb = with_confidence(kb, sizes, object_identity=cfg.object_identity, smoothing=cfg.smoothing)
    height, model, notes = _model(dataset, cfg, kb, sizes)
    if model.complete:
        known, sample = (
            derivability.build_derivability_index(kb, sizes, model, height, MAX_DERIVATIONS_PER_ATOM * cfg.max_atoms),
            None,
        )
    else:
        notes = [
            f"T_P to height 1 {model.stop_reason}: held only as far as valid and test ask, and a sample to learn from"
        ]
        model, known, sample = _part(dataset, cfg, kb, sizes, model)
    facts, more = _facts(dataset, cfg, height, known)
    entity = {name: i for i, name in enumerate(dataset.entities, 1)}
    regions = dataset.name.lower().startswith("countries") and all(r in entity for r in COUNTRIES_REGIONS)
    entities = sorted(entity[r] for r in COUNTRIES_REGIONS) if regions else list(range(1, dataset.n_constants + 1))
    pool = torch.tensor(entities)
    true = np.concatenate([dataset.facts, dataset.train, dataset.valid, dataset.test])
    made = ProverTask(
        dataset=dataset,
        cfg=cfg,
        kb=kb,
        sizes=sizes,
        least_model=model,
        max_height=height,
        derivability_index=known,
        derived_sample=sample,
        fact_selection=facts,
        entity_pool=pool,
        filter_index=triple_index.build_filter_index(sizes, model, torch.from_numpy(true), pool),
        is_countries=regions,
        notes=(*dataset.notes, *notes, *more),
    )
    kb, known, sample = tree.map(lambda x: x.to(device), (kb, known, sample))
    return replace(with_ranking_on(made, device), kb=kb, derivability_index=known, derived_sample=sample)


def _model(
    dataset: Dataset, settings: ProverTaskConfig, kb: KnowledgeBase, sizes: KBSizes
) -> tuple[int, LeastModel, list[str]]:
    """The height to search to, T_P up to it, and how it was chosen; where not even one step fits, T_P up to 0."""
    run = lambda height: fixpoint.least_model(
        kb, sizes, max_height=height, max_atoms=settings.max_atoms, object_identity=settings.object_identity
    )
    if settings.max_height is not None:
        model = run(settings.max_height)
        if not model.complete and settings.max_height > 1:
            raise ValueError(f"{dataset.name}: T_P to height {settings.max_height} {model.stop_reason}")
        return settings.max_height, model, []
    model = run(max(CANDIDATE_HEIGHTS))
    deepest = len(model.n_atoms_after_step) - 1
    if not deepest and not model.reached_fixpoint:
        return 1, model, []
    valid = torch.from_numpy(dataset.valid).long()
    height = fixpoint.atom_height(model, valid)
    share = [
        float(((height >= 0) & (height <= h)).float().mean()) if len(valid) else 0.0
        for h in CANDIDATE_HEIGHTS[:deepest]
    ]
    share = share or [0.0]
    chosen = next(h for h, s in enumerate(share, 1) if s >= max(share) - MIN_HEIGHT_GAIN)
    shown = ", ".join(f"{s:.3f} at {h}" for h, s in enumerate(share, 1))
    return chosen, run(chosen), [f"height {chosen} chosen: share of valid provable {shown}"]


def _facts(
    dataset: Dataset, settings: ProverTaskConfig, height: int, known: DerivabilityIndex | None
) -> tuple[prover_env.FactSelection, list[str]]:
    """Whether the policy picks facts too, and what there is to say about it."""
    if settings.fact_selection == "oracle" and (height > 1 or known is None):
        why = f"height {height}" if height > 1 else "derivations that pass the budget"
        raise ValueError(f"{dataset.name}: fact_selection=oracle wants height 1 and all derivations, got {why}")
    if known is not None:
        return ("oracle" if height == 1 and settings.fact_selection != "policy" else "policy"), []
    return "policy", ["the derivations pass the budget: the policy does not see which rules derive its goal"]


def _part(
    dataset: Dataset, settings: ProverTaskConfig, kb: KnowledgeBase, sizes: KBSizes, stopped: LeastModel
) -> tuple[LeastModel, DerivabilityIndex, Tensor]:
    """T_P to height 1 as far as valid and test ask for it, and a sample, for rules that derive too much to hold it all.

    Errors: ValueError when that is too much as well.
    """
    queries = torch.from_numpy(np.concatenate([dataset.valid, dataset.test]))
    sample, budget = (
        partial_fixpoint.priority_sample(kb, sizes, MAX_SAMPLED_ATOMS, settings.object_identity),
        MAX_DERIVATIONS_PER_ATOM * settings.max_atoms,
    )
    found = partial_fixpoint.restricted_step(kb, sizes, queries, sample, budget, settings.object_identity)
    if found is None:
        over = f"valid and test ask for more than {budget} derivations"
        raise ValueError(f"{dataset.name}: T_P to height 1 {stopped.stop_reason}; {over}")
    return *found, sample


def build_config(task: ProverTask, ppo: PPOConfig, matmul_dtype: torch.dtype | None = None) -> Config:
    """The learning problem; its network multiplies matrices in `products`, in float32 where that is None.

    Errors: ValueError for object identity where a policy searches: it is known only where T_P finds the facts.
    """
    settings = task.cfg
    if settings.object_identity and task.fact_selection != "oracle":
        raise ValueError(f"{task.dataset.name}: object_identity wants fact_selection=oracle, at height 1, got policy")
    shape = resolve.make_resolve_config(task.kb, task.sizes, task.max_height)
    if task.fact_selection == "oracle":  # only rules are chosen
        shape = resolve.rules_only_config(shape)
    if settings.max_successors is not None:
        shape = replace(shape, max_successors=settings.max_successors)
    env = prover_env.ProverEnvConfig(
        resolve=shape,
        max_depth=settings.max_depth,
        reward=settings.reward,
        fact_selection=task.fact_selection,
        negatives_per_positive=settings.negatives_per_positive,
        hard_negative_fraction=settings.hard_negative_fraction,
    )
    network = net.ProverNetworkConfig(
        sizes=task.sizes,
        n_variables=max(shape.max_goals * (task.sizes.atom_width - 1), _rule_variables(task)),
        max_height=task.max_height,
        embed_dim=settings.embed_dim,
        hidden_dim=settings.hidden_dim,
        n_residual_blocks=settings.n_residual_blocks,
        matmul_dtype=matmul_dtype,
    )
    return Config(ppo=ppo, env=prover_env.environment(env), agent=net.agent(network))


def _rule_variables(problem: ProverTask) -> int:
    """How many variables the rule with most of them has; ids are counted from the number of constants."""
    terms = problem.kb.rules[..., 1:]
    return max(int(terms.max()) - problem.sizes.n_constants, 0) if terms.numel() else 0


def training_world(task: ProverTask) -> prover_env.World:
    """What training reads: positives are the train facts that some rule's head can meet; others teach nothing.

    Errors: ValueError when no train fact has a rule for its predicate, or negatives are wanted beyond the sample.
    """
    settings, name = task.cfg, task.dataset.name
    if task.derived_sample is not None and settings.negatives_per_positive and settings.hard_negative_fraction < 1.0:
        raise ValueError(
            f"{name}: T_P is held in part: want all negatives from its sample (--prover.hard-negative-fraction 1)"
        )
    train = torch.from_numpy(task.dataset.train).to(task.kb.facts.device)
    train = train[torch.isin(train[:, 0], task.kb.rules[:, 0, 0])]
    if not len(train):
        raise ValueError(f"{name}: no train fact has the predicate of a rule's head")
    return inference_world(task)._replace(positives=train, hard_negatives=_hard(task))


def _hard(problem: ProverTask) -> Tensor:
    """Provable atoms that are no facts, if negatives are drawn from them."""
    if not problem.cfg.hard_negative_fraction:
        return problem.kb.facts[:0]
    return (
        problem.least_model.atoms[problem.least_model.height > 0]
        if problem.derived_sample is None
        else problem.derived_sample
    )


def false_negative_rate(task: ProverTask) -> float | None:
    """The share of the negatives drawn from provable atoms that valid or test hold; None where none are drawn."""
    if not task.cfg.hard_negative_fraction:
        return None
    negatives, sizes = _hard(task), task.sizes
    held_out = torch.from_numpy(np.concatenate([task.dataset.valid, task.dataset.test])).to(negatives.device)
    _, index = kbase.sort_and_index_atoms(held_out.long(), sizes.n_predicates, sizes.n_constants)
    true = kbase.find_atoms(index, sizes, negatives.long()) >= 0
    return float(true.float().mean()) if len(true) else None


def inference_world(task: ProverTask) -> prover_env.World:
    """A world to search in; nothing is drawn from it."""
    none = task.kb.facts[:0]
    known = task.derivability_index or derivability.empty_derivability_index(task.kb, task.sizes)
    return prover_env.World(kb=task.kb, positives=none, hard_negatives=none, derivability_index=known)


def with_ranking_on(task: ProverTask, device: str) -> ProverTask:
    """The problem with what ranking reads on a device, which need not be the one that scores."""
    model, to = task.least_model, lambda x: x.to(device)
    return replace(
        task,
        least_model=replace(
            model, atoms=to(model.atoms), height=to(model.height), atom_index=tree.map(to, model.atom_index)
        ),
        filter_index=tree.map(to, task.filter_index),
        entity_pool=to(task.entity_pool),
    )
