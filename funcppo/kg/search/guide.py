"""Best-first search for proofs of ground atoms, in an order that a policy may have learnt.

A partial proof is a list of goals, as in `env`. A resolution step takes the cheapest one, resolves the goal of which
most is known with every rule and fact that matches, and keeps what is left. What a successor costs is an `Order`, such
as that of a policy. Orders differ in nothing else.

The search finds facts from which an atom follows (`find_facts`), and the exact engine proves the atom from those alone
(`prove_from`), or from all facts where none are found: an order costs time, never correctness.

Sources: Orseau et al. 2018, "Single-agent policy tree search with guarantees"; Kaliszyk et al. 2018, "Reinforcement
learning of theorem proving".
"""

from __future__ import annotations

import heapq
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.config import Config
from funcppo.core import tree
from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.kg.logic import fixpoint, prove
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.joins import (
    RowBudget,
    Rule,
    most_general_unifier,
    substitute_atom,
    substitute_rule,
)
from funcppo.kg.logic.proof import Atom
from funcppo.kg.logic.prove import Clauses, Limits, QueryResult, Row
from funcppo.kg.logic.resolve import Goals, Successors
from funcppo.kg.logic.row_index import from_numpy, int_list
from funcppo.kg.search.env import Observation, World, make_observation
from funcppo.kg.search.network import Params

# goals left to prove, each with its height
OpenGoals = tuple[tuple[Atom, int], ...]
# the goals that one clause leaves, the id of the rule (-1 for a fact), and the facts that proved goals
Successor = tuple[OpenGoals, int, tuple[Atom, ...]]
# goals of a partial proof; those with more are cut
MAX_GOALS = 64
# partial proofs that one search may hold, about a gigabyte
MAX_PARTIAL_PROOFS = 1_000_000
# facts of a predicate that are indexed whole; larger ones are looked up in the tables of the knowledge base
MAX_INDEXED = 500_000
# partial proofs that a search resolves at a time; a policy asked for more at a time is faster, and its order coarser
GUIDED_WIDTH = 8
PRIOR_SHARE = 0.2  # of the confidences in the order of a policy
# rows of the joins of an open query that goals are sampled from, and queries in a row without a new answer
GOAL_ROWS, MAX_BARREN = 5_000, 50


class Expansion(NamedTuple):
    """A partial proof and what one resolution step makes of it; a host-side value."""

    query: Atom
    goals: OpenGoals
    depth: int  # resolution steps on the path to it
    cost: float  # of the path to it
    step: int  # its number among the steps of the search
    path: tuple  # the facts on the path to it, in linked pairs
    successors: list[Successor]


# The costs of the paths to each successor of some partial proofs. The cheapest partial proof is resolved next.
Order = Callable[[Sequence[Expansion]], list[Sequence[float]]]


