"""From a data set to what is learnt and judged on it: the knowledge base, its model, the configuration, the world."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from funcppo import protocol, tree
from funcppo.beam import EvalConfig, Score
from funcppo.config import Config, PPOConfig, ProverSettings
from funcppo.data import Dataset
from funcppo.envs import prover
from funcppo.logic import asked, baselines, fixpoint, joins, outlook, resolve
from funcppo.logic import kb as kbase
from funcppo.logic.consequences import with_confidence
from funcppo.logic.fixpoint import Model
from funcppo.logic.kb import KnowledgeBase, Sizes
from funcppo.logic.outlook import Outlook
from funcppo.nets import prover as net
from funcppo.protocol import Protocol, Ranking

REGIONS = ("africa", "americas", "asia", "europe", "oceania")
HEIGHTS = (1, 2, 3)  # those tried when the valid split chooses
PAIRS = 20  # derivations held at most, for each atom of the budget
SAMPLE = 500_000  # atoms drawn to learn from, where T_P is held in part
ENOUGH = 0.005  # a height is high enough once no higher one proves this share of valid more


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A data set made ready; a value of the host."""

    dataset: Dataset
    settings: ProverSettings
    kb: KnowledgeBase
    sizes: Sizes
    model: Model  # T_P up to `max_height`
    max_height: int
    outlook: Outlook | None  # None: too large to hold
    sample: Tensor | None  # derived atoms that are no facts, where the model holds a part of T_P; None: it holds all
    facts: prover.Facts
    pool: Tensor  # entities that queries are ranked against, ascending
    known: protocol.Known  # what candidates are filtered by and looked up in
    regions: bool  # the Countries protocol: tails against the five regions
    notes: tuple[str, ...]  # what was chosen or left out, one line each


def build(dataset: Dataset, settings: ProverSettings, device: str = "cpu") -> Problem:
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
    kb = with_confidence(kb, sizes, object_identity=settings.object_identity, smoothing=settings.smoothing)
    height, model, notes = _model(dataset, settings, kb, sizes)
    if model.complete:
        known, sample = outlook.build(kb, sizes, model, height, PAIRS * settings.budget), None
    else:
        notes = [f"T_P to height 1 {model.stopped}: held only as far as valid and test ask, and a sample to learn from"]
        model, known, sample = _part(dataset, settings, kb, sizes, model)
    facts, more = _facts(dataset, settings, height, known)
    entity = {name: i for i, name in enumerate(dataset.entities, 1)}
    regions = dataset.name.lower().startswith("countries") and all(r in entity for r in REGIONS)
    entities = sorted(entity[r] for r in REGIONS) if regions else list(range(1, dataset.n_constants + 1))
    pool = torch.tensor(entities)
    true = np.concatenate([dataset.facts, dataset.train, dataset.valid, dataset.test])
    made = Problem(
        dataset=dataset,
        settings=settings,
        kb=kb,
        sizes=sizes,
        model=model,
        max_height=height,
        outlook=known,
        sample=sample,
        facts=facts,
        pool=pool,
        known=protocol.known(sizes, model, torch.from_numpy(true), pool),
        regions=regions,
        notes=(*dataset.notes, *notes, *more),
    )
    kb, known, sample = tree.map(lambda x: x.to(device), (kb, known, sample))
    return replace(ranked_on(made, device), kb=kb, outlook=known, sample=sample)


def _model(dataset: Dataset, settings: ProverSettings, kb: KnowledgeBase, sizes: Sizes) -> tuple[int, Model, list[str]]:
    """The height to search to, T_P up to it, and how it was chosen; where not even one step fits, T_P up to 0."""
    run = lambda height: fixpoint.least_model(
        kb, sizes, max_height=height, budget=settings.budget, object_identity=settings.object_identity
    )
    if settings.max_height is not None:
        model = run(settings.max_height)
        if not model.complete and settings.max_height > 1:
            raise ValueError(f"{dataset.name}: T_P to height {settings.max_height} {model.stopped}")
        return settings.max_height, model, []
    model = run(max(HEIGHTS))
    deepest = len(model.counts) - 1
    if not deepest and not model.fixpoint:
        return 1, model, []
    valid = torch.from_numpy(dataset.valid).long()
    height = fixpoint.contains(model, valid)
    share = [float(((height >= 0) & (height <= h)).float().mean()) if len(valid) else 0.0 for h in HEIGHTS[:deepest]]
    share = share or [0.0]
    chosen = next(h for h, s in enumerate(share, 1) if s >= max(share) - ENOUGH)
    shown = ", ".join(f"{s:.3f} at {h}" for h, s in enumerate(share, 1))
    return chosen, run(chosen), [f"height {chosen} chosen: share of valid provable {shown}"]


