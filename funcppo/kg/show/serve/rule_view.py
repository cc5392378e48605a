"""Rules as the explorer shows them: their counts, what they derive, and what they decide."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.kg.answers import Answerer
from funcppo.kg.graph.rules import format_rule
from funcppo.kg.logic import triple_index
from funcppo.kg.logic.fixpoint import iter_consequences
from funcppo.kg.logic.joins import RowBudget, RowBudgetExceeded
from funcppo.kg.logic.proof import Proof
from funcppo.kg.logic.triple_index import TAIL
from funcppo.kg.show import measure
from funcppo.kg.show.measure import RuleUse
from funcppo.kg.show.serve.values import Learning, Name, Rule, Rules

# queries of a relation that are proved to see which rules decide them, and seconds for that
MAX_SAMPLED = 20
SAMPLE_SECONDS = 2.0
# relations whose sample is kept
KEPT_SAMPLES = 64
# rows that the joins of a rule may make, and atoms that are listed
MAX_ROWS = 10_000_000
MAX_LISTED = 20


class Detail(NamedTuple):
    """What a rule derives and decides."""

    learning: Learning | None
    sampled_from: str
    n_sampled: int
    decided: list[list[int]]
    n_derived: int | None
    n_known: int | None
    derived: list[list[int]]
    note: str


class _Sample(NamedTuple):
    """Queries of a relation with their proofs."""

    split: str
    atoms: Tensor  # [n, W]
    proofs: list[Proof | None]
    uses: dict[int, RuleUse]  # by rule; of a trained run alone


class RuleView:
    """The rules of an answerer."""

    def __init__(self, answerer: Answerer) -> None:
        """Sort the rules by confidence."""
        task = answerer.subject.task
        self._answerer = answerer
        self._dataset = answerer.dataset
        self._support = task.kb.support.double().cpu().numpy()
        self._pairs = task.kb.body_pairs.double().cpu().numpy()
        self._confidence = self._support / np.maximum(self._pairs, 1e-9)
        self._head = self._dataset.rules[:, 0, 0]
        self._order = np.argsort(-self._confidence, kind="stable")
        self._smoothing = float(task.cfg.smoothing or 0.0)
        # Where T_P is not held, other proofs apply all rules of a relation.
        run = answerer.subject.policy_run
        self._proves_quickly = task.answers_plan is None or (
            run is not None and run.questions is not None
        )
        self._sample = lru_cache(KEPT_SAMPLES)(self._draw_sample)

    def count(self, relation: int) -> int:
        """The number of rules of a relation."""
        return int(np.count_nonzero(self._head == relation))

    def page(self, relation: int | None, offset: int, n_rows: int) -> Rules:
        """Some of the rules, of one relation or of all, the most confident first."""
        rules = self._order
        name: Name | None = None
        if relation is not None:
            rules = rules[self._head[rules] == relation]
            name = self._relation_name(relation)
        listed = rules[offset : offset + n_rows].tolist()
        return {
            "relation": name,
            "n_rules": len(rules),
            "offset": offset,
            "rules": [self.rule(rule) for rule in listed],
        }

    def rule(self, rule: int) -> Rule:
        """A rule with its counts."""
        return {
            "id": rule,
            "text": format_rule(self._dataset, self._dataset.rules[rule]),
            "relation": self._relation_name(int(self._head[rule])),
            "support": round(float(self._support[rule])),
            "body_pairs": round(float(self._pairs[rule]) - self._smoothing),
            "confidence": float(self._confidence[rule]),
        }

    def detail(self, rule: int) -> Detail:
        """What a rule derives and decides."""
        sample = self._sample(int(self._head[rule]))
        decided = [
            atom
            for atom, proof in zip(sample.atoms.tolist(), sample.proofs)
            if proof is not None and proof.nodes[0].rule == rule
        ]

        use = sample.uses.get(rule)
        learning: Learning | None = None
        if use is not None and use.n_firings:
            learning = {
                "before": use.before,
                "after": use.after,
                "n_weighed": use.n_firings,
            }

        detail = Detail(
            learning=learning,
            sampled_from=sample.split,
            n_sampled=len(sample.proofs),
            decided=decided,
            n_derived=None,
            n_known=None,
            derived=[],
            note="",
        )
        return self._with_derived(detail, rule)

    def _with_derived(self, detail: Detail, rule: int) -> Detail:
        """The detail with what the rule derives from facts in one step, atoms that are not known first."""
        task = self._answerer.subject.task
        try:
            (derived,) = iter_consequences(
                task.kb,
                task.sizes,
                rule_ids=[rule],
                object_identity=task.least_model.object_identity,
                budget=RowBudget(MAX_ROWS),
            )
        except RowBudgetExceeded:
            note = f"stopped: what it derives takes more than {MAX_ROWS:,} rows of joins"
            return detail._replace(note=note)

        atoms = derived.atoms.long()
        is_known = derived.fact >= 0
        if triple_index.binary_atoms(atoms[:1]).numel():
            known = self._answerer.known
            is_known = triple_index.contains(known, atoms, TAIL)
        order = torch.argsort(is_known.int(), stable=True)[:MAX_LISTED]
        return detail._replace(
            n_derived=len(atoms),
            n_known=int(is_known.sum()),
            derived=atoms[order].tolist(),
        )

    def _draw_sample(self, relation: int) -> _Sample:
        """Prove some queries of a relation, of test if it has any, for as long as there is time."""
        dataset = self._dataset
        for split in ("test", "valid", "train"):
            table: np.ndarray = getattr(dataset, split)
            table = table[table[:, 0] == relation]
            if len(table):
                break
        is_binary = dataset.arities[relation - 1] == TAIL
        n_sampled = 0
        if is_binary and self._proves_quickly:
            n_sampled = min(MAX_SAMPLED, len(table))
        places = np.linspace(0, len(table) - 1, n_sampled).astype(int)
        atoms = torch.from_numpy(table[places]).long()

        proofs: list[Proof | None] = []
        end = time.monotonic() + SAMPLE_SECONDS
        for atom in atoms:
            if time.monotonic() > end:
                break
            proofs.append(self._answerer.explain(atom, TAIL).proof)
        atoms = atoms[: len(proofs)]
        return _Sample(split, atoms, proofs, self._uses(atoms, proofs))

    def _uses(
        self, atoms: Tensor, proofs: list[Proof | None]
    ) -> dict[int, RuleUse]:
        """What a run makes of the rules that derive some atoms, by the id of the rule."""
        run = self._answerer.subject.policy_run
        if run is None or not len(atoms):
            return {}
        return measure.uses_by_rule(run, atoms, proofs)

    def _relation_name(self, relation: int) -> Name:
        """A relation with its name."""
        return {"id": relation, "name": self._dataset.predicates[relation - 1]}
