"""Share of goals proved against resolution steps, by the order in which a search tries rules and bindings.

    python experiments/benchmarks/guided_proofs.py --data DATA --out experiments/results/guided_proofs.json

Problems (`--problem`): facts and rules, goals that a policy is trained on, and others of which the share is measured.

    kinship                       ancestors, relatives and in-laws in generated families of --people persons, height 10
    distractors                   paths in random graphs beside rules and facts that prove nothing, height 6
    part_whole                    closures over WN18RR beside the rules mined from it, height 4
    countries_s2, countries_s3    the published rules (uclnlp/ntp), height 4
    nsg                           a published recursive rule (keras_ns_grounders), height 6
    clutrr                        stories of 5 to 10 facts after training on 2 to 4, height 10; rules that hold in all
                                  training stories of 2 facts

Orders of one search: the program's; rule confidences; the policy untrained; trained by PPO on episodes; and fitted
listwise to the steps of one proof of each training goal. A gain of PPO is the paired difference in the share proved,
with its standard error over goals or over seeds, the larger. rlCoP (Kaliszyk et al. 2018) proves 40 % more problems
than leanCoP at an equal budget.
"""

import argparse
import dataclasses
import math
import multiprocessing
import random as host_random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

import numpy as np
import torch

from experiments import provenance
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, make_parser
from funcppo import learner, train_step
from funcppo.config import PPOConfig
from funcppo.core import random, tree
from funcppo.core.host import Deadline
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph.dataset import Dataset, from_splits, with_rules
from funcppo.kg.graph.rules import read_clauses
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic import prove
from funcppo.kg.logic.fixpoint import Verdict
from funcppo.kg.logic.joins import RowBudget
from funcppo.kg.run.train import with_capacity
from funcppo.kg.search import guide
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.network import CONFIDENCE_CLIP
from funcppo.kg.search.task import ProverTask

DEFAULTS = {
    "device": "cpu",  # of PPO
    "people": 2000,
    "goals": 60,
    "train-goals": 400,
    "updates": 40,
    "envs": 128,
    "epochs": 10,  # of the listwise fit
    "steps": 1000,  # of a search
    "seeds": 3,
    "exact-seconds": 2.0,  # of the exact engine, for a goal
    "seconds": 3600.0,  # of a problem
    "processes": 1,
}
BUDGETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
PPO = PPOConfig(
    n_envs=128,
    n_steps=8,
    n_epochs=2,
    n_minibatches=4,
    learning_rate=3e-3,
    entropy_coef=0.02,
)
Triple = tuple[str, str, str]


class Problem(NamedTuple):
    """Facts, rules and goals."""

    facts: list[Triple]
    rules: str
    height: int
    asked: tuple[str, ...]  # relations of goals that are sampled
    # goals by name that are given; none where they are sampled
    train: Sequence[Triple] = ()
    test: Sequence[Triple] = ()


# -- problems


