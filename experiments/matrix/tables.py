"""Markdown made from the records: INVESTIGATION.md's tables, and the full ones in full_step_matrix.md."""

import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from experiments.matrix import record, registry
from experiments.matrix.measure import CAUSES
from experiments.tables import table

Record = dict[str, Any]
BACKENDS = ("none", "eager", "aot_eager", "inductor")
REPORT = tuple(str(i) for i in range(1, 12))
NOT_RUN = "not run"
# What somebody has, what to do about it, and the cell that was measured.
DECISIONS = (
    (
        "functional code, or code that you may rewrite",
        "compile the whole step, transform inside (first recipe)",
        "A/written back outside",
    ),
    (
        "a CleanRL-style script: `loss.backward()`, `clip_grad_norm_`, `optimizer.step()`",
        "set the flag `trace_autograd_ops`; compile `autograd.grad`, clipping and the bare step (second recipe)",
        "B/gradients copied into p.grad",
    ),
    (
        "the same, and `backward()` must stay",
        "set the flag; call torch's Adam as a function",
        "1/repaired",
    ),
    (
        "a trainer that calls `backward()` and `step()` itself (Lightning, torchrl)",
        "compile forward and loss, use fused Adam; for the whole step take over the update (manual optimisation)",
        "0/loss compiled, eager backward, fused Adam",
    ),
    (
        "nothing that you may change, on a GPU",
        "capture the eager step as one CUDA graph, with a capturable optimizer",
        "0/eager, fused Adam",
    ),
    ("a loop over minibatches", "compile its body once as a `scan`", "E/scan"),
    (
        "several learners of one size",
        "`vmap` inside the compiled step",
        "G/vmap",
    ),
    (
        "a step to save and load again",
        "trace it by `make_fx`, compile that",
        "D/make_fx + standalone_compile",
    ),
)
PLACE = re.compile(r"(<!-- matrix:(\w+) -->\n).*?(<!-- /matrix -->)", re.DOTALL)


def records(folder: Path) -> list[Record]:
    """All records of a folder, by version, CPU first."""
    found = [
        record.load(file) for file in folder.glob("full_step_matrix-*.json")
    ]
    return sorted(found, key=lambda r: (r["device"] != "cpu", version(r)))


def version(of: Record) -> tuple[int, ...]:
    """As in (2, 13, 0)."""
    return tuple(int(part) for part in of["torch"].split("+")[0].split("."))


def label(of: Record) -> str:
    """As in 2.13.0, cpu."""
    return (
        f"{of['torch'].split('+')[0]}, {of['device'].removeprefix('NVIDIA ')}"
    )


def outcome(cell: Record) -> str:
    """A cell's status in a few words."""
    if cell["status"] == "fails":
        cause = cell["error"]["cause"]
        return f"fails: {cause or cell['error']['type']}"
    if cell["status"] == "several graphs":
        kinds = ("graphs", "breaks", "recompiles")
        return ", ".join(
            f"{cell[k]} {k if cell[k] > 1 else k[:-1]}"
            for k in kinds
            if cell[k]
        )
    if cell["status"] == "wrong":
        return "**wrong result**"
    if cell["status"] == "not compiled":
        return "**no graph at all**"
    if cell["status"] == "one graph":
        if cell["compiles"] == "step":
            return "**one graph**"
        return f"one graph, of the {cell['compiles']} only"
    return cell["status"]


def variants(
    of: list[Record], approaches: tuple[str, ...]
) -> list[tuple[str, str, str]]:
    """Approach, title and variant of every way in the records, in the order of the code."""
    seen = {
        (c["approach"], c["title"], c["variant"])
        for r in of
        for c in r["cells"].values()
    }
    order = [(way.approach, way.title, way.variant) for way in registry.WAYS]
    wanted = [way for way in seen if way[0] in approaches]
    return sorted(
        wanted, key=lambda way: (approaches.index(way[0]), order.index(way))
    )


def by_backend(of: Record, approach: str, variant: str) -> str:
    """How a way ends in the default mode, or in its only one: once where the backends agree."""
    name, cells = f"{approach}/{variant}", {}
    for backend, mode in itertools.product(
        BACKENDS, ("default", "graphed callables")
    ):
        cell = of["cells"].get(f"{name}/{backend}/{mode}")
        cells[backend] = cells.get(backend) or cell
    ends: dict[str, list[str]] = {}
    for backend, cell in cells.items():
        if cell:
            ends.setdefault(outcome(cell), []).append(backend)
    if len(ends) <= 1:
        return next(iter(ends), NOT_RUN)
    return "; ".join(
        f"{', '.join(backends)}: {text}" for text, backends in ends.items()
    )


def statuses(of: list[Record], approaches: tuple[str, ...]) -> str:
    """A row for each way, a column for each record."""
    rows = [
        [
            approach,
            title,
            variant,
            *(by_backend(r, approach, variant) for r in of),
        ]
        for approach, title, variant in variants(of, approaches)
    ]
    return table(["way", "title", "variant", *map(label, of)], rows)


