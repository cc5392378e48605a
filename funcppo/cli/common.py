"""Parts that several programs share: text for people, JSON output, checks before any work, devices, Ctrl-C, locks.

Names of entities, relations and rules are printed as they are: a name such as "[/x]" or ":smile:" is neither markup nor
an emoji.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
)
from rich.table import Column, Table
from rich.text import Text

from funcppo.cli import (
    STANDARD_OUTPUT,
    STOP_SIGNALS,
    Terminated,
    handled,
    interrupt_main,
    named_output,
    package_version,
    raise_terminated,
    write_output,
)
from funcppo.core import files
from funcppo.core.files import remove_stale_parts, shorten
from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.core.settings import CONFIG_FILE, MAX_PORT, is_cuda
from funcppo.kg.config import (
    RUN_FILES,
    Note,
    NoteKind,
    read_config,
)
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import id_files, is_stored_graph, load
from funcppo.kg.graph.triples import DEFAULT_CONFIG, DataConfig
from funcppo.runtime import distributed

# PyTorch takes seconds to import, and --help does not wait for it.
if TYPE_CHECKING:
    from funcppo.kg.logic.fixpoint import StepCallback
    from funcppo.kg.run.telemetry import Exporter
    from funcppo.kg.search.task import PhaseCallback, ProverTask

# version of the keys in results.json and in the output of every --json; 1 had no version
JSON_FORMAT = 2
GRACE_SECONDS = 0.5  # that work may take to end by itself, after a signal
LINE_SECONDS = 10.0  # between lines on work in progress, without a terminal
METRIC_COLUMNS = ("mrr", "hits@1", "hits@3", "hits@10", "auc_pr", "proved")
# Files of a data set in a folder, in any format.
_SPLIT_FILE = re.compile(r"(train|valid|test|facts)\.")
_DATA_FILE = re.compile(r"(train|valid|test|facts|rules|labels)\.")

JsonObject: TypeAlias = dict[str, Any]


# -- text for people


class _PlainConsole(Console):
    """Console without markup, which leaves a closed pipe to the caller.

    Attributes:
      is_quiet: with -q neither notes nor progress are shown.
      is_verbose: with -v all notes are.
      live: the terminal on which progress is shown; what others print on a terminal goes there, above it.
    """

    is_quiet: ClassVar[bool] = False
    is_verbose: ClassVar[bool] = False
    live: ClassVar[Console | None] = None

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects, on a terminal with texts broken at words; a system error names the stream."""
        with named_output("standard error" if self.stderr else STANDARD_OUTPUT):
            live = _PlainConsole.live
            if not self.is_terminal:
                return super().print(*objects, **options)
            if live is not None and live is not self:
                return live.print(*objects, **options)
            broken = (
                _break_lines(self, x) if isinstance(x, str) else x
                for x in objects
            )
            super().print(*broken, **options)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError: rich would exit with status 1, which `funcppo prove` uses for a refutation."""
        raise BrokenPipeError


def set_verbosity(is_quiet: bool, is_verbose: bool) -> None:
    """Show few notes and the progress of the program, neither with -q, or all notes with -v."""
    _PlainConsole.is_quiet = is_quiet
    _PlainConsole.is_verbose = is_verbose


def is_verbose() -> bool:
    """Return whether all notes are shown."""
    return _PlainConsole.is_verbose


def _break_lines(console: Console, text: str) -> str:
    """Break lines wider than a console at words; what goes on is indented, between the lines of a tree."""
    lines: list[str] = []
    for line in text.split("\n"):
        if cell_len(line) <= console.width:
            lines.append(line)
            continue

        body = line.lstrip(" │├└─")
        start = line[: len(line) - len(body)]
        below = start.translate({ord("├"): "│", ord("└"): " ", ord("─"): " "})
        if len(start) > console.width // 2:
            start = below = ""
        parts = Text(body).wrap(console, console.width - len(start) - 4)
        lines.append(start + parts[0].plain.rstrip())
        lines += [f"{below}    {part.plain.rstrip()}" for part in parts[1:]]
    return "\n".join(lines)


def make_console(use_stderr: bool) -> Console:
    """Build a console on standard output, or on standard error if standard output is for a machine."""
    console = _PlainConsole(
        stderr=use_stderr,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=True,
    )
    if not console.is_terminal:
        # Tables are as wide as their names, so that none is cut in two.
        console.width = 10_000
    return console


class WorkDisplay:
    """Display of a program's progress: a bar in a terminal, else a line on standard error every `LINE_SECONDS`.

    Another text begins a part of the work, whose time and speed are measured by themselves.
    """

    def __init__(
        self,
        text: str,
        console: Console | None = None,
        deadline: Deadline = NO_DEADLINE,
    ) -> None:
        """Build a display that begins with a text, to be used as a context.

        Args:
          console: that the program prints on meanwhile; None for standard error.
          deadline: when the work ends, whatever is done.
        """
        console = console or make_console(use_stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            # On a narrow terminal the bar is short, and all stays on one line.
            _WorkColumn(Column(no_wrap=True)),
            console=console,
            transient=True,
            disable=_PlainConsole.is_quiet or not console.is_terminal,
            # Answers in a pipe stay there.
            redirect_stdout=sys.stdout.isatty(),
            speed_estimate_period=120.0,
        )
        self._deadline = deadline
        self._has_ended = threading.Event()
        number = self._progress.add_task(text)
        self._task = self._progress.tasks[number]
        self.update(text)

    def __enter__(self) -> WorkDisplay:
        """Show the display."""
        self._progress.start()
        self._outer = _PlainConsole.live
        if not self._progress.disable:
            _PlainConsole.live = self._progress.console
        elif not _PlainConsole.is_quiet:
            threading.Thread(target=self._print_lines, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the display."""
        _PlainConsole.live = self._outer
        self._has_ended.set()
        self._progress.stop()

    def update(
        self,
        text: str,
        done: int = 0,
        total: int | None = None,
        deadline: Deadline = NO_DEADLINE,
        *,
        note: str = "",
    ) -> None:
        """Set the displayed text, progress and note.

        Args:
          text: what is being done; another text begins a part.
          done: how much of it is.
          total: how much there is; None if that is not known.
          deadline: when this part ends, whatever is done.
          note: a free text behind the time.
        """
        task = self._task
        if text != task.description or done < task.completed:
            self._progress.reset(task.id, description=text)
        task.total = total
        self._progress.update(
            task.id,
            completed=done,
            note=note,
            deadlines=(self._deadline, deadline),
        )

    def report(self, stage: str, done: float, total: float) -> None:
        """Set the displayed stage and progress, rounded; a total of 0 stands for an unknown one."""
        self.update(stage, round(done), round(total) or None)

    def line(self) -> str:
        """Return the line that is printed without a terminal."""
        return f"{self._task.description}: {_describe_work(self._task)}"

    def _print_lines(self) -> None:
        """Print the line repeatedly until the work ends."""
        while not self._has_ended.wait(LINE_SECONDS):
            # A closed standard error ends no work.
            with suppress(OSError, ValueError):
                print(self.line(), file=sys.stderr, flush=True)


