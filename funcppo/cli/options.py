"""Options of programs: how they are declared, parsed and described in --help.

A program is a frozen dataclass: a field is an option, the docstring below the field is its help. A field that is a
dataclass holds settings: those that it shows are options too, all others are set by `--set group.name=value`, with
the names of config.json, and `--help-all` lists them.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import math
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

from funcppo.cli import exit_with_error
from funcppo.cli.common import (
    WorkDisplay,
    check_outputs,
    check_read_as_trained,
    data_files,
    is_run_folder,
    select_device,
    set_target_threads,
    set_verbosity,
    tell_others,
    write_output,
)
from funcppo.core.files import shorten
from funcppo.core.settings import (
    DeviceName,
    FieldError,
    FixedPort,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Size,
    check_fields,
    check_value,
    did_you_mean,
    field_types,
    parse_value,
    read_mapping,
)
from funcppo.kg.config import CHOICE_SECONDS
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import (
    find_rules,
    load,
    with_candidates,
    with_known,
    with_rule_file,
)
from funcppo.kg.graph.triples import DEFAULT_CONFIG, DataConfig
from funcppo.logs import LoggerName
from funcppo.runtime import distributed

if TYPE_CHECKING:
    from funcppo.kg.answers import Answerer
    from funcppo.kg.run.run import Run
    from funcppo.kg.run.subject import Subject
    from funcppo.kg.search.task import PhaseCallback

# Fields that are no options but arguments, in all programs.
ARGUMENTS = {
    "dataset": "DATASET",
    "target": "RUN|DATASET",
    "query": "QUERY",
    "triples": "TRIPLES",
    "run_folder": "RUN",
    "env": "ENV",
}
METAVARS_OF_FIELDS = {
    "rules": "FILE",
    "seconds": "SECONDS",
    "device": "DEVICE",
    "columns": "H,R,T",
    "split_ratios": "X,X,X",
}
METAVARS = {int: "N", float: "X", str: "NAME", Path: "FILE", bool: "on|off"}


@dataclass(frozen=True)
class Opt:
    """How a field is an option: what stands for its value, or the names of settings that are shown.

    Attributes:
      metavar: what stands for the value in --help; by the type if empty.
      shown: of a field of settings.
      is_hidden: it is set by --set alone.
    """

    metavar: str = ""
    shown: tuple[str, ...] = ()
    is_hidden: bool = False


HIDDEN = Opt(is_hidden=True)
# Fields of settings that a program sets itself, by other options.
SET_BY_PROGRAMS = ("n_updates", "source")

OptionalFile: TypeAlias = Annotated[str | None, Opt("FILE")]
JsonOutput: TypeAlias = Annotated[str | None, Opt("FILE|-")]
MetricsPort: TypeAlias = Annotated[FixedPort | None, Opt("PORT")]
LoggerNames: TypeAlias = Annotated[
    tuple[LoggerName, ...], Opt("csv|tensorboard|wandb|mlflow")
]
MemoryOption: TypeAlias = Annotated[str | None, Opt("BYTES")]
CacheFolder: TypeAlias = Annotated[Path | None, Opt("DIR")]
CudaGraphs: TypeAlias = Annotated[
    Literal["auto", "off", "trees", "manual"], Opt("{auto,off,manual}")
]
DataOptions: TypeAlias = Annotated[
    DataConfig, Opt(shown=("columns", "split_ratios"))
]


# A program: a dataclass with `json`, where the result is written, and `run`, which returns the exit status.
ProgramT = TypeVar("ProgramT")


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What a program works on: a trained run, perhaps with other facts, or a data set."""

    target: str
    """Folder of a training run, or a data set: an embedded name (countries_s1, countries_s2, countries_s3,
    family_tree:PEOPLE:SEED, clans:PEOPLE:SEED), pykeen:NAME, a folder with train.txt, a file of triples (text, CSV,
    JSON lines, RDF, Parquet), - for standard input, or a Prolog program FILE.pl."""
    rules: OptionalFile = None
    """Rule file to use instead of the data set's own rules (data sets only). Default: the data set's rules."""
    graph: Annotated[str | None, Opt("DATASET")] = None
    """Facts that a run is asked about, matched by name; their valid and test too. Default: the data set that it was
    trained on, as it is now, or the facts of training where it is gone."""
    recount: Annotated[bool, HIDDEN] = False
    """Count the rules of a run over the facts that it is asked about. Default: their confidences are those of
    training."""
    data: Annotated[DataConfig, Opt(shown=("columns",))] = DEFAULT_CONFIG
    """How files of triples are read and split."""
    threads: Annotated[PositiveInt | None, HIDDEN] = None
    """Number of CPU threads of an operation. Default: as many as the run was trained with; 1 for a data set."""
    json: JsonOutput = None
    """Write the result as JSON to FILE; - writes it to standard output in place of the text. Default: no JSON."""

    @property
    def is_run(self) -> bool:
        """Return whether the target is a trained run."""
        return is_run_folder(self.target)

    def inputs(self) -> list[Path]:
        """List the files that are read, which an output must not overwrite."""
        found = data_files(self.target, self.rules)
        return found + (data_files(self.graph) if self.graph else [])

    def prepare(
        self,
        *outputs: tuple[str, str | Path | None],
        inputs: Sequence[str | None] = (),
    ) -> None:
        """Check the outputs beside --json before any work, and set the device and the threads.

        Args:
          inputs: more files that are read; None for none.

        Raises:
          ValueError: an output cannot be written, there is no such device, or the config of a run is damaged.
        """
        select_device(getattr(self, "device", "cpu"))
        check_outputs(
            [*outputs, ("--json", self.json)],
            [*self.inputs(), *map(Path, filter(None, inputs))],
            can_be_parquet=True,
        )
        set_target_threads(self.target, self.threads)

    def load_graph(self) -> Dataset | None:
        """Load the facts that a run is asked about; None for those of its own data set.

        Raises:
          ValueError: they cannot be read, or an option does not fit the target.
        """
        if self.is_run and self.graph is not None:
            return load(self.graph, with_rules=False, cfg=self.data)
        if self.is_run:
            check_read_as_trained(self.target, self.data)
        else:
            for name in ("graph", "recount"):
                if getattr(self, name):
                    raise ValueError(
                        f"--{name}: expected a trained run, got {self.target}"
                    )
        return None

    def open_run(self, on_phase: PhaseCallback, device: str = "cpu") -> Run:
        """Open the trained run on the facts that it is asked about; raises as `load_graph` does."""
        from funcppo.kg.run import run

        return run.open_run(
            Path(self.target),
            device,
            on_phase,
            self.load_graph(),
            self.change_of_graph(),
            recount=self.recount,
        )

    def change_of_graph(self) -> Callable[[Dataset], Dataset] | None:
        """Return what is changed in the data before they are ranked; None for nothing."""
        return None


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
    seconds: PositiveFloat | None = None
    """Time limit of the whole program, in seconds; what is left out for it is counted. Default: no limit."""
    smoothing: Annotated[NonNegativeFloat | Literal["auto"] | None, HIDDEN] = (
        "auto"
    )
    """Pseudo-count of wrong predictions added to each rule's leave-one-out body count (data sets only); None: plain
    counts, without leave-one-out. Default: auto, chosen on the valid split."""
    object_identity: Annotated[bool | Literal["auto"], HIDDEN] = "auto"
    """Bind the variables of a rule to different constants, none of which the rule names (object identity, as AnyBURL
    counts; data sets only). Default: auto, chosen on the valid split."""
    filter: Annotated[OptionalFile, HIDDEN] = None
    """File of more triples that are known to be true, which are no wrong answers. Default: those of all splits and of
    facts.txt."""
    candidates: Annotated[OptionalFile, HIDDEN] = None
    """File of the entities that are answers, one a line; in `funcppo evaluate` also types: of each query the entities
    that known triples of its relation have in the asked place. Default: all."""
    choice_seconds: Annotated[PositiveFloat, HIDDEN] = CHOICE_SECONDS
    """Time limit of choosing these settings and the score, in seconds (data sets only). What it leaves out is noted."""

    def open_subject(self, on_phase: PhaseCallback) -> Subject:
        """Load the run or the data set and choose its score; among several processes, rank 0 chooses.

        Args:
          on_phase: receives what is being done.

        Raises:
          ValueError: an option is bad or does not fit the target.
        """
        from funcppo.kg.config import ProverTaskConfig
        from funcppo.kg.run import subject
        from funcppo.kg.scores.score import parse

        if self.is_run:
            of_data = "rules height smoothing object_identity choice_seconds"
            for name in of_data.split():
                value = getattr(self, name)
                if value != getattr(ScoreOptions, name):
                    raise ValueError(
                        f"--{name.replace('_', '-')}: {self.target} is a trained run, which has its own"
                    )
            run = self.open_run(on_phase, self.device)
            return subject.run_subject(run, self.score, on_phase)

        self.load_graph()  # before the data are read, as the score
        if self.score != "auto":
            parse(self.score)
        return subject.dataset_subject(
            self._load_changed(),
            ProverTaskConfig(
                max_height=self.height,
                smoothing=self.smoothing,
                object_identity=self.object_identity,
            ),
            self.score,
            self.device,
            tell_others(on_phase),
            min(self.choice_seconds, (self.seconds or math.inf) / 4),
            distributed.current_processes(),
        )

    def load_triples(self) -> Dataset:
        """Load the data set without rules, with what is changed in it before it is ranked."""
        change = self.change_of_graph()
        dataset = load(self.target, with_rules=False, cfg=self.data)
        return change(dataset) if change else dataset

    def _load_changed(self) -> Dataset:
        """Load the data set with what is changed in it before it is ranked, and then its rules."""
        if self.change_of_graph() is None:
            return load(self.target, self.rules, cfg=self.data)
        dataset = self.load_triples()
        rules = Path(self.rules) if self.rules else None
        rules = rules or find_rules(Path(self.target))
        return dataset if rules is None else with_rule_file(dataset, rules)

    def change_of_graph(self) -> Callable[[Dataset], Dataset] | None:
        """Return the function that adds known triples and limits the candidates; None where neither is asked for."""
        if self.filter is None and self.candidates is None:
            return None

        def change(dataset: Dataset) -> Dataset:
            if self.filter is not None:
                dataset = with_known(dataset, Path(self.filter))
            if self.candidates == "types":
                return dataclasses.replace(dataset, by_type=True)
            if self.candidates is not None:
                dataset = with_candidates(dataset, Path(self.candidates))
            return dataset

        return change

    def inputs(self) -> list[Path]:
        """List the files that are read, which an output must not overwrite."""
        more = filter(None, (self.filter, self.candidates))
        return [*super().inputs(), *map(Path, more)]

    def open_answerer(self) -> tuple[Answerer, list[str]]:
        """Build the answerer of queries; return it with notes on the data and on what was chosen."""
        from funcppo.kg.answers import Answerer

        with WorkDisplay("reading data") as status:
            subject = self.open_subject(status.update)
            status.update("indexing answers")
            answerer = Answerer(subject)
        notes = [*subject.task.notes, *subject.notes]
        if not self.is_run:
            untrained = f"no trained run: untrained score {subject.score}, height {subject.task.max_height}"
            notes.insert(0, untrained)
        return answerer, notes


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
        """Return the name of the field."""
        return self.path[-1]

    @property
    def annotation(self) -> object:
        """Return the type annotation of the setting's values."""
        return field_types(self.owner)[self.field]

    @property
    def is_argument(self) -> bool:
        """Return whether the setting is a positional argument of the program."""
        return self.field in ARGUMENTS

    @property
    def option(self) -> str:
        """Return the setting's name on the command line, such as --split-ratios, or --set with its path."""
        if self.opt is None:
            return f"--set {self.name}"
        argument = ARGUMENTS.get(self.field)
        return argument or "--" + self.field.replace("_", "-")

    @property
    def is_flag(self) -> bool:
        """Return whether the option takes no value."""
        return self.opt is not None and _plain_type(self.annotation) is bool

    @property
    def metavar(self) -> str:
        """Return the placeholder of the value in --help."""
        own = (
            ARGUMENTS.get(self.field),
            self.opt and self.opt.metavar,
            METAVARS_OF_FIELDS.get(self.field),
        )
        return next(filter(None, own), "") or _metavar(self.annotation)

    @property
    def text(self) -> str:
        """Return the setting's text in --help, with its default unless the text names it."""
        text = field_docs(self.owner).get(self.field, "")
        if "Default: " in text or "(required" in text or self.default == ():
            return text
        if self.default is dataclasses.MISSING:
            return f"{text} (required)"
        shown = self.default
        if isinstance(shown, bool):
            shown = "on" if shown else "off"
        return f"{text} (default: {shown})"

    def parse(self, text: str | None) -> object:
        """Parse a text of the command line as the setting's value; None stands for itself.

        Raises:
          ValueError: it has none, or one out of range; the message names the option.
        """
        try:
            value = text
            if text is not None:
                value = parse_value(self.annotation, text)
            check_value(self.field, self.annotation, value)
        except ValueError as error:
            problem = error.problem if isinstance(error, FieldError) else error
            raise ValueError(f"{self.option}: {problem}") from None
        return value