def _facts(
    dataset: Dataset, settings: ProverSettings, height: int, known: Outlook | None
) -> tuple[prover.Facts, list[str]]:
    """Whether the policy picks facts too, and what there is to say about it."""
    if settings.facts == "found" and (height > 1 or known is None):
        why = f"height {height}" if height > 1 else "derivations that pass the budget"
        raise ValueError(f"{dataset.name}: facts=found wants height 1 and all derivations, got {why}")
    if known is not None:
        return ("found" if height == 1 and settings.facts != "chosen" else "chosen"), []
    return "chosen", ["the derivations pass the budget: the policy does not see which rules derive its goal"]


def _part(
    dataset: Dataset, settings: ProverSettings, kb: KnowledgeBase, sizes: Sizes, stopped: Model
) -> tuple[Model, Outlook, Tensor]:
    """T_P to height 1 as far as valid and test ask for it, and a sample, for rules that derive too much to hold it all.

    Errors: ValueError when that is too much as well.
    """
    queries = torch.from_numpy(np.concatenate([dataset.valid, dataset.test]))
    sample, budget = asked.draw(kb, sizes, SAMPLE, settings.object_identity), PAIRS * settings.budget
    found = asked.one_step(kb, sizes, queries, sample, budget, settings.object_identity)
    if found is None:
        over = f"valid and test ask for more than {budget} derivations"
        raise ValueError(f"{dataset.name}: T_P to height 1 {stopped.stopped}; {over}")
    return *found, sample


def config(problem: Problem, ppo: PPOConfig, products: torch.dtype | None = None) -> Config:
    """The learning problem; its network multiplies matrices in `products`, in float32 where that is None.

    Errors: ValueError for object identity where a policy searches: it is known only where T_P finds the facts.
    """
    settings = problem.settings
    if settings.object_identity and problem.facts != "found":
        raise ValueError(f"{problem.dataset.name}: object_identity wants facts found, at height 1, got facts chosen")
    shape = resolve.config(problem.kb, problem.sizes, problem.max_height)
    if problem.facts == "found":  # only rules are chosen
        shape = resolve.rules_alone(shape)
    if settings.max_successors is not None:
        shape = replace(shape, max_successors=settings.max_successors)
    env = prover.ProverConfig(
        resolve=shape,
        max_depth=settings.max_depth,
        reward=settings.reward,
        facts=problem.facts,
        negatives=settings.negatives,
        hard_fraction=settings.hard_fraction,
    )
    network = net.NetConfig(
        sizes=problem.sizes,
        n_variables=max(shape.max_goals * (problem.sizes.width - 1), _rule_variables(problem)),
        max_height=problem.max_height,
        embed_dim=settings.embed_dim,
        hidden_dim=settings.hidden_dim,
        n_blocks=settings.n_blocks,
        products=products,
    )
    return Config(ppo=ppo, env=prover.environment(env), agent=net.agent(network))


def _rule_variables(problem: Problem) -> int:
    """How many variables the rule with most of them has; ids are counted from the number of constants."""
    terms = problem.kb.rules[..., 1:]
    return max(int(terms.max()) - problem.sizes.n_constants, 0) if terms.numel() else 0


def world(problem: Problem) -> prover.World:
    """What training reads: positives are the train facts that some rule's head can meet; others teach nothing.

    Errors: ValueError when no train fact has a rule for its predicate, or negatives are wanted beyond the sample.
    """
    settings, name = problem.settings, problem.dataset.name
    if problem.sample is not None and settings.negatives and settings.hard_fraction < 1.0:
        raise ValueError(f"{name}: T_P is held in part: want all negatives from its sample (--prover.hard-fraction 1)")
    train = torch.from_numpy(problem.dataset.train).to(problem.kb.facts.device)
    train = train[torch.isin(train[:, 0], problem.kb.rules[:, 0, 0])]
    if not len(train):
        raise ValueError(f"{name}: no train fact has the predicate of a rule's head")
    return fixed_world(problem)._replace(train=train, hard=_hard(problem))


