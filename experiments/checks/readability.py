"""Claim: the package reads as easily as other JAX-style libraries; one table of measures, each beside its target.

    python experiments/checks/readability.py             the table; exit 1 if a target is missed
    python experiments/checks/readability.py --list      and every function that counts against a target
    python experiments/checks/readability.py DIR ...     the same measures of other packages

For comparison, measured on 2026-11-22: rlax 6.6 syntax nodes a body line and 0 % packed bodies, mctx 5.2 and 0 %,
optax 4.9 and 3 %, equinox 4.7 and 16 %, gymnax 5.5 and 28 %, PyKEEN 5.0 and 6 %.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.paths import ROOT, make_parser

PACKAGE = ROOT / "funcppo"
NOT_COUNTED = (
    ast.expr_context,
    ast.operator,
    ast.cmpop,
    ast.boolop,
    ast.unaryop,
)
LAYOUT_TOKENS = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try)

LONG_BODY_LINES = 20  # so long a body should have a blank line or a comment
MAX_STATEMENTS = 25
MAX_PARAMETERS = 10
MAX_NESTING = 4
# so long a public function should document its arguments and result
REAL_WORK_STATEMENTS = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Measures:
    """Counts over the files of a package."""

    body_nodes: int = 0
    body_lines: int = 0
    code_lines: int = 0
    n_any: int = 0
    functions: int = 0
    long_bodies: int = 0
    documentable: int = 0
    packed: list[str] = field(default_factory=list)
    long: list[str] = field(default_factory=list)
    many_parameters: list[str] = field(default_factory=list)
    nested: list[str] = field(default_factory=list)
    undocumented: list[str] = field(default_factory=list)


def measure(folder: Path) -> Measures:
    """The measures of every Python file below a folder, tests left out."""
    total = Measures()
    for path in sorted(folder.rglob("*.py")):
        if "test" not in path.name:
            add_file(total, path, str(path.relative_to(folder)))
    return total


def add_file(total: Measures, path: Path, name: str) -> None:
    """Add the counts of one file."""
    text = path.read_text(errors="replace")
    module = ast.parse(text)
    rows = text.split("\n")
    coded, commented = token_lines(text, rows)
    documented = docstring_lines(module)
    total.code_lines += len(coded - documented)
    total.n_any += sum(
        isinstance(node, ast.Name) and node.id == "Any"
        for node in ast.walk(module)
    )
    for function, is_public in functions(module):
        add_function(
            total,
            function,
            is_public,
            f"{name}:{function.lineno} {function.name}",
            rows,
            coded - documented,
            commented,
        )


def add_function(
    total: Measures,
    function: Function,
    is_public: bool,
    place: str,
    rows: list[str],
    coded: set[int],
    commented: set[int],
) -> None:
    """Add the counts of one function."""
    body = function.body[1:] if docstring(function) else function.body
    if not body:
        return
    total.functions += 1
    span = set(
        range(body[0].lineno, (function.end_lineno or body[0].lineno) + 1)
    )
    total.body_nodes += sum(
        not isinstance(node, NOT_COUNTED)
        for statement in body
        for node in ast.walk(statement)
    )
    total.body_lines += len(span & coded)

    if len(span) >= LONG_BODY_LINES:
        total.long_bodies += 1
        if not (span & commented) and all(
            rows[line - 1].strip() for line in span
        ):
            total.packed.append(place)

    n_statements = sum(
        isinstance(node, ast.stmt)
        for statement in body
        for node in ast.walk(statement)
    )
    arguments = function.args
    n_parameters = len(
        arguments.posonlyargs + arguments.args + arguments.kwonlyargs
    )
    if n_statements > MAX_STATEMENTS:
        total.long.append(f"{place} {n_statements}")
    is_kernel = "constexpr" in ast.unparse(arguments)  # a GPU kernel
    if n_parameters > MAX_PARAMETERS and not is_kernel:
        total.many_parameters.append(f"{place} {n_parameters}")
    if (depth := nesting(function)) > MAX_NESTING:
        total.nested.append(f"{place} {depth}")

    if is_public and n_statements >= REAL_WORK_STATEMENTS:
        total.documentable += 1
        text = ast.get_docstring(function) or ""
        if not ("Returns:" in text or "Args:" in text or "Yields:" in text):
            total.undocumented.append(place)


def functions(module: ast.Module) -> Iterator[tuple[Function, bool]]:
    """Top-level functions and methods, and whether each is public."""
    for node in module.body:
        if isinstance(node, Function):
            yield node, not node.name.startswith("_")
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, Function):
                    yield (
                        member,
                        not (
                            member.name.startswith("_")
                            or node.name.startswith("_")
                        ),
                    )


def nesting(node: ast.AST) -> int:
    """The depth of loops, branches, with and try blocks within a node; `elif` adds none."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        is_elif = (
            isinstance(node, ast.If)
            and isinstance(child, ast.If)
            and child in node.orelse
        )
        deepest = max(
            deepest,
            nesting(child) + (isinstance(child, BLOCKS) and not is_elif),
        )
    return deepest