def _plain_type(annotation: object) -> object:
    """Strip the metadata from an annotation."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _metavar(annotation: object) -> str:
    """Return the placeholder for a value of a type."""
    kind = _plain_type(annotation)
    members = [x for x in get_args(kind) if x is not type(None)]
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, members)) + "}"
    if get_origin(kind) is tuple:
        return f"{_metavar(members[0])}..."
    if members:
        names = [_metavar(member).strip("{}") for member in members]
        return "|".join(names).replace(",", "|")
    return METAVARS.get(cast(type, kind), "TEXT")


@functools.cache
def settings_of(program: type) -> tuple[Setting, ...]:
    """List all settings of a program, in the order of its fields."""
    return tuple(_iter_settings(program, None, (), "", None))


def _iter_settings(
    owner: type,
    defaults: object,
    path: tuple[str, ...],
    prefix: str,
    shown: tuple[str, ...] | None,
) -> Iterator[Setting]:
    """Yield the settings of a dataclass, including nested ones.

    Args:
      defaults: an object of it; None for the defaults of its fields.
      path: fields that lead to it.
      prefix: of the names of its settings, such as "ppo.".
      shown: which are options; None for all that are not hidden.
    """
    annotations = field_types(owner)
    for field in dataclasses.fields(owner):
        name, annotation = field.name, annotations[field.name]
        if name in SET_BY_PROGRAMS:
            continue
        default = field.default
        if defaults is not None:
            default = getattr(defaults, name)
        metadata = get_args(annotation)[1:]
        opts = [x for x in metadata if isinstance(x, Opt)] or [Opt()]
        opt, kind = opts[-1], _plain_type(annotation)
        if isinstance(kind, type) and is_dataclass(kind):
            # Those of a run have the names of its config.json.
            group = "" if name == "settings" else f"{prefix}{name}."
            start = f"{name}."
            below = [x for x in shown or () if x.startswith(start)]
            names = (*(x.removeprefix(start) for x in below), *opt.shown)
            yield from _iter_settings(
                kind, default, (*path, name), group, names
            )
            continue
        is_shown = (shown is None or name in shown) and not opt.is_hidden
        yield Setting(
            path=(*path, name),
            name=f"{prefix}{name}",
            owner=owner,
            default=default,
            opt=opt if is_shown else None,
        )


# -- the command line


def parse_options(
    program: type[ProgramT], arguments: Sequence[str], prog: str = "funcppo"
) -> ProgramT | None:
    """Build a program from the options of a command line; None after --help.

    Args:
      program: the class of the program. Its class method `stored_settings`, if it has one, returns the settings that
        the options on the command line are applied to, such as those of a run to resume; it receives what these are by
        name.
      prog: the name of the program in --help.

    Raises:
      ValueError: an option is unknown, missing, of another type or out of range; the message names it.
    """
    helps = {"-h", "--help", "--help-all"}.intersection(arguments)
    given = _read_arguments(
        program, [word for word in arguments if word not in helps]
    )
    stored = None
    has_stored = hasattr(program, "stored_settings")
    if has_stored and (given or not helps):
        by_name = {s.name: value for s, value in given.items()}
        stored = cast(Any, program).stored_settings(by_name)
    if helps:
        text = describe(program, prog, stored, "--help-all" in helps)
        write_output(text)
        return None

    return _build(program, given, stored)


def _build(
    program: type[ProgramT], given: Mapping[Setting, object], stored: object
) -> ProgramT:
    """Build a program from the given settings; all further ones take their stored values or defaults.

    Raises:
      ValueError: one is missing, or values do not fit each other.
    """
    values: dict[str, Any] = {}
    settings = settings_of(program)
    options_by_name = {setting.name: setting.option for setting in settings}
    for setting, value in given.items():
        group = values
        for name in setting.path[:-1]:
            group = group.setdefault(name, {})
        group[setting.field] = value
    for field in dataclasses.fields(cast(Any, program)):
        name, base, prefix = field.name, field.default, f"{field.name}."
        if name == "settings":
            base, prefix = stored or base, ""
        if is_dataclass(base):
            found = values.get(name, {})
            values[name] = _replace(base, found, prefix, options_by_name)
        elif base is dataclasses.MISSING and name not in values:
            raise ValueError(
                f"{options_by_name[name]}: expected a value, got none (see --help)"
            )
    options = program(**values)
    check_fields(options)
    return options


def _replace(
    base: Any,
    values: Mapping[str, Any],
    prefix: str,
    options_by_name: Mapping[str, str],
) -> Any:
    """Replace some fields of a dataclass; those of nested ones are in mappings.

    Args:
      prefix: of the names of its settings, for errors.
      options_by_name: what the command line calls each setting.

    Raises:
      ValueError: values do not fit each other.
    """
    fields = {
        name: _replace(
            getattr(base, name), value, f"{prefix}{name}.", options_by_name
        )
        if isinstance(value, dict)
        else value
        for name, value in values.items()
    }
    try:
        return dataclasses.replace(base, **fields)
    except ValueError as error:
        text = str(error)  # begins with the field
        name, colon, problem = f"{prefix}{text}".partition(":")
        option = options_by_name.get(name, f"--set {name}")
        is_named = text.startswith("--")
        raise ValueError(
            text if is_named else f"{option}{colon}{problem}"
        ) from None


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        message = message.removeprefix("argument ")
        message = message.replace("one argument", "a value, got none")
        exit_with_error(f"{message} (see --help)")


def _add_argument(group: Any, setting: Setting) -> None:
    """Add an option or an argument to a group of a parser."""
    has_several = get_origin(_plain_type(setting.annotation)) is tuple
    text = setting.text.replace("%", "%%")
    words: dict[str, Any] = {"help": text, "default": None}
    if setting.is_argument:
        words["nargs"] = "*" if has_several else "?"
        group.add_argument(setting.name, metavar=setting.metavar, **words)
        return

    words["dest"] = setting.name
    if setting.is_flag:
        words["action"] = (
            argparse.BooleanOptionalAction
            if setting.default is True
            else "store_true"
        )
    else:
        words["metavar"] = setting.metavar
        words["nargs"] = "+" if has_several else None
        if setting.field == "log":  # several places add up
            words["action"] = "extend"
    group.add_argument(setting.option, **words)


def _read_arguments(
    program: type, arguments: Sequence[str]
) -> dict[Setting, object]:
    """Parse a command line; return {setting: its value} for the settings that it and its file give.

    Raises:
      ValueError: a name is unknown, or a value of another type or out of range; the message names it, and the file.
    """
    settings = settings_of(program)
    parser = _make_parser(program, "", settings)
    found, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        raise ValueError(_describe_unknown(unknown[0], settings))

    words = vars(found)
    set_verbosity(words["--quiet"], words["--verbose"])
    given: dict[Setting, object] = {}
    if config := words["--config"]:
        given |= _read_config(Path(config), settings)
    for assignment in words["--set"] or ():
        setting, text = _read_assignment(assignment, settings)
        given[setting] = setting.parse(text)
    for setting in settings:
        value = words.get(setting.name)
        if value is not None and value != []:
            given[setting] = _parse_words(setting, value)
    return given


def _parse_words(setting: Setting, value: bool | str | list[str]) -> object:
    """Parse what the command line gives for a setting."""
    if isinstance(value, bool):
        return value
    return setting.parse(value if isinstance(value, str) else " ".join(value))


def _read_config(
    path: Path, settings: Sequence[Setting]
) -> dict[Setting, object]:
    """Return {setting: its value} of a file with the names of --help-all; raises as `_read_arguments` does."""
    given: dict[Setting, object] = {}
    for name, text in _iter_texts(read_mapping(path), ""):
        if name.rpartition(".")[2] in SET_BY_PROGRAMS:
            continue
        setting = _setting_of(name, settings, f"{path}: {name}")
        try:
            given[setting] = setting.parse(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return given


def _read_assignment(
    assignment: str, settings: Sequence[Setting]
) -> tuple[Setting, str]:
    """Parse `--set name=value`; return the setting and the text of the value."""
    name, equals, text = assignment.partition("=")
    name = name.strip().replace("-", "_")
    options = [setting for setting in settings if not setting.is_argument]
    setting = _setting_of(name, options, f"--set {shorten(assignment)}")
    if not equals:
        raise ValueError(f"--set {name}: expected {name}=VALUE, got no value")
    return setting, text.strip()


def _iter_texts(
    values: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each setting of a file, and its value as --set takes it; None for null."""
    for key, value in values.items():
        name = f"{prefix}{key}".replace("-", "_")
        if isinstance(value, dict):
            yield from _iter_texts(value, f"{name}.")
        elif isinstance(value, list):
            yield name, " ".join(map(str, value))
        else:
            yield name, None if value is None else str(value)


