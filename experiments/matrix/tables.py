"""Markdown made from the records, and its place in INVESTIGATION.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.matrix import record, registry
from experiments.matrix.causes import CAUSES

Record = dict[str, Any]
BASELINE = "0/eager, fused Adam/none/default"
BACKENDS = ("none", "eager", "aot_eager", "inductor")
REPORT = tuple(str(i) for i in range(1, 12))
PLACE = re.compile(r"(<!-- matrix:(\w+) -->\n).*?(<!-- /matrix -->)", re.DOTALL)


def records(folder: Path) -> list[Record]:
    """All records of a folder, by version, CPU first."""
    found = [record.load(file) for file in folder.glob("full_step_matrix-*.json")]
    return sorted(found, key=lambda r: (r["device"] != "cpu", version(r)))


def version(of: Record) -> tuple[int, ...]:
    """As in (2, 13, 0)."""
    return tuple(int(part) for part in of["torch"].split("+")[0].split("."))


def label(of: Record) -> str:
    """As in 2.13.0, cpu."""
    return f"{of['torch'].split('+')[0]}, {of['device'].removeprefix('NVIDIA ')}"


def grid(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def outcome(cell: Record) -> str:
    """A cell's status in a few words."""
    if cell["status"] == "fails":
        return f"fails: {cell['error']['cause'] or cell['error']['type']}"
    if cell["status"] == "several graphs":
        extra = [f"{cell[key]} {key}" for key in ("breaks", "recompiles") if cell[key]]
        return ", ".join([f"{cell['graphs']} graphs" if cell["graphs"] > 1 else "1 graph", *extra])
    if cell["status"] == "wrong":
        return "**wrong result**"
    if cell["status"] == "not compiled":
        return "**no graph at all**"
    if cell["status"] == "one graph":
        return "**one graph**" if cell["compiles"] == "step" else "one graph, of the loss only"
    return cell["status"]


