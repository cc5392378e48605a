"""How options are declared, parsed and described in --help; one style for all programs.

A program is a frozen dataclass: a field is an option, the docstring below the field is its help. `parse_options` reads
the command line of one program. The configs nested in a program (`--ppo.*`, `--prover.*`) get the same style.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    runtime_checkable,
)

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from funcppo.config import PPOConfig
from funcppo.core.settings import (
    DeviceChoice,
    DeviceName,
    FixedPort,
    PositiveFloat,
    check_fields,
)
from funcppo.kg.graph.config import DataConfig
from funcppo.logs import LoggerName

DatasetArgument: TypeAlias = Annotated[Positional[str], arg(metavar="DATASET")]
TargetArgument: TypeAlias = Annotated[
    Positional[str], arg(metavar="RUN|DATASET")
]
OptionalFile: TypeAlias = Annotated[str | None, arg(metavar="FILE")]
# its options have no prefix
DataOptions: TypeAlias = Annotated[DataConfig, arg(name="")]
JsonOutput: TypeAlias = Annotated[str | None, arg(metavar="FILE|-")]
DeviceOption: TypeAlias = Annotated[DeviceName, arg(metavar="DEVICE")]
AutoDeviceOption: TypeAlias = Annotated[DeviceChoice, arg(metavar="DEVICE")]
ChoiceSeconds: TypeAlias = Annotated[PositiveFloat, arg(metavar="SECONDS")]
MetricsPort: TypeAlias = Annotated[FixedPort | None, arg(metavar="PORT")]
MetricsFile: TypeAlias = Annotated[str | None, arg(metavar="FILE")]
LoggerNames: TypeAlias = Annotated[
    tuple[LoggerName, ...], arg(metavar="{csv,tensorboard,wandb,jsonl}")
]

# of configs; a program that hides options of the program it extends lists them itself
HIDDEN_OPTIONS = {PPOConfig: {"n_updates"}}  # set by --steps
METAVARS = {int: "N", float: "X", str: "NAME", Path: "FILE"}
METAVARS_OF_FIELDS = {
    "columns": "H,R,T",
    "split_ratios": "X,X,X",
    "seconds": "SECONDS",
    "smoothing": "auto|None|X",
    "odds_power": "auto|X",
}
DEFAULT_NAMES = {"True": "on", "False": "off"}


class Program(Protocol):
    """A program with its options."""

    @property
    def json(self) -> str | None:
        """Where the result is written as JSON: a file, - for standard output, None for nowhere."""
        ...

    def run(self) -> int:
        """Run the program and return its exit status."""
        ...


@runtime_checkable
class HasStoredOptions(Protocol):
    """A program that continues earlier work with the options of that."""

    def stored_options(self) -> Self | None:
        """The program with the stored options, for those that the command line leaves out; None for new work."""
        ...


ProgramT = TypeVar("ProgramT", bound=Program)


def parse_options(
    program: type[ProgramT], arguments: Sequence[str], prog: str | None = None
) -> ProgramT:
    """Return a program with the options of a command line, and if it continues earlier work with those stored there.

    Args:
      program: the class of the program; its method `defaults`, if it has one, makes a program with the defaults for a
        command line.
      arguments: the command line without the name of the program.
      prog: the name of the program in --help and in errors.

    Raises:
      SystemExit: after --help, with status 0; after a bad option, whose error is on standard error.
      FieldError: an option is out of range.
      ValueError: what is stored cannot be read.
    """
    defaults: dict[str, Any] = {}
    make_defaults = getattr(program, "defaults", None)
    if make_defaults is not None:
        defaults["default"] = make_defaults(arguments)
    parsed: ProgramT = tyro.cli(
        program,
        prog=prog,
        args=arguments,
        registry=_make_registry(),
        **defaults,
    )
    stored = _stored_options(parsed)
    if stored is not None:
        # A flag that is off by default may be stored as on, and turned off.
        registry = _make_registry(has_all_twins=True)
        parsed = tyro.cli(
            program, default=stored, args=arguments, registry=registry
        )
    check_fields(parsed)
    return parsed


def _stored_options(program: object) -> Any:
    """The program with the options of earlier work that it continues; None if it continues none."""
    if isinstance(program, HasStoredOptions):
        return program.stored_options()
    return None


def _make_registry(has_all_twins: bool = False) -> ConstructorRegistry:
    """The rules of tyro, and one that styles the options of dataclasses.

    Args:
      has_all_twins: flags that are off have a `--no-` twin too.
    """
    registry = ConstructorRegistry()
    active: list[StructTypeInfo] = []

    def style_dataclass(info: StructTypeInfo) -> StructConstructorSpec | None:
        # The nested call must come to tyro's own rule.
        if active or not dataclasses.is_dataclass(info.type):
            return None
        active.append(info)
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            active.pop()

        if not isinstance(spec, StructConstructorSpec):
            return None
        own = getattr(info.type, "HIDDEN_OPTIONS", set())
        hidden = HIDDEN_OPTIONS.get(info.type, own)
        fields = tuple(
            _style_field(field, has_all_twins)
            for field in spec.fields
            if field.name not in hidden
        )
        return dataclasses.replace(spec, fields=fields)

    registry.struct_rule(style_dataclass)
    return registry


def _style_field(
    field: StructFieldSpec, has_all_twins: bool
) -> StructFieldSpec:
    """A field with a uniform metavar, a help text without line breaks, and no `--no-` twin of a flag that is off."""
    describe = _one_line(field.helptext)
    settings = [
        arg(
            metavar=METAVARS_OF_FIELDS.get(field.name, _metavar(field.type)),
            help_behavior_hint=_default_hint(describe),
        )
    ]
    if field.default is False and not has_all_twins:
        settings.append(FlagCreatePairsOff)
    styled_type = Annotated[(field.type, *settings)]  # pyright: ignore[reportInvalidTypeForm]
    return dataclasses.replace(field, type=styled_type, helptext=describe)


def _one_line(
    helptext: str | Callable[[], str | None] | None,
) -> Callable[[], str | None]:
    """The help text of a field on one line: the docstring below a field has the line breaks of the source."""

    def describe() -> str | None:
        text = helptext() if callable(helptext) else helptext
        return None if text is None else " ".join(text.split())

    return describe


def _default_hint(describe: Callable[[], str | None]) -> Callable[[str], str]:
    """A function from the text of a default to what --help says of it: nothing, where the help text says it."""

    def hint(default: str) -> str:
        if re.search(r"Default|\(required", describe() or ""):
            return ""
        if not default:  # of arguments of which there may be several
            return "(required)"
        return f"(default: {DEFAULT_NAMES.get(default, default)})"

    return hint


def _metavar(annotation: object) -> str | None:
    """The metavar of a type, None where an annotation or tyro gives one."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        metavars = [
            value.metavar
            for value in metadata
            if getattr(value, "metavar", None)
        ]
        return metavars[-1] if metavars else _metavar(inner)
    if get_origin(annotation) in (Union, types.UnionType):
        members = [
            member
            for member in get_args(annotation)
            if member is not type(None)
        ]
        return _metavar(members[0]) if len(members) == 1 else None
    return METAVARS.get(annotation) if isinstance(annotation, type) else None