def decisions(of: list[Record]) -> str:
    """What to do with what one has: since which version it is one graph, and the times of the newest GPU record."""
    timed = next((r for r in reversed(of) if r["device"] != "cpu"), None)
    head = ["you have", "do", "way", "one graph since"]
    if timed is not None:
        head += [f"{label(timed)}, {m}" for m in ("default", "manual graph")]
    rows = []
    for have, advice, name in DECISIONS:
        approach, variant = name.split("/", 1)
        row = [have, advice, approach, _first_version(of, approach, variant)]
        if timed is not None:
            row += [
                _time(timed, _timed(timed, approach, variant, mode))
                for mode in ("default", "manual graph")
            ]
        rows.append(row)
    return table(head, rows)


def eleven(of: list[Record]) -> str:
    """The report's approaches: how each ends as written, and since when its repair is one graph."""
    rows = []
    for approach in REPORT:
        mine = variants(of, (approach,))
        written = [v for _, _, v in mine if v.startswith("as written")]
        repaired = [v for _, _, v in mine if v not in written]
        since = {_first_version(of, approach, v) for v in repaired} - {"never"}
        rows.append(
            [
                approach,
                mine[0][1],
                "; ".join(_distinct_ends(of, approach, written)),
                min(since, key=_numbers, default="never"),
            ]
        )
    return table(
        ["way", "approach", "as written", "a repair is one graph since"], rows
    )


def _distinct_ends(
    of: list[Record], approach: str, names: list[str]
) -> list[str]:
    """How variants of an approach end in the records that have them, each end once."""
    ends = [by_backend(r, approach, name) for name in names for r in of]
    return [end for end in dict.fromkeys(ends) if end != NOT_RUN]


def _first_version(of: list[Record], approach: str, variant: str) -> str:
    """The oldest version whose CPU record has the whole step as one graph by every backend that was tried."""
    found = [
        version(r)
        for r in of
        if r["device"] == "cpu"
        and by_backend(r, approach, variant) == "**one graph**"
    ]
    return ".".join(map(str, min(found))) if found else "never"


def _numbers(text: str) -> tuple[int, ...]:
    """A version's text as numbers."""
    return tuple(int(part) for part in text.split("."))


def messages(of: list[Record]) -> str:
    """What PyTorch says of each cause, and who meets it."""
    rows = [
        [
            cause,
            ", ".join(sorted({c["approach"] for _, c in met}, key=_order)),
            _labels(met),
            said,
        ]
        for cause in CAUSES
        for said, met in _complaints(of, cause).items()
    ]
    return table(
        ["cause", "ways", "records", "first line of the exception"], rows
    )


def others(of: list[Record]) -> str:
    """The failures that have none of the causes."""
    name = lambda c: (
        f"{c['approach']}/{c['variant']}"
        + (f"/{c['mode']}" if c["mode"] != "default" else "")
    )
    rows = [
        [", ".join(sorted({name(c) for _, c in met})), _labels(met), said]
        for said, met in _complaints(of, "").items()
    ]
    return table(["cells", "records", "first line of the exception"], rows)


def _complaints(
    of: list[Record], cause: str
) -> dict[str, list[tuple[Record, Record]]]:
    """The exceptions of a cause, each with the records and cells that met it."""
    met: dict[str, list[tuple[Record, Record]]] = {}
    for r in of:
        for cell in r["cells"].values():
            if "error" in cell and cell["error"]["cause"] == cause:
                message = re.sub(
                    r"0x[0-9a-f]+", "0x", cell["error"]["message"]
                )  # an address differs in every process
                said = f"`` {cell['error']['type']}: {message} ``"  # it may hold a backtick itself
                met.setdefault(said, []).append((r, cell))
    return met


def _labels(met: list[tuple[Record, Record]]) -> str:
    return "; ".join(dict.fromkeys(label(r) for r, _ in met))


def _order(approach: str) -> tuple[int, str]:
    return (int(approach), "") if approach.isdigit() else (99, approach)


def silent(of: list[Record]) -> str:
    """Cells that somewhere raise nothing and yet compute something else, or compile nothing."""
    names = sorted(
        {
            n
            for r in of
            for n, c in r["cells"].items()
            if c["status"] in ("wrong", "not compiled")
        }
    )
    rows = [
        [name, *(_silent(r["cells"].get(name)) for r in of)] for name in names
    ]
    return table(
        ["cell: largest error in float64, in float32", *map(label, of)], rows
    )


def _silent(cell: Record | None) -> str:
    if cell is None:
        return NOT_RUN
    return ", ".join(
        [
            outcome(cell),
            *(
                f"{cell['parity'][d]:.0e}"
                for d in ("float64", "float32")
                if d in cell["parity"]
            ),
        ]
    )


