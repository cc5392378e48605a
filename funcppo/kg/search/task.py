"""From a data set to a learning problem: what the rules derive, what the policy chooses, and what it trains on.

`build_task` computes what every use of a data set shares: the knowledge base, the atoms that the rules derive (T_P) and
the candidates of a ranking. `build_config` and `training_world` make of it the two arguments of `train_step`;
`inference_world` is the world of a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from funcppo.config import Config, PPOConfig
from funcppo.core import tree
from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.core.types import I32, I64, Bool
from funcppo.kg.config import (
    FactSelection,
    ProofSettings,
    ProverTaskConfig,
    proof_settings,
)
from funcppo.kg.graph.dataset import Dataset, index_entities
from funcppo.kg.graph.rules import check_horn
from funcppo.kg.logic import (
    derive,
    fixpoint,
    prove,
    resolve,
)
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derive import DerivabilityIndex, RulePlan, plan_rules
from funcppo.kg.logic.fixpoint import (
    LeastModel,
    RuleCounts,
    count_rules,
    with_confidence,
)
from funcppo.kg.logic.joins import RowBudget, RowBudgetExceeded
from funcppo.kg.logic.kb import KBSizes, KnowledgeBase
from funcppo.kg.logic.resolve import ResolveConfig
from funcppo.kg.logic.row_index import unique_rows
from funcppo.kg.scores.score import OtherFactCounts, count_other_facts
from funcppo.kg.search import env as prover_env
from funcppo.kg.search import network
from funcppo.kg.search.env import World

COUNTRIES_REGIONS = ("africa", "americas", "asia", "europe", "oceania")
# the derivability index holds at most this many derivations times `max_atoms`
MAX_DERIVATIONS_PER_ATOM = 20
# rows of joins to count rules exactly, about ten minutes; those that make more are counted from samples
MAX_EXACT_ROWS = 3_000_000_000
# heads of one rule that are held for it, about two gigabytes; the same holds for a rule that derives more
MAX_EXACT_HEADS = 2**24
# rows of joins to index derivations by, about ten minutes of work
MAX_INDEX_ROWS = 3_000_000_000
# successors and goals of a state of a guide that is trained
GUIDE_SUCCESSORS, GUIDE_GOALS = 64, 12
COUNTING = "computing rule confidences"
INDEXING = "indexing derivations"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProverTask:
    """A data set with all that is computed from it once: its knowledge base, T_P, and the candidates of a ranking."""

    dataset: Dataset
    """The triples of all splits, the rules and the names."""

    cfg: ProverTaskConfig
    """The settings that the task was built with."""

    kb: KnowledgeBase
    """Facts and rules with their train confidences, on the device of the task."""

    sizes: KBSizes
    """Sizes of `kb`."""

    least_model: LeastModel
    """T_P up to `max_height`; nothing if `answers_plan` is there."""

    max_height: int
    """Maximum height of a proof."""

    derivability_index: DerivabilityIndex | None
    """The rules that derive each atom; None if there are too many derivations to hold, or nothing reads them."""

    fact_selection: FactSelection
    """Whether the policy or an oracle selects facts."""

    entity_pool: I64[Tensor, "E"]
    """Entities that queries are ranked against, ascending."""

    filter_index: kbase.FilterIndex
    """Known triples, which are filtered from the candidates, and derivable ones; none with `answers_plan`."""

    unproved_facts: I32[Tensor, "n W"]
    """Known facts among the triples of valid and test that other facts do not prove: as answers they are not provable,
    since a fact is no fact while it is asked."""

    answers_plan: RulePlan | None
    """What the atoms that queries ask for are derived from, see `with_answers`; None if what is needed is held."""

    is_countries: bool
    """Whether the Countries protocol applies: tails are ranked against the five regions."""

    notes: tuple[str, ...]
    """What was chosen or left out, one line each."""

    other_facts: OtherFactCounts | None = None
    """How many candidates have other facts of the asked relation, see `with_other_facts`; None where nothing asks."""

    is_guide: bool = False
    """Whether a policy is to order a search for proofs (`kg.search.guide`) and ranks nothing: it sees classes of
    constants, and T_P is not computed."""

    @property
    def device(self) -> torch.device:
        """Return the device on which atoms are scored."""
        return self.kb.facts.device

    @property
    def object_identity(self) -> bool:
        """Return whether different variables of a rule bind different constants, none of which the rule names."""
        return self.least_model.object_identity


class PhaseCallback(Protocol):
    """Callback that receives what is being done, and how far it is."""

    def __call__(
        self,
        text: str,
        done: int = 0,
        total: int | None = None,
        deadline: Deadline = NO_DEADLINE,
        /,
    ) -> None:
        """Receive what is being done and how much of it is done, out of `total` (None if not known).

        Args:
          deadline: ends it, whatever is left.
        """
        ...


# what the rules derive, the rules that derive each atom, and notes
_Derived = tuple[LeastModel, DerivabilityIndex | None, list[str]]


def ignore_phase(
    text: str,
    done: int = 0,
    total: int | None = None,
    deadline: Deadline = NO_DEADLINE,
    /,
) -> None:
    """Ignore the arguments: the default phase callback."""


def build_task(
    dataset: Dataset,
    cfg: ProverTaskConfig,
    device: str = "cpu",
    on_phase: PhaseCallback = ignore_phase,
    *,
    with_derivations: bool = True,
    as_guide: bool = False,
    needs_rules: bool = True,
    deadline: Deadline = NO_DEADLINE,
    plan: RulePlan | None = None,
    counts: RuleCounts | None = None,
) -> ProverTask:
    """Build the task of a data set on the host, and move it to `device` as a whole.

    Thousands of rules make as many small joins, each of whose sizes the host must know before the next one starts.

    Args:
      dataset: triples and rules.
      cfg: what the data set does not fix, with a height, a smoothing and an object identity; `choose_settings` of
        `funcppo.kg.run.choices` chooses those that are open.
      device: where searches, training and ranking read the task's tensors.
      on_phase: receives what is being computed.
      deadline: when T_P up to a height above 1 ends; it is an error then.
      with_derivations: index the rules that derive each atom, which searches and training by proofs read. At height 1
        each query derives its own answers without.
      as_guide: for a policy that orders searches and ranks nothing, see `ProverTask.is_guide`.
      needs_rules: it is an error where there are none.
      plan: what the rules of the data set fire from, on the host; None to make it where it is needed.
      counts: of the rules, which confidences are computed from; None to count them over the facts.

    Raises:
      ValueError: a setting is not chosen yet, there are no rules, or T_P exceeds `cfg.max_atoms` or, to a height above
        1, the deadline.
    """
    settings = proof_settings(cfg)
    check_horn(dataset)
    if needs_rules and not len(dataset.rules):
        raise ValueError(
            f"{dataset.name}: expected rules (--rules FILE, as `funcppo mine` writes it, or rules.txt), got none"
        )
    on_phase(COUNTING)
    kb, sizes = kbase.from_dataset(dataset)
    counts, count_notes = (
        (counts, [])
        if counts
        else _count_rules(
            dataset, settings.object_identity, kb, sizes, on_phase, set()
        )
    )
    kb = with_confidence(kb, counts, settings.smoothing)

    # What the rules derive, and who selects facts. Each query derives its own answers from a model without atoms.
    no_atoms = fixpoint.partial_model(
        kb,
        sizes,
        kb.facts[:0],
        object_identity=settings.object_identity,
        facts=kb.facts[:0],
    )
    model, index, model_notes = (
        (no_atoms, None, [])
        if as_guide or (not with_derivations and settings.max_height == 1)
        else _derived_atoms(
            dataset,
            cfg,
            kb,
            sizes,
            counts,
            settings,
            with_derivations,
            deadline,
            on_phase,
        )
    )
    derives_by_query = not (as_guide or model.complete)
    fact_selection = _choose_fact_selection(
        dataset, cfg, settings.max_height, index
    )

    # What queries are ranked against.
    on_phase("indexing candidates")
    unproved_facts, fact_notes = _unproved_facts(
        dataset, cfg, kb, sizes, settings
    )
    pool, is_countries = entity_pool(dataset)
    known = torch.from_numpy(
        dataset.facts[:0] if derives_by_query else known_triples(dataset)
    )
    filter_index = fixpoint.build_filter_index(
        sizes, model, known, pool, unproved_facts
    )

    host_task = ProverTask(
        dataset=dataset,
        cfg=cfg,
        kb=kb,
        sizes=sizes,
        least_model=model,
        max_height=settings.max_height,
        derivability_index=index,
        fact_selection=fact_selection,
        entity_pool=pool,
        filter_index=filter_index,
        unproved_facts=unproved_facts,
        answers_plan=None,
        is_countries=is_countries,
        notes=(*dataset.notes, *count_notes, *model_notes, *fact_notes),
        is_guide=as_guide,
    )
    task: ProverTask = _moved(
        with_ranking_on(host_task, device), device, "kb", "derivability_index"
    )
    if derives_by_query:
        if plan is None or task.kb.facts.is_cuda:
            plan = plan_rules(task.kb, sizes)
        plan = replace(plan, memory_share=cfg.memory_share)
        task = replace(task, answers_plan=plan)
    return task


def with_rule_counts(
    dataset: Dataset,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
    *,
    with_estimates: bool = True,
) -> tuple[Dataset, list[str]]:
    """Return the data set with the counts of all its rules without object identity, and notes on estimates.

    Args:
      with_estimates: estimates are counts too; else the counts of these rules are -1.
    """
    known = dataset.rule_counts
    if known is not None and (known >= 0).all():
        return dataset, []
    on_phase(COUNTING)
    kb, sizes = kbase.from_dataset(dataset)
    sampled: set[int] = set()
    counts, notes = _count_rules(
        dataset, False, kb, sizes, on_phase, sampled, deadline
    )
    table = torch.stack(counts, dim=1).numpy()
    if not with_estimates:
        table[sorted(sampled)] = -1
    return replace(dataset, rule_counts=table), notes


def _count_rules(
    dataset: Dataset,
    object_identity: bool,
    kb: KnowledgeBase,
    sizes: KBSizes,
    on_phase: PhaseCallback,
    sampled: set[int],
    deadline: Deadline = NO_DEADLINE,
) -> tuple[RuleCounts, list[str]]:
    """Return the counts of all rules, and a note if some of them are estimates.

    Args:
      sampled: receives the rules whose counts are estimates.
      deadline: of the estimates; what is not counted in half of the time is estimated.
    """
    budget = RowBudget(
        MAX_EXACT_ROWS, max_held=MAX_EXACT_HEADS, deadline=deadline.share(0.5)
    )
    counts = count_rules(
        kb,
        sizes,
        object_identity=object_identity,
        known=as_counts(dataset.rule_counts),
        budget=budget,
        sampled_rules=sampled,
        deadline=deadline,
        progress=lambda done, total: on_phase(COUNTING, done, total, deadline),
    )
    if not sampled:
        return counts, []

    return counts, [
        f"counts of {len(sampled):,} of {sizes.n_rules:,} rules, and their confidences, are estimates from a "
        f"sample: counting them exactly makes more than {MAX_EXACT_ROWS:,} rows of joins, or {MAX_EXACT_HEADS:,} heads "
        "of a rule, or takes more time than was left"
    ]


def with_other_facts(
    task: ProverTask, on_phase: PhaseCallback = ignore_phase
) -> ProverTask:
    """Return the task with `other_facts`: counts of facts and derived atoms that have another fact of the relation.

    Args:
      on_phase: receives how many rules are applied; what it raises ends the count.
    """
    if task.other_facts is not None:
        return task
    counts = count_other_facts(
        task.kb,
        task.sizes,
        object_identity=task.object_identity,
        progress=partial(on_phase, "counting candidates with other facts"),
    )
    return replace(task, other_facts=counts)


def with_answers(
    task: ProverTask,
    queries: I64[Tensor, "Q W"],
    sides: Sequence[int],
    derived: I32[Tensor, "n W"] | None = None,
) -> ProverTask:
    """Return the task with all known and derivable answers of some queries; unchanged if it holds T_P.

    Args:
      queries: atoms of two arguments, each of which is replaced in turn.
      sides: the arguments that are replaced.
      derived: what `derive.derive_answers` derives for them, in any order; None to derive it.
    """
    plan = task.answers_plan
    if plan is None:
        return task
    kb, sizes = task.kb, task.sizes
    identity = task.object_identity

    queries = queries.long().to(kb.facts.device)
    if derived is None:
        derived = derive.derive_answers(
            plan, queries, sides, object_identity=identity
        )
    facts = derive.answering_facts(kb, sizes, queries, sides)
    model = fixpoint.partial_model(
        kb,
        sizes,
        derived,
        object_identity=identity,
        facts=facts,
    )

    device = task.entity_pool.device
    others = torch.from_numpy(other_triples(task.dataset))
    answered = replace(
        with_ranking_on(replace(task, least_model=model), str(device)),
        answers_plan=None,
    )
    filter_index = fixpoint.build_filter_index(
        sizes,
        answered.least_model,
        torch.cat([facts.to(device), others.to(device)]),
        task.entity_pool,
        task.unproved_facts,
    )
    return replace(answered, filter_index=filter_index)


def is_unproved_fact(
    task: ProverTask, atoms: I64[Tensor, "n W"]
) -> Bool[Tensor, "n"]:
    """Check, per atom, whether it is among the task's `unproved_facts`."""
    sizes, table = task.sizes, task.unproved_facts
    _, index = kbase.sort_and_index_atoms(table.long(), sizes)
    found = kbase.find_atoms(index, sizes, atoms.long().to(table.device)) >= 0
    return found.to(atoms.device)