class SearchProgram:
    """Facts and rules as the search reads them; many searches may share them."""

    def __init__(self, clauses: Clauses, max_height: int) -> None:
        self.clauses = Clauses(clauses.kb, clauses.sizes, MAX_INDEXED)
        self.max_height = max_height
        self.n_constants = clauses.sizes.n_constants
        self._rules: dict[int, list[Rule]] = {}
        self._matches: dict[Atom, Collection[Row]] = {}

    def rules_of(self, predicate: int) -> list[Rule]:
        """Return the rules of a predicate, with variables that no partial proof has."""
        rules = self._rules.get(predicate)
        if rules is None:
            first = self.n_constants + 1
            # A partial proof has at most so many variables.
            apart = MAX_GOALS * self.clauses.sizes.atom_width
            rules = []
            for rule in self.clauses.rules_of(predicate):
                terms = {t for a in (rule.head, *rule.body) for t in a[1:]}
                renaming = {t: t + apart for t in terms if t >= first}
                rules.append(substitute_rule(rule, renaming))
            self._rules[predicate] = rules
        return rules

    def matches(self, atom: Atom) -> tuple[Row, Collection[Row]]:
        """Return the variables of an atom, one for each place, and their values in the facts that match."""
        n = self.n_constants
        goal = (atom[0], *(t if t <= n else -1 for t in atom[1:]))
        found = self._matches.get(goal)
        if found is None:
            found = self._matches[goal] = self.clauses.matching(atom)
        return tuple(t for t in atom[1:] if t > n), found

    def is_closed(self, atom: Atom, height: int) -> bool:
        """Return whether facts alone may answer a goal."""
        return height >= self.max_height or not self.rules_of(atom[0])

    def successors(self, query: Atom, goals: OpenGoals) -> list[Successor]:
        """Return what one resolution step leaves of some goals: facts first, then rules in file order.

        The goal that is resolved is the one of which most is known. Goals that are facts leave at once; successors with
        a goal that nothing matches are dropped.
        """
        place = self._select(goals)
        (atom, height), rest = (
            goals[place],
            goals[:place] + goals[place + 1 :],
        )
        found: list[Successor] = []
        variables, rows = self.matches(atom)
        for row in rows:
            binding = dict(zip(variables, row))
            fact = substitute_atom(atom, binding)
            # A variable that occurs twice has one constant; the query is no fact of its own proof.
            if fact == query or any(
                binding[v] != c for v, c in zip(variables, row)
            ):
                continue
            self._add(found, query, rest, binding, -1, (fact,))
        if height < self.max_height:
            for rule in self.rules_of(atom[0]):
                unifier = most_general_unifier(
                    rule.head, atom, self.n_constants
                )
                if unifier is not None:
                    body = tuple((a, height + 1) for a in rule.body)
                    self._add(found, query, body + rest, unifier, rule.id, ())
        return found

    def _select(self, goals: OpenGoals) -> int:
        """Return the place of the goal of which most is known: facts before goals, and the fewest facts first."""

        def rank(place: int) -> tuple[int, int]:
            atom, height = goals[place]
            n_known = sum(0 < t <= self.n_constants for t in atom[1:])
            is_goal = int(not self.is_closed(atom, height))
            if not n_known:
                return 4 + is_goal, 0
            variables, rows = self.matches(atom)
            if not variables:
                return 2 * is_goal, 0
            return 2 * is_goal + 1, len(rows)

        return min(range(len(goals)), key=rank) if len(goals) > 1 else 0

    def _add(
        self,
        found: list[Successor],
        query: Atom,
        goals: OpenGoals,
        binding: dict[int, int],
        rule: int,
        leaves: tuple[Atom, ...],
    ) -> None:
        """Add a successor, unless one of its goals cannot be proved."""
        names: dict[int, int] = {}
        left: list[tuple[Atom, int]] = []
        for goal, height in goals:
            atom = substitute_atom(goal, binding)
            variables, rows = self.matches(atom)
            is_fact = not variables and bool(rows) and atom != query
            if is_fact:
                leaves = (*leaves, atom)
                continue
            if atom == query or (not rows and self.is_closed(atom, height)):
                return
            for variable in variables:
                names.setdefault(variable, self.n_constants + 1 + len(names))
            left.append((atom, height))
        # Variables are numbered by first occurrence, so that equal partial proofs are equal tuples.
        renamed = tuple((substitute_atom(a, names), h) for a, h in left)
        found.append((renamed, rule, leaves))


class ProofSearch:
    """Best-first search for a proof of one ground atom; its frontier changes with every step."""

    def __init__(
        self, program: SearchProgram, query: Atom, goals: OpenGoals = ()
    ) -> None:
        """Begin a search.

        Args:
          goals: to prove in place of the query, which is no fact of its own proof.
        """
        self.program, self.query = program, query
        self.n_steps = self.n_cut = self._n_held = 0
        # facts from which the query follows; None before a proof is found
        self.leaves: list[Atom] | None = None
        # cost, goals, and number of a partial proof; then its goals, depth, and the facts on its path
        self._frontier: list[tuple[float, int, int, OpenGoals, int, tuple]] = [
            (0.0, 1, 0, goals or ((query, 0),), 0, ())
        ]
        self._seen: dict[tuple[Atom, ...], list[Row]] = {}

    @property
    def is_over(self) -> bool:
        """Return whether a proof is found, or there is nothing left to resolve."""
        return self.leaves is not None or not self._frontier

    def expand(self) -> Expansion:
        """Take the cheapest partial proof and resolve it."""
        cost, _, _, goals, depth, path = heapq.heappop(self._frontier)
        self.n_steps += 1
        successors = [
            successor
            for successor in self.program.successors(self.query, goals)
            if self._is_new(successor[0])
        ]
        return Expansion(
            self.query, goals, depth, cost, self.n_steps, path, successors
        )

    def add(self, expansion: Expansion, costs: Sequence[float]) -> None:
        """Add the successors of a partial proof to the frontier, or end with the proof among them."""
        for (goals, _, leaves), cost in zip(expansion.successors, costs):
            path = (leaves, expansion.path)
            self._n_held += 1
            if not goals:
                self.leaves = [*chain(*prove.iter_links(path))]
                return
            entry = (
                cost,
                len(goals),
                self._n_held,
                goals,
                expansion.depth + 1,
                path,
            )
            heapq.heappush(self._frontier, entry)

    def _is_new(self, goals: OpenGoals) -> bool:
        """Return whether no partial proof before had these goals at as small heights; note it."""
        if len(goals) > MAX_GOALS or self._n_held > MAX_PARTIAL_PROOFS:
            self.n_cut += 1
            return False
        heights = tuple(height for _, height in goals)
        seen = self._seen.setdefault(tuple(atom for atom, _ in goals), [])
        if any(all(map(int.__le__, before, heights)) for before in seen):
            return False
        seen.append(heights)
        return True


