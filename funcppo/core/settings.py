"""Settings: their ranges, declared in the types of fields, and their files, config.json and YAML.

    @dataclass(frozen=True)
    class Config:
        n_envs: Size = 4
        gamma: UnitInterval = 0.99

        def __post_init__(self) -> None:
            check_fields(self)

`check_fields` compares each field with its annotation: kind of value, choices and range. NaN and infinity are in no
range. This module imports no PyTorch, so that the command line's help does without it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from funcppo.core import files
from funcppo.core.files import Json, shorten

ConfigT = TypeVar("ConfigT")
Fn = TypeVar("Fn", bound=Callable[..., object])

# Files in the folder of a run.
CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"

INT32_MAX = 2**31 - 1
MAX_PORT = 65_535
INT64_MAX = 2**63 - 1
FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
MAX_SHOWN_CHARACTERS = 40  # of a value in an error


@dataclass(frozen=True, slots=True)
class Range:
    """Range of numbers from a minimum to a maximum, both included unless stated otherwise."""

    minimum: float
    maximum: float
    excludes_minimum: bool = False
    excludes_maximum: bool = False

    def contains(self, number: float) -> bool:
        """Return whether a number is in the range; false for NaN."""
        is_excluded = (self.excludes_minimum and number == self.minimum) or (
            self.excludes_maximum and number == self.maximum
        )
        return self.minimum <= number <= self.maximum and not is_excluded

    def describe(self, number: float) -> str:
        """Describe the range in words for a number outside; limits of number formats appear only if exceeded."""
        minimum, maximum = (
            str(bound) if isinstance(bound, int) else f"{bound:g}"
            for bound in (self.minimum, self.maximum)
        )
        if self.maximum < INT32_MAX:
            below = "below " if self.excludes_maximum else ""
            return f"{minimum} to {below}{maximum}"
        if number > self.maximum:
            return f"at most {maximum}"
        is_open = self.excludes_minimum
        return f"more than {minimum}" if is_open else f"{minimum} or more"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Pattern that matches texts by a regular expression as a whole."""

    expression: str
    description: str  # for an error


# Sizes of tensors and counts that are multiplied.
Size: TypeAlias = Annotated[int, Range(1, INT32_MAX)]
FixedPort: TypeAlias = Annotated[int, Range(1, MAX_PORT)]
PositiveInt: TypeAlias = Annotated[int, Range(1, INT64_MAX)]
NonNegativeInt: TypeAlias = Annotated[int, Range(0, INT64_MAX)]
Port: TypeAlias = Annotated[int, Range(0, MAX_PORT)]  # 0: any that is free
# A seed is taken modulo 2**64.
Seed: TypeAlias = Annotated[int, Range(-INT64_MAX - 1, INT64_MAX)]
PositiveFloat: TypeAlias = Annotated[
    float, Range(0.0, FLOAT32_MAX, excludes_minimum=True)
]
NonNegativeFloat: TypeAlias = Annotated[float, Range(0.0, FLOAT32_MAX)]
FiniteFloat: TypeAlias = Annotated[float, Range(-FLOAT32_MAX, FLOAT32_MAX)]
UnitInterval: TypeAlias = Annotated[float, Range(0.0, 1.0)]
# Of the logarithm of a standard deviation.
LogStd: TypeAlias = Annotated[float, Range(-20.0, 2.0)]
Share: TypeAlias = Annotated[float, Range(0.0, 1.0, excludes_minimum=True)]
# Of an exponential moving average, which does not forget at 1.
DecayRate: TypeAlias = Annotated[float, Range(0.0, 1.0, excludes_maximum=True)]


DeviceName: TypeAlias = Annotated[
    str, Pattern(r"cpu|cuda(:\d{1,3})?", "cpu, cuda or cuda:N")
]

DeviceChoice: TypeAlias = Annotated[
    str, Pattern(r"auto|cpu|cuda(:\d{1,3})?", "auto, cpu, cuda or cuda:N")
]


def is_cuda(device: str) -> bool:
    """Return whether a device name is that of a GPU."""
    return device.partition(":")[0] == "cuda"


