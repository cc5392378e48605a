"""Search in names against a slow oracle."""

from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.show.serve.name_index import NameIndex, fold

NAMES = st.lists(
    st.text(alphabet="aAbB é\u0301\n\u202e<", max_size=4),
    max_size=8,
    unique=True,
)


def oracle(names, text, limit):
    """Equal names, then those that start with the text, then those that contain it."""
    wanted = fold(text)
    ranks = []
    for i, name in enumerate(map(fold, names), 1):
        if wanted in name:
            rank = (name != wanted) + (not name.startswith(wanted))
            ranks.append((rank, i))
    return [i for _, i in sorted(ranks)][:limit]


@given(NAMES, st.text(alphabet="aAbB é\n", min_size=1, max_size=3))
def test_names_are_found_in_order(names, text):
    index = NameIndex(names)
    for limit in (1, 3, 20):
        assert index.find(text, limit) == oracle(names, text, limit)


def test_case_and_composition_do_not_count():
    index = NameIndex(["Zürich", "Zu\u0308richberg", "STRASSE", "ﬁre"])
    assert index.find("zu\u0308rich", 9) == [1, 2]
    assert index.find("straße", 9) == [3]
    assert index.find("fire", 9) == [4]
    assert index.find("nothing", 9) == []