def search(
    searches: Sequence[ProofSearch],
    order: Order,
    max_steps: int,
    width: int = 1,
    deadline: Deadline = NO_DEADLINE,
) -> None:
    """Run searches side by side until each is over or has made `max_steps` resolution steps.

    Args:
      order: is asked once for the partial proofs that all searches resolve at a time.
      width: partial proofs of a search that are resolved at a time.
      deadline: ends the searches.
    """
    active = list(searches)
    while active and not deadline.is_over:
        expansions: list[tuple[ProofSearch, Expansion]] = []
        for one in active:
            for _ in range(min(width, max_steps - one.n_steps)):
                if not one.is_over:
                    expansions.append((one, one.expand()))
        costs = order([expansion for _, expansion in expansions])
        for (one, expansion), cost in zip(expansions, costs):
            one.add(expansion, cost)
        active = [
            one for one in active if not one.is_over and one.n_steps < max_steps
        ]


# -- orders


def policy_order(cfg: Config, world: World, params: Params) -> Order:
    """Return the order of the probability with which a policy takes the path to a partial proof, the largest first.

    Args:
      cfg: the learning problem of the policy. The search does not give up (END).
    """

    def order(expansions: Sequence[Expansion]) -> list[Sequence[float]]:
        open_rows = [
            i for i, e in enumerate(expansions) if len(e.successors) > 1
        ]
        # What has one successor goes there.
        costs: list[Sequence[float]] = [
            [e.cost] * len(e.successors) for e in expansions
        ]
        if open_rows:
            asked = [expansions[i] for i in open_rows]
            log_prob = _log_probs(cfg, world, params, asked).tolist()
            for i, row in zip(open_rows, log_prob):
                costs[i] = [costs[i][0] - p for p in row]
        return costs

    return order


@torch.no_grad()
def _log_probs(
    cfg: Config,
    world: World,
    params: Params,
    expansions: Sequence[Expansion],
) -> Tensor:
    """Compute the log-probabilities of the successors of partial proofs, [B, S], by a policy and the confidences."""
    observation = observe(cfg, world, expansions)
    output = cfg.agent.apply(cfg.agent.cfg, world, params, observation)
    # A part of the confidences: what the policy is wrong about is tried later, not never.
    policy = output.logits[:, :-1].softmax(1)
    prior = output.prior_logits[:, :-1].softmax(1)
    return torch.lerp(policy, prior, PRIOR_SHARE).log()


def observe(
    cfg: Config, world: World, expansions: Sequence[Expansion]
) -> Observation:
    """Return what a policy sees of some partial proofs, one a row."""
    env = cfg.env.cfg
    n_slots = max(len(e.successors) for e in expansions)
    device = world.kb.facts.device
    pack = partial(_pack, cfg, device)
    goals = pack([[e.goals] for e in expansions], 1)

    rules = np.full((len(expansions), n_slots), -2, np.int32)
    for row, e in zip(rules, expansions):
        row[: len(e.successors)] = [rule for _, rule, _ in e.successors]
    rule = from_numpy(rules).to(device)
    mask = rule >= -1

    successors = Successors(
        goals=pack([[s[0] for s in e.successors] for e in expansions], n_slots),
        rule=rule.clamp_min(-1),
        fact=torch.zeros_like(rule),
        mask=mask,
        overflow=mask[:, 0],
    )
    depth = torch.tensor([e.depth for e in expansions], device=device)
    return make_observation(
        env.resolve,
        world,
        tree.map(lambda x: x[:, 0], goals),
        successors,
        torch.tensor(
            [e.query for e in expansions], dtype=torch.int32, device=device
        ),
        (1.0 - depth / env.max_depth).clamp_min(0.0),
    )


