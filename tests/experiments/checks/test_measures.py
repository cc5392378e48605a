"""The size of a project is counted as described."""

from experiments.checks import measures


def test_each_measure_counts_what_it_names(tmp_path):
    package = tmp_path / "funcppo"
    package.mkdir()
    for folder in ("tests", "experiments", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("a = 1\nb = 2\n")
    for name in ("README.md", "INVESTIGATION.md", "CHANGELOG.md", "docs/a.md"):
        (tmp_path / name).write_text("two words\n")
    (package / "a.py").write_text(
        "SIZES = (1, 2 * 3)\n"
        "LIMIT: int = -5\n"
        "NAME = 'a'\n"
        "IS_ON = True\n"
        "@dataclass(frozen=True)\n"
        "class A: ...\n"
        "class B(NamedTuple): ...\n"
        "class C(typing.Protocol[T]): ...\n"
        "class D(B): ...\n"
        "def f(a):\n    'Text.'\n    return a\n"
    )
    result = measures.measure(tmp_path, has_options=False)
    assert result == {
        "syntax nodes in function bodies": 2,
        "modules": 1,
        "classes (NamedTuple, dataclass, Protocol, TypedDict)": 3,
        "  NamedTuple": 1,
        "  Protocol": 1,
        "  dataclass": 1,
        "numeric module constants": 2,
        "lines of tests": 2,
        "lines of experiments": 0,
        "words of documents": 6,
        "words of CHANGELOG.md": 2,
    }


def test_an_option_is_counted_once():
    text = "--out RUN\n --seed N, see --out and --no-a.b-c; -h"
    assert measures.options(text) == {"--out", "--seed", "--no-a.b-c"}
