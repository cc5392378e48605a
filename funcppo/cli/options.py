"""Options of programs: how they are declared, parsed and described in --help.

A program is a frozen dataclass: a field is an option, the docstring below the field is its help. A field that is a
dataclass holds settings: those that it shows are options too, all others are set by `--set group.name=value`, with
the names of config.json, and `--help-all` lists them.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NoReturn,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

from funcppo.cli.common import exit_with_error, set_threads, write_output
from funcppo.cli.console import make_console, show_status
from funcppo.core.files import shorten
from funcppo.core.settings import (
    CONFIG_FILE,
    METRICS_FILE,
    DeviceName,
    FieldError,
    FixedPort,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Size,
    check_field,
    check_fields,
    field_types,
    parse_value,
)
from funcppo.kg.graph.config import DEFAULT_CONFIG, DataConfig
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import is_stored_graph, load
from funcppo.kg.run.config import (
    CHOICE_SECONDS,
    RESULTS_FILE,
    RUN_FILES,
    read_config,
)
from funcppo.logs import LoggerName

if TYPE_CHECKING:
    from funcppo.kg.logic.fixpoint import StepCallback

# Files of a data set in a folder, in any format.
_DATA_FILE = re.compile(r"(train|valid|test|facts|rules)\.")
# Fields that are no options but arguments, in all programs.
ARGUMENTS = {
    "dataset": "DATASET",
    "target": "RUN|DATASET",
    "query": "QUERY",
    "runs": "RUN...",
    "env": "ENV",
}
METAVARS_OF_FIELDS = {
    "rules": "FILE",
    "seconds": "SECONDS",
    "device": "DEVICE",
    "columns": "H,R,T",
    "split_ratios": "X,X,X",
}
METAVARS = {int: "N", float: "X", str: "NAME", Path: "FILE"}
# What a program sets itself, by other options.
EXCLUDED = ("n_updates", "source")
DEFAULT_NAMES = {True: "on", False: "off"}
HELP_COLUMN = 26  # of the texts
HELP = ("-h", "--help", "--help-all")


@dataclass(frozen=True)
class Opt:
    """How a field is an option: what stands for its value, or the names of settings that are shown.

    Attributes:
      metavar: what stands for the value in --help; by the type if empty.
      shown: of a field of settings.
      is_hidden: it is set by --set alone.
      short: another name, such as -v.
    """

    metavar: str = ""
    shown: tuple[str, ...] = ()
    is_hidden: bool = False
    short: str = ""


HIDDEN = Opt(is_hidden=True)

OptionalFile: TypeAlias = Annotated[str | None, Opt("FILE")]
JsonOutput: TypeAlias = Annotated[str | None, Opt("FILE|-")]
MetricsPort: TypeAlias = Annotated[FixedPort | None, Opt("PORT")]
LoggerNames: TypeAlias = Annotated[
    tuple[LoggerName, ...], Opt("csv|tensorboard|wandb")
]
MemoryOption: TypeAlias = Annotated[str | None, Opt("BYTES")]
CacheFolder: TypeAlias = Annotated[Path | None, Opt("DIR")]
CudaGraphs: TypeAlias = Annotated[
    Literal["auto", "off", "trees", "manual"], Opt("{auto,off,manual}")
]
DataOptions: TypeAlias = Annotated[
    DataConfig, Opt(shown=("columns", "split_ratios"))
]


class Program(Protocol):
    """A program with its options."""

    @property
    def json(self) -> str | None:
        """Where the result is written as JSON: a file, - for standard output, None for nowhere."""
        ...

    def run(self) -> int:
        """Run the program and return its exit status."""
        ...


ProgramT = TypeVar("ProgramT", bound=Program)


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What a program works on: a trained run, or a data set."""

    target: str
    """Folder of a training run, or a data set: an embedded name (countries_s1, countries_s2, countries_s3,
    family_tree:PEOPLE:SEED, clans:PEOPLE:SEED), pykeen:NAME, a folder with train.txt, a file of triples (.txt, .tsv,
    .csv, .nt or .parquet), or a Prolog program FILE.pl."""
    rules: OptionalFile = None
    """Rule file to use instead of the data set's own rules (data sets only). Default: the data set's rules."""
    data: DataOptions = DEFAULT_CONFIG
    """How files of triples are read and split."""
    threads: Annotated[PositiveInt | None, HIDDEN] = None
    """Number of CPU threads of an operation. Default: as many as the run was trained with; 1 for a data set."""
    json: JsonOutput = None
    """Write the result as JSON to FILE; - writes it to standard output in place of the text. Default: no JSON."""


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(TargetOptions):
    """By what a program scores candidates, and where."""

    score: str = "auto"
    """Score of a candidate, as --score of `funcppo evaluate`. Default: auto, that of the run's policy or its rule
    score, whichever ranks valid better; for a data set the one that ranks its valid split best."""
    height: Size | None = None
    """Maximum height of a proof: rule applications on one branch (data sets only). Default: chosen on the valid
    split."""
    device: DeviceName = "cpu"
    """Device to score on: cpu, cuda, or cuda:N for GPU number N."""
    smoothing: Annotated[NonNegativeFloat | Literal["auto"] | None, HIDDEN] = (
        "auto"
    )
    """Pseudo-count of wrong predictions added to each rule's leave-one-out body count (data sets only); None: plain
    counts, without leave-one-out. Default: auto, chosen on the valid split."""
    object_identity: Annotated[bool | Literal["auto"], HIDDEN] = "auto"
    """Bind the variables of a rule to different constants, none of which the rule names (object identity, as AnyBURL
    counts; data sets only). Default: auto, chosen on the valid split."""
    choice_seconds: Annotated[PositiveFloat, HIDDEN] = CHOICE_SECONDS
    """Time limit of choosing these settings and the score, in seconds (data sets only). What it leaves out is noted."""
    cuda_graphs: Annotated[CudaGraphs, HIDDEN] = "auto"
    """Replay the search of a policy as CUDA graphs on a GPU. auto: where they can be recorded; off: never, to rule them
    out; manual: always, and it is an error where one cannot be recorded; trees: those that PyTorch records of compiled
    functions, to compare with."""