def _derived_atoms(
    dataset: Dataset,
    cfg: ProverTaskConfig,
    kb: KnowledgeBase,
    sizes: KBSizes,
    counts: RuleCounts,
    settings: ProofSettings,
    with_derivations: bool,
    deadline: Deadline,
    on_phase: PhaseCallback,
) -> _Derived:
    """Compute all that the rules derive up to the height of the settings, its index, and notes.

    Raises:
      ValueError: T_P is too large to hold, and a search or training reads it.
    """

    def show_step(step: int, n_atoms: int, n_done: int, n_rules: int) -> None:
        on_phase(
            f"T_P step {step + 1}, from {n_atoms:,} atoms", n_done, n_rules
        )

    # What a resumed run computes again must not depend on the time.
    is_one_step = settings.max_height == 1
    budget = RowBudget(deadline=NO_DEADLINE if is_one_step else deadline)
    model = fixpoint.least_model(
        kb,
        sizes,
        max_height=settings.max_height,
        max_atoms=cfg.max_atoms,
        object_identity=settings.object_identity,
        budget=budget,
        progress=show_step,
    )
    if not model.complete:
        advice = (
            ": expected fewer rules, a larger prover.max_atoms, or a run that learns from questions, which needs no "
            "T_P (--learner questions)"
        )
        raise ValueError(
            f"{dataset.name}: T_P to height {settings.max_height} {model.stop_reason}"
            + advice * is_one_step
        )
    if not with_derivations:
        return model, None, []
    # At height 1 what is counted is what is derived; no join is made where that cannot be held.
    n_others = int((counts.body_pairs - counts.circular_support).sum())
    index, index_notes = _index_derivations(
        kb,
        sizes,
        model,
        settings.max_height,
        n_others if is_one_step else 0,
        MAX_DERIVATIONS_PER_ATOM * cfg.max_atoms,
        on_phase,
    )
    return model, index, index_notes


