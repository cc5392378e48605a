"""What the README's programs print, its PPO example and `make train`, and its picture.

    python experiments/benchmarks/readme_outputs.py

The code of the example is taken from README.md, the command of `make train` from the Makefile. `experiments/tables.py`
puts what they print into the README. The picture is `docs/answer.svg`.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

import funcppo as fp
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DOCS, RESULTS, ROOT
from experiments.provenance import describe_machine
from funcppo.kg.graph import drawing

# A picture that a page loads has no text around it whose colour it could take.
COLOURS = (
    "<style>svg{color:#1f2328}"
    "@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
)


def main() -> None:
    """Run both, write the record, and draw the picture."""
    (DOCS / "answer.svg").write_text(draw_answer())
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    with tempfile.TemporaryDirectory() as folder:
        training, answers = [
            run([sys.executable, "-m", "funcppo", *words])
            for words in train_commands(makefile, Path(folder) / "run")
        ]
    record = {
        "ppo": run([sys.executable, "-c", example_code(readme)]),
        "train": f"{result_part(training)}\n{answers}",
        "machine": describe_machine(),
    }
    write_record(RESULTS / "readme_outputs.json", record)


def example_code(readme: str) -> str:
    """The first indented block after the heading of the PPO example."""
    section = readme.split("## PPO in 20 lines\n", 1)[1]
    match = re.search(r"^ {4}\S.*\n(?:(?: {4}.*)?\n)*", section, re.MULTILINE)
    assert match, "README.md: expected code below its PPO heading"
    return re.sub(r"^ {4}", "", match[0], flags=re.MULTILINE).rstrip() + "\n"


def train_commands(makefile: str, out: Path) -> list[list[str]]:
    """The arguments of `funcppo` in the recipe of `make train`, with another folder for the run."""
    recipe = makefile.split("\ntrain:", 1)[1].split("\n\n")[0]
    commands = re.findall(r"/funcppo (.*)$", recipe, re.MULTILINE)
    assert len(commands) == 2, "Makefile: expected two programs in `make train`"
    return [
        [str(out) if word == "runs/clans" else word for word in shlex.split(x)]
        for x in commands
    ]


def result_part(text: str) -> str:
    """The table of test metrics: from its title to the line before the last."""
    return text[text.index("test (") : text.index("\ndone in ")]


def draw_answer() -> str:
    """Return a picture of an answer, the facts of its proof, and four neighbours."""
    graph = fp.load("countries_s3")
    data = graph.dataset
    names, relations = data.entities, data.predicates
    answer = fp.fit(graph, seconds=8).prove("locatedIn(france, europe)")
    assert answer.proof, "expected a proof"
    edges = drawing.proof_edges(
        ((node.goal, node.rule) for node in answer.proof.nodes),
        lambda i: relations[i - 1],
    )
    ids = {name: i for i, name in enumerate(names, 1)}
    beside = [
        drawing.Edge(ids[head], ids[tail], relation)
        for head, relation, tail in graph.triples
        if (head, relation) == ("france", "neighborOf")
    ][:4]
    columns = drawing.columns_of(edges, edges[0].head)
    columns |= {edge.tail: -1 for edge in beside}
    picture = drawing.draw(
        [*beside, *edges],
        lambda i: names[i - 1],
        title=answer.query,
        columns=columns,
    )
    return picture.replace("<defs>", f"{COLOURS}<defs>", 1) + "\n"


def run(command: list[str]) -> str:
    """What a program prints, on one thread of the CPU.

    Raises:
      CalledProcessError: it fails.
    """
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


if __name__ == "__main__":
    main()
