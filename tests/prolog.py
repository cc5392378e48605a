"""SWI-Prolog as an oracle: least models by tabling, provability up to a height, successors of one resolution step."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.oracles import Atom, Program

Goals = tuple[tuple[Atom, int], ...]  # each with its height
Ask = tuple[int, Atom, Goals]  # which program, the root, the goals
Successor = tuple[
    str, int, Goals
]  # "rule" or "fact", its position, the goals that are left

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


_STEP = """
successor(P, Root, [G-H | T], r, I, Left) :-
    rule(P, I, G, B), limit(P, M), H < M, H1 is H + 1, at_height(B, H1, New), append(New, T, All),
    exclude(known(P, Root), All, Left).
successor(P, Root, [G-_ | T], f, I, Left) :- fact(P, I, G), G \\== Root, exclude(known(P, Root), T, Left).
at_height([], _, []).
at_height([G | B], H, [G-H | T]) :- at_height(B, H, T).
known(P, Root, G-_) :- ground(G), G \\== Root, fact(P, _, F), F == G.
main :- forall((ask(N, P, Root, Goals), successor(P, Root, Goals, Kind, I, Left)),
               (numbervars(Left, 0, _), write_term([N, Kind, I, Left], [numbervars(true)]), nl)), halt.
"""


def models(program: Program, height: int) -> tuple[set[Atom], dict[Atom, int]]:
    """The answers to every open query, and the least height up to `height` of what is provable within it."""
    lines = [_DRIVER.replace("{height}", str(height))]
    for p, n in enumerate(program.arity, 1):
        nothing = _term((p, *[program.n_constants + 1] * n), program)
        lines.append(
            f":- table p{p}/{n}.\npredicate(p{p}, {n}).\n{nothing} :- fail."
        )
    lines += [f"fact({_term(fact, program)})." for fact in program.facts]
    lines += [
        f"rule({_term(r[0], program)}, [{', '.join(_term(a, program) for a in r[1:])}])."
        for r in program.rules
    ]
    lines += [f"{_term(fact, program)}." for fact in program.facts]
    lines += [
        f"{_term(r[0], program)} :- {', '.join(['true', *(_term(a, program) for a in r[1:])])}."
        for r in program.rules
    ]
    rows = [tuple(int(t) for t in line.split()) for line in _run(lines)]
    heights: dict[Atom, int] = {}
    for h, *atom in rows:
        if h >= 0:
            heights.setdefault(tuple(atom), h)
    return {tuple(atom) for h, *atom in rows if h < 0}, heights


def successors(
    kb: Sequence[Program], limits: Sequence[int], asked: Sequence[Ask]
) -> list[list[Successor]]:
    """The goal lists one step away from each that is asked: by rules in their order, then by facts in theirs.

    Args:
      limits: of each program, the height from which goals meet facts only.
    """
    lines = [":- discontiguous fact/3, rule/4, limit/2, ask/4.", _STEP]
    for p, (program, limit) in enumerate(zip(kb, limits)):
        lines += [
            f"fact({p}, {i}, {_plain(fact, program)})."
            for i, fact in enumerate(program.facts)
        ]
        for i, (head, *body) in enumerate(program.rules):
            lines.append(
                f"rule({p}, {i}, {_plain(head, program)}, [{', '.join(_plain(a, program) for a in body)}])."
            )
        lines.append(f"limit({p}, {limit}).")
    lines += ["fact(-1, 0, a). rule(-1, 0, a, []). ask(-1, 0, a, []) :- fail."]
    for n, (p, root, goals) in enumerate(asked):
        shown = ", ".join(
            f"{_plain(atom, kb[p])}-{height}" for atom, height in goals
        )
        lines.append(f"ask({n}, {p}, {_plain(root, kb[p])}, [{shown}]).")
    found: list[list[Successor]] = [[] for _ in asked]
    for line in _run(lines):
        n, kind, i, rest = re.fullmatch(
            r"\[(\d+),([rf]),(\d+),\[(.*)\]\]", line
        ).groups()
        n_constants = kb[asked[int(n)][0]].n_constants
        goals = tuple(
            (_ids(atom, n_constants), int(h))
            for atom, h in re.findall(r"a\(([^-]*)\)-(\d+)", rest)
        )
        found[int(n)].append(({"r": "rule", "f": "fact"}[kind], int(i), goals))
    return found


_ALL = """
main :- forall((program(M, File, Predicates), load_files(M:File, [silent(true)]), member(P/N, Predicates),
                functor(G, P, N), M:G), (G =.. L, maplist(atom_codes, L, C), print([M | C]), nl)), halt.
"""


def all_answers(
    programs: Sequence[str], predicates: Sequence[Iterable[tuple[str, int]]]
) -> list[set[tuple[str, tuple[str, ...]]]]:
    """The ground atoms that follow from each of some programs, by tabling, as names.

    Args:
      programs: their texts.
      predicates: the names and numbers of arguments of each.
    """
    lines = [_ALL]
    found: list[set[tuple[str, tuple[str, ...]]]] = [set() for _ in programs]
    with tempfile.TemporaryDirectory() as folder:
        for i, (text, signatures) in enumerate(zip(programs, predicates)):
            names = ["'" + re.sub(r"(['\\])", r"\\\1", p) + f"'/{n}" for p, n in signatures]  # fmt: skip
            declared = ", ".join(names)
            start = f":- dynamic {declared}.\n:- table {declared}.\n"
            path = Path(folder) / f"{i}.pl"
            path.write_text(_QUIET + start + text, encoding="utf-8")
            lines.append(f"program(m{i}, '{path}', [{declared}]).")
        for line in _run(lines):
            module, *codes = json.loads(re.sub("^.m", "[", line))
            name, *arguments = ["".join(map(chr, c)) for c in codes]
            found[module].add((name, tuple(arguments)))
    return found


_QUIET = ":- style_check(-discontiguous).\n:- style_check(-singleton).\n"


def run(goal: str, *files: Path) -> tuple[str, str]:
    """What a goal prints on standard output, and as errors."""
    done = subprocess.run(
        ["swipl", "-q", "-g", goal, "-t", "halt", *map(str, files)],
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        env={**os.environ, "LANG": "C.UTF-8"},
    )
    assert done.returncode == 0, done.stderr[:2000]
    return done.stdout, done.stderr


def _run(lines: list[str]) -> list[str]:
    """What `main` of a program prints."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.pl"
        path.write_text(_QUIET + "\n".join(lines) + "\n", encoding="utf-8")
        out, errors = run("main", path)
    assert not errors, errors[:2000]
    return out.splitlines()


def _plain(atom: Atom, program: Program) -> str:
    """The atom as a(predicate, argument, ...)."""
    return f"a({', '.join([str(atom[0]), *(f'V{t}' if t > program.n_constants else str(t) for t in atom[1:])])})"


def _ids(terms: str, n_constants: int) -> Atom:
    """The atom that is printed so; variables are A, B, ..., Z, A1, ... in the order of their first occurrence."""
    number = lambda t: (
        n_constants + 1 + ord(t[0]) - ord("A") + 26 * int(t[1:] or 0)
    )
    return tuple(
        number(t) if t[0].isupper() else int(t) for t in terms.split(",")
    )


def _term(atom: Atom, program: Program) -> str:
    arguments = [
        f"V{t}" if t > program.n_constants else str(t) for t in atom[1:]
    ]
    return f"p{atom[0]}" + (f"({', '.join(arguments)})" if arguments else "")