def _setting_of(
    name: str, settings: Sequence[Setting], place: str = ""
) -> Setting:
    """Return the setting of a name.

    Args:
      place: of the name, for the error.

    Raises:
      ValueError: there is none.
    """
    by_name = {setting.name: setting for setting in settings}
    if name not in by_name:
        hint = did_you_mean(name, {x: x for x in by_name})
        raise ValueError(
            f"{place}: expected the name of a setting, got an unknown one{hint} (see --help-all)"
        )
    return by_name[name]


def _describe_unknown(unknown: str, settings: Sequence[Setting]) -> str:
    """Format the error for a word that is no option, with the option or setting that may be meant."""
    word = unknown.partition("=")[0]
    if not word.startswith("--"):
        return f"expected an option, got {shorten(unknown)} (see --help)"
    known = {"--set": "--set", "--help-all": "--help-all"}
    for setting in settings:
        words = setting.option + "=VALUE" * (setting.opt is None)
        known[f"--{setting.name}"] = known[setting.option] = words
    hint = did_you_mean(word, known)
    return f"{word}: expected an option, got an unknown one{hint} (see --help)"


# -- --help


COMPLETION = """\
[ -n "$ZSH_VERSION" ] && autoload -U +X bashcompinit && bashcompinit
_funcppo() {
  local word="${COMP_WORDS[COMP_CWORD]}" words
  case "${COMP_WORDS[1]}" in
CASES
  esac
  [ "$COMP_CWORD" = 1 ] && words='PROGRAMS --help --version'
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o bashdefault -o default -F _funcppo funcppo"""