def tell_others(on_phase: PhaseCallback) -> PhaseCallback:
    """Return the callback so that it also tells waiting processes how far this one is."""
    processes = distributed.current_processes()
    if processes is None:
        return on_phase

    def tell(
        text: str,
        done: int = 0,
        total: int | None = None,
        deadline: Deadline = NO_DEADLINE,
        /,
    ) -> None:
        processes.report(f"{text} {done} of {total}" if total else text)
        on_phase(text, done, total, deadline)

    return tell


class _WorkColumn(ProgressColumn):
    """Column with the progress of a part of the work, and its time."""

    def render(self, task: Task) -> Text:
        """Return the text of the column for a task."""
        return Text(_describe_work(task))


def _describe_work(task: Task) -> str:
    """Format how much of a task is done, its time, the time left if known, and its note."""
    parts = [f"{task.elapsed or 0:.0f} s"]
    if task.total is not None:
        parts.insert(0, f"{task.completed:,.0f} of {task.total:,.0f}")
        left = task.time_remaining
        if left:
            deadlines = task.fields["deadlines"]
            left = min(left, *(x.seconds_left for x in deadlines))
            parts.append(f"about {left:.0f} s left")
    return ", ".join(filter(None, [*parts, task.fields["note"]]))


def print_notes(
    notes: Iterable[str],
    console: Console | None = None,
    most: int | None = None,
    label: str = "note",
) -> None:
    """Print one line for each note on what was chosen, dropped or estimated.

    Args:
      console: None for standard error, after what has been printed of a result.
      most: notes that are printed without -v; the last one says how many more there are. None for all.
      label: before each.
    """
    if _PlainConsole.is_quiet:
        return
    sys.stdout.flush()
    console = console or make_console(use_stderr=True)
    lines = list(notes)
    if most is None or is_verbose():
        most = len(lines)
    n_more = len(lines) - most
    if n_more > 0:
        lines = lines[:most]
        lines[-1] += f" (and {n_more} more: -v)"
    for line in lines:
        console.print(f"{label}: {line}", style="dim")