def _index_derivations(
    kb: KnowledgeBase,
    sizes: KBSizes,
    model: LeastModel,
    height: int,
    n_known: int,
    max_derivations: int,
    on_phase: PhaseCallback,
) -> tuple[DerivabilityIndex | None, list[str]]:
    """Index the rules that derive each atom of a model; None with a note if that is too many or too much work.

    Args:
      n_known: derivations that there are at least.
    """
    reason = "too many derivations to hold"
    if n_known <= max_derivations:
        text = f"{INDEXING}, within {MAX_INDEX_ROWS:,} rows of joins"
        on_phase(text, 0, sizes.n_rules)
        try:
            index = derive.build_derivability_index(
                kb,
                sizes,
                model,
                height,
                max_derivations,
                RowBudget(MAX_INDEX_ROWS),
                partial(on_phase, text),
            )
        except RowBudgetExceeded as error:
            index, reason = None, f"{INDEXING} makes {error}"
        if index is not None:
            return index, []

    return None, [
        f"{reason}: the policy does not see which rules derive its goal"
    ]


def _unproved_facts(
    dataset: Dataset,
    cfg: ProverTaskConfig,
    kb: KnowledgeBase,
    sizes: KBSizes,
    settings: ProofSettings,
) -> tuple[I32[Tensor, "n W"], list[str]]:
    """Return the known facts in valid and test that other facts do not prove, and a note on undecided facts."""
    held_out = unique_rows(torch.from_numpy(held_out_triples(dataset)))
    facts = held_out[kbase.contains(kb, sizes, held_out)]
    limits = prove.Limits(
        max_height=settings.max_height,
        max_atoms=cfg.max_atoms,
        object_identity=settings.object_identity,
        budget=RowBudget(prove.MAX_FACT_ROWS),
    )
    found = prove.fact_heights(kb, sizes, facts, limits, cfg.memory_share)

    notes: list[str] = []
    if found.n_undecided:
        notes.append(
            f"{found.n_undecided:,} of {len(facts):,} triples of valid and test that are known facts count as not "
            "provable: whether other facts prove them was not decided within "
            f"{prove.MAX_FACT_ROWS:,} rows of joins"
        )
    return facts[found.height < 0], notes


