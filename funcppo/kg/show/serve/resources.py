"""The table of what can be asked: parameters, the method of `Explorer` that answers, and the type of the answer.

A page and a path of the JSON API are made of each row, and so is the OpenAPI document.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl

from funcppo.core.files import Json, shorten
from funcppo.kg.graph.text import similar_names_hint
from funcppo.kg.show.serve import values
from funcppo.kg.show.serve.errors import RequestError
from funcppo.kg.show.serve.explorer import Explorer

MAX_FIELDS = 20
MAX_NUMBER = 10**9
MAX_ANSWERS = 1000
MAX_FOUND = 100
OPENAPI_VERSION = "3.1.0"

Kind = Literal["entity", "relation", "text", "integer", "number", "flag"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of a query string. A name N may be given by its id instead, as N_id."""

    name: str
    kind: Kind
    summary: str
    default: str | int | float | bool | None = None
    required: bool = False
    minimum: int = 0
    maximum: int = MAX_NUMBER
    choices: tuple[str, ...] = ()

    @property
    def is_name(self) -> bool:
        """Whether it is an entity or a relation."""
        return self.kind in ("entity", "relation")

    @property
    def fields(self) -> tuple[str, ...]:
        """The names that it has in a query string."""
        return (self.name, f"{self.name}_id") if self.is_name else (self.name,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """Something that can be asked."""

    name: str
    summary: str
    answer: Callable[..., Mapping[str, Any]]
    """The method of `Explorer`, with the parameters by name."""
    value: type
    parameters: tuple[Parameter, ...]
    is_lookup: bool = False
    """Whether it neither ranks nor proves, and so does not wait for that."""


_OFFSET = Parameter(
    name="offset",
    kind="integer",
    summary="Rows that are left out before the first.",
    default=0,
)
_RELATION = Parameter(name="relation", kind="relation", summary="Relation.")
_HEAD = Parameter(name="head", kind="entity", summary="First argument.")
_TAIL = Parameter(name="tail", kind="entity", summary="Second argument.")


def _make_required(parameter: Parameter) -> Parameter:
    """The parameter, required."""
    return Parameter(
        name=parameter.name,
        kind=parameter.kind,
        summary=parameter.summary,
        required=True,
    )


RESOURCES = (
    Resource(
        name="graph",
        is_lookup=True,
        summary="What is explored: sizes, score, notes, relations",
        answer=Explorer.graph,
        value=values.Graph,
        parameters=(_OFFSET,),
    ),
    Resource(
        name="search",
        is_lookup=True,
        summary="Names that contain a text",
        answer=Explorer.search,
        value=values.NameMatches,
        parameters=(
            Parameter(
                name="q",
                kind="text",
                summary="Text; case does not count.",
                default="",
            ),
            Parameter(
                name="kind",
                kind="text",
                summary="What to look for.",
                default="any",
                choices=("any", "entity", "relation"),
            ),
            Parameter(
                name="limit",
                kind="integer",
                summary="The most names.",
                default=20,
                minimum=1,
                maximum=MAX_FOUND,
            ),
        ),
    ),
    Resource(
        name="answers",
        summary="Ranked answers of relation(head, X) or relation(X, tail)",
        answer=Explorer.answers,
        value=values.Answers,
        parameters=(
            _make_required(_RELATION),
            _HEAD,
            _TAIL,
            Parameter(
                name="k",
                kind="integer",
                summary="The most answers.",
                default=20,
                minimum=1,
                maximum=MAX_ANSWERS,
            ),
            Parameter(
                name="known",
                kind="flag",
                summary="List known answers too.",
                default=False,
            ),
            Parameter(
                name="with_self",
                kind="flag",
                summary="List the given entity too, where no triple of the relation links an entity to itself.",
                default=False,
            ),
            Parameter(
                name="min_score",
                kind="number",
                summary="Leave out answers that score less.",
                default=0.0,
                maximum=1,
            ),
        ),
    ),
    Resource(
        name="why",
        summary="Why an atom is an answer: score, proof, evidence; or why not",
        answer=Explorer.why,
        value=values.AtomExplanation,
        parameters=(
            _make_required(_RELATION),
            _make_required(_HEAD),
            _make_required(_TAIL),
            Parameter(
                name="side",
                kind="text",
                summary="The argument that the query asks for.",
                default="tail",
                choices=("head", "tail"),
            ),
        ),
    ),
    Resource(
        name="entity",
        is_lookup=True,
        summary="An entity and its neighbours, by relation",
        answer=Explorer.entity,
        value=values.Entity,
        parameters=(
            Parameter(
                name="entity",
                kind="entity",
                summary="Entity.",
                required=True,
            ),
        ),
    ),
    Resource(
        name="relation",
        is_lookup=True,
        summary="A relation with its first facts and its best rules",
        answer=Explorer.relation,
        value=values.Relation,
        parameters=(_make_required(_RELATION),),
    ),
    Resource(
        name="facts",
        is_lookup=True,
        summary="Known facts with some names in their places",
        answer=Explorer.facts,
        value=values.Facts,
        parameters=(_RELATION, _HEAD, _TAIL, _OFFSET),
    ),
    Resource(
        name="rules",
        is_lookup=True,
        summary="Rules, the most confident first",
        answer=Explorer.rules,
        value=values.Rules,
        parameters=(_RELATION, _OFFSET),
    ),
    Resource(
        name="rule",
        summary="A rule: what it derives, what it decides, what was learnt",
        answer=Explorer.rule,
        value=values.RuleDetail,
        parameters=(
            Parameter(
                name="rule",
                kind="integer",
                summary="Number of the rule, from 0.",
                required=True,
            ),
        ),
    ),
)


# -- reading a query string


def read_fields(query_string: bytes) -> dict[str, str]:
    """The fields of a query string, those without a value left out.

    Raises:
      RequestError: it is not UTF-8, has too many fields, or one of them twice.
    """
    try:
        pairs = parse_qsl(
            query_string.decode("ascii"),
            keep_blank_values=True,
            encoding="utf-8",
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
    except UnicodeError:
        raise RequestError(
            400, "query string: expected percent-encoded UTF-8"
        ) from None
    except ValueError:
        raise RequestError(
            400, f"query string: expected at most {MAX_FIELDS} fields"
        ) from None

    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(
                400, f"{shorten(name)}: expected once, got it twice"
            )
    return {name: value for name, value in pairs if value}


def read_arguments(
    resource: Resource, explorer: Explorer, fields: Mapping[str, str]
) -> dict[str, object]:
    """The parameters of a resource by name, names of entities and relations as ids.

    Raises:
      RequestError: a parameter is unknown, missing or wrong.
    """
    allowed = [field for p in resource.parameters for field in p.fields]
    for field in fields:
        if field not in allowed:
            hint = similar_names_hint(field, allowed)
            raise RequestError(
                400, f"unknown parameter {shorten(field)} ({hint})"
            )
    return {
        parameter.name: _read(parameter, explorer, fields)
        for parameter in resource.parameters
    }


def _read(
    parameter: Parameter, explorer: Explorer, fields: Mapping[str, str]
) -> object:
    """The value of one parameter."""
    name = parameter.name
    given = [field for field in parameter.fields if field in fields]
    if len(given) > 1:
        raise RequestError(
            400, f"{name}: expected {name} or {name}_id, got both"
        )
    if not given:
        if parameter.required:
            expected = " or ".join(parameter.fields)
            raise RequestError(400, f"expected {expected}, got nothing")
        return parameter.default

    text = fields[given[0]]
    if given[0] != name:
        return _read_integer(given[0], text, 1, MAX_NUMBER)
    if parameter.kind == "entity":
        return explorer.entity_id(text)
    if parameter.kind == "relation":
        return explorer.relation_id(text)
    return _read_plain(parameter, text)


def _read_plain(parameter: Parameter, text: str) -> object:
    """The value of a parameter that is no name."""
    name = parameter.name
    if parameter.kind == "integer":
        return _read_integer(name, text, parameter.minimum, parameter.maximum)
    if parameter.kind == "number":
        return _read_number(parameter, text)
    if parameter.kind == "flag":
        flags = {"0": False, "1": True, "false": False, "true": True}
        if text not in flags:
            raise RequestError(
                400, f"{name}: expected true or false, got {shorten(text)}"
            )
        return flags[text]
    if parameter.choices and text not in parameter.choices:
        raise RequestError(
            400,
            f"{name}: expected one of {', '.join(parameter.choices)}, got {shorten(text)}",
        )
    return text


def _read_integer(name: str, text: str, minimum: int, maximum: int) -> int:
    """A whole number within bounds."""
    is_number = re.fullmatch("[0-9]{1,10}", text) is not None
    if not is_number or not minimum <= int(text) <= maximum:
        raise RequestError(
            400,
            f"{name}: expected a number from {minimum} to {maximum}, got {shorten(text)}",
        )
    return int(text)


def _read_number(parameter: Parameter, text: str) -> float:
    """A number within bounds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not parameter.minimum <= value <= parameter.maximum:
        raise RequestError(
            400,
            f"{parameter.name}: expected a number from {parameter.minimum} to {parameter.maximum}, got {shorten(text)}",
        )
    return value


# -- the OpenAPI document


def openapi(version: str) -> Json:
    """The OpenAPI document of the JSON API.

    Args:
      version: of the package.
    """
    schemas: dict[str, Json] = {}
    values.add_schemas(schemas, values.Problem)
    for resource in RESOURCES:
        values.add_schemas(schemas, resource.value)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "funcppo serve",
            "version": version,
            "description": "Ranked, explained answers over a knowledge graph. "
            "Every request is a GET. Names may be given by their ids. An error is one line.",
        },
        "paths": {f"/api/{r.name}": {"get": _operation(r)} for r in RESOURCES},
        "components": {"schemas": schemas},
    }


def _operation(resource: Resource) -> Json:
    """The operation of a resource."""
    problem = {"$ref": "#/components/schemas/Problem"}
    answer = {"$ref": f"#/components/schemas/{resource.value.__name__}"}
    statuses = {
        "200": ("The answer.", answer),
        "400": ("A parameter is missing or wrong.", problem),
        "404": ("A name or an id is unknown.", problem),
        "503": ("It takes too much work, or others wait.", problem),
    }

    return {
        "operationId": resource.name,
        "summary": resource.summary,
        "parameters": [
            _parameter_document(parameter, field)
            for parameter in resource.parameters
            for field in parameter.fields
        ],
        "responses": {
            status: {
                "description": text,
                "content": {"application/json": {"schema": schema}},
            }
            for status, (text, schema) in statuses.items()
        },
    }


def _parameter_document(parameter: Parameter, field: str) -> Json:
    """A parameter as OpenAPI describes it."""
    kinds = {"integer": "integer", "number": "number", "flag": "boolean"}
    schema: Json = {"type": kinds.get(parameter.kind, "string")}
    summary = parameter.summary
    if field != parameter.name:
        schema = {"type": "integer", "minimum": 1}
        summary = f"Its id, in place of {parameter.name}."
    elif parameter.kind in ("integer", "number"):
        schema |= {"minimum": parameter.minimum, "maximum": parameter.maximum}
    if parameter.choices:
        schema["enum"] = list(parameter.choices)
    if parameter.default is not None and field == parameter.name:
        schema["default"] = parameter.default
    return {
        "name": field,
        "in": "query",
        "description": summary,
        # one of two fields is required where a name may be given by its id
        "required": parameter.required and not parameter.is_name,
        "schema": schema,
    }
