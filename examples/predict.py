"""Ranked answers with proofs from triples in memory: `python examples/predict.py`.

Mines rules, trains on them, and asks for a grandparent that nobody stated.
"""

import random

import funcppo as fp


def make_triples(n_families=30):
    """Grandparents, parents and siblings of families with two children, as (head, relation, tail)."""
    triples = []
    for i in range(n_families):
        old, middle, young, other = (
            f"{x}{i}" for x in ("ann", "bob", "eve", "joe")
        )
        triples += [(old, "parent", middle), (middle, "parent", young)]
        triples += [(middle, "parent", other), (young, "sibling", other)]
        triples += [(old, "grandparent", young), (old, "grandparent", other)]
    return triples


def main():
    triples = make_triples()
    random.Random(0).shuffle(triples)
    held_out = [t for t in triples if t[1] == "grandparent"][:20]
    train = [t for t in triples if t not in held_out]

    graph = fp.load(train, valid=held_out[:10], test=held_out[10:])
    graph = fp.mine(graph, seconds=5)
    run = fp.fit(graph, steps=1000)  # out="runs/families" keeps it
    print(run.evaluate("test"))

    head, relation, tail = held_out[-1]
    answers = run.predict(relation, head=head, k=3, known=True, explain=True)
    print(answers)
    print("\n".join(answers[0].explanation.to_lines()))
    print(run.prove(f"{relation}({head}, {tail})").verdict)


if __name__ == "__main__":
    main()