@dataclass(frozen=True)
class Setting:
    """A field that the command line can set.

    Attributes:
      path: fields that lead from the program to it.
      name: of --set, such as ppo.gamma.
      owner: the dataclass that has the field.
      default: its value where nothing sets it; `dataclasses.MISSING` for none.
      opt: how it is shown; None if it is set by --set alone.
    """

    path: tuple[str, ...]
    name: str
    owner: type
    default: object
    opt: Opt | None

    @property
    def field(self) -> str:
        """The name of the field."""
        return self.path[-1]

    @property
    def annotation(self) -> object:
        """The type of its values."""
        return field_types(self.owner)[self.field]

    @property
    def option(self) -> str:
        """How the command line names it: --split-ratios for data.split_ratios, or --set with its name."""
        if self.opt is None:
            return f"--set {self.name}"
        argument = ARGUMENTS.get(self.field)
        return argument or "--" + self.field.replace("_", "-")

    @property
    def is_flag(self) -> bool:
        """Whether its option takes no value."""
        return self.opt is not None and _plain_type(self.annotation) is bool

    @property
    def metavar(self) -> str:
        """What stands for its value in --help."""
        if self.field in ARGUMENTS:
            return ARGUMENTS[self.field]
        if self.opt is not None and self.opt.metavar:
            return self.opt.metavar
        named = METAVARS_OF_FIELDS.get(self.field)
        return named or _metavar(self.annotation)

    def parse(self, text: str) -> object:
        """The value that a text of the command line stands for.

        Raises:
          ValueError: it has none, or one out of range; the message names the option.
        """
        try:
            value = parse_value(self.annotation, text)
            check_field(self.owner, self.field, value)
        except FieldError as error:
            raise ValueError(f"{self.option}: {error.problem}") from None
        except ValueError as error:
            raise ValueError(f"{self.option}: {error}") from None
        return value


