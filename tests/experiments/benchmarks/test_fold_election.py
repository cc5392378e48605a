"""Training questions whose rules are elected without their facts."""

import torch

from experiments.benchmarks import fold_election
from funcppo import data
from funcppo.experiment import question_training
from funcppo.logic.question_types import Questions
from funcppo.logic.triple_index import HEAD
from funcppo.prover import evidence, link_embedding
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.question_config import QuestionConfig
from funcppo.prover.task import build_task

SETTINGS = ProverTaskConfig(max_height=1, smoothing=5.0, object_identity=False)


def collect():
    dataset = data.load("family_tree:60:0")
    task = build_task(dataset, SETTINGS)
    facts = evidence.index_facts(task.kb, task.sizes)
    cfg = QuestionConfig(left_out="fact")
    return dataset, question_training.collect_questions(
        task, facts, cfg, 0, uses_degrees=False
    )


def test_where_all_folds_elect_all_rules_nothing_changes():
    dataset, collected = collect()
    every = torch.ones((4, len(dataset.rules)), dtype=torch.bool)
    same = fold_election.with_elected(collected, every)
    for one, other in zip(collected.world.evidence, same.world.evidence):
        assert torch.equal(one, other)
    assert torch.equal(collected.world.question, same.world.question)
    assert collected.policy == same.policy


def test_a_fold_that_does_not_elect_a_rule_loses_its_firings_alone():
    dataset, collected = collect()
    listed = collected.world.evidence
    rule = int(torch.bincount(listed.rule).argmax())
    elected = torch.ones((4, len(dataset.rules)), dtype=torch.bool)
    elected[1, rule] = False
    kept = fold_election.with_elected(collected, elected).world.evidence

    def firings(part):
        """Question, candidate, rule and groundings of each firing, and the links of each candidate."""
        row = torch.repeat_interleave(torch.diff(part.firing_offsets))
        question, entity = part.question[row], part.entity[row]
        columns = (question, entity, part.rule, part.n_groundings)
        n_links = torch.diff(part.link_offsets)
        return (
            [tuple(x) for x in torch.stack(columns, 1).tolist()],
            dict(
                zip(
                    zip(part.question.tolist(), part.entity.tolist()),
                    n_links.tolist(),
                )
            ),
        )

    asked = Questions(
        listed.label // 2,
        listed.label % 2 + HEAD,
        listed.given,
        listed.left_out,
    )
    fold = link_embedding.fold_of(asked, 4, "fact").tolist()
    before, links = firings(listed)
    after, links_after = firings(kept)
    expected = [x for x in before if x[2] != rule or fold[x[0]] != 1]
    assert after == expected != before
    assert links_after == {key[:2]: links[key[:2]] for key in after}
    answers = kept.answer >= 0
    assert torch.equal(
        kept.entity[kept.answer[answers]], kept.left_out[answers]
    )
