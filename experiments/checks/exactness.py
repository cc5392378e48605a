"""Claim: the answers to queries of random Datalog programs are those of SWI-Prolog and of clingo.

    python experiments/checks/exactness.py --programs 1000 --out experiments/results/exactness.json

Programs have facts and rules of 0 to 4 arguments, recursion, constants in heads, variables that repeat, names that need
quotes, and integers in several spellings (`tests/kg/test_datalog.py`). The least model of each is compared, and the
answers to an open query and another one of each predicate. Exit status 1 if any answer differs.
"""

import json
import sys
import tempfile
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

import clingo

from experiments.paths import make_parser
from experiments.provenance import describe_machine
from tests import prolog
from tests.kg import test_datalog as programs


def main() -> None:
    """Compare all programs and write the record."""
    parser = make_parser(__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    random = Random(0)
    sets = [programs.random_clauses(random) for _ in range(args.programs)]
    texts = [programs.format_program(clauses, random) for clauses in sets]
    of_prolog = prolog.all_answers(texts, list(map(programs.signatures, sets)))

    n_different, n_answers = 0, sum(map(len, of_prolog))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.pl"
        for clauses, text, expected in zip(sets, texts, of_prolog):
            path.write_text(text)
            try:
                assert programs.clingo_answers(clauses) == expected
                programs.assert_answers(path, clauses, random, expected)
            except AssertionError:
                n_different += 1
                print(text, file=sys.stderr)
    record = {
        "machine": describe_machine() | {"clingo": clingo.__version__},
        "programs": args.programs,
        "answers": n_answers,
        "programs_with_differences": n_different,
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    sys.exit(n_different > 0)


if __name__ == "__main__":
    main()
