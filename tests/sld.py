"""SLD resolution over Python lists: the oracle of terms and resolve, slow and obviously right."""

Atom = tuple[int, ...]


def walk(term, bindings):
    while term in bindings:
        term = bindings[term]
    return term


def unify(a, b, n_constants, bindings=None):
    """A most general unifier as a dict, or None."""
    if a[0] != b[0]:
        return None
    bindings = dict(bindings or {})
    for x, y in zip(a[1:], b[1:]):
        x, y = walk(x, bindings), walk(y, bindings)
        if x == y:
            continue
        if x > n_constants:
            bindings[x] = y
        elif y > n_constants:
            bindings[y] = x
        else:
            return None
    return bindings


def apply(atom, bindings):
    return (atom[0], *(walk(t, bindings) for t in atom[1:]))


def rename(goals, n_constants):
    """Goals (atom, height) with variables numbered by first occurrence."""
    names: dict[int, int] = {}
    out = []
    for atom, height in goals:
        args = tuple(
            names.setdefault(t, n_constants + 1 + len(names))
            if t > n_constants
            else t
            for t in atom[1:]
        )
        out.append(((atom[0], *args), height))
    return tuple(out)


def successors(goals, root, facts, rules, n_constants, max_height):
    """[(kind, id, goals)]: rules in file order, then facts in order; known ground goals removed, root never a fact."""
    known = set(facts) - {root}
    (goal, height), tail = goals[0], goals[1:]
    clauses = []
    if height < max_height:
        clauses += [
            ("rule", i, [tuple(a) for a in rule if a[0]])
            for i, rule in enumerate(rules)
        ]
    clauses += [
        ("fact", i, [fact]) for i, fact in enumerate(facts) if fact in known
    ]
    found = []
    for kind, i, (head, *body) in clauses:
        moved = lambda t: t + 10_000 if t > n_constants else t
        apart = [(a[0], *map(moved, a[1:])) for a in (head, *body)]
        bindings = unify(apart[0], goal, n_constants)
        if bindings is None:
            continue
        new = [(apply(a, bindings), height + 1) for a in apart[1:]] + [
            (apply(a, bindings), h) for a, h in tail
        ]
        left = [goal for goal in new if goal[0] not in known]
        found.append((kind, i, rename(left, n_constants)))
    return found
