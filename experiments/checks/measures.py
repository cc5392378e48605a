"""Print how large the project is: what somebody must know who maintains it, each measure beside its goal.

python experiments/checks/measures.py                of this checkout
python experiments/checks/measures.py --root DIR     of another one
python experiments/checks/measures.py --no-options   without the programs' --help, which takes most of the time
"""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.checks import readability
from experiments.paths import ROOT, make_parser

RECORD_BASES = ("NamedTuple", "Protocol", "TypedDict")
NUMBER_PARTS = (
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.expr_context,
    ast.Tuple,
)
GOALS = {
    "syntax nodes in function bodies": 125_000,
    "modules": 120,
    "classes (NamedTuple, dataclass, Protocol, TypedDict)": 350,
    "numeric module constants": 220,
    "options of train in --help": 30,
    "options of all programs in --help": 180,
    "programs": 12,
    "lines of tests": 36_000,
    "lines of experiments": 11_000,
    "words of documents": 28_000,
    "words of CHANGELOG.md": 1_500,
}


def measure(root: Path, has_options: bool = True) -> dict[str, int]:
    """Returns each measure of a checkout by its name.

    Args:
      root: the folder of the checkout.
      has_options: count the options of programs too, by running each with --help.
    """
    package = root / "funcppo"
    modules = [ast.parse(path.read_text()) for path in package.rglob("*.py")]
    kinds = count_record_classes(modules)
    measures = {
        "syntax nodes in function bodies": readability.measure(
            package
        ).body_nodes,
        "modules": len(modules),
        "classes (NamedTuple, dataclass, Protocol, TypedDict)": kinds.total(),
    }
    for kind, count in sorted(kinds.items()):
        measures[f"  {kind}"] = count
    measures["numeric module constants"] = sum(
        len(list(numeric_constants(module))) for module in modules
    )

    if has_options:
        measures |= count_options(root)
    documents = [root / "README.md", root / "INVESTIGATION.md"]
    documents += [
        path
        for path in (root / "docs").rglob("*.md")
        if not {"_build", "_made"} & {*path.parts}
    ]
    return measures | {
        "lines of tests": count_lines(root / "tests"),
        "lines of experiments": count_lines(root / "experiments"),
        "words of documents": count_words(documents),
        "words of CHANGELOG.md": count_words([root / "CHANGELOG.md"]),
    }


def count_record_classes(modules: list[ast.Module]) -> Counter[str]:
    """Returns the number of NamedTuples, dataclasses, Protocols and TypedDicts."""
    counts: Counter[str] = Counter()
    for module in modules:
        for node in ast.walk(module):
            if not isinstance(node, ast.ClassDef):
                continue
            bases = {last_name(base) for base in node.bases}
            counts.update(base for base in RECORD_BASES if base in bases)
            decorators = {last_name(item) for item in node.decorator_list}
            counts.update({"dataclass"} & decorators)
    return counts


def last_name(node: ast.expr) -> str:
    """Returns the name that an expression such as `typing.Protocol[T]` or `dataclass(...)` ends in."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def numeric_constants(module: ast.Module) -> Iterator[str]:
    """Yields each name in capitals at the top of a module whose value is a number, a tuple or arithmetic of numbers."""
    for node in module.body:
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign):
            target = node.target
        else:
            continue
        if (
            isinstance(target, ast.Name)
            and target.id.isupper()
            and node.value is not None
            and consists_of_numbers(node.value)
        ):
            yield target.id


def consists_of_numbers(value: ast.expr) -> bool:
    """Whether an expression holds numbers, arithmetic and tuples, and nothing else."""
    n_numbers = 0
    for node in ast.walk(value):
        if isinstance(node, ast.Constant):
            if type(node.value) not in (int, float):
                return False
            n_numbers += 1
        elif not isinstance(node, NUMBER_PARTS):
            return False
    return n_numbers > 0


def count_options(root: Path) -> dict[str, int]:
    """Returns how many programs there are, and the options that --help and --help-all name: of train, of all."""
    programs = re.findall(
        r"^    ([a-z]+) +[A-Z]", help_text(root), re.MULTILINE
    )
    shown = {name: options(help_text(root, name)) for name in programs}
    known = {
        name: shown[name] | options(help_text(root, name, "--help-all"))
        for name in programs
    }
    return {
        "programs": len(programs),
        "options of train in --help": len(shown["train"]),
        "options of train in --help-all": len(known["train"]),
        "options of all programs in --help": sum(map(len, shown.values())),
        "options of all programs in --help-all": sum(map(len, known.values())),
    }


def help_text(root: Path, program: str = "", option: str = "--help") -> str:
    """Returns what a program prints for --help; nothing if it does not know the option."""
    command = [sys.executable, "-m", "funcppo", *program.split(), option]
    result = subprocess.run(
        command,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return result.stdout if result.returncode == 0 else ""


def options(text: str) -> set[str]:
    """Returns the distinct long options that a help text names."""
    return set(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9.-]*[a-z0-9]", text))


def count_lines(folder: Path) -> int:
    """Returns the number of lines of all Python files below a folder."""
    return sum(
        len(path.read_text().splitlines()) for path in folder.rglob("*.py")
    )


def count_words(paths: list[Path]) -> int:
    """Returns the number of words, as `wc -w` counts them, of some files."""
    return sum(len(path.read_text().split()) for path in paths)


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--root",
        type=Path,
        default=ROOT,
        metavar="DIR",
        help="the checkout to measure; this one by default",
    )
    parser.add_argument(
        "--no-options",
        action="store_true",
        help="leave out the options of programs",
    )
    args = parser.parse_args()

    measures = measure(args.root.resolve(), not args.no_options)
    width = max(map(len, measures))
    for name, value in measures.items():
        goal = f"  at most {GOALS[name]:>7,}" if name in GOALS else ""
        print(f"{name:<{width}} {value:>8,}{goal}")


if __name__ == "__main__":
    main()