def completion_script(programs: Mapping[str, type]) -> str:
    """Return the commands by which bash and zsh complete programs, their options and files."""
    cases: list[str] = []
    for name, program in programs.items():
        shown = [s for s in settings_of(program) if s.opt]
        words = [setting.option for setting in shown if not setting.is_argument]
        words += ["--help", "--quiet", "--verbose", "--set", "--help-all"]
        cases.append(f"    {name}) words='{' '.join(words)}' ;;")

    script = COMPLETION.replace("CASES", "\n".join(cases))
    return script.replace("PROGRAMS", " ".join(programs))


def describe(program: type, prog: str, stored: object, has_all: bool) -> str:
    """Format the text of --help, or of --help-all, which lists all settings too.

    Args:
      stored: settings of the environment or the run that the command line names, the defaults that are shown; None for
        none.
    """
    settings: list[Setting] = []
    for setting in settings_of(program):
        if stored is not None and setting.path[0] == "settings":
            default = functools.reduce(getattr, setting.path[1:], stored)
            setting = dataclasses.replace(setting, default=default)
        settings.append(setting)
    parser = _make_parser(program, prog, settings, has_all)
    if has_all:
        group = parser.add_argument_group("settings of --set")
        for setting in settings:
            if setting.opt is None:
                words = f"{setting.name} {setting.metavar}"
                text = setting.text.replace("%", "%%")
                group.add_argument(setting.name, metavar=words, help=text)
    return parser.format_help()


