"""The README's example and the command of `make train`, as they are taken from the files."""

import ast
from pathlib import Path

from experiments.benchmarks import readme_outputs
from experiments.paths import ROOT


def test_the_example_of_the_readme_is_a_program():
    code = readme_outputs.example_code((ROOT / "README.md").read_text())
    names = {
        node.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute)
    }
    assert {"ppo", "compile", "init", "step"} <= names
    assert code.startswith("import funcppo as fp\n")


def test_the_command_of_make_train_writes_to_another_folder():
    words = readme_outputs.train_command(
        "train: x\n\tA=1 $(BIN)/funcppo train d:1 --p 0.5 --out runs/d --overwrite\n",
        Path("/tmp/r"),
    )
    assert words == [
        "train",
        "d:1",
        "--p",
        "0.5",
        "--out",
        "/tmp/r",
        "--overwrite",
    ]
    makefile = (ROOT / "Makefile").read_text()
    assert readme_outputs.train_command(makefile, Path("x"))[0] == "train"


def test_the_result_is_the_table_and_the_proof():
    text = "note: x\ntest (filtered)\n a 1\n\na proof:\np\n\ndone in 3 s: r\n"
    assert (
        readme_outputs.result_part(text)
        == "test (filtered)\n a 1\n\na proof:\np\n"
    )