def _plain_type(annotation: object) -> object:
    """An annotation without metadata."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _opt_of(annotation: object) -> Opt | None:
    """How an annotation says that a field is shown."""
    found = [x for x in get_args(annotation)[1:] if isinstance(x, Opt)]
    return found[-1] if found else None


def _metavar(annotation: object) -> str:
    """What stands for a value of a type."""
    kind = _plain_type(annotation)
    members = [x for x in get_args(kind) if x is not type(None)]
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, members)) + "}"
    if get_origin(kind) is tuple:
        return f"{_metavar(members[0])}..."
    if members:
        names = [_metavar(member).strip("{}") for member in members]
        return "|".join(names).replace(",", "|")
    if kind is bool:
        return "on|off"
    return METAVARS.get(kind, "TEXT") if isinstance(kind, type) else "TEXT"


@functools.cache
def settings_of(program: type) -> tuple[Setting, ...]:
    """All settings of a program, in the order of its fields."""
    return tuple(_iter_settings(program, None, (), "", None))


def _iter_settings(
    owner: type,
    defaults: object,
    path: tuple[str, ...],
    prefix: str,
    shown: tuple[str, ...] | None,
) -> Iterator[Setting]:
    """Yield the settings of a dataclass.

    Args:
      defaults: an object of it; None for the defaults of its fields.
      path: fields that lead to it.
      prefix: of the names of its settings, such as "ppo.".
      shown: which are options; None for all that are not hidden.
    """
    annotations = field_types(owner)
    for field in dataclasses.fields(owner):
        name, annotation = field.name, annotations[field.name]
        if name in EXCLUDED:
            continue
        default = field.default
        if defaults is not None:
            default = getattr(defaults, name)
        opt, kind = _opt_of(annotation), _plain_type(annotation)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            # Those of a run have the names of its config.json.
            group = "" if name == "settings" else f"{prefix}{name}."
            of_group = [
                path.removeprefix(f"{name}.")
                for path in shown or ()
                if path.startswith(f"{name}.")
            ]
            of_group += opt.shown if opt else ()
            yield from _iter_settings(
                kind, default, (*path, name), group, tuple(of_group)
            )
            continue
        is_shown = name in shown if shown is not None else True
        if opt is not None and opt.is_hidden:
            is_shown = False
        yield Setting(
            path=(*path, name),
            name=f"{prefix}{name}",
            owner=owner,
            default=default,
            opt=(opt or Opt()) if is_shown else None,
        )


# -- the command line


def parse_options(
    program: type[ProgramT], arguments: Sequence[str], prog: str = "funcppo"
) -> ProgramT:
    """Return a program with the options of a command line.

    Args:
      program: the class of the program. Its class method `stored_settings`, if it has one, returns the settings that
        the options on the command line are applied to, such as those of a run to resume; it receives what these are by
        name.
      prog: the name of the program in --help.

    Raises:
      SystemExit: after --help, with status 0.
      ValueError: an option is unknown, missing, of another type or out of range; the message names it.
    """
    if set(HELP) & set(arguments):
        has_all = "--help-all" in arguments
        words = [word for word in arguments if word not in HELP]
        write_output(describe(program, prog, words, has_all) + "\n")
        raise SystemExit(0)
    settings = settings_of(program)
    given = _read_arguments(settings, arguments)
    stored = _stored_settings(program, given)
    values = _base_values(settings, stored)
    values |= {setting.path: value for setting, value in given.items()}

    missing = [s for s in settings if values[s.path] is dataclasses.MISSING]
    if missing:
        raise ValueError(
            f"{missing[0].option}: expected a value, got none (see --help)"
        )
    base = program if stored is None else _WithSettings(program, stored)
    options = _build(program, values, (), settings, base)
    check_fields(options)
    return options


class _WithSettings:
    """The defaults of a program, but for its settings."""

    def __init__(self, program: type, settings: object) -> None:
        self._program = program
        self.settings = settings

    def __getattr__(self, name: str) -> object:
        """The default of another field."""
        return getattr(self._program, name)


def _base_values(
    settings: Sequence[Setting], stored: object
) -> dict[tuple[str, ...], object]:
    """The value of each setting before the command line: the stored one, or its default."""
    values: dict[tuple[str, ...], object] = {}
    for setting in settings:
        value = setting.default
        if stored is not None and setting.path[0] == "settings":
            value = functools.reduce(getattr, setting.path[1:], stored)
        values[setting.path] = value
    return values


def _stored_settings(
    program: type, given: Mapping[Setting, object]
) -> object | None:
    """The settings that options are applied to, if a program has such; see `parse_options`."""
    stored_settings = getattr(program, "stored_settings", None)
    if stored_settings is None:
        return None
    return stored_settings({s.name: value for s, value in given.items()})


def _build(
    owner: type[Any],
    values: Mapping[tuple[str, ...], object],
    path: tuple[str, ...],
    settings: Sequence[Setting],
    base: object,
) -> Any:
    """A dataclass with the values of its fields.

    Args:
      base: has the values of fields that no option sets.

    Raises:
      ValueError: values do not fit each other; the message names the option.
    """
    fields: dict[str, Any] = {}
    for name, annotation in field_types(owner).items():
        kind = _plain_type(annotation)
        here = (*path, name)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            fields[name] = _build(
                kind, values, here, settings, getattr(base, name)
            )
        else:
            fields[name] = (
                values[here] if here in values else getattr(base, name)
            )
    try:
        return owner(**fields)
    except ValueError as error:
        # It begins with the field.
        field, _, problem = str(error).partition(": ")
        options = [s.option for s in settings if s.path == (*path, field)]
        if not options:
            raise
        raise ValueError(f"{options[0]}: {problem}") from None


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        message = message.removeprefix("argument ")
        message = message.replace("one argument", "a value, got none")
        exit_with_error(f"{message} (see --help)")


def _make_parser(settings: Sequence[Setting]) -> _Parser:
    """A parser of the options and arguments that are shown."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for setting in settings:
        if setting.opt is None:
            continue
        has_several = get_origin(_plain_type(setting.annotation)) is tuple
        names = [setting.option, setting.opt.short or setting.option]
        if setting.field in ARGUMENTS:
            count = "*" if has_several else "?"
            parser.add_argument(setting.name, nargs=count)
        elif setting.is_flag:
            action: Any = "store_true"
            if setting.default is True:
                action = argparse.BooleanOptionalAction
            parser.add_argument(
                *dict.fromkeys(names),
                dest=setting.name,
                action=action,
                default=None,
            )
        else:
            count = "+" if has_several else None
            parser.add_argument(setting.option, dest=setting.name, nargs=count)
    parser.add_argument("--set", action="append", default=[], dest="--set")
    return parser