def _make_parser(
    program: type,
    prog: str,
    settings: Sequence[Setting],
    has_all: bool = False,
) -> _Parser:
    """Return the parser of a program's command line, with the texts of --help, or of --help-all."""
    width = min(shutil.get_terminal_size().columns, 120)
    paragraphs = [
        textwrap.fill(" ".join(paragraph.split()), width)
        for paragraph in inspect.cleandoc(program.__doc__ or "").split("\n\n")
    ]
    examples = [f"    {x}" for x in getattr(program, "EXAMPLES", ())]
    parser = _Parser(
        usage=_usage(prog, settings),
        description="\n\n".join(
            filter(None, [paragraphs[0], "\n".join(examples)])
        ),
        epilog="\n\n".join(paragraphs[1:]),
        add_help=False,
        allow_abbrev=False,
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter,
            max_help_position=26,
            width=width,
        ),
    )

    first: Sequence[str] = getattr(program, "FIRST_OPTIONS", ())
    title = "more options" if first else "options"
    titles = ("arguments", "options of a first run", title, "all programs")
    arguments, of_first_run, more, common = map(
        parser.add_argument_group, titles
    )
    by_field = {setting.field: setting for setting in settings if setting.opt}
    # those of a first run in their own order
    for field in (*first, *(name for name in by_field if name not in first)):
        setting = by_field[field]
        group = of_first_run if field in first else more
        group = arguments if setting.is_argument else group
        _add_argument(group, setting)
    _add_common_options(common, settings, has_all)
    return parser


