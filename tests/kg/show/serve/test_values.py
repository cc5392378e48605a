"""The JSON Schema of the values, and what the explorer answers against it."""

from __future__ import annotations

from funcppo.kg.show.serve import values


def problems(value, schema, schemas, place="$"):
    """Where a JSON value does not fit a schema; the subset of JSON Schema that the API uses."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        found = [problems(value, s, schemas, place) for s in schema["anyOf"]]
        return [] if [] in found else found[0]
    kinds = {
        "integer": int, "number": (int, float), "string": str,
        "boolean": bool, "null": type(None), "array": list, "object": dict,
    }  # fmt: skip
    kind = kinds[schema["type"]]
    is_flag_as_number = isinstance(value, bool) and kind is not bool
    if not isinstance(value, kind) or is_flag_as_number:
        return [f"{place}: expected {schema['type']}, got {value!r}"]
    found = []
    if isinstance(value, list):
        for i, item in enumerate(value):
            found += problems(item, schema["items"], schemas, f"{place}[{i}]")
    if isinstance(value, dict):
        fields = schema.get("properties", {})
        others = schema.get("additionalProperties")
        for name in schema.get("required", []):
            found += [] if name in value else [f"{place}: no {name}"]
        for name, item in value.items():
            below = fields.get(name, others)
            where = f"{place}.{name}"
            found += (
                problems(item, below, schemas, where)
                if below
                else [f"{where}: not described"]
            )
    return found


def test_a_schema_has_every_kind_of_field():
    schemas = {}
    values.add_schemas(schemas, values.Proof)
    assert set(schemas) == {"Proof", "ProofNode"}
    node = schemas["ProofNode"]["properties"]
    assert node["goal"] == {"type": "array", "items": {"type": "integer"}}
    assert node["rule"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    names = schemas["Proof"]["properties"]["constants"]
    assert names["additionalProperties"] == {"type": "string"}


def test_the_check_of_values_sees_what_does_not_fit():
    schemas = {}
    values.add_schemas(schemas, values.NameMatches)
    ref = {"$ref": "#/components/schemas/NameMatches"}
    good = {"query": "a", "names": [], "has_more": False}
    assert problems(good, ref, schemas) == []
    name = {"kind": "entity", "id": "1", "name": "a", "text": "a"}
    assert problems({**good, "names": [name]}, ref, schemas)
    assert problems({**good, "has_more": 1}, ref, schemas)
    assert problems({**good, "more": 1}, ref, schemas)
    assert problems({"query": "a", "names": []}, ref, schemas)