def variants(of: list[Record], approaches: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Approach, title and variant of every way in the records, in order."""
    seen = {(c["approach"], c["title"], c["variant"]) for r in of for c in r["cells"].values()}
    order = {name: i for i, name in enumerate(approaches)}
    return sorted((way for way in seen if way[0] in order), key=lambda way: (order[way[0]], way[2]))


def by_backend(of: Record, approach: str, variant: str) -> str:
    """How a way ends in the default mode: once where the backends agree."""
    cells = {b: of["cells"].get(f"{approach}/{variant}/{b}/default") for b in BACKENDS}
    words = {backend: outcome(cell) for backend, cell in cells.items() if cell}
    if len(set(words.values())) <= 1:
        return next(iter(words.values()), "not run")
    return "; ".join(f"{backend}: {text}" for backend, text in words.items())


def statuses(of: list[Record], approaches: tuple[str, ...]) -> str:
    """A row for each way, a column for each record."""
    rows = [
        [approach, title, variant, *(by_backend(r, approach, variant) for r in of)]
        for approach, title, variant in variants(of, approaches)
    ]
    return grid(["", "approach", "variant", *map(label, of)], rows)


def messages(of: list[Record]) -> str:
    """For each cause the approaches that meet it, and what PyTorch says."""
    rows = []
    for cause in CAUSES:
        for r in of:
            hit = [c for c in r["cells"].values() if c["status"] == "fails" and c["error"]["cause"] == cause]
            said = sorted({f"`{c['error']['type']}: {c['error']['message']}`" for c in hit})
            if hit:
                rows.append([cause, label(r), ", ".join(sorted({c["approach"] for c in hit}, key=_order)), said[0]])
    return grid(["cause", "record", "approaches", "first line of the exception"], rows)


def _order(approach: str) -> tuple[int, str]:
    return (int(approach), "") if approach.isdigit() else (99, approach)


def silent(of: list[Record]) -> str:
    """Cells that raise nothing and yet compute something else, or compile nothing."""
    rows = [
        [
            label(r),
            name,
            outcome(c),
            *(f"{c['parity'].get(dtype, float('nan')):.0e}" for dtype in ("float64", "float32")),
        ]
        for r in of
        for name, c in r["cells"].items()
        if c["status"] in ("wrong", "not compiled")
    ]
    return grid(["record", "cell", "outcome", "float64 error", "float32 error"], rows)


def times(of: list[Record]) -> str:
    """What the ways that work are worth, for each record a table."""
    return "\n".join(f"{label(r)}:\n\n{_times(r)}" for r in of)


def _times(of: Record) -> str:
    """Microseconds from a GPU; from a CPU, whose clock others share, ratios only."""
    modes = [m for m in registry.MODES if any(c["mode"] == m for c in of["cells"].values())]
    base, gpu = of["cells"].get(BASELINE, {}).get("step_us"), of["device"] != "cpu"
    rows = []
    for approach, title, variant in variants([of], ("0", *REPORT, *"ABCDEFGH")):
        backend = "none" if f"{approach}/{variant}/none/default" in of["cells"] else "inductor"
        cells = [of["cells"].get(f"{approach}/{variant}/{backend}/{mode}", {}) for mode in modes]
        if any("step_us" in c for c in cells):
            compiled = "step_us" in cells[0] and backend != "none"
            seconds = f"{cells[0]['compile_s']:.0f}" if compiled else ""
            rows.append([approach, f"{title}: {variant}", seconds, *(_time(c, base, gpu) for c in cells)])
    unit = "µs a step (speed-up over row 1)" if gpu else "speed-up over row 1"
    return grid(["", "way", "compile, s", *(f"{mode}: {unit}" for mode in modes)], rows)


def _time(cell: Record, base: float | None, gpu: bool) -> str:
    if "step_us" not in cell:
        return outcome(cell) if cell else ""
    ratio = f"{base / cell['step_us']:.1f}x" if base else ""
    return f"{cell['step_us']:.0f} ({ratio})" if gpu else ratio


def replays(of: list[Record]) -> str:
    """What a GPU recorded, and why graph trees skipped."""
    rows = [
        [label(r), name, str(c["recordings"]), "; ".join(c["skips"])]
        for r in of
        for name, c in r["cells"].items()
        if c["mode"] == "reduce-overhead" and "recordings" in c
    ]
    return grid(["record", "cell", "recordings", "reasons for skipping"], rows) if rows else "No GPU record yet.\n"


def provenance(of: list[Record]) -> str:
    """Where each record comes from."""
    rows = [
        [
            label(r),
            r["processor"],
            r["python"],
            str(len(r["cells"])),
            ", ".join(sorted({c["commit"] or "unknown" for c in r["cells"].values()})),
        ]
        for r in of
    ]
    return grid(["record", "processor", "Python", "cells", "commits"], rows)


TABLES: dict[str, Callable[[list[Record]], str]] = {
    "approaches": lambda of: statuses(of, REPORT),
    "routes": lambda of: statuses(of, tuple("ABCDEFG")),
    "hopes": lambda of: statuses(of, ("H",)),
    "baselines": lambda of: statuses(of, ("0",)),
    "messages": messages,
    "silent": silent,
    "times": times,
    "replays": replays,
    "records": provenance,
}


def rewritten(text: str, of: list[Record]) -> str:
    """A text with every table between its marks made anew; KeyError for a mark of no table."""
    return PLACE.sub(lambda found: f"{found[1]}{TABLES[found[2]](of)}{found[3]}", text)


def publish(text: Path, folder: Path) -> None:
    """Every record of a folder as a table beside it, and the tables of a text."""
    for file in folder.glob("full_step_matrix-*.json"):
        file.with_suffix(".md").write_text(whole(record.load(file)))
    text.write_text(rewritten(text.read_text(), records(folder)))


def whole(of: Record) -> str:
    """Every cell of a record."""
    rows = [
        [
            name,
            outcome(c),
            *(f"{c['parity'][dtype]:.0e}" if dtype in c["parity"] else "" for dtype in ("float64", "float32")),
            *(str(c.get(key, "")) for key in ("compile_s", "step_us", "recordings")),
            c["error"]["message"] if "error" in c else "; ".join(c.get("skips", [])),
        ]
        for name, c in of["cells"].items()
    ]
    head = ["cell", "outcome", "float64 error", "float32 error", "compile, s", "µs a step", "recordings", "message"]
    return f"# {label(of)}\n\n{grid(head, rows)}"