def _choose_fact_selection(
    dataset: Dataset,
    cfg: ProverTaskConfig,
    height: int,
    index: DerivabilityIndex | None,
) -> FactSelection:
    """Return "oracle" at height 1 if there is an index, unless the policy is set; otherwise "policy".

    Raises:
      ValueError: the oracle is set and impossible.
    """
    oracle_is_possible = height == 1 and index is not None
    if cfg.fact_selection == "oracle" and not oracle_is_possible:
        obstacle = (
            f"height {height}" if height > 1 else "too many derivations to hold"
        )
        raise ValueError(
            f"{dataset.name}: fact_selection=oracle: expected height 1 and all derivations, got {obstacle}"
        )
    return (
        "oracle"
        if oracle_is_possible and cfg.fact_selection != "policy"
        else "policy"
    )


def with_pool_of(task: ProverTask, relation: int, side: int) -> ProverTask:
    """Return the task whose queries are ranked against the entities that known triples of a relation have on a side."""
    known = known_triples(task.dataset)
    of_relation = known[known[:, 0] == relation, side]
    pool = torch.from_numpy(np.unique(of_relation)).to(task.entity_pool)
    pool = pool[torch.isin(pool, task.entity_pool)]
    filter_index = task.filter_index
    if task.answers_plan is None:
        filter_index = fixpoint.build_filter_index(
            task.sizes,
            task.least_model,
            torch.from_numpy(known).to(pool.device),
            pool,
            task.unproved_facts,
        )
    return replace(
        task,
        dataset=replace(task.dataset, by_type=False),
        entity_pool=pool,
        filter_index=filter_index,
    )