class Screen:
    """Printer of a program's lines: at most six beside its table, all notes if verbose, only the table with -q.

    Attributes:
      console: for the table.
    """

    def __init__(self, console: Console) -> None:
        """Build a screen on which nothing is printed yet."""
        self.console = console
        self._told: set[str] = set()

    def print(self, *lines: str) -> None:
        """Print lines, unless only the table is wanted."""
        for line in lines:
            if not _PlainConsole.is_quiet:
                self.console.print(line)

    def add(self, notes: Iterable[str], *kinds: NoteKind) -> None:
        """Print notes that were not printed yet: all of them if verbose, else those of the given kinds."""
        for note in notes:
            if note in self._told:
                continue
            if is_verbose():
                print_notes([note], self.console)
            elif _kind(note) in kinds:
                self.print(note)
            else:
                continue
            self._told.add(note)

    def show_cut(self, notes: Iterable[str]) -> None:
        """Print the first note on work that was cut for time or memory, and the number of further ones."""
        cut = [note for note in notes if _kind(note) == "cut"]
        self._show_first("left out", cut)

    def show_data(self, dataset: Dataset) -> None:
        """Print the first note on the data, such as on dropped lines, and the number of further ones."""
        notes = [x for x in dataset.notes if _kind(x) != "answers"]
        self._show_first("data", notes)

    def _show_first(self, label: str, notes: Sequence[str]) -> None:
        """Print the first note and the number of further ones; nothing if verbose, which prints each note."""
        if notes and not is_verbose():
            print_notes(notes, self.console, 1, label)


def _kind(note: str) -> NoteKind:
    """Return the kind of a note; a note without one is a detail."""
    return note.kind if isinstance(note, Note) else "detail"


def describe_task(task: ProverTask, score: str) -> str:
    """Format on one line the data set, score and sizes that a program works on."""
    sizes = task.dataset.describe()
    return f"{sizes}, height {task.max_height}, score {score}"