def kinship(args: argparse.Namespace, rng: host_random.Random) -> Problem:
    """Seven generations; half of each marry in."""
    facts: list[Triple] = []
    n_people, generation = 0, []
    while n_people < args.people:
        n_new = max(2, args.people // 8)
        people = [f"p{n_people + i}" for i in range(n_new)]
        n_people += n_new
        rng.shuffle(people)
        couples = list(zip(people[::2], people[1::2]))
        facts += [(a, "spouse", b) for a, b in couples]
        if generation:
            # Half of the people marry in.
            for child in people[: n_new // 2]:
                facts += [(p, "parent", child) for p in rng.choice(generation)]
        generation = couples
    rules = """
        ancestor(X,Y) :- parent(X,Y)
        ancestor(X,Y) :- parent(X,Z), ancestor(Z,Y)
        ancestor(X,Y) :- ancestor(X,Z), parent(Z,Y)
        ancestor(X,Y) :- ancestor(X,Z), ancestor(Z,Y)
        relative(X,Y) :- ancestor(Z,X), ancestor(Z,Y)
        in_law(X,Y) :- spouse(X,Z), relative(Z,Y)
        in_law(X,Y) :- relative(X,Z), spouse(Z,Y)
    """
    return Problem(facts, rules, 10, ("ancestor", "relative", "in_law"))


def distractors(args: argparse.Namespace, rng: host_random.Random) -> Problem:
    """Rules of the noise relations match most facts and prove nothing."""
    n = args.people // 10
    facts = [
        (f"v{i}", relation, f"v{rng.randrange(n)}")
        for relation in ("a", "a", "b", *["n0", "n1"] * 4)
        for i in range(n)
    ]
    rules = """
        path(X,Y) :- n0(X,Z), dead0(Z,Y)
        dead0(X,Y) :- n0(X,Z), dead0(Z,Y)
        dead0(X,Y) :- n1(Z,Y), dead0(X,Z)
        path(X,Y) :- n1(X,Z), dead1(Z,Y)
        dead1(X,Y) :- n1(X,Z), dead1(Z,Y)
        dead1(X,Y) :- n0(X,Y), dead0(X,Y)
        path(X,Y) :- a(X,Z), path(Z,Y)
        path(X,Y) :- b(X,Y)
    """
    return Problem(facts, rules, 6, ("path",))


def part_whole(args: argparse.Namespace, rng: host_random.Random) -> Problem:
    """Closures over WordNet beside the rules mined from it."""
    folder = args.data / "wn18rr"
    rules = """
        contains(X,Y) :- _has_part(X,Y)
        contains(X,Y) :- _member_meronym(X,Y)
        contains(X,Y) :- contains(X,Z), contains(Z,Y)
        contains(X,Y) :- _hypernym(X,Z), contains(Z,Y)
        contains(X,Y) :- contains(X,Z), _hypernym(Y,Z)
    """
    mined = (folder / "rules.txt").read_text().splitlines()
    rules += "\n".join(line.split("\t")[1] for line in mined)
    asked = ("contains", "_has_part", "_synset_domain_topic_of", "_also_see")
    return Problem(read_triples(folder / "train.txt"), rules, 4, asked)


def published(name: str, rules: str, height: int, asked: str) -> Any:
    """The problem of a folder with its published rules."""

    def make(args: argparse.Namespace, rng: host_random.Random) -> Problem:
        folder = args.data / name
        text = (folder / rules).read_text().splitlines()
        clauses = "\n".join(line.split("\t")[-1] for line in text)
        facts = read_triples(folder / "train.txt")
        return Problem(facts, clauses, height, (asked,))

    return make


def clutrr(args: argparse.Namespace, rng: host_random.Random) -> Problem:
    """Each story has people of its own."""

    def stories(name: str) -> Iterable[tuple[list[Triple], Triple, str]]:
        lines = (args.data / "clutrr" / name).read_text().splitlines()[1:]
        for number, line in enumerate(lines):
            _, text, pair, relation = line.split("\t")
            tag = f"{name}:{number}:"
            rows = [fact.split(",") for fact in text.split(" ")]
            facts = [(tag + a, r, tag + b) for a, r, b in rows]
            first, last = pair.split(",")
            yield facts, (tag + first, relation, tag + last), tag

    heads: dict[tuple[str, str], set[str]] = defaultdict(set)
    told = list(stories("train.tsv"))
    for facts, (_, relation, _), _ in told:
        if len(facts) == 2:
            heads[facts[0][1], facts[1][1]].add(relation)
    rules = "\n".join(
        f"{next(iter(head))}(X,Z) :- {a}(X,Y), {b}(Y,Z)"
        for (a, b), head in sorted(heads.items())
        if len(head) == 1
    )
    rng.shuffle(told)
    told = told[: args.train_goals]
    tests = [s for n in range(5, 11) for s in stories(f"test_{n}.tsv")]
    rng.shuffle(tests)
    tests = tests[: args.goals]
    facts = [fact for story in told + tests for fact in story[0]]
    return Problem(
        facts, rules, 10, (), [s[1] for s in told], [s[1] for s in tests]
    )


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "kinship": kinship,
    "distractors": distractors,
    "part_whole": part_whole,
    "countries_s2": published("countries_S2", "rules.txt", 4, "locatedIn"),
    "countries_s3": published(
        "countries_S3", "rules_ntp_variant.txt", 4, "locatedIn"
    ),
    "nsg": published("nsg_ablation_d3", "rules_given.txt", 6, "locatedInCR"),
    "clutrr": clutrr,
}


def read_triples(path: Path) -> list[Triple]:
    """The triples of a file."""
    lines = path.read_text().splitlines()
    return [tuple(line.split("\t")) for line in lines]


def build(problem: Problem, n_train: int, n_test: int, seed: int) -> Dataset:
    """The data set: its train goals are no facts, its test goals are held out."""
    goals = set(problem.train) | set(problem.test)
    splits = {
        "train": problem.facts,
        "valid": list(problem.train),
        "test": list(problem.test),
    }
    dataset = from_splits("problem", splits)
    lines = [x.strip() for x in problem.rules.splitlines() if x.strip()]
    clauses, _ = read_clauses("\n".join(lines), "rules", "weighted")
    dataset = with_rules(dataset, clauses, "rules")
    train, test = dataset.valid, dataset.test
    if not goals:
        ids = {name: i + 1 for i, name in enumerate(dataset.predicates)}
        sampled = guide.sample_goals(
            prove.Clauses(*kbase.from_dataset(dataset)),
            problem.height,
            n_train + n_test,
            seed,
            Deadline(at=time.monotonic() + 60.0),
            [ids[name] for name in problem.asked],
        )
        table = np.array(sampled, np.int32)
        n_test = min(n_test, len(table) // 3)
        test, train = table[:n_test], table[n_test:]
    return dataclasses.replace(
        dataset, train=train, valid=dataset.valid[:0], test=test
    )


# -- orders and curves


def program_order(
    expansions: Sequence[guide.Expansion],
) -> list[Sequence[float]]:
    """The first successor comes next, and the others where its search fails (depth first)."""
    return [
        [i / (1 + len(e.successors)) - e.step for i in range(len(e.successors))]
        for e in expansions
    ]


def confidence_order(confidence: Sequence[float]) -> guide.Order:
    """The order of the product of rule confidences, by id, the largest first."""
    costs = [-math.log(max(c, CONFIDENCE_CLIP)) for c in confidence]
    costs.append(0.0)  # of a fact, which is rule -1
    return lambda expansions: [
        [e.cost + costs[rule] for _, rule, _ in e.successors]
        for e in expansions
    ]


def search_all(
    task: ProverTask,
    goals: np.ndarray,
    order: guide.Order,
    max_steps: int,
    deadline: Deadline,
) -> list[guide.ProofSearch]:
    """Searches for all goals, side by side."""
    clauses = prove.Clauses(task.kb, task.sizes)
    program = guide.SearchProgram(clauses, task.max_height)
    searches = [guide.ProofSearch(program, tuple(g)) for g in goals.tolist()]
    guide.search(searches, order, max_steps, deadline=deadline)
    return searches


def prove_all(
    task: ProverTask, order: guide.Order, max_steps: int, deadline: Deadline
) -> dict[str, Any]:
    """The steps in which each test goal is proved (None: not), and what the searches took."""
    start = time.perf_counter()
    searches = search_all(task, task.dataset.test, order, max_steps, deadline)
    return {
        # searches that the time ended before their steps
        "n_ended": sum(
            not one.is_over and one.n_steps < max_steps for one in searches
        ),
        "steps": [
            one.n_steps if one.leaves is not None else None for one in searches
        ],
        "seconds": round(time.perf_counter() - start, 2),
        "n_cut": sum(one.n_cut for one in searches),
    }


def prove_exactly(
    task: ProverTask, seconds: float, deadline: Deadline
) -> dict[str, Any]:
    """How many test goals the exact engine proves, each within some seconds."""
    clauses = prove.Clauses(task.kb, task.sizes)
    start, verdicts = time.perf_counter(), []
    for goal in task.dataset.test.tolist():
        if deadline.is_over:
            break
        limits = prove.Limits(
            max_height=task.max_height,
            budget=RowBudget(
                sys.maxsize, deadline=Deadline(at=time.monotonic() + seconds)
            ),
        )
        verdicts.append(prove.prove_ground(clauses, tuple(goal), limits))
    proved = [found.verdict is Verdict.PROVED for found in verdicts]
    return {
        "share": sum(proved) / max(1, len(proved)),
        "goals": len(proved),
        "seconds": round(time.perf_counter() - start, 2),
        "seconds_for_each": seconds,
    }


# an order, and how it was learnt
Policy = tuple[guide.Order, dict[str, Any]]


def train(
    task: ProverTask, args: argparse.Namespace, seed: int, deadline: Deadline
) -> Policy:
    """PPO on episodes of the training goals."""
    ppo = dataclasses.replace(
        PPO, n_envs=args.envs, n_updates=max(1, args.updates)
    )
    cfg = prover_task.build_config(task, ppo)
    world = prover_task.training_world(task)
    key = random.key(seed, task.kb.facts.device)
    state = train_step.init(cfg, world, key)
    returns, began = [], time.perf_counter()
    if args.updates:
        cfg = with_capacity(cfg, world, state)
        step, _ = learner.prepare_step(
            cfg, world, state, train_step.EAGER_PARTS, "auto"
        )
        for _ in range(args.updates):
            metrics = step.step()
            total = float(metrics.rollout.episode_return_sum)
            returns.append(total / max(1.0, float(metrics.rollout.n_episodes)))
            if deadline.is_over:
                break
        state = step.state
    params, world = tree.map(lambda x: x.cpu(), (state.params, world))
    proved = [statistics.fmean(x) for x in (returns[:5], returns[-5:]) if x]
    row = {"seconds": time.perf_counter() - began, "episodes_proved": proved}
    row |= {"updates": len(returns)}
    return guide.policy_order(cfg, world, params), row


def imitate(
    task: ProverTask, args: argparse.Namespace, seed: int, deadline: Deadline
) -> Policy:
    """A listwise fit of the same network to the steps of one proof of each training goal."""
    cfg = prover_task.build_config(task, PPO)
    world = prover_task.training_world(task)
    params = cfg.agent.init(cfg.agent.cfg, random.key(seed))
    began = time.perf_counter()
    steps = list(proof_steps(task, deadline.share(0.5)))
    leaves = [x.clone().requires_grad_() for x in tree.leaves(params)]
    optimiser = torch.optim.Adam(leaves, lr=PPO.learning_rate)
    rng = host_random.Random(seed)
    n_epochs = 0
    while n_epochs < args.epochs and not (n_epochs and deadline.is_over):
        n_epochs += 1
        rng.shuffle(steps)
        for first in range(0, len(steps), 64):
            part = steps[first : first + 64]
            observed = guide.observe(cfg, world, [one for one, _ in part])
            output = cfg.agent.apply(
                cfg.agent.cfg, world, tree.unflatten(params, leaves), observed
            )
            log_prob = output.logits[:, :-1].log_softmax(1)
            is_right = torch.zeros_like(log_prob, dtype=torch.bool)
            for row, (_, right) in enumerate(part):
                is_right[row, right] = True
            right = log_prob.masked_fill(~is_right, -torch.inf).logsumexp(1)
            optimiser.zero_grad()
            (-right.mean()).backward()
            optimiser.step()
    fitted = tree.unflatten(params, [x.detach() for x in leaves])
    row = {"seconds": time.perf_counter() - began, "n_steps": len(steps)}
    row |= {"epochs": n_epochs}
    return guide.policy_order(cfg, world, fitted), row


def proof_steps(
    task: ProverTask, deadline: Deadline
) -> Iterable[tuple[guide.Expansion, list[int]]]:
    """Partial proofs along a proof of each training goal, with the successors from which its facts prove the rest."""
    confidence = kbase.rule_confidence(task.kb).tolist()
    order = confidence_order(confidence)
    until = deadline.share(0.5)
    for one in search_all(task, task.dataset.train, order, 500, until):
        if one.leaves is None or deadline.is_over:
            continue
        query, program = one.query, one.program
        facts = guide.only_facts(program.clauses, one.leaves)
        few = guide.SearchProgram(facts, task.max_height)
        goals: guide.OpenGoals = ((query, 0),)
        while goals:
            made = program.successors(query, goals)
            right = [
                i
                for i, (left, _, _) in enumerate(made)
                if not left or is_provable(few, query, left)
            ]
            if not right:
                break
            if len(made) > 1:
                yield guide.Expansion(query, goals, 0, 0.0, 0, (), made), right
            goals = made[right[0]][0]


def is_provable(
    program: guide.SearchProgram, query: Any, goals: guide.OpenGoals
) -> bool:
    """Whether a short search proves some goals."""
    one = guide.ProofSearch(program, query, goals)
    guide.search([one], program_order, max_steps=200)
    return one.leaves is not None


# -- the record


def proved_within(runs: Sequence[Any], budget: int) -> np.ndarray:
    """Which goals each run proves within a number of steps, [seeds, goals]."""
    steps = [[s or np.inf for s in run["steps"]] for run in runs]
    return (np.array(steps) <= budget).astype(float)


def gain(runs: Sequence[Any], others: Sequence[Any], budget: int) -> Any:
    """The paired difference in the share proved, and its standard error."""
    proved = proved_within(runs, budget) - proved_within(others, budget).mean(0)
    errors = [
        x.std(ddof=1) / len(x) ** 0.5
        for x in (proved.mean(0), proved.mean(1))
        if len(x) > 1
    ]
    return round(float(proved.mean()), 3), round(float(max(errors)), 3)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All orders on one problem."""
    torch.set_num_threads(1)
    deadline = Deadline(at=time.monotonic() + args.seconds)
    problem = PROBLEMS[name](args, host_random.Random(0))
    dataset = build(problem, args.train_goals, args.goals, 0)
    settings = ProverTaskConfig(max_height=problem.height)
    on_cpu, task = (
        prover_task.build_task(dataset, settings, device, as_guide=True)
        for device in ("cpu", args.device)
    )
    confidence = kbase.rule_confidence(on_cpu.kb).tolist()
    untrained = argparse.Namespace(**{**vars(args), "updates": 0})
    budgets = [b for b in BUDGETS if b <= args.steps]
    runs: dict[str, list[Any]] = defaultdict(list)
    row = {
        "problem": name,
        "facts": len(dataset.facts),
        "rules": len(dataset.rules),
        "height": problem.height,
        "train_goals": len(dataset.train),
        "test_goals": len(dataset.test),
        "exact": prove_exactly(
            on_cpu, args.exact_seconds, deadline.share(0.15)
        ),
    }
    known = {
        "program": program_order,
        "confidences": confidence_order(confidence),
    }
    todo = [
        (label, lambda *_, o=order: (o, {})) for label, order in known.items()
    ]
    todo.append(("untrained", partial(train, on_cpu, untrained)))
    # What may end late, since it compiles, comes last.
    todo += [("listwise", partial(imitate, on_cpu, args))] * args.seeds
    todo += [("PPO", partial(train, task, args))] * args.seeds
    for i, (label, learn) in enumerate(todo):
        if deadline.is_over:
            print(name, f"no time for {len(todo) - i} orders", flush=True)
            break
        # Each order gets an equal part of the time left, of which learning takes a half; it may end late.
        part = 0.5 / (len(todo) - i)
        order, learnt = learn(len(runs[label]), deadline.share(part))
        least = time.monotonic() + 20.0
        until = Deadline(at=max(least, deadline.share(2 * part).at))
        found = prove_all(on_cpu, order, args.steps, until)
        runs[label].append(found | {"learnt": learnt})
        shares = [proved_within([found], b).mean().round(2) for b in budgets]
        print(name, label, *shares, learnt, flush=True)
    return row | summarise(runs, budgets)


def summarise(
    runs: dict[str, list[Any]], budgets: Sequence[int]
) -> dict[str, Any]:
    """The curves of orders, what PPO gains over each, and what was learnt."""
    ppo = runs.get("PPO", [])
    return {
        "curves": {
            label: {
                b: round(float(proved_within(found, b).mean()), 3)
                for b in budgets
            }
            for label, found in runs.items()
            if found
        },
        "gains_of_PPO": {
            label: {b: gain(ppo, found, b) for b in (20, 100, 1000)}
            for label, found in runs.items()
            if ppo and found
        },
        "runs": {
            label: [{k: v for k, v in x.items() if k != "steps"} for x in found]
            for label, found in runs.items()
        },
    }


def main() -> None:
    """Measure the problems; write the record after each."""
    parser = make_parser(__doc__)
    parser.add_argument("--problem", nargs="+", default=list(PROBLEMS))
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path)
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args = parser.parse_args()
    record = {
        "machine": provenance.describe_machine(args.device),
        "settings": {k: vars(args)[k.replace("-", "_")] for k in DEFAULTS},
        "rows": [],
    }
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
        for row in pool.map(partial(measure, args=args), args.problem):
            record["rows"].append(row)
            if args.out:
                write_record(args.out, record)


if __name__ == "__main__":
    main()