def entity_pool(dataset: Dataset) -> tuple[I64[Tensor, "E"], bool]:
    """Return the entities to rank against, ascending, and whether they are the regions of the Countries protocol."""
    if dataset.candidates is not None:
        return torch.from_numpy(dataset.candidates), False
    if dataset.name.lower().startswith("countries"):
        ids = index_entities(dataset)
        regions = [ids[region] for region in COUNTRIES_REGIONS if region in ids]
        if len(regions) == len(COUNTRIES_REGIONS):
            return torch.tensor(sorted(regions)), True
    return torch.arange(1, dataset.n_constants + 1), False


def known_triples(dataset: Dataset) -> np.ndarray:
    """Return all triples that are known to be true, [N, W]: facts, valid and test, others; with repetitions."""
    return np.concatenate([dataset.facts, other_triples(dataset)])


def other_triples(dataset: Dataset) -> np.ndarray:
    """Return the known triples beside the facts, [N, W], with repetitions."""
    known = [] if dataset.known is None else [dataset.known]
    return np.concatenate([held_out_triples(dataset), *known])


def held_out_triples(dataset: Dataset) -> np.ndarray:
    """Return the triples of valid and test, [N, W], with repetitions."""
    return np.concatenate([dataset.valid, dataset.test])


def as_counts(counts: np.ndarray | None) -> I64[Tensor, "R 3"] | None:
    """Return counts of a data set's rules as a tensor [R, 3]; None stays None."""
    return None if counts is None else torch.from_numpy(counts)


