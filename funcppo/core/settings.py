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
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
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

    def expected(self, value: object) -> str | None:
        """Describe the range if a number is outside, NaN included, else None; a value that is no number fits.

        Limits of number formats appear only if they are exceeded.
        """
        if not isinstance(value, Real):
            return None
        number = int(value) if isinstance(value, Integral) else float(value)
        is_excluded = (self.excludes_minimum and number == self.minimum) or (
            self.excludes_maximum and number == self.maximum
        )
        if self.minimum <= number <= self.maximum and not is_excluded:
            return None
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

    def expected(self, value: object) -> str | None:
        """Describe the texts if a text does not match, else None; a value that is no text fits."""
        if isinstance(value, str) and not re.fullmatch(self.expression, value):
            return self.description
        return None


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


def check_kind(value: object, kind: type, expected: str) -> None:
    """Check the class of a value.

    Args:
      expected: the beginning of the error, such as "name: expected a text".

    Raises:
      TypeError: it is of another class.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{expected}, got {type(value).__name__}")


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


def _expected_value(
    annotation: object, value: object, is_kind_enough: bool = False
) -> str | None:
    """Describe what an annotation expects if the value does not fit; None if the value fits.

    Args:
      is_kind_enough: whether a number out of range, or a text of no pattern, fits.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind, *limits = arguments
        expected = _expected_value(kind, value, is_kind_enough)
        known = [x for x in limits if isinstance(x, Range | Pattern)]
        if expected or is_kind_enough:
            return expected
        return next(filter(None, (x.expected(value) for x in known)), None)
    if origin in (Union, types.UnionType):
        members = {
            member: _expected_value(member, value, is_kind_enough)
            for member in arguments
        }
        return _expected_member(members)
    if origin is Literal:
        return _expected_choice(arguments, value)
    if origin is not tuple:
        return _expected_kind(annotation, value)
    if not isinstance(value, tuple | list):
        one = _expected_value(arguments[0], None, is_kind_enough)
        return f"{one}, or several"
    problems = [
        _expected_value(arguments[0], item, is_kind_enough)
        for item in cast(Sequence[object], value)
    ]
    return next(filter(None, problems), None)


def _expected_member(members: dict[object, str | None]) -> str | None:
    """Describe what the members of a union expect, NoneType aside; None if one of them expects nothing else."""
    if None in members.values():
        return None
    members.pop(types.NoneType, None)
    return " or ".join(cast("Iterable[str]", members.values()))


def _expected_choice(choices: tuple[object, ...], value: object) -> str | None:
    """Describe the expected choices if the value is none of them, else None; True is not the choice 1."""
    if any(type(value) is type(x) and value == x for x in choices):
        return None
    texts = ", ".join(map(str, choices))
    return f"one of {texts}" if len(choices) > 1 else texts


def _expected_kind(kind: object, value: object) -> str | None:
    """Describe the expected type if the value is not of it, else None; types unknown to settings fit all values."""
    type_, expected = _KINDS.get(kind, (object, ""))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        type_, expected = kind, f"{article} {kind.__name__}"
    # True is no number.
    is_other = isinstance(value, bool) and kind in (int, float)
    fits = isinstance(value, type_) and not is_other
    return None if fits else expected


# The values that fit a type, and how it is described.
_KINDS: dict[object, tuple[type, str]] = {
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    types.NoneType: (types.NoneType, "none"),
    str: (str, "a text"),
    Path: (Path, "a path"),
    bool: (bool, "true or false"),
}


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
    words = text.replace(",", " ").split()
    tuples = zip(*map(_readings, words)) if words else [()]
    for value in (*_readings(text), *tuples):
        if _expected_value(annotation, value, is_kind_enough=True) is None:
            return value
    expected = _expected_value(annotation, text, is_kind_enough=True)
    raise ValueError(f"expected {expected}, got {shorten(text)}")


def _readings(text: str) -> list[object]:
    """List what a text may stand for: a number, a flag, None, and itself, which comes last."""
    readings: list[object] = []
    # Python also reads digits of other scripts, 1_000, and spaces around.
    is_plain = re.fullmatch(r"[0-9A-Za-z.+-]+", text) is not None
    for kind in (float, int) if is_plain else ():
        try:
            readings.append(kind(text))
        except ValueError:
            readings.append(text)
    word = text.lower()
    is_none = word in ("none", "null")
    named = None if is_none else text
    return [*readings, _FLAGS.get(word, text), named, text, Path(text)]


_FLAGS = {"true": True, "on": True, "false": False, "off": False}


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


def check_resumed(
    stored: Any, given: Any, folder: Path, free: Collection[str]
) -> None:
    """Check that a run is resumed with its own settings, but for those that are free, and with as many steps or more.

    Raises:
      ValueError: another setting was given, or fewer steps.
    """
    changes = [
        f"{name}: expected {old}, got {new}"
        for name, old, new in iter_differences(stored, given)
        if name not in free
    ]
    if changes:
        raise ValueError(
            f"{folder}: a run is resumed with its own settings: {'; '.join(changes)}"
        )
    if (given.steps or 0) < (stored.steps or 0):
        raise ValueError(
            f"{folder}: --steps: expected {stored.steps} or more, to extend the run, got {given.steps}"
        )


def write_config(run_config: Any, folder: Path) -> None:
    """Write a dataclass of settings atomically to config.json in the folder of a run."""
    contents = {files.FORMAT_KEY: files.FORMAT}
    contents |= dataclasses.asdict(run_config)
    text = json.dumps(contents, indent=2) + "\n"
    files.write_file(folder / CONFIG_FILE, text)


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
        # Only what is wrong and where; the rest is advice to programmers.
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        reason = " ".join(str(getattr(error, "problem", error)).split())
        raise ValueError(
            f"{place}: expected YAML of settings, got {reason}"
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
        text = files.read_file(path)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    is_json = path.suffix == ".json"
    parse = files.parse_object if is_json else parse_yaml
    settings = parse(path, text)
    files.check_format(path, settings.pop(files.FORMAT_KEY, files.FORMAT))
    return settings


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
      ValueError: a field is missing, unknown, of another type or out of range.
    """
    fields = dict(raw)
    types = field_types(config_type)
    for name, annotation in types.items():
        if not isinstance(annotation, type) or not is_dataclass(annotation):
            continue
        nested = fields.get(name)
        if not isinstance(nested, dict):
            raise ValueError(
                f"{prefix}{name}: expected an object, got {nested!r}"
            )
        fields[name] = from_json(annotation, nested, f"{prefix}{name}.")

    # A file of another program lacks a nested config, which says more.
    for name in fields:
        _check_name(name, types, prefix)
    for name, parameter in inspect.signature(config_type).parameters.items():
        if parameter.default is parameter.empty and name not in fields:
            raise ValueError(f"{prefix}{name}: expected a value, got none")
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