def _pack(
    cfg: Config,
    device: torch.device,
    lists: Sequence[Sequence[OpenGoals]],
    n_slots: int,
) -> Goals:
    """Return lists of goals as tensors [B, S, A, ...], padded with 0."""
    sizes = cfg.env.cfg.resolve.sizes
    width = sizes.atom_width
    n_goals = max((len(g) for row in lists for g in row), default=1) or 1
    table = np.zeros((len(lists), n_slots, n_goals, width + 1), np.int32)
    for i, row in enumerate(lists):
        for j, goals in enumerate(row):
            if goals:
                table[i, j, : len(goals)] = [
                    (*a, height) for a, height in goals
                ]
    # A policy knows as many variables as its own search needs.
    most = sizes.n_constants + cfg.agent.cfg.n_variables
    table[..., 1:width] = table[..., 1:width].clip(max=most)
    packed = from_numpy(table).to(device)
    return Goals(packed[..., :width], packed[..., width])


# -- the exact engine behind it


def find_facts(
    clauses: Clauses,
    atom: Atom,
    order: Order,
    max_height: int,
    deadline: Deadline,
) -> tuple[list[Atom] | None, int]:
    """Search for facts from which a ground atom follows.

    Args:
      clauses: facts and rules.
      atom: padded to the width of the knowledge base; it is no fact of its own proof.
      max_height: of the proof.
      deadline: ends the search.

    Returns:
      The facts, None where no proof is found; and the resolution steps that the search made.
    """
    one = ProofSearch(SearchProgram(clauses, max_height), atom)
    search([one], order, sys.maxsize, GUIDED_WIDTH, deadline)
    return one.leaves, one.n_steps


def prove_from(
    clauses: Clauses, facts: Collection[Atom], atom: Atom, limits: Limits
) -> QueryResult:
    """Prove a ground atom from some of the facts alone; arguments and result are those of `prove.prove_ground`.

    A verdict other than PROVED says nothing of all facts. The proof has the smallest height among those from these.
    """
    kb, sizes = clauses.kb, clauses.sizes
    row = torch.tensor(atom, device=kb.facts.device)
    is_fact = bool(kbase.contains(kb, sizes, row))
    found = prove.prove_ground(only_facts(clauses, facts), atom, limits)
    return replace(found, is_fact=is_fact)


def only_facts(clauses: Clauses, facts: Collection[Atom]) -> Clauses:
    """Return the clauses with those of their facts alone that are among some atoms."""
    kb, sizes = clauses.kb, clauses.sizes
    atoms = torch.tensor([*facts], dtype=torch.int64, device=kb.facts.device)
    atoms = atoms.view(-1, sizes.atom_width)
    few = atoms[kbase.contains(kb, sizes, atoms)]
    return Clauses(*fixpoint.with_facts(kb, sizes, few))


# -- goals to learn from


def sample_goals(
    clauses: Clauses,
    max_height: int,
    n: int,
    seed: int,
    deadline: Deadline,
    predicates: Collection[int] = (),
) -> list[Atom]:
    """Return distinct atoms that rules derive, in random order: of an open query one answer of each height.

    The queries ask rules' heads for a random constant. The exact engine answers them within a bound on rows.

    Args:
      deadline: ends the sampling.
      predicates: of the atoms, heads of rules; none for all heads.
    """
    rng = random.Random(seed)
    sizes = clauses.sizes
    heads = sorted(predicates or set(int_list(clauses.kb.rules[:, 0, 0])))
    head_of = {rule[0][0]: rule[0] for rule in reversed(clauses.rules)}
    found: dict[Atom, None] = {}
    n_barren = 0

    while len(found) < n and n_barren < MAX_BARREN and not deadline.is_over:
        head, known = rng.choice(heads), 1 + rng.randrange(sizes.atom_width)
        query = [
            t and sizes.n_constants + i for i, t in enumerate(head_of[head])
        ]
        query[0] = head
        if known < len(query) and query[known]:
            query[known] = rng.randint(1, sizes.n_constants)

        limits = Limits(max_height=max_height, budget=RowBudget(GOAL_ROWS))
        by_height: dict[int, list[Atom]] = defaultdict(list)
        answers = prove.solve(clauses, (*query,), limits).heights
        for atom, height in answers.items():
            if height != 0 and atom not in found:
                by_height[height or 0].append(atom)
        n_barren = 0 if by_height else n_barren + 1
        found |= {rng.choice(atoms): None for atoms in by_height.values()}
    goals = list(found)
    rng.shuffle(goals)
    return goals[:n]