class FieldError(ValueError):
    """Error for a field with a value of the wrong kind or out of range.

    Attributes:
      field: name of the field.
      problem: what was expected, and the value.
    """

    def __init__(self, field: str, expected: str, value: object) -> None:
        self.field = field
        self.problem = f"expected {expected}, got {_show(value)}"
        super().__init__(f"{field}: {self.problem}")


def check_fields(config: object) -> None:
    """Check every field of a dataclass against its annotation.

    What is checked: numbers, with the `Range` of the annotation, texts, flags, choices (`Literal`), dataclasses, tuples
    and unions of these.

    Raises:
      FieldError: a value does not fit; the message names the field, what was expected, and the value.
    """
    for field, annotation in field_types(type(config)).items():
        check_value(field, annotation, getattr(config, field))


def check_value(field: str, annotation: object, value: object) -> None:
    """Check a value against an annotation.

    Raises:
      FieldError: the value does not fit.
    """
    expected = _expected_value(annotation, value)
    if expected is not None:
        raise FieldError(field, expected, value)


def checks_arguments(fn: Fn) -> Fn:
    """Return the function so that each call checks its arguments against their annotations first.

    Raises:
      FieldError: of a call, an argument that does not fit, as `check_value`.
    """
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def call(*args: object, **options: object) -> object:
        hints = get_type_hints(fn, include_extras=True)
        for name, value in signature.bind(*args, **options).arguments.items():
            if (
                signature.parameters[name].kind
                is not inspect.Parameter.VAR_KEYWORD
            ):
                check_value(name, hints.get(name, object), value)
        return fn(*args, **options)

    return cast(Fn, call)


@functools.cache
def field_types(config_type: type) -> dict[str, object]:
    """Return the annotation of each field of a dataclass, with its metadata."""
    hints = get_type_hints(config_type, include_extras=True)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(config_type)
    }


def _expected_value(annotation: object, value: object) -> str | None:
    """Describe what an annotation expects if the value does not fit; None if the value fits."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind, *metadata = arguments
        ranges = [item for item in metadata if isinstance(item, Range)]
        patterns = [item for item in metadata if isinstance(item, Pattern)]
        return (
            _expected_value(kind, value)
            or _expected_range(ranges, value)
            or _expected_pattern(patterns, value)
        )

    if origin in (Union, types.UnionType):
        return _expected_of_union(arguments, value)
    if origin is Literal:
        return _expected_choice(arguments, value)
    if origin is tuple and not isinstance(value, tuple | list):
        return "a tuple"
    if origin is tuple:
        problems = [
            _expected_value(arguments[0], item)
            for item in cast(Sequence[object], value)
        ]
        return next(filter(None, problems), None)
    return _expected_kind(annotation, value)


def _expected_choice(choices: tuple[object, ...], value: object) -> str | None:
    """Describe the expected choices if the value is none of them, else None; True is not the choice 1."""
    if any(type(value) is type(c) and value == c for c in choices):
        return None
    texts = ", ".join(map(str, choices))
    return f"one of {texts}" if len(choices) > 1 else texts


def _expected_range(ranges: list[Range], value: object) -> str | None:
    """Describe the expected range if a number is outside, else None; a value that is no number fits."""
    if not isinstance(value, Real):
        return None
    number = int(value) if isinstance(value, Integral) else float(value)
    for range_ in ranges:
        if not range_.contains(number):
            return range_.describe(number)
    return None


def _expected_pattern(patterns: list[Pattern], value: object) -> str | None:
    """Describe the expected text if a text does not match, else None; a value that is no text fits."""
    for pattern in patterns:
        if isinstance(value, str) and not re.fullmatch(
            pattern.expression, value
        ):
            return pattern.description
    return None


def _expected_of_union(
    members: tuple[object, ...], value: object
) -> str | None:
    """Describe the expected members if the value fits none of them, else None; NoneType is not listed."""
    expected: list[str] = []
    for member in members:
        text = _expected_value(member, value)
        if text is None:
            return None
        if member is not types.NoneType:
            expected.append(text)
    return " or ".join(expected)


def _expected_kind(kind: object, value: object) -> str | None:
    """Describe the expected type if the value is not of it, else None; types unknown to settings fit all values."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if kind is int:
        fits = is_number and isinstance(value, Integral)
        return None if fits else "an integer"
    if kind is float:
        return None if is_number else "a number"
    if kind is types.NoneType:
        return None if value is None else "none"
    if kind is str:
        return None if isinstance(value, str) else "a text"
    if kind is Path:
        return None if isinstance(value, Path) else "a path"
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        return None if isinstance(value, kind) else f"{article} {kind.__name__}"
    return None


