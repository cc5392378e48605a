"""SWI-Prolog as an oracle: least models by tabling, and provability up to a height by a meta-interpreter."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.oracles import Atom, Program

AVAILABLE = shutil.which("swipl") is not None

_DRIVER = """
:- dynamic fact/1, rule/2, predicate/2.
:- table prove/3.
prove(_, G, _) :- fact(G).
prove(H, G, r) :- H > 0, H1 is H - 1, rule(G, B), all(H1, B).
all(_, []).
all(H, [G | B]) :- prove(H, G, _), all(H, B).
holds(G) :- predicate(P, N), functor(G, P, N), call(G).
main :-
    forall(holds(G), (write(-1), write(' '), show(G))),
    forall((between(0, {height}, H), predicate(P, N), functor(G, P, N)),
           forall(prove(H, G, _), (write(H), write(' '), show(G)))),
    halt.
show(G) :- G =.. [_ | A], functor(G, P, _), atom_concat(p, N, P), write(N),
    forall(member(X, A), (write(' '), write(X))), nl.
"""


def models(program: Program, height: int) -> tuple[set[Atom], dict[Atom, int]]:
    """The answers to every open query, and the least height up to `height` of what is provable within it."""
    lines = [_DRIVER.replace("{height}", str(height))]
    for p, n in enumerate(program.arity, 1):
        nothing = _term((p, *[program.n_constants + 1] * n), program)
        lines.append(f":- table p{p}/{n}.\npredicate(p{p}, {n}).\n{nothing} :- fail.")
    lines += [f"fact({_term(fact, program)})." for fact in program.facts]
    lines += [f"rule({_term(r[0], program)}, [{', '.join(_term(a, program) for a in r[1:])}])." for r in program.rules]
    lines += [f"{_term(fact, program)}." for fact in program.facts]
    lines += [
        f"{_term(r[0], program)} :- {', '.join(['true', *(_term(a, program) for a in r[1:])])}." for r in program.rules
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.pl"
        path.write_text(":- style_check(-discontiguous).\n:- style_check(-singleton).\n" + "\n".join(lines) + "\n")
        done = subprocess.run(["swipl", "-q", "-g", "main", str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr[:2000]
    rows = [tuple(int(t) for t in line.split()) for line in done.stdout.splitlines()]
    heights: dict[Atom, int] = {}
    for h, *atom in rows:
        if h >= 0:
            heights.setdefault(tuple(atom), h)
    return {tuple(atom) for h, *atom in rows if h < 0}, heights


def _term(atom: Atom, program: Program) -> str:
    arguments = [f"V{t}" if t > program.n_constants else str(t) for t in atom[1:]]
    return f"p{atom[0]}" + (f"({', '.join(arguments)})" if arguments else "")