def _add_common_options(
    group: Any, settings: Sequence[Setting], has_all: bool
) -> None:
    """Add the options that all programs have."""
    config = "Read settings from FILE: the config.json of a run, or YAML with these names. The command line wins."
    for words, text in (
        ("--help", "Show this text and exit. Default: off."),
        ("-q", "Print results alone, without notes and progress."),
        ("--quiet", argparse.SUPPRESS),
        ("-v", "Print every note on what was chosen, left out or estimated."),
        ("--verbose", argparse.SUPPRESS),
        ("--help-all", "List the settings of --set too. Default: off."),
    ):
        dest = {"-q": "--quiet", "-v": "--verbose"}.get(words, words)
        group.add_argument(words, action="store_true", dest=dest, help=text)

    names = [setting.name for setting in settings if setting.opt is None]
    example = "ppo.gamma" if "ppo.gamma" in names else [*names, "name"][0]
    for words, metavar, action, text in (
        (
            "--set",
            "NAME=VALUE",
            "append",
            f"Set another setting, such as {example}; it may be given again. Default: none.",
        ),
        ("--config", "FILE", "store", config if has_all else argparse.SUPPRESS),
    ):
        group.add_argument(
            words, metavar=metavar, action=action, dest=words, help=text
        )


def _usage(prog: str, settings: Sequence[Setting]) -> str:
    """Format the program's usage, with its arguments and required options."""
    words = [prog]
    for setting in settings:
        is_required = setting.default is dataclasses.MISSING
        if setting.is_argument:
            word = setting.metavar
            words.append(word if is_required else f"[{word}]")
        elif is_required and setting.opt is not None:
            words.append(f"{setting.option} {setting.metavar}")
    return " ".join([*words, "[options]"]).replace("%", "%%")


@functools.cache
def field_docs(owner: type) -> dict[str, str]:
    """Return {field: the docstring below it, on one line} of a dataclass."""
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