def _show(value: object) -> str:
    """Format a value for an error; integers beyond int64 by their bits, as Python may refuse to print them."""
    if isinstance(value, int) and abs(value) > INT64_MAX:
        return f"a number of {value.bit_length()} bits"
    text = str(value) if isinstance(value, float) else repr(value)
    is_long = len(text) > MAX_SHOWN_CHARACTERS
    return text[:MAX_SHOWN_CHARACTERS] + "..." if is_long else text


def parse_value(annotation: object, text: str) -> object:
    """Parse the text of a setting, such as an option's, by the setting's annotation.

    None stands for itself, on, off, true and false for flags, words with spaces or commas between them for a tuple.

    Raises:
      ValueError: no value of that type has this text.
    """
    found = _parse_text(annotation, text)
    if found is _NO_VALUE:
        raise ValueError(
            f"expected {_describe_type(annotation)}, got {shorten(text)}"
        )
    return found


_NO_VALUE = object()
_FLAGS = {"true": True, "on": True, "false": False, "off": False}


def _parse_text(annotation: object, text: str) -> object:
    """Parse a text like `parse_value`; return `_NO_VALUE` if it does not fit."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _parse_text(arguments[0], text)
    if origin is Literal:
        return next((x for x in arguments if str(x) == text), _NO_VALUE)
    if origin in (Union, types.UnionType):
        # A text fits every name, so names come last.
        members = sorted(arguments, key=lambda member: member is str)
        found = (_parse_text(member, text) for member in members)
        return next((x for x in found if x is not _NO_VALUE), _NO_VALUE)
    if origin is tuple:
        words = text.replace(",", " ").split()
        values = tuple(_parse_text(arguments[0], word) for word in words)
        return _NO_VALUE if _NO_VALUE in values else values
    if annotation is types.NoneType:
        return None if text.lower() in ("none", "null") else _NO_VALUE
    if annotation is bool:
        return _FLAGS.get(text.lower(), _NO_VALUE)
    try:
        return cast(type, annotation)(text)
    except ValueError:
        return _NO_VALUE


def _describe_type(annotation: object) -> str:
    """Describe in words the texts that a type accepts."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe_type(arguments[0])
    if origin is Literal:
        names = ", ".join(map(str, arguments))
        return f"one of {names}" if len(arguments) > 1 else names
    if origin in (Union, types.UnionType):
        return " or ".join(map(_describe_type, arguments))
    if origin is tuple:
        return f"{_describe_type(arguments[0])}, or several"
    names = {int: "a whole number", float: "a number", bool: "on or off"}
    names |= {types.NoneType: "none"}
    return names.get(cast(type, annotation), "a text")


def iter_differences(
    old: object, new: object, prefix: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield the path of each field in which two configs of one type differ, such as "ppo.gamma", and both values."""
    for name in field_types(type(old)):
        old_value, new_value = getattr(old, name), getattr(new, name)
        if is_dataclass(old_value):
            yield from iter_differences(
                old_value, new_value, f"{prefix}{name}."
            )
        elif old_value != new_value:
            yield f"{prefix}{name}", old_value, new_value


def write_config(run_config: Any, folder: Path) -> None:
    """Write a dataclass of settings atomically to config.json in the folder of a run."""
    contents = {files.FORMAT_KEY: files.FORMAT}
    contents |= dataclasses.asdict(run_config)
    text = json.dumps(contents, indent=2) + "\n"
    files.write_atomically(
        folder / CONFIG_FILE, lambda file: file.write(text.encode())
    )


def parse_yaml(path: Path, text: bytes) -> Json:
    """Parse the mapping of a YAML file; an empty file has no settings.

    Raises:
      ValueError: it is not valid, or not a mapping.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        value = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path}: expected YAML of settings, got {reason}"
        ) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(
            f"{path}: expected settings such as `steps: 2000`, got {value!r:.60}"
        )
    return dict(value)


