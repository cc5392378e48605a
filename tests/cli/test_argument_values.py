"""Any values of any arguments give a result or one line: a seeded fuzz of all programs in this process."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcppo import cli
from funcppo.cli.options import Setting, settings_of
from tests.cli.runner import write_graph

# What works on little data, and what begins with a data set or an environment that there is not, as its work is long.
ARGUMENTS = {
    "data": ["g"],
    "prove": ["g", "r(a,X)"],
    "predict": ["g", "r(a,X)"],
    "evaluate": ["g", "--score=noisy-or", "--height=1"],
    "mine": ["g", "--out", "r.tsv"],
    "check": ["g"],
    "train": ["none"],
    "rl": ["Nope-v9"],
    "report": ["none"],
    "serve": ["none"],
}
VALUES = [
    "", " ", "0", "-1", "1", "2", "0.5", "nan", "inf", "-inf", "1e400", "1e-400", "9" * 30, "9" * 5000,
    str(2**63 - 1), str(2**31 - 1), "0x10", "1_000", "\uff11\uff12", "None", "true", "on", "\udcff", "a\nb", "{",
    "[1]", "1,2,3", "0.5,0.25,0.25", "x" * 300, "x" * 5000, "-", "/dev/null", ".", "/none/x", "auto", "'", "%s",
    "{0}", "{split}.nt", "--", "cpu", "cuda:7", "1GB", "1B", "r(X,Y)", "train", "test", "x.parquet", "\\",
]  # fmt: skip


def _words(setting: Setting, value: str) -> list[str]:
    if setting.opt is None:
        return ["--set", f"{setting.name}={value}"]
    return [setting.option if setting.is_flag else f"{setting.option}={value}"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    files = {
        "train": "a\tr\tb\nb\tr\tc\na\ts\tb\nb\ts\tc\nc\ts\td\n",
        "valid": "c\tr\td\n",
        "test": "d\tr\ta\n",
        "rules": "0.5\tr(X,Y) :- s(X,Y)\n",
    }
    write_graph(tmp_path / "g", **files)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ARGUMENTS)
@settings(
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_value_gives_a_result_or_one_line(name, data, programs, capsys):
    program = settings_of(cli.program_class(name))
    choices = [s for s in program if not s.is_argument]
    arguments = list(ARGUMENTS[name])
    for setting in data.draw(st.lists(st.sampled_from(choices), max_size=2)):
        arguments += _words(setting, data.draw(st.sampled_from(VALUES)))
    if data.draw(st.booleans()):
        n_words = 2 if "r(a,X)" in arguments else 1
        place = data.draw(st.integers(0, n_words - 1))
        arguments[place] = data.draw(st.sampled_from(VALUES))
    status = programs(name, *arguments)
    errors = capsys.readouterr().err.splitlines()
    lines = [line for line in errors if line.startswith("funcppo: ")]
    if status != 2:
        # 1 and 3 are verdicts of `prove` and `check`.
        assert status in (0, 1, 3) and not lines
    else:
        assert lines == errors[-1:]
        assert len(lines[0]) <= 1000