def build_config(
    task: ProverTask, ppo: PPOConfig, matmul_dtype: torch.dtype | None = None
) -> Config:
    """Build the learner's configuration for a task: algorithm, environment and network.

    Args:
      ppo: settings of the algorithm.
      matmul_dtype: data type of the network's matrix products; None: float32.

    Raises:
      ValueError: object identity is set and the policy selects facts. Only the oracle knows which facts keep it.
    """
    cfg = task.cfg
    if cfg.object_identity and not (
        task.is_guide or task.fact_selection == "oracle"
    ):
        raise ValueError(
            f"{task.dataset.name}: object_identity: expected fact_selection=oracle, at height 1, got policy"
        )

    resolve_config = _resolve_config(task)
    env_config = prover_env.ProverEnvConfig(
        resolve=resolve_config,
        max_depth=cfg.max_depth,
        reward=cfg.reward,
        fact_selection=task.fact_selection,
        negatives_per_positive=cfg.negatives_per_positive,
        hard_negative_fraction=cfg.hard_negative_fraction,
    )
    sizes, max_height = task.sizes, task.max_height
    if task.is_guide:
        # It learns which proofs to try, of goals that have one.
        env_config = replace(
            env_config,
            max_depth=max(cfg.max_depth, 4 * task.max_height),
            reward="proof",
            negatives_per_positive=0.0,
            hard_negative_fraction=0.0,
        )
        n_classes = prover_env.n_term_classes(sizes)
        sizes = replace(sizes, n_constants=n_classes)
        max_height = prover_env.SEEN_HEIGHT

    # A variable id is an index of the term table, so the table must be as large as any goal list or rule can need.
    max_goal_variables = resolve_config.max_goals * (task.sizes.atom_width - 1)
    network_config = network.ProverNetworkConfig(
        sizes=sizes,
        n_variables=max(max_goal_variables, _max_rule_variables(task)),
        max_height=max_height,
        embed_dim=cfg.embed_dim,
        hidden_dim=cfg.hidden_dim,
        n_residual_blocks=cfg.n_residual_blocks,
        matmul_dtype=matmul_dtype,
    )
    return Config(
        ppo=ppo,
        env=prover_env.environment(env_config),
        agent=network.agent(network_config),
    )


def _resolve_config(task: ProverTask) -> ResolveConfig:
    """Return the settings of a resolution step, wide enough to drop nothing unless `max_successors` is set."""
    config = resolve.make_resolve_config(task.kb, task.sizes, task.max_height)
    if task.fact_selection == "oracle":
        config = resolve.rules_only_config(config)
    if task.is_guide:
        # A state with more successors or goals overflows, and is counted. Goals of which nothing is known come last.
        fanout = min(kbase.max_known_fanout(task.kb), GUIDE_SUCCESSORS)
        config = replace(
            config,
            max_successors=fanout + task.sizes.max_rules_per_predicate,
            max_fanout=fanout,
            max_goals=min(config.max_goals, GUIDE_GOALS),
            selects_goal=True,
        )
    if task.cfg.max_successors is not None:
        config = replace(config, max_successors=task.cfg.max_successors)
    return config


def _max_rule_variables(task: ProverTask) -> int:
    """Return the largest number of variables in one rule."""
    terms = task.kb.rules[..., 1:]
    if not terms.numel():
        return 0
    return max(int(terms.max()) - task.sizes.n_constants, 0)


def training_world(task: ProverTask) -> World:
    """Return the world that training reads.

    Positives are the train facts whose predicate some rule's head has. For the others no rule can be chosen, so they
    teach nothing.

    Raises:
      ValueError: there are no such facts.
    """
    train = torch.from_numpy(task.dataset.train).to(task.device)
    head_predicates = task.kb.rules[:, 0, 0]
    positives = train[torch.isin(train[:, 0], head_predicates)]
    if not len(positives):
        raise ValueError(
            f"{task.dataset.name}: expected a train fact with the predicate of a rule's head, got none: training "
            "learns from known facts of what is asked (add some, or ask without training: funcppo predict)"
        )
    world = inference_world(task)._replace(positives=positives)
    if task.cfg.hard_negative_fraction:
        # Provable atoms that are not facts.
        model = task.least_model
        world = world._replace(hard_negatives=model.atoms[model.height > 0])
    return world


def inference_world(task: ProverTask) -> World:
    """Return the world of a search; it holds no training queries."""
    no_atoms = task.kb.facts[:0]
    index = task.derivability_index
    if index is None:
        index = derive.empty_derivability_index(task.kb, task.sizes)
    return World(
        kb=task.kb,
        positives=no_atoms,
        hard_negatives=no_atoms,
        derivability_index=index,
        term_class=prover_env.term_classes(task.kb, task.sizes)
        if task.is_guide
        else no_atoms[:, 0],
    )


def with_ranking_on(task: ProverTask, device: str) -> ProverTask:
    """Return the task with the tensors that ranking reads on a device, which may differ from the scoring device."""
    model = _moved(task.least_model, device, "atoms", "height", "atom_index")
    task = replace(task, least_model=model)
    return _moved(task, device, "filter_index", "unproved_facts", "entity_pool")


def _moved(record: Any, device: str, *names: str) -> Any:
    """Return a record with some of its fields on a device."""
    parts = {name: getattr(record, name) for name in names}
    return replace(record, **tree.map(lambda x: x.to(device), parts))