def read_mapping(path: Path) -> Json:
    """Read the settings of a file by name: JSON if its name ends in .json, YAML (1.2) otherwise.

    Raises:
      ValueError: the file is missing, no mapping, or of a newer format.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    is_json = path.suffix == ".json"
    parse = files.parse_object if is_json else parse_yaml
    settings = parse(path, text)
    files.check_format(path, settings.pop(files.FORMAT_KEY, files.FORMAT))
    return settings


def merge_settings(base: Json, given: Json, prefix: str) -> Json:
    """Replace some settings by name, in nested configs one by one; return the merged settings.

    Raises:
      ValueError: a name is unknown.
    """
    merged = dict(base)
    for name, value in given.items():
        _check_name(name, base, prefix)
        is_group = isinstance(base[name], dict) and isinstance(value, dict)
        merged[name] = (
            merge_settings(base[name], value, f"{prefix}{name}.")
            if is_group
            else value
        )
    return merged


def _check_name(name: str, settings: Json, prefix: str) -> None:
    """Raise ValueError for the name of no setting, with the name that may be meant.

    Raises:
      ValueError: the name is unknown.
    """
    if name not in settings:
        known = {option: f"{prefix}{option}" for option in settings}
        for group, nested in settings.items():
            for option in nested if isinstance(nested, dict) else ():
                path = f"{group}.{option}"
                known[path] = f"{prefix}{path}"
        hint = did_you_mean(str(name), known)
        raise ValueError(
            f"{prefix}{name}: expected the name of a setting, got an unknown one{hint}"
        )


def did_you_mean(name: str, known: Mapping[str, str]) -> str:
    """Format the known name that an unknown one may mean, as part of an error; empty if none is similar.

    Args:
      name: also the last part of a known name, such as gamma of ppo.gamma, is compared.
      known: by the spelling of each name, what the error says.
    """
    by_part = {x.rpartition(".")[2].strip("-"): x for x in known}
    by_part |= {x: x for x in known}
    for word in (name, name.rpartition(".")[2].strip("-")):
        for close in difflib.get_close_matches(word, by_part, n=1):
            return f" (did you mean {known[by_part[close]]}?)"
    return ""


def from_json(config_type: type[ConfigT], raw: Json, prefix: str) -> ConfigT:
    """Build a config from its JSON object; nested configs are objects too.

    Args:
      prefix: the fields that lead to the config, such as "ppo.adam.", for errors.

    Raises:
      KeyError: a nested config is missing.
      ValueError: a field is missing, unknown, of another type or out of range.
    """
    fields = dict(raw)
    types = field_types(config_type)
    for name, annotation in types.items():
        if not isinstance(annotation, type) or not is_dataclass(annotation):
            continue
        nested = fields[name]
        if not isinstance(nested, dict):
            raise ValueError(
                f"{prefix}{name}: expected an object, got {nested!r}"
            )
        fields[name] = from_json(annotation, nested, f"{prefix}{name}.")

    # A file of another program lacks a nested config, which says more.
    for name in fields:
        _check_name(name, types, prefix)
    try:
        return config_type(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{prefix}{error}") from None


_MARK = "reads_no_scalar_fields"


def reads_scalars_apart(fn: Fn) -> Fn:
    """Mark a function whose code does not depend on the fields that the settings' `without_scalars` resets."""
    setattr(fn, _MARK, fn)
    return fn


def as_compiled(
    fn: Callable[..., object], args: tuple[Any, ...]
) -> tuple[object, ...]:
    """Return a call's arguments without the scalars on which compiled code of a marked function does not depend.

    Nothing is left out unless the function, or all that it is a partial application of, is marked by
    `reads_scalars_apart`: compiled code of such a function serves all values of these fields.
    """
    if not _is_marked(fn):
        return args
    return tuple(
        x.without_scalars() if hasattr(x, "without_scalars") else x
        for x in args
    )


def _is_marked(fn: Any) -> bool:
    if isinstance(fn, functools.partial):
        values = (*fn.args, *fn.keywords.values())
        return all(map(_is_marked, (fn.func, *filter(callable, values))))
    # A wrapper has the attributes of what it wraps, and may read more.
    return getattr(fn, _MARK, None) is fn
