"""Claim: mutated input makes the parsers raise nothing but ValueError of one line, and what is accepted reads back.

    python experiments/fuzz_parsers.py [--bytes 10000000] [--seed 0]

Writes experiments/results/fuzz_parsers.json. Seeds are one text for each format; a mutation cuts, repeats, splices or
overwrites, with bytes that mean something to some format.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from funcppo.data import Dataset, format_atom, load, parse_query
from funcppo.data.writers import format_clauses, to_clauses

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
        b"edge(a, 'B c'). edge(a, -12). % facts\npath(X, Y) :- edge(X, Y).\npath(X, Z) :- path(X, Y),\n edge(Y, Z).\nhot.\n",  # noqa: E501
        b"p('\\x41\\', 'it''s', '\\n\\\\'). /* c */ q(X) :- p(X, _, Y), q(Y), hot. hot :- q(a).\n",
    ],
}
WORDS = [b"(", b")", b",", b".", b"'", b":-", b"<=", b"=>", b"\t", b"\n", b"\\", b"\\x", b"X", b"_", b"?a", b"%", b"/*"]
WORDS += [
    b"\xff",
    b"\xc3\xa9",
    b"\xe2\x80\xa8",
    b"\x00",
    b"\r\n",
    b"not ",
    b"\\+",
    b"[",
    b'"',
    b"1",
    b"-0",
    b"0.5",
    b" ",
]
WORDS += [b"\xef\xbb\xbf", b"\xc2\xa0", b"#", b"Rule\t", b"!", b";", b"is", b"true", b"knows", b"likes(X,Y)", b"f(X)"]
WORDS += [b"*/", b" ", b"  ", b"ann", b"(((((((((", b"'\\''"]


def mutate(rng: np.random.Generator, text: bytes) -> bytes:
    """The text, perhaps repeated, after one to four small changes."""
    text *= int(rng.integers(1, 7))
    for _ in range(rng.integers(1, 5)):
        at, other = sorted(int(i) for i in rng.integers(0, len(text) + 1, 2))
        word = WORDS[rng.integers(len(WORDS))]
        change = rng.integers(6)
        if change == 0:
            text = text[:at] + word + text[at:]
        elif change == 1:
            text = text[:at] + word + text[at + len(word) :]
        elif change == 2:
            text = text[:at] + text[min(other, at + 12) :]
        elif change == 3:
            text = text[:at] + text[at:other] * 2 + text[other:]
        elif change == 4:
            text = text[:at] + rng.bytes(2) + text[at:]
        else:
            text = text[:at] + word * int(rng.integers(1, 40)) + text[other:]
    return text[:5000]


def attempt(folder: Path, name: str, text: bytes) -> bool:
    """Whether the loader accepts the file; anything but a dataset that reads back or one line of ValueError raises."""
    path = folder / name
    path.write_bytes(text)
    try:
        dataset = load(path if name.endswith(".pl") else folder)
    except ValueError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 1000, error
        return False
    finally:
        path.unlink()
    again = folder / "again.pl"
    facts, rules = to_clauses(dataset)
    again.write_text(format_clauses([*facts, *rules], "Prolog"), encoding="utf-8", newline="")
    back = load(again)
    assert [*map(repr_of, to_clauses(back))] == [*map(repr_of, (facts, rules))], text
    for atom in dataset.facts:
        assert (parse_query(dataset, format_atom(dataset, atom)) == atom).all(), text
    return True


def attempt_query(dataset: Dataset, text: str) -> None:
    """A query is refused by one line of ValueError, or printed so that it reads back."""
    try:
        atom = parse_query(dataset, text)
    except ValueError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 1000, error
    else:
        assert (parse_query(dataset, format_atom(dataset, atom)) == atom).all(), text


def repr_of(clauses: list) -> list[tuple]:
    """Clauses made comparable: weights and lines left out."""
    return [clause[:2] for clause in clauses]


def fuzz(n_bytes: int, seed: int) -> dict[str, int]:
    """Counts after at least `n_bytes` bytes of mutated input."""
    rng = np.random.default_rng(seed)
    counts = {"bytes": 0, "inputs": 0, "accepted": 0, "rejected": 0}
    with tempfile.TemporaryDirectory() as temporary:
        known = load(good_folder(Path(temporary) / "known", ""))
        folders = {name: good_folder(Path(temporary) / name, name) for name in SEEDS}
        while counts["bytes"] < n_bytes:
            name = list(SEEDS)[rng.integers(len(SEEDS))]
            text = mutate(rng, SEEDS[name][rng.integers(len(SEEDS[name]))])
            attempt_query(known, text[:300].decode("utf-8", "replace"))
            attempt_query(known, mutate(rng, b"knows(ann, 'O\\'Hara')")[:300].decode("utf-8", "replace"))
            accepted = attempt(folders[name], name, text)
            more = {"bytes": len(text), "inputs": 1, "accepted": accepted, "rejected": not accepted}
            counts = {key: counts[key] + more[key] for key in counts}
    return counts


def good_folder(folder: Path, name: str) -> Path:
    """A folder that lacks only the file `name` to be a data set."""
    folder.mkdir()
    for split in ("train.txt", "valid.txt", "test.txt"):
        if not name or not name.startswith(split):
            (folder / split).write_bytes(TRIPLES)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    counts = fuzz(args.bytes, args.seed)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    row = {"seed": args.seed, **counts, "seconds": round(time.perf_counter() - start, 1), "commit": commit}
    row |= {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
    path = Path(__file__).parent / "results" / "fuzz_parsers.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(row, indent=2) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