def times(of: list[Record]) -> str:
    """What the ways that work are worth: a row for each, a column for each record and mode.

    A GPU's cells say microseconds and speed-up, those of a CPU, whose clock others share, speed-ups only; then, in the
    default mode, the seconds of compiling.
    """
    columns = [
        (r, m)
        for r in of
        for m in registry.MODES
        if any(c["mode"] == m for c in r["cells"].values())
    ]
    rows = []
    for approach, title, variant in variants(of, ("0", *REPORT, *"ABCDEFGHI")):
        cells = [_timed(r, approach, variant, mode) for r, mode in columns]
        if any("step_us" in cell for cell in cells):
            rows.append(
                [
                    approach,
                    f"{title}: {variant}",
                    *(_time(r, c) for (r, _), c in zip(columns, cells)),
                ]
            )
    heads = [
        label(r) + (f", {mode}" if r["device"] != "cpu" else "")
        for r, mode in columns
    ]
    return table(["", "way", *heads], rows)


def _timed(of: Record, approach: str, variant: str, mode: str) -> Record:
    """The cell of a way that is timed: not compiled, or compiled by Inductor."""
    found = (
        of["cells"].get(f"{approach}/{variant}/{backend}/{mode}")
        for backend in ("none", "inductor")
    )
    return next((cell for cell in found if cell), {})


def _time(of: Record, cell: Record) -> str:
    """Microseconds on a GPU, the speed-up, and the seconds of compiling.

    A speed-up is given with its quartiles: where those of two cells overlap, neither is faster.
    """
    if "step_us" not in cell:
        return outcome(cell) if cell else ""
    words: list[str] = []
    if of["device"] != "cpu":
        words.append(f"{cell['step_us']:.0f} µs")
    if "speedup" in cell:
        low, high = cell["speedup_quartiles"]
        words.append(f"{cell['speedup']:.1f}x ({low:.1f} to {high:.1f})")
    if cell["mode"] == "default" and cell["backend"] != "none":
        words.append(f"{cell['compile_s']:.0f} s")
    return ", ".join(words)


def replays(of: list[Record]) -> str:
    """What a GPU recorded under graph trees, and why they skipped: the cells where that is the same together."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for r in of:
        for c in r["cells"].values():
            if c["mode"] == "reduce-overhead" and "recordings" in c:
                key = label(r), str(c["recordings"]), "; ".join(c["skips"])
                alike.setdefault(key, []).append(
                    f"{c['approach']}/{c['variant']}"
                )
    rows = [[*key, ", ".join(names)] for key, names in alike.items()]
    return (
        table(["record", "recordings", "reasons for skipping", "cells"], rows)
        if rows
        else "No GPU record yet.\n"
    )


def provenance(of: list[Record]) -> str:
    """Where each record comes from, and how long its cells took one after the other, without timing them."""
    rows = [
        [
            label(r),
            r["processor"],
            r["python"],
            str(len(r["cells"])),
            f"{sum(c['seconds'] for c in r['cells'].values()) / 60:.0f}",
            ", ".join(
                sorted({c["commit"] or "unknown" for c in r["cells"].values()})
            ),
        ]
        for r in of
    ]
    return table(
        ["record", "processor", "Python", "cells", "minutes", "commits"], rows
    )


TABLES: dict[str, Callable[[list[Record]], str]] = {
    "decisions": decisions,
    "eleven": eleven,
    "approaches": lambda of: statuses(of, REPORT),
    "routes": lambda of: statuses(of, tuple("ABCDEFG")),
    "hopes": lambda of: statuses(of, ("H",)),
    "ingredients": lambda of: statuses(of, ("I",)),
    "messages": messages,
    "others": others,
    "silent": silent,
    "times": times,
    "replays": replays,
    "records": provenance,
}


def rewritten(text: str, of: list[Record]) -> str:
    """A text with every table between its marks made anew; KeyError for a mark of no table."""
    return PLACE.sub(
        lambda found: f"{found[1]}{TABLES[found[2]](of)}{found[3]}", text
    )


def publish(texts: Iterable[Path], folder: Path) -> None:
    """Rewrite the tables of some texts from the records of a folder."""
    for text in texts:
        text.write_text(rewritten(text.read_text(), records(folder)))


def whole(of: Record) -> str:
    """Every cell of a record."""
    rows = [
        [
            name,
            outcome(c),
            *(
                f"{c['parity'][dtype]:.0e}" if dtype in c["parity"] else ""
                for dtype in ("float64", "float32")
            ),
            str(c.get("compile_s", "")),
            _time(of, {**c, "mode": ""}) if "step_us" in c else "",
            f"{c['peak_bytes'] / 1e9:.3f}" if "peak_bytes" in c else "",
            str(c.get("recordings", "")),
            c["error"]["message"]
            if "error" in c
            else "; ".join(c.get("skips", [])),
        ]
        for name, c in of["cells"].items()
    ]
    head = [
        "cell",
        "outcome",
        "float64 error",
        "float32 error",
        "compile, s",
        "a step, times as fast (quartiles)",
        "GB held",
        "recordings",
        "message",
    ]
    return f"# {label(of)}\n\n{table(head, rows)}"