def make_table(
    title: str, columns: Sequence[str], texts: Collection[str] = ()
) -> Table:
    """Build a table with columns and no rows.

    Args:
      title: the line above the table; empty for none.
      columns: their names.
      texts: the columns that hold texts beside the first one, the others hold numbers.
    """
    table = Table(
        title=title or None,
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in columns:
        # Where a terminal is too narrow, texts are broken, so that no digit is lost.
        if name in (columns[0], *texts):
            table.add_column(name, overflow="fold", min_width=8)
            continue
        width = max(len(line) for line in (*name.split("\n"), "0.1234"))
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table, with more space between its columns on a wide console."""
    table.padding = (0, 1) if console.width >= 100 else (0, 0)
    console.print(table)


def metrics_table(
    title: str, metrics_by_score: Mapping[str, JsonObject], default: str = ""
) -> Table:
    """Build a table of metrics with one row for each score.

    Args:
      title: the line above the table.
      metrics_by_score: the metrics of each score by name, with `ceiling` and `n_queries`.
      default: the score by which answers are ranked, which is marked; empty for none.
    """
    rows = metrics_by_score.values()
    columns = [x for x in METRIC_COLUMNS if any(x in row for row in rows)]
    columns.append("ceiling")
    table = make_table(title, ("score", *columns, "queries"))
    for score, metrics in metrics_by_score.items():
        cells = [
            f"{metrics[name]:.4f}" if name in metrics else ""
            for name in columns
        ]
        mark = " *" if score == default else ""
        table.add_row(score + mark, *cells, str(metrics["n_queries"]))
    if default in metrics_by_score:
        table.caption = "* `funcppo predict` ranks by it"
        table.caption_justify = "left"
    return table


# -- outputs


def print_text(text: str) -> None:
    """Print a text for people: on a terminal with lines broken at words, otherwise as it is."""
    if sys.stdout.isatty():
        make_console(use_stderr=False).print(text)
    else:
        write_output(f"{text}\n")


def write_json(destination: str | None, value: JsonObject) -> None:
    """Write an object with its format version to the destination of `--json`; None writes nothing.

    Args:
      destination: path of a file; - for standard output; None for nowhere.
      value: the object without its version.
    """
    if destination is None:
        return
    document = {"format": JSON_FORMAT, **value}
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    text = files.escape_unprintable(text)
    if destination == "-":
        write_output(text)
        return
    files.write_file(Path(destination), text)


# How a file begins that the option may replace: what it has written itself.
_OWN_FILES = {
    "--json": rb'\{(?s:.*)"format": ',
    "--csv": rb"query,|PAR1",
    "--metrics-file": rb"# HELP ",
    "--out": rb"#source_weight\t|Rule\t|[0-9]+\t[0-9]+\t[^\t]+\t.* <= |<!DOCTYPE html>|<\?xml|<svg|\x89PNG|"
    rb'\{"rank": |query,|PAR1|head,relation,tail,probability,|\{"head": |'
    rb"[^\n]+\nHeads: ",
}


class OutputFolder(NamedTuple):
    """Folder that a program writes."""

    option: str
    path: Path
    names: Sequence[
        str
    ]  # of the files that it writes there, the first of which tells that the folder is its own
    key: str = (
        ""  # that the first file, a JSON object, has; empty for another file
    )


def check_outputs(
    outputs: Iterable[tuple[str, str | Path | None]],
    inputs: Iterable[Path],
    folder: OutputFolder | None = None,
    *,
    can_be_parquet: bool = False,
) -> None:
    """Check before any work that outputs can be written, and replace nothing but what the program wrote earlier.

    Args:
      outputs: option and path of each file; - is standard output, None is no output. A device is written to as it is.
      inputs: files that the program reads.
      folder: that it writes too; None for none.
      can_be_parquet: all but --json write Parquet where a name ends so.

    Raises:
      ValueError: an output is an input or another output, under whatever names, a folder of inputs, something that the
        program has not written, or cannot be written; the message names the option.
    """
    taken = [(path, f"{path}, which would be overwritten") for path in inputs]
    data_folders = {path.resolve().parent for path, _ in taken}
    if folder is not None:
        _check_output_folder(folder, [path for path, _ in taken])
        own = f"those of {folder.option}"
        taken += [(folder.path / name, own) for name in folder.names]
    for option, name in outputs:
        path = Path(name or "")
        is_device = path.exists() and not (path.is_file() or path.is_dir())
        if not name or is_device:
            continue
        for other, description in taken:
            if _is_same_file(path, other):
                raise ValueError(
                    f"{option} {path}: expected another file than {description}"
                )
        # A file of a split beside the data would be read as one of theirs.
        is_split = _SPLIT_FILE.match(path.name)
        if is_split and path.resolve().parent in data_folders:
            raise ValueError(
                f"{option} {path}: expected another name than that of a split of the data"
            )
        taken.append((path, f"that of {option}"))
        if path.suffix == ".parquet" and not (
            can_be_parquet and option != "--json"
        ):
            raise ValueError(
                f"{option} {path}: expected another format, got Parquet"
            )
        if str(path) != "-":
            _check_output_file(option, path)


def _check_output_file(option: str, path: Path) -> None:
    """Raise ValueError if a file cannot be written at a path, or one is there that the option has not written."""
    if path.is_dir() or not path.parent.is_dir():
        or_stream = ", or -" * (option == "--json")
        raise ValueError(
            f"{option} {path}: expected a file in a folder that exists{or_stream}"
        )
    # A file is replaced, which takes permission for its folder.
    if not os.access(path.resolve().parent, os.W_OK):
        raise ValueError(f"{option} {path}: no permission to write it")
    if path.name.endswith(".settings.json"):
        option = "--json"  # beside the file of the option
    if path.is_file() and option in _OWN_FILES and path.suffix != ".part":
        with path.open("rb") as file:
            start = file.read(4096)
        if start and not re.match(_OWN_FILES[option], start):
            raise ValueError(
                f"{option} {path}: expected a new file, or one that {option} wrote, got another file"
            )


def _check_output_folder(folder: OutputFolder, inputs: Sequence[Path]) -> None:
    """Raise ValueError if a folder holds inputs, or anything else that is not the program's own."""
    option, path, names, key = folder
    place = f"{option} {path}"
    if path.exists() and not path.is_dir():
        raise ValueError(f"{place}: expected a folder, got a file")
    for file in inputs:
        is_own = file.parent.resolve() == path.resolve() and file.name in names
        if file.resolve().is_relative_to(path.resolve()) and not is_own:
            raise ValueError(
                f"{place}: expected another folder than that of {file}, which is read"
            )

    present = sorted(path.iterdir()) if path.is_dir() else []
    marker = path / names[0]
    if marker in present and (not key or key in files.read_object(marker)):
        return
    own = (*names[1:], "run.lock")
    foreign = [x for x in present if x.name not in own and x.suffix != ".part"]
    if foreign:
        raise ValueError(
            f"{place}: expected a new folder, or one that {option} wrote, got one with {foreign[0].name}"
        )


def _is_same_file(path: Path, other: Path) -> bool:
    """Return whether two paths are one file, which may not exist yet."""
    if path.exists() and other.exists():
        return path.samefile(other)
    return path.resolve() == other.resolve()


# -- what a program works on


def is_run_folder(target: str) -> bool:
    """Return whether the target is the folder of a training run: it holds a config.json, and no triples."""
    path = Path(target)
    return (path / CONFIG_FILE).is_file() and not any(path.glob("train.*"))


def data_files(target: str, rules: str | None = None) -> list[Path]:
    """List the files of a target that an output must not overwrite; an embedded data set has none.

    Args:
      target: folder of a training run, name, folder or file of a data set.
      rules: rule file that is read in place of the data set's own; None for none.

    Raises:
      ValueError: the config of a run is damaged.
    """
    path = Path(target)
    found = [] if rules is None else [Path(rules)]
    if is_run_folder(target):
        run_config = read_config(path)
        found += [path / name for name in RUN_FILES]
        if is_run_folder(run_config.dataset):
            raise ValueError(
                f"{path}: expected a run of a data set, got one of the run {run_config.dataset}"
            )
        return found + data_files(run_config.dataset, run_config.rules)
    if not path.is_dir():
        return [*found, path] if path.is_file() else found
    is_stored = is_stored_graph(path)
    found += id_files(path)
    for file in path.iterdir():
        if (is_stored and file.is_file()) or _DATA_FILE.match(file.name):
            found.append(file)
    return found


def open_dataset(
    target: str,
    rules: str | None,
    cfg: DataConfig = DEFAULT_CONFIG,
    graph: Dataset | None = None,
) -> Dataset:
    """Load the data set of a target, with a display on standard error.

    Args:
      target: folder of a training run, embedded name, folder or file of a data set.
      rules: rule file to use instead of the data set's own; None for the latter.
      cfg: how files of triples are read and split.
      graph: facts that a run is asked about; None for those of its own data set.

    Returns:
      The data set; for a run, the facts that it is asked about with the rules that it was trained with.

    Raises:
      ValueError: the target is neither a run nor a data set, or `rules` or `cfg` are given for a run.
    """
    if not is_run_folder(target):
        with WorkDisplay("reading data"):
            return load(target, rules, cfg=cfg)

    if graph is None:
        check_read_as_trained(target, cfg)
    if rules is not None:
        raise ValueError(
            f"--rules {rules}: {target} is a trained run, expected the rules it was trained with"
        )
    from funcppo.kg.run.run import present_graph

    with WorkDisplay("reading data"):
        return present_graph(Path(target), graph).dataset


def check_read_as_trained(run_folder: str, cfg: DataConfig) -> None:
    """Raise ValueError if options ask to read a run's data otherwise than in training."""
    if cfg != DEFAULT_CONFIG:
        options = "--columns, --split-ratios, data.split_seed"
        raise ValueError(
            f"{options}: {run_folder} is a trained run, which reads its data as in training"
        )


@contextmanager
def fixpoint_progress() -> Iterator[StepCallback]:
    """Yield a callback that shows the steps of T_P on standard error.

    Returns:
      A context that yields the function to call before each step and after each of its rules.
    """
    with WorkDisplay("reading") as status:

        def show_step(
            step: int, n_atoms: int, n_done: int, n_rules: int
        ) -> None:
            status.update(
                f"T_P step {step + 1}, from {n_atoms:,} atoms", n_done, n_rules
            )

        yield show_step


# -- the machine


def set_target_threads(target: str, n_threads: int | None) -> None:
    """Set the CPU threads of an operation; None means those of the run, or 1 without a run.

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


def set_threads(n_threads: int) -> None:
    """Set how many CPU threads an operation of PyTorch uses."""
    import torch

    torch.set_num_threads(n_threads)


def select_device(device: str) -> None:
    """Check that PyTorch has the device; a numbered GPU becomes the current one.

    Raises:
      ValueError: PyTorch does not find the GPU.
    """
    if not is_cuda(device):
        return

    import torch

    n_devices = torch.cuda.device_count()
    number = device.partition(":")[2]
    if int(number or 0) >= n_devices:
        last = n_devices - 1
        expected = f"cuda:0 to cuda:{last}" if n_devices else "a CUDA device"
        raise ValueError(
            f"--device {device}: expected {expected}, PyTorch found {'no other' if n_devices else 'none'}"
        )
    if number:
        torch.cuda.set_device(int(number))


def resolve_device(device: str) -> str:
    """Return the device; auto becomes a GPU if there is one, else the CPU."""
    if device != "auto":
        return device

    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def parse_memory(text: str) -> int:
    """Parse the bytes of --memory: a number, alone or with a unit.

    Raises:
      ValueError: it is none.
    """
    number = r"([0-9]{1,18}(?:\.[0-9]{1,18}(?= ?[kmg]))?) ?(?:([kmg])(i?)b)?"
    match = re.fullmatch(number, text.strip().lower())
    if match is None:
        raise ValueError(
            f"--memory: expected bytes below 10^18, or a number with kb, mb, gb, kib, mib, gib, got {shorten(text)}"
        )
    base = 1024 if match[3] else 1000
    power = "kmg".index(match[2]) + 1 if match[2] else 0
    return int(float(match[1]) * base**power)


def memory_limit(text: str | None, device: str) -> int:
    """Return the bytes that --memory allows; by default the used memory plus three quarters of the free memory.

    Each process of a host gets its part of what is free.
    """
    if text is not None:
        return parse_memory(text)
    from funcppo.runtime import memory

    n_sharing = distributed.local_size() if device == "cpu" else 1
    free_bytes = memory.free_bytes(device) // n_sharing
    return memory.used_bytes(device) + free_bytes * 3 // 4


def set_caches(cache_dir: Path | None) -> None:
    """Keep compiled code in a folder instead of the user's cache folder; None changes nothing.

    Raises:
      ValueError: others own it, or may write it.
    """
    if cache_dir is not None:
        from funcppo.runtime.cache import use_folder

        use_folder(cache_dir)


@contextmanager
def graphs_allowed(graphs: str, device: str) -> Iterator[None]:
    """Record within the context only the CUDA graphs that --cuda-graphs allows.

    Raises:
      ValueError: --cuda-graphs demands graphs, and there is no GPU, or one cannot be recorded.
    """
    if graphs == "auto":
        yield
        return

    device = resolve_device(device)
    if graphs in ("trees", "manual") and not is_cuda(device):
        raise ValueError(
            f"--cuda-graphs {graphs}: expected --device cuda, got {device}, which has no CUDA graphs: "
            "--cuda-graphs auto runs the same step without them"
        )
    from funcppo.runtime import capture

    contexts = {
        "off": lambda: capture.without_cuda_graphs(
            "turned off by --cuda-graphs off"
        ),
        "trees": capture.cudagraph_trees_only,
        "manual": capture.with_cuda_graphs_only,
    }
    try:
        with contexts[graphs]():
            yield
    except capture.CaptureError as error:
        raise ValueError(
            f"--cuda-graphs manual: expected a CUDA graph, got none: {error}"
        ) from error


def _port_of_process(port: int) -> int:
    """Return the metrics port of this process: --metrics-port plus its number on its host.

    Raises:
      ValueError: there is none.
    """
    n = distributed.local_rank()
    if port + n > MAX_PORT:
        raise ValueError(
            f"--metrics-port: expected at most {MAX_PORT - n} for process {n} of the host, which serves at port "
            f"{port} + {n}, got {port}"
        )
    return port + n


@contextmanager
def metrics_exported(
    port: int | None, file: str | None, program: str
) -> Iterator[Exporter | None]:
    """Export a program's metrics within the context and yield the exporter; None if none are asked for.

    Of several processes each has a port of its own on its host, from --metrics-port on; rank 0 alone writes the file.

    Raises:
      ValueError: the port is taken, the file cannot be written, or prometheus-client is missing.
    """
    processes = distributed.current_processes()
    if processes is not None and not processes.is_main:
        file = None
    if port is None and file is None:
        yield None
        return

    path = Path(file) if file else None
    from funcppo.kg.run import telemetry

    if processes is not None and port is not None:
        port = _port_of_process(port)
    versions = {name: package_version(name) for name in ("funcppo", "torch")}
    with telemetry.export(
        port,
        path,
        program,
        versions,
        lambda line: print(f"note: {line}", file=sys.stderr),
    ) as exporter:
        n_processes = processes.world_size if processes else 1
        exporter.telemetry.set("world_size", n_processes)
        if processes is not None and port is not None:
            # before any work: a port may be taken
            processes.exchange("metrics", port)
        yield exporter


# -- Ctrl-C


def print_interrupted(console: Console, update: int, *words: object) -> None:
    """Print the last saved update, and the command of the given words that continues from it, if there is one."""
    line = f"interrupted after update {update}"
    if words:
        command = shlex.join(["funcppo", *map(str, words), "--resume"])
        line += f"; `{command}` continues"
    console.print(line)


class Interrupt:
    """Record of whether Ctrl-C or SIGTERM asked the program to stop.

    Attributes:
      signal_number: the first signal; 0 before any.
    """

    signal_number = 0

    @property
    def requested(self) -> bool:
        """Return whether a signal came; cheap enough for the innermost loop."""
        return self.signal_number != 0

    @property
    def exit_status(self) -> int:
        """Return the exit status of a program that the signal stopped."""
        return 128 + self.signal_number


@contextmanager
def defer_interrupt() -> Iterator[Interrupt]:
    """Record a first Ctrl-C or SIGTERM in the yielded object, so that work can end cleanly.

    Where it has not ended after `GRACE_SECONDS`, the signal is repeated. A second one raises at once, and a third one
    kills the process.

    Raises:
      KeyboardInterrupt: at the second signal; `Terminated` if that is a SIGTERM.
    """
    interrupt = Interrupt()
    repeats: list[threading.Timer] = []

    def handle_signal(signal_number: int, frame: FrameType | None) -> None:
        if not interrupt.requested:
            interrupt.signal_number = signal_number
            repeat = threading.Timer(
                GRACE_SECONDS, interrupt_main, [signal_number]
            )
            repeat.daemon = True
            repeat.start()
            repeats.append(repeat)
            return
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        is_sigterm = signal_number == signal.SIGTERM
        raise Terminated if is_sigterm else KeyboardInterrupt

    with handled(STOP_SIGNALS, handle_signal):
        try:
            yield interrupt
        finally:
            for repeat in repeats:
                repeat.cancel()


@contextmanager
def bounded(
    seconds: float | None, device: str = "cpu"
) -> Iterator[Callable[[], bool]]:
    """Bound the time of the work within the context, and on a CPU its memory, by three quarters of what is free.

    When the time is over, a SIGTERM ends the work as one from outside does.

    Args:
      seconds: None for no bound.

    Returns:
      A context that yields a function, which returns whether the time is over.

    Raises:
      ValueError: the time was over, and the work did not end by itself.
    """
    from funcppo.runtime import memory

    is_over, is_waiting = threading.Event(), threading.Lock()

    def end() -> None:
        if is_waiting.acquire(blocking=False):
            is_over.set()
            interrupt_main(signal.SIGTERM)

    timer = threading.Timer(min(seconds or 0.0, threading.TIMEOUT_MAX), end)
    timer.daemon = True
    limit = memory_limit(None, device) if device == "cpu" else None
    try:
        with raise_terminated(), memory.limit_memory(limit, device):
            if seconds is not None:
                timer.start()
            yield is_over.is_set
            # From now on nothing ends the work, not even a signal on its way.
            is_waiting.acquire(blocking=False)
    except Terminated:
        if not is_over.is_set():
            raise
        raise ValueError(
            f"--seconds {seconds:g}: expected more time, it was over before there was a result"
        ) from None
    finally:
        timer.cancel()


@contextmanager
def cut_when(is_over: Callable[[], bool]) -> Iterator[None]:
    """Go on after the context where the time that `bounded` tells of is over in it."""
    try:
        yield
    except Terminated:
        if not is_over():
            raise


# -- locks


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to a folder; create it if missing, and remove it if it is left empty.

    Raises:
      ValueError: another process writes to it; the message names it and the process.
      OSError: the folder cannot be written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _hold(folder / "run.lock", folder):
            yield
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


@contextmanager
def lock_output(path: str | Path | None) -> Iterator[None]:
    """Keep other processes from writing a file, by FILE.lock beside it; remove half-written files of killed processes.

    A device, a pipe, standard output (-) and no file at all (None) are not locked.

    Raises:
      ValueError: another process writes it; the message names it and the process.
      OSError: its folder cannot be written.
    """
    file = None if path is None or str(path) == "-" else Path(path).resolve()
    if file is None or (file.exists() and not file.is_file()):
        yield
        return
    with _hold(file.with_name(f"{file.name}.lock"), file):
        names = (file.name, f"{file.name}.part", f"{file.name}.settings.json")
        remove_stale_parts(file.parent, names)
        yield


@contextmanager
def _hold(lock_path: Path, locked: Path) -> Iterator[None]:
    """Hold a lock file with this process's id within the context, and remove it at the end.

    Raises:
      ValueError: another process holds it.
    """
    # The system releases a lock when its process ends, however it ends, so that a killed process blocks nobody.
    from filelock import FileLock, Timeout

    # A file of another program's may be called so.
    if lock_path.is_file() and not re.fullmatch(
        rb"\d*", lock_path.read_bytes()
    ):
        raise ValueError(
            f"{lock_path}: expected no such file, or the lock of {locked}, got another file"
        )

    def write_id(descriptor: int) -> None:
        # On a full disk the lock holds without the id.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())

    lock = FileLock(lock_path, on_acquired=write_id)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        # It may have gone meanwhile, or the system shows it to no other.
        holder = ""
        with suppress(OSError):
            holder = lock_path.read_text()
        raise ValueError(
            f"{locked}: expected no other process that writes it, got process {holder or 'unknown'}"
        ) from None
    try:
        yield
    finally:
        # While it is held: one who waits for a removed file tries again.
        with suppress(OSError):
            lock_path.unlink(missing_ok=True)
        lock.release()
