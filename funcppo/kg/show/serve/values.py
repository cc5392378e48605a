"""The answers of the explorer: typed dictionaries, which are the JSON of its API, and their JSON Schema."""

from __future__ import annotations

from types import NoneType
from typing import (
    Any,
    TypedDict,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from funcppo.core.files import Json


class Name(TypedDict):
    """An entity or a relation."""

    id: int
    name: str


class NameMatch(TypedDict):
    """A name that a search found; `text` is how it is shown."""

    kind: str
    id: int
    name: str
    text: str


class NameMatches(TypedDict):
    """The names that contain a text: the same ones first, then those that start with it."""

    query: str
    names: list[NameMatch]
    has_more: bool


class Fact(TypedDict):
    """An atom, and the splits that hold it: train, facts, valid, test; none if it is not known."""

    text: str
    relation: Name
    arguments: list[Name]
    splits: list[str]


class RelationSize(TypedDict):
    """A relation with the numbers of its known facts and of its rules."""

    id: int
    name: str
    arity: int
    n_facts: int
    n_rules: int


class Graph(TypedDict):
    """What is explored; relations are a page of them."""

    name: str
    trained: bool
    score: str
    height: int
    n_entities: int
    n_relations: int
    n_rules: int
    n_train: int
    n_valid: int
    n_test: int
    notes: list[str]
    offset: int
    relations: list[RelationSize]


class FactGroup(TypedDict):
    """The known facts that have an entity in one place of a relation, the first of them listed."""

    relation: Name
    place: int
    n_facts: int
    facts: list[Fact]


class Entity(TypedDict):
    """An entity and its neighbours; groups are the first of `n_groups`."""

    entity: Name
    n_facts: int
    n_groups: int
    groups: list[FactGroup]


class Facts(TypedDict):
    """Known facts with some names in their places, a page of them."""

    relation: Name | None
    head: Name | None
    tail: Name | None
    n_facts: int
    offset: int
    facts: list[Fact]


class Rule(TypedDict):
    """A rule: right for `support` of `body_pairs` in train; scores use the confidence."""

    id: int
    text: str
    relation: Name
    support: int
    body_pairs: int
    confidence: float


class Rules(TypedDict):
    """Rules, the most confident first, a page of them."""

    relation: Name | None
    n_rules: int
    offset: int
    rules: list[Rule]


class Relation(TypedDict):
    """A relation with its first facts and its most confident rules."""

    relation: RelationSize
    facts: list[Fact]
    rules: list[Rule]


class Learning(TypedDict):
    """What a run makes of a rule, as in `funcppo report`: means over the answers that it was weighed for."""

    before: float
    after: float
    n_weighed: int


class RuleDetail(TypedDict):
    """A rule, what it derives from facts in one step, and what it decides.

    It decides a query if it is the last step of the proof that is shown; `n_sampled` queries of `sampled_from` were
    proved. Counts of what it derives are null where that takes too much work.
    """

    rule: Rule
    learning: Learning | None
    sampled_from: str
    n_sampled: int
    n_decided: int
    decided: list[Fact]
    n_derived: int | None
    n_known: int | None
    derived: list[Fact]
    note: str


class Answer(TypedDict):
    """A ranked answer, with the fields of `funcppo predict --json`."""

    rank: int
    entity: str
    entity_id: int
    score: float
    known: bool
    verdict: str
    head: str
    relation: str
    tail: str
    log_score: float | None
    quantised_score: int | None


class Answers(TypedDict):
    """The ranked answers of a query, best first; `n_self` is 1 if the given entity is derivable and left out."""

    query: str
    side: str
    relation: Name
    given: Name
    score: str
    trained: bool
    n_new: int
    n_self: int
    n_known: int
    n_entities: int
    answers: list[Answer]


class ProofNode(TypedDict):
    """A goal of a proof, and the rule that proves it from its children; no rule for a fact."""

    goal: list[int]
    goal_text: str
    rule: int | None
    rule_text: str | None
    substitution: list[list[int]]
    probability: float | None
    children: list[int]


class Proof(TypedDict):
    """A proof, as `funcppo prove --json` writes it: the root first, with the names of all ids."""

    format: int
    nodes: list[ProofNode]
    predicates: dict[str, str]
    constants: dict[str, str]
    variables: dict[str, str]


class RuleEvidence(TypedDict):
    """A rule that derives an answer, and its share of what all such rules add."""

    rule: int
    rule_text: str
    share: float
    support: int
    body_pairs: int
    n_groundings: int
    fan_out: int
    n_all_groundings: int
    walk: float | None


class FactEvidence(TypedDict):
    """A fact between the answer and the entity of the question, and what it adds to the score."""

    fact: str
    weight: float


class DegreeEvidence(TypedDict):
    """How many facts of a relation the answer has as head or tail, and what that adds to the score."""

    relation: str
    side: str
    n_facts: int
    weight: float


class Evidence(TypedDict):
    """What a run weighs that learnt from questions; its score is the sum of the weights."""

    question: str
    candidate: str
    is_fact: bool
    score: float
    probability: float
    place: int
    n_candidates: int
    rules: list[RuleEvidence]
    rule_score: float
    facts: list[FactEvidence]
    linked_weight: float
    own_degree: int
    own_degree_weight: float
    degree_weight: float
    degrees: list[DegreeEvidence]
    embedding_weight: float
    bellman_ford_weight: float


class OtherFacts(TypedDict):
    """How many other facts of the relation an answer has, and what a score with other facts adds for that."""

    relation: str
    side: str
    n_facts: int
    share_of_facts: float
    share_of_derived: float
    log_odds: float


class FailedRule(TypedDict):
    """A rule whose head matches an atom, and the first of its goals that nothing satisfies."""

    rule: int
    rule_text: str
    goals: list[str]


class AtomExplanation(TypedDict):
    """Why an atom is an answer to a query, or why it is none."""

    atom: Fact
    side: str
    query: str
    score: float
    score_name: str
    trained: bool
    verdict: str
    proof: Proof | None
    evidence: Evidence | None
    other_facts: OtherFacts | None
    failed_rules: list[FailedRule]
    n_matching_rules: int
    note: str


class Problem(TypedDict):
    """Why a request has no answer, in one line."""

    error: str


# -- JSON Schema


def add_schemas(found: dict[str, Json], value_type: type) -> None:
    """Add the JSON Schema of a typed dictionary, and of those in it, to those found so far, by name."""
    name = value_type.__name__
    if name in found:
        return
    hints = get_type_hints(value_type)
    found[name] = {
        "type": "object",
        "description": " ".join((value_type.__doc__ or "").split()),
        "properties": {
            field: _schema(found, hint) for field, hint in hints.items()
        },
        "required": list(hints),
    }


def _schema(found: dict[str, Json], hint: Any) -> Json:
    """The schema of an annotation."""
    if is_typeddict(hint):
        add_schemas(found, hint)
        return {"$ref": f"#/components/schemas/{hint.__name__}"}
    arguments = get_args(hint)
    if get_origin(hint) is list:
        return {"type": "array", "items": _schema(found, arguments[0])}
    if get_origin(hint) is dict:
        values = _schema(found, arguments[1])
        return {"type": "object", "additionalProperties": values}
    if NoneType in arguments:
        member = next(kind for kind in arguments if kind is not NoneType)
        return {"anyOf": [_schema(found, member), {"type": "null"}]}
    kinds = {int: "integer", float: "number", str: "string", bool: "boolean"}
    return {"type": kinds[hint]}