def _read_arguments(
    settings: Sequence[Setting], arguments: Sequence[str]
) -> dict[Setting, object]:
    """The settings that a command line gives, with their values."""
    parser = _make_parser(settings)
    found, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        raise ValueError(_describe_unknown(unknown, settings))

    given: dict[Setting, object] = {}
    for assignment in vars(found).pop("--set"):
        setting, text = _read_assignment(assignment, settings)
        given[setting] = setting.parse(text)
    for setting in settings:
        value = getattr(found, setting.name, None)
        if value is None or value == []:
            continue
        if isinstance(value, bool) or setting.metavar == ARGUMENTS["runs"]:
            given[setting] = tuple(value) if isinstance(value, list) else value
            continue
        text = " ".join(value) if isinstance(value, list) else value
        given[setting] = setting.parse(text)
    return given


def _read_assignment(
    assignment: str, settings: Sequence[Setting]
) -> tuple[Setting, str]:
    """The setting and the text of `--set name=value`.

    Raises:
      ValueError: there is no such setting, or no value.
    """
    name, equals, text = assignment.partition("=")
    name = name.strip().replace("-", "_")
    by_name = {s.name: s for s in settings if s.field not in ARGUMENTS}
    if name not in by_name:
        hint = _did_you_mean(name, by_name)
        raise ValueError(
            f"--set {shorten(assignment)}: expected the name of a setting, got an unknown one{hint} (see --help-all)"
        )
    if not equals:
        raise ValueError(f"--set {name}: expected {name}=VALUE, got no value")
    return by_name[name], text.strip()


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that an unknown one may mean, as a part of an error; empty if none is like it."""
    by_last = {path.rpartition(".")[2]: path for path in known}
    close = difflib.get_close_matches(name, known, n=1)
    if not close:
        last = name.rpartition(".")[2]
        close = difflib.get_close_matches(last, by_last, n=1)
        close = [by_last[found] for found in close]
    return f" (did you mean {close[0]}?)" if close else ""


def _describe_unknown(
    unknown: Sequence[str], settings: Sequence[Setting]
) -> str:
    """The error of words that are no options: what sets such a setting, or the option that a word may mean."""
    word, _, value = unknown[0].partition("=")
    if not word.startswith("--"):
        return f"expected an option, got {shorten(unknown[0])} (see --help)"
    name = word[2:].replace("-", "_")
    by_name = {setting.name: setting for setting in settings}
    is_flag = name.rpartition(".")[2].startswith("no_")
    plain = name.replace("no_", "", 1) if is_flag else name
    if plain in by_name:
        follows = unknown[1:2] if not value else []
        values = [x for x in follows if not x.startswith("--")]
        value = value or ("off" if is_flag else "".join(values) or "on")
        return f"{word}: expected --set {plain}={value} (see --help-all)"
    options = [s.option for s in settings if s.opt and s.option[:2] == "--"]
    hint = _did_you_mean(word, [*options, "--set"])
    if not hint:
        found = _did_you_mean(name, by_name).replace("mean ", "mean --set ")
        hint = found.replace("?)", "=VALUE?)")
    return f"{word}: expected an option, got an unknown one{hint} (see --help)"


# -- --help


def describe(
    program: type, prog: str, words: Sequence[str], has_all: bool
) -> str:
    """The text of --help, or of --help-all, which lists all settings too.

    Args:
      words: of the command line beside it: the defaults shown are those of the environment or the run that it names.
    """
    width = min(shutil.get_terminal_size().columns, 120)
    settings = _with_defaults(program, words)
    shown = [s for s in settings if s.opt is not None]
    arguments = [s for s in shown if s.field in ARGUMENTS]
    options = [s for s in shown if s.field not in ARGUMENTS]
    others = [s for s in settings if s.opt is None]
    names = getattr(program, "FIRST_OPTIONS", ())
    first = [s for name in names for s in options if s.field == name]
    more = [s for s in options if s not in first]

    usage = [prog]
    usage += [_bracket(s, s.metavar) for s in arguments]
    usage += [f"{s.option} {s.metavar}" for s in options if _is_required(s)]
    examples = getattr(program, "EXAMPLES", ())
    paragraphs = inspect.cleandoc(program.__doc__ or "").split("\n\n")
    parts = [
        f"usage: {' '.join(usage)} [options]",
        _fill(paragraphs[0], width),
        "\n".join(f"    {example}" for example in examples),
        _list_options("arguments", arguments, width),
        _list_options("options of a first run", first, width),
        _list_options("more options" if first else "options", more, width),
        _list_common(others, width),
        *(_fill(paragraph, width) for paragraph in paragraphs[1:]),
    ]
    if has_all:
        parts.append(_list_options("settings of --set", others, width))
    return "\n\n".join(part for part in parts if part)


def _with_defaults(program: type, words: Sequence[str]) -> Sequence[Setting]:
    """The settings of a program, with the defaults of the environment or the run that a command line names."""
    settings = settings_of(program)
    if not words:
        return settings
    given = _read_arguments(settings, words)
    values = _base_values(settings, _stored_settings(program, given))
    return [
        dataclasses.replace(setting, default=values[setting.path])
        for setting in settings
    ]


def _list_common(others: Sequence[Setting], width: int) -> str:
    """The options that programs have in common.

    Args:
      others: settings that no option shows.
    """
    text = "Show this text and exit. Default: off."
    entries = [_entry("--help", text, width)]
    if others:
        names = [setting.name for setting in others]
        example = "ppo.gamma" if "ppo.gamma" in names else names[0]
        text = f"Set another setting, such as {example}; it may be given again. Default: none."
        entries.append(_entry("--set NAME=VALUE", text, width))
        text = "List these settings too. Default: off."
        entries.append(_entry("--help-all", text, width))
    return "\n".join(["all programs:", *entries])


def _is_required(setting: Setting) -> bool:
    """Whether a setting has no default."""
    return setting.default is dataclasses.MISSING


def _bracket(setting: Setting, text: str) -> str:
    """A text, in brackets where the setting has a default."""
    return text if _is_required(setting) else f"[{text}]"


def _list_options(title: str, settings: Sequence[Setting], width: int) -> str:
    """A title, and an entry for each setting; empty for none."""
    if not settings:
        return ""
    entries: list[str] = []
    for setting in settings:
        name = setting.name if setting.opt is None else setting.option
        if setting.opt is not None and setting.opt.short:
            name = f"{setting.opt.short}, {name}"
        if setting.is_flag and setting.default is True:
            name += f", --no-{setting.option[2:]}"
        if not setting.is_flag and setting.field not in ARGUMENTS:
            name += f" {setting.metavar}"
        text = field_docs(setting.owner).get(setting.field, "")
        entries.append(_entry(name, text + _default_text(setting, text), width))
    return "\n".join([f"{title}:", *entries])


def _default_text(setting: Setting, text: str) -> str:
    """What --help says of the default of a setting; nothing where its text says it."""
    if "Default: " in text or "(required" in text:
        return ""
    if _is_required(setting):
        return " (required)"
    default = setting.default
    if default == ():
        return ""
    shown = DEFAULT_NAMES[default] if isinstance(default, bool) else default
    return f" (default: {shown})"


def _entry(name: str, text: str, width: int) -> str:
    """The name of an option and its text, from a column on."""
    lines = textwrap.wrap(text, max(20, width - HELP_COLUMN)) or [""]
    indent = " " * HELP_COLUMN
    first = f"  {name}"
    if len(first) + 2 > HELP_COLUMN:
        return "\n".join([first, *(indent + line for line in lines)])
    rest = [indent + line for line in lines[1:]]
    return "\n".join([f"{first:<{HELP_COLUMN}}{lines[0]}", *rest])


def _fill(paragraph: str, width: int) -> str:
    """A paragraph on lines of a width."""
    return textwrap.fill(" ".join(paragraph.split()), width)


@functools.cache
def field_docs(owner: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, on one line."""
    docs: dict[str, str] = {}
    for base in reversed(owner.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        body = cast(ast.ClassDef, tree.body[0]).body
        for field, below in itertools.pairwise(body):
            if not isinstance(field, ast.AnnAssign):
                continue
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docs[ast.unparse(field.target)] = " ".join(text.split())
                case _:
                    pass
    return docs


# -- what a program works on


def is_run_folder(target: str) -> bool:
    """Whether the target is the folder of a training run: only such a folder holds a config.json."""
    return (Path(target) / CONFIG_FILE).is_file()


def debug_files(run_folder: Path) -> list[Path]:
    """Files of a run to attach to a report of a bug."""
    names = (CONFIG_FILE, METRICS_FILE, RESULTS_FILE)
    return [run_folder / name for name in names]


def open_dataset(
    target: str, rules: str | None, cfg: DataConfig = DEFAULT_CONFIG
) -> Dataset:
    """Load the data set of a target, showing so on standard error.

    Args:
      target: folder of a training run, embedded name, folder or file of a data set.
      rules: rule file to use instead of the data set's own; None for the latter.
      cfg: how files of triples are read and split.

    Returns:
      The data set; for a run, the one that it was trained on, with the rules that it was trained with.

    Raises:
      ValueError: the target is neither a run nor a data set, or `rules` or `cfg` are given for a run.
    """
    status = show_status(make_console(use_stderr=True), "reading data")
    if not is_run_folder(target):
        with status:
            return load(target, rules, cfg=cfg)

    check_read_as_trained(target, cfg)
    if rules is not None:
        raise ValueError(
            f"--rules {rules}: {target} is a trained run, expected the rules it was trained with"
        )
    from funcppo.kg.run.run_build import load_dataset_of

    folder = Path(target)
    with status:
        return load_dataset_of(read_config(folder), folder)


def check_read_as_trained(run_folder: str, cfg: DataConfig) -> None:
    """Raise ValueError if options ask to read the data of a run in a way of their own."""
    if cfg != DEFAULT_CONFIG:
        options = "--columns, --split-ratios, data.split_seed"
        raise ValueError(
            f"{options}: {run_folder} is a trained run, which reads its data as in training"
        )


def print_notes_to_stderr(notes: Iterable[str]) -> None:
    """Print notes, one a line, where they do not mix with a result, and after what has been printed of it."""
    sys.stdout.flush()
    for line in notes:
        print(f"note: {line}", file=sys.stderr)


def set_target_threads(target: str, n_threads: int | None) -> None:
    """Set how many CPU threads an operation uses.

    Args:
      target: folder of a training run, name, folder or file of a data set.
      n_threads: as set; None for as many as the run was trained with, or 1 for a data set.

    Raises:
      ValueError: the config of a run is damaged.
    """
    if n_threads is None:
        is_run = is_run_folder(target)
        n_threads = read_config(Path(target)).threads if is_run else 1
    set_threads(n_threads)


def data_files(target: str, rules: str | None = None) -> list[Path]:
    """Return the files of a target that an output must not overwrite; names of embedded data sets have none.

    Args:
      target: folder of a training run, name, folder or file of a data set.
      rules: rule file that is read in place of the data set's own; None for none.

    Raises:
      ValueError: the config of a run is damaged.
    """
    path = Path(target)
    files = [] if rules is None else [Path(rules)]
    if is_run_folder(target):
        run_config = read_config(path)
        files += [path / name for name in RUN_FILES]
        return files + data_files(run_config.dataset, run_config.rules)
    if is_stored_graph(path):
        return files + [file for file in path.iterdir() if file.is_file()]
    if path.is_dir():
        return files + [
            file for file in path.iterdir() if _DATA_FILE.match(file.name)
        ]
    return [*files, path] if path.is_file() else files


@contextmanager
def fixpoint_progress() -> Iterator[StepCallback]:
    """Show the steps of T_P on standard error.

    Returns:
      A context that yields the function to call before each step and after each of its rules.
    """
    with show_status(make_console(use_stderr=True), "reading") as status:

        def show_step(
            step: int, n_atoms: int, n_done: int, n_rules: int
        ) -> None:
            status.update(
                f"T_P step {step + 1}, from {n_atoms:,} atoms", n_done, n_rules
            )

        yield show_step
