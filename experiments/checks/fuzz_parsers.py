"""Claim: mutated input makes the parsers raise nothing but ValueError of one line, and accepted input reads back.

    python experiments/checks/fuzz_parsers.py [--bytes 10000000] [--seed 0]

Writes experiments/results/fuzz_parsers.json. There is a seed text for each format; a mutation cuts, repeats, splices or
overwrites, with bytes that mean something to some format.
"""

import gzip
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import RESULTS, make_parser
from experiments.provenance import current_commit
from funcppo.kg.graph.dataset import Dataset, with_rules
from funcppo.kg.graph.loaders import load
from funcppo.kg.graph.rules import (
    format_atom,
    format_rule,
    parse_query,
    read_clauses,
)

TRIPLES = b"ann\tknows\tbob\nbob\tknows\tcid\ncid\tlikes\tann\nann lee\tlikes\tO'Hara\n/m/02\t/p/q.r\t-1\n"
SEEDS = {
    "train.txt": [TRIPLES],
    "train.txt.gz": [gzip.compress(TRIPLES)],
    "rules.txt": [
        b"0.5\tknows(X,Y) :- likes(X,Z), knows(Z,Y)\n\tlikes(X,'ann lee') :- knows(X,cid)\n",
        b"#source_weight\ttrain_support\ttrain_conf\trule\n\t5\t.5\t/p/q.r(X,Y) :- knows(X,Z), likes(Y,Z)\n",
        b"10\t5\t0.5\tknows(X,Y) <= likes(X,A), knows(A,Y)\n3\t2\t0.6\tlikes(X,bob) <= knows(X,cid)\n",
        b"Rule\tHead Coverage\tStd Confidence\n?a  knows  ?c  ?c  likes  ?b   => ?a  knows  ?b\t0.1\t0.5\n",
        b"knows(X, Y) :- likes(X, _), % why\n  knows(_, Y). /* so */ likes(X, X) :- knows(X, 'O\\'Hara').\n",
    ],
    "program.pl": [
        b"edge(a, 'B c'). edge(a, -12). % facts\npath(X, Y) :- edge(X, Y).\n"
        b"path(X, Z) :- path(X, Y),\n edge(Y, Z).\nhot.\n",
        b"p('\\x41\\', 'it''s', '\\n\\\\'). /* c */ q(X) :- p(X, _, Y), q(Y), hot. hot :- q(a).\n",
    ],
}
QUERY_SEED = b"knows(ann, 'O\\'Hara')"
# spaces aside, divided by them
WORDS = (
    *rb"( ) , . ' :- <= => \ \x X _ ?a % /* \+ [ 1 -0 0.5 # ! ; */ ((((((((( '\''".split(),
    *b"is true knows likes(X,Y) f(X) ann".split(),
    *(b"\t", b"\n", b"\xff", b"\xc3\xa9", b"\xe2\x80\xa8", b"\x00", b"\r\n"),
    *(b"not ", b'"', b" ", b"  ", b"\xef\xbb\xbf", b"\xc2\xa0", b"Rule\t"),
)
MAX_TEXT_BYTES, MAX_QUERY_BYTES = 5000, 300
MAX_ERROR_CHARACTERS = 1000


def main() -> None:
    """Fuzz, and write the record."""
    parser = make_parser(__doc__)
    parser.add_argument("--bytes", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "fuzz_parsers.json",
        help="record to write",
    )
    args = parser.parse_args()
    start = time.perf_counter()
    counts = fuzz(args.bytes, args.seed)
    record = {
        "seed": args.seed,
        **counts,
        "seconds": round(time.perf_counter() - start, 1),
        "commit": current_commit(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
    }
    write_record(args.out, record)
    print(json.dumps(record, indent=1))


def fuzz(n_bytes: int, seed: int) -> dict[str, int]:
    """Try at least `n_bytes` bytes of mutated input; an AssertionError names what should not have happened.

    Returns:
      Counts: bytes, inputs, accepted and rejected inputs.
    """
    rng = np.random.default_rng(seed)
    counts = {"bytes": 0, "inputs": 0, "accepted": 0, "rejected": 0}
    with tempfile.TemporaryDirectory() as scratch:
        dataset = load(make_folder(Path(scratch) / "whole", ""))
        folders = {
            name: make_folder(Path(scratch) / name, name) for name in SEEDS
        }
        while counts["bytes"] < n_bytes:
            name = list(SEEDS)[rng.integers(len(SEEDS))]
            text = mutate(rng, SEEDS[name][rng.integers(len(SEEDS[name]))])
            try_query(dataset, text)
            try_query(dataset, mutate(rng, QUERY_SEED))
            is_accepted = try_file(folders[name], name, text)
            counts["bytes"] += len(text)
            counts["inputs"] += 1
            counts["accepted" if is_accepted else "rejected"] += 1
    return counts


def make_folder(folder: Path, missing: str) -> Path:
    """A folder that lacks only the file `missing` to be a data set."""
    folder.mkdir()
    for split in ("train.txt", "valid.txt", "test.txt"):
        if not missing or not missing.startswith(split):
            (folder / split).write_bytes(TRIPLES)
    return folder


def mutate(rng: np.random.Generator, text: bytes) -> bytes:
    """The text, perhaps repeated, after one to four small changes."""
    text *= int(rng.integers(1, 7))
    for _ in range(rng.integers(1, 5)):
        start, end = sorted(int(i) for i in rng.integers(0, len(text) + 1, 2))
        word = WORDS[rng.integers(len(WORDS))]
        change = rng.integers(6)
        if change == 0:  # insert a word
            text = text[:start] + word + text[start:]
        elif change == 1:  # overwrite with a word
            text = text[:start] + word + text[start + len(word) :]
        elif change == 2:  # cut
            text = text[:start] + text[min(end, start + 12) :]
        elif change == 3:  # repeat a part
            text = text[:start] + text[start:end] * 2 + text[end:]
        elif change == 4:  # insert random bytes
            text = text[:start] + rng.bytes(2) + text[start:]
        else:  # overwrite with a repeated word
            text = text[:start] + word * int(rng.integers(1, 40)) + text[end:]
    return text[:MAX_TEXT_BYTES]


def try_file(folder: Path, name: str, text: bytes) -> bool:
    """Whether the loader accepts the file; accepted, it must read back, refused, by one line of ValueError."""
    path = folder / name
    path.write_bytes(text)
    try:
        dataset = load(path if name.endswith(".pl") else folder)
    except ValueError as error:
        check_error(error)
        return False
    finally:
        path.unlink()

    if len(dataset.rules):
        lines = "".join(f"{format_rule(dataset, r)}\n" for r in dataset.rules)
        clauses, _ = read_clauses(lines, "again", "weighted")
        again = with_rules(dataset, clauses, "again")
        assert (again.rules == dataset.rules).all(), text
    for atom in dataset.facts:
        assert (
            parse_query(dataset, format_atom(dataset, atom)) == atom
        ).all(), text
    return True


def try_query(dataset: Dataset, text: bytes) -> None:
    """A query is refused by one line of ValueError, or printed so that it reads back."""
    query = text[:MAX_QUERY_BYTES].decode("utf-8", "replace")
    try:
        atom = parse_query(dataset, query)
    except ValueError as error:
        check_error(error)
    else:
        assert (
            parse_query(dataset, format_atom(dataset, atom)) == atom
        ).all(), text


def check_error(error: ValueError) -> None:
    """Raise AssertionError where an error is not one short line."""
    text = str(error)
    assert text and "\n" not in text and len(text) < MAX_ERROR_CHARACTERS, error


if __name__ == "__main__":
    main()
