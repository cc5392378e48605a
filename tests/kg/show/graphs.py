"""A small graph whose names attack pages and pictures, and small runs on it."""

import numpy as np

from tests.cli.runner import SIZES

HOSTILE = (
    "<script>alert(1)</script>",
    "'\"><img src=x onerror=alert(1)>",
    "</pre></details></script><b>bold",
    "{{ 7*7 }}",
    "$\\frac{1}{2}$",
    "\u202eevil",
    "\u05e9\u05dc\u05d5\u05dd",
    "red\x1b[31m\x07",
    "x" * 5000,
    "http://evil.example/x.png",
    "]]>",
    "<!-- -->",
    'id="x" url(#x)',
    "&amp;",
    "o'brien \\",
)
LIKES, INVERSE, ALSO = "<b>likes</b>", '$p$ "q"', "rel\u202e x"
SMALL = ["--steps", "128", "--strategy", "eager", *SIZES]
RULES = f"""'{INVERSE}'(X, Y) :- '{LIKES}'(Y, X).
'{ALSO}'(X, Y) :- '{LIKES}'(X, Y).
'{ALSO}'(X, Y) :- '{LIKES}'(X, Z), '{LIKES}'(Z, Y).
"""


def write_graph(folder, *, has_test=True):
    """Write train, valid, test and rules; the rules derive some answers of test, and others not."""
    folder.mkdir(parents=True)
    names = [*HOSTILE, *(f"e{i}" for i in range(12))]
    generator = np.random.default_rng(0)
    pairs = np.unique(generator.integers(len(names), size=(90, 2)), axis=0)
    likes = [(names[h], LIKES, names[t]) for h, t in pairs]
    derived = [(t, INVERSE, h) for h, _, t in likes]
    derived += [(h, ALSO, t) for h, _, t in likes[::2]]
    derived = [derived[i] for i in generator.permutation(len(derived))]

    splits = {"train": likes + derived[24:], "valid": derived[12:24]}
    # No rule derives the last two.
    known = set(likes)
    others = [(name, LIKES, "e0") for name in HOSTILE]
    unprovable = [triple for triple in others if triple not in known][:2]
    if has_test:
        splits["test"] = derived[:12] + unprovable
    for name, rows in splits.items():
        text = "".join("\t".join(row) + "\n" for row in rows)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    (folder / "rules.txt").write_text(RULES, encoding="utf-8")
    return folder
