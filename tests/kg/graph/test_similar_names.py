"""Names of similar spelling: those that `difflib` finds, of many names too, as text that reads back."""

import difflib
import random
import shlex

from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.graph import text as names_like
from funcppo.kg.graph.loaders import from_triples
from funcppo.kg.graph.rules import parse_query
from funcppo.kg.graph.text import (
    find_similar_names,
    similar_names_hint,
    unknown_name_message,
)


def test_a_name_of_similar_spelling_is_suggested():
    assert unknown_name_message(
        "entity", "fance", ["france", "spain"]
    ).endswith("(close: 'france')")
    assert unknown_name_message("entity", "zzz", ["france", "spain"]).endswith(
        "(none of 2 is spelled like it)"
    )
    assert "none of 1" in unknown_name_message("entity", "a" * 101, ["a" * 101])


NAMES = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0"),
    min_size=1,
    max_size=100,
)


@given(NAMES)
def test_a_suggestion_can_be_pasted_into_a_query(name):
    pasted = similar_names_hint(name, [name]).removeprefix("close: ")
    dataset = from_triples([(name, "r", f"{name}b")])
    assert parse_query(dataset, f"r({pasted}, ?x)").tolist() == [1, 1, 3]


def test_a_plain_suggestion_can_be_pasted_into_a_shell():
    hint = similar_names_hint("lives i", ["lives in", "born in"])
    assert shlex.split(hint)[1] == "lives in"


def test_of_many_names_the_nearest_are_found(monkeypatch):
    """As of few: a letter more, one less, another one, two that change places; names with line breaks count."""
    generator = random.Random(0)
    letters = "abcdefghijklmnop "
    known = ["".join(generator.choices(letters, k=12)) for _ in range(400)]
    known[7] = "line\nbreak at seven"
    monkeypatch.setattr(names_like, "MAX_COMPARED", 40)
    for name in known[:50]:
        at = generator.randrange(1, len(name) - 2)
        for typo in (
            name[:at] + "x" + name[at:],
            name[:at] + name[at + 1 :],
            name[:at] + "y" + name[at + 1 :],
            name[:at] + name[at + 1] + name[at] + name[at + 2 :],
        ):
            expected = difflib.get_close_matches(typo, known, n=1)
            assert find_similar_names(typo, known)[:1] == expected == [name]
    assert find_similar_names("zzzzzz", known) == []
