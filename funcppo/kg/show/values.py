"""What can be asked of the explorer, and its answers: query strings and the JSON of the API as pydantic models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# -- query strings; a name N may be given by its id instead, as N_id


Id = Annotated[
    int | None,
    Field(ge=1, le=10**9, description="Its id, in place of the name."),
]


class Query(BaseModel):
    """A query string, which holds no other fields."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


class PageQuery(Query):
    """A page of a list."""

    offset: int = Field(
        0,
        ge=0,
        le=10**9,
        description="Rows that are left out before the first.",
    )


class RelationQuery(Query):
    """A relation."""

    relation: str | None = Field(default=None, description="Relation.")
    relation_id: Id = None


class EntityQuery(Query):
    """An entity."""

    entity: str | None = Field(default=None, description="Entity.")
    entity_id: Id = None
    expand: str = Field(
        "",
        pattern=r"^(\d{1,9}(,\d{1,9}){0,9})?$",
        description="Ids of at most ten entities, with commas between, whose neighbours the picture shows too.",
    )


class AtomQuery(RelationQuery):
    """A relation and its arguments."""

    head: str | None = Field(default=None, description="First argument.")
    head_id: Id = None
    tail: str | None = Field(default=None, description="Second argument.")
    tail_id: Id = None


class FactsQuery(AtomQuery, PageQuery):
    """A page of the facts of a relation with some names in their places."""


class RulesQuery(RelationQuery, PageQuery):
    """A page of rules, of one relation or of all, or a single one."""

    rule: int | None = Field(
        None, ge=0, le=10**9, description="Number of a single rule, from 0."
    )


class AnswersQuery(AtomQuery):
    """The answers of relation(head, X) or relation(X, tail)."""

    k: int = Field(20, ge=1, le=1000, description="The most answers.")
    known: bool = Field(False, description="List known answers too.")
    with_self: bool = Field(
        False,
        description="List the given entity too, where no triple of the relation links an entity to itself.",
    )
    min_score: float = Field(
        0.0, ge=0, le=1, description="Leave out answers that score less."
    )


class WhyQuery(AtomQuery):
    """An atom as an answer about one side."""

    side: Literal["head", "tail"] = Field(
        "tail", description="The argument that the query asks for."
    )
    proofs: int = Field(
        1,
        ge=1,
        le=100,
        description="How many of the most probable proofs to show, if more than one.",
    )
    beside_id: Id = Field(
        None, description="Id of another answer to compare it with."
    )


class SearchQuery(Query):
    """A search in names."""

    q: str = Field("", description="Text; case does not count.")
    kind: Literal["any", "entity", "relation"] = Field(
        "any", description="What to look for."
    )
    limit: int = Field(20, ge=1, le=100, description="The most names.")


# -- answers


class Name(BaseModel):
    """An entity or a relation; `label` is what people call it, its name where it has no other."""

    id: int
    name: str
    label: str


class NameMatch(Name):
    """A name that a search found; `text` is how it is shown."""

    kind: str
    text: str


class NameMatches(BaseModel):
    """The names that contain a text: the same ones first, then those that start with it."""

    query: str
    names: list[NameMatch]
    has_more: bool


class Fact(BaseModel):
    """An atom, and the splits that hold it: train, facts, valid, test; none if it is not known."""

    text: str
    relation: Name
    arguments: list[Name]
    splits: list[str]


class RelationSize(Name):
    """A relation with the numbers of its known facts and of its rules."""

    arity: int
    n_facts: int
    n_rules: int


class Graph(BaseModel):
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
    test_mrr: float | None
    """Of the score on test, as the run recorded it; None where there is no record."""
    examples: list[Fact]
    """Facts held out of train, whose tails are questions to begin with."""
    offset: int
    relations: list[RelationSize]


class FactGroup(BaseModel):
    """The known facts that have an entity in one place of a relation, the first of them listed."""

    relation: Name
    place: int
    n_facts: int
    facts: list[Fact]


class Entity(BaseModel):
    """An entity and its neighbours; groups are the first of `n_groups`."""

    entity: Name
    n_facts: int
    n_groups: int
    groups: list[FactGroup]
    expanded: list[int]
    """Ids of the entities whose neighbours the picture shows too."""


class Rule(BaseModel):
    """A rule: right for `support` of `body_pairs` in train; scores use the confidence."""

    id: int
    text: str
    relation: Name
    support: int
    body_pairs: int
    confidence: float


class Rules(BaseModel):
    """Rules, the most confident first, a page of them."""

    relation: Name | None
    n_rules: int
    offset: int
    rules: list[Rule]


class Relation(BaseModel):
    """A relation with its most confident rules, and a page of its known facts with some names in their places."""

    relation: RelationSize
    rules: list[Rule]
    head: Name | None
    tail: Name | None
    n_facts: int
    offset: int
    facts: list[Fact]


class Answer(BaseModel):
    """A ranked answer, with the fields of `funcppo predict --json`."""

    rank: int
    entity: str
    entity_id: int
    label: str
    score: float
    known: bool
    verdict: str
    head: str
    relation: str
    tail: str
    log_score: float | None
    quantised_score: int | None


class Answers(BaseModel):
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


class ProofNode(BaseModel):
    """A goal of a proof, and the rule that proves it from its children; no rule for a fact."""

    goal: list[int]
    goal_text: str
    rule: int | None
    rule_text: str | None
    substitution: list[list[int]]
    probability: float | None
    children: list[int]


class Proof(BaseModel):
    """A proof, as `funcppo prove --json` writes it: the root first, with the names of all ids."""

    format: int
    nodes: list[ProofNode]
    predicates: dict[str, str]
    constants: dict[str, str]
    variables: dict[str, str]


class ProbableProof(BaseModel):
    """A proof with the product of the confidences of its rules."""

    probability: float
    proof: Proof


class RuleEvidence(BaseModel):
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


class TermEvidence(BaseModel):
    """What speaks for or against an answer, and what it adds to the score."""

    kind: str
    log_odds: float
    text: str


class Evidence(BaseModel):
    """What a run weighs that learnt from queries; its score is the sum of the terms."""

    question: str
    candidate: str
    is_fact: bool
    score: float
    probability: float
    place: int
    n_candidates: int
    rules: list[RuleEvidence]
    terms: list[TermEvidence]


class OtherFacts(BaseModel):
    """How many other facts of the relation an answer has, and what a score with other facts adds for that."""

    relation: str
    side: str
    n_facts: int
    share_of_facts: float
    share_of_derived: float
    log_odds: float


class FailedRule(BaseModel):
    """A rule whose head matches an atom, and the first of its goals that nothing satisfies."""

    rule: int
    rule_text: str
    goals: list[str]


class AtomExplanation(BaseModel):
    """Why an atom is an answer to a query, or why it is none."""

    atom: Fact
    side: str
    query: str
    score: float
    score_name: str
    trained: bool
    verdict: str
    proof: Proof | None = None
    proofs: list[ProbableProof] = []
    proofs_stop_reason: str = ""
    evidence: Evidence | None = None
    other_facts: OtherFacts | None = None
    beside: AtomExplanation | None = None
    """Another answer to the query."""
    failed_rules: list[FailedRule] = []
    n_matching_rules: int = 0
    note: str = ""


class Problem(BaseModel):
    """Why a request has no answer, in one line."""

    error: str