def _hard(problem: Problem) -> Tensor:
    """Provable atoms that are no facts, if negatives are drawn from them."""
    if not problem.settings.hard_fraction:
        return problem.kb.facts[:0]
    return problem.model.atoms[problem.model.height > 0] if problem.sample is None else problem.sample


def false_negatives(problem: Problem) -> float | None:
    """The share of the negatives drawn from provable atoms that valid or test hold; None where none are drawn."""
    if not problem.settings.hard_fraction:
        return None
    negatives, sizes = _hard(problem), problem.sizes
    held_out = torch.from_numpy(np.concatenate([problem.dataset.valid, problem.dataset.test])).to(negatives.device)
    _, index = kbase.index_atoms(held_out.long(), sizes.n_predicates, sizes.n_constants)
    true = kbase.locate(index, sizes, negatives.long()) >= 0
    return float(true.float().mean()) if len(true) else None


def fixed_world(problem: Problem) -> prover.World:
    """A world to search in; nothing is drawn from it."""
    none = problem.kb.facts[:0]
    known = problem.outlook or outlook.nothing(problem.kb, problem.sizes)
    return prover.World(kb=problem.kb, train=none, hard=none, outlook=known)


def rank(
    problem: Problem, split: np.ndarray, scorer: protocol.Scorer, how: Protocol, query_id: np.ndarray | None = None
) -> Ranking:
    """The ranking of some queries under a protocol, filtered by all splits.

    Args:
      query_id: the rows of the split that these are; None: the first ones.
    """
    device = problem.pool.device
    ids = np.arange(len(split)) if query_id is None else query_id
    rows, ids = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (split, ids))
    return protocol.rank_split(how, problem.model, problem.known, rows, ids, problem.pool, scorer)


def untrained_scorer(problem: Problem, name: str) -> protocol.Scorer:
    """`exists@H`, `max-confidence`, `noisy-or` or `noisy-or@P`, of power P.

    Errors: ValueError for another name.
    """
    kb, sizes, model, height = problem.kb, problem.sizes, problem.model, problem.max_height
    kind, _, number = name.partition("@")
    if kind == "exists" and number.isdigit():
        return lambda atoms: baselines.exists(model, int(number), atoms)
    if name == "max-confidence":
        score = baselines.max_confidence
    elif name == "noisy-or" or (kind == "noisy-or" and re.fullmatch(r"[1-9]\d?(\.\d+)?", number)):
        score = partial(baselines.noisy_or, power=float(number or 1))
    else:
        want = "success, best-proof, greedy, exists@H, max-confidence, noisy-or or noisy-or@P"
        raise ValueError(f"score {name!r}: want {want}, P from 1 to 99")
    if height == 1 and (known := problem.outlook) is not None:
        return lambda atoms: score(kb, outlook.each_derivation(known, sizes, atoms, joins.PIECE), len(atoms))
    return lambda atoms: score(kb, baselines.each_derivation(kb, sizes, model, height, atoms), len(atoms))


def evaluation(
    problem: Problem, cfg: Config, score: Score, *, slots: int, beam: int, rows: int, window: int
) -> EvalConfig:
    """How a policy's scores are computed."""
    return EvalConfig(
        resolve=cfg.env.cfg.resolve,
        agent=cfg.agent,
        score=score,
        max_depth=problem.settings.max_depth,
        slots=slots,
        beam=1 if score == "greedy" else beam,
        rows=rows,
        window=window,
        refill=True,
    )


def ranked_on(problem: Problem, device: str) -> Problem:
    """The problem with what ranking reads on a device, which need not be the one that scores."""
    model, to = problem.model, lambda x: x.to(device)
    return replace(
        problem,
        model=replace(model, atoms=to(model.atoms), height=to(model.height), index=tree.map(to, model.index)),
        known=tree.map(to, problem.known),
        pool=to(problem.pool),
    )