def token_lines(text: str, rows: list[str]) -> tuple[set[int], set[int]]:
    """Numbers of the lines that hold code, and of those that hold nothing but a comment."""
    coded: set[int] = set()
    commented: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line, column = token.start
        if (
            token.type == tokenize.COMMENT
            and not rows[line - 1][:column].strip()
        ):
            commented.add(line)
        elif token.type not in LAYOUT_TOKENS:
            coded |= set(range(line, token.end[0] + 1))
    return coded, commented


def docstring(node: ast.AST) -> ast.Expr | None:
    """The statement that is the docstring of a module, class or function."""
    first = node.body[0] if getattr(node, "body", None) else None  # type: ignore[attr-defined]
    is_text = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    return first if is_text else None


def docstring_lines(module: ast.Module) -> set[int]:
    """Numbers of the lines of all docstrings."""
    lines: set[int] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (
            text := docstring(node)
        ):
            lines |= set(
                range(text.lineno, (text.end_lineno or text.lineno) + 1)
            )
    return lines


def table(measures: Measures) -> list[tuple[str, str, str, bool]]:
    """Rows of measure, value, target, and whether the target is met."""
    nodes = measures.body_nodes / max(measures.body_lines, 1)
    packed = len(measures.packed) / max(measures.long_bodies, 1)
    any_rate = 1000 * measures.n_any / max(measures.code_lines, 1)
    documented = 1 - len(measures.undocumented) / max(measures.documentable, 1)
    return [
        (
            "syntax nodes a body line",
            f"{nodes:.1f}",
            "at most 6.5",
            nodes <= 6.5,
        ),
        (
            "bodies of 20 lines without a blank line or comment",
            f"{packed:.0%}",
            "under 10 %",
            packed < 0.1,
        ),
        (
            "Any per 1,000 code lines",
            f"{any_rate:.0f}",
            "below 15",
            any_rate < 15,
        ),
        (
            "public functions of 6 statements with Args or Returns",
            f"{documented:.0%}",
            "at least 50 %",
            documented >= 0.5,
        ),
        (
            f"functions of more than {MAX_STATEMENTS} statements",
            str(len(measures.long)),
            "0",
            not measures.long,
        ),
        (
            f"functions of more than {MAX_PARAMETERS} parameters",
            str(len(measures.many_parameters)),
            "0",
            not measures.many_parameters,
        ),
        (
            f"functions nested deeper than {MAX_NESTING}",
            str(len(measures.nested)),
            "0",
            not measures.nested,
        ),
        ("functions", str(measures.functions), "", True),
        ("code lines", str(measures.code_lines), "", True),
    ]


def main() -> int:
    """The exit status: 0, or 1 when the package misses a target."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="DIR",
        help="packages to measure; this one by default",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="name the functions that count against a target",
    )
    args = parser.parse_args()

    missed = False
    for folder in args.folders or [PACKAGE]:
        measures = measure(folder)
        print(folder.name)
        for name, value, target, is_met in table(measures):
            print(
                f"  {name:<56} {value:>8}  {target:<14}{'' if is_met else 'MISSED'}"
            )
            missed |= not is_met
        if args.list:
            for title in (
                "packed",
                "long",
                "many_parameters",
                "nested",
                "undocumented",
            ):
                print(f"  {title}: " + "; ".join(getattr(measures, title)))
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
