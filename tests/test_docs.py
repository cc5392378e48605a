"""The pages lead to each other, quote what the programs say, and hold code that runs."""

import re
import shlex
from pathlib import Path

import pytest

import funcppo as fp
from funcppo import cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = {
    f"_made/{name}.md"
    for name in (
        *("investigation", "investigation_tables", "cli"),
        *("changelog", "citation"),
    )
}
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if "/_" not in path.relative_to(ROOT).as_posix()
)
LINKING = [*PAGES, *ROOT.glob("*.md"), ROOT / "experiments" / "README.md"]
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = FENCE.sub("", path.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading).lower() for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def test_every_page_is_in_the_contents():
    index = (DOCS / "index.md").read_text()
    listed = [
        line
        for block in re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL)
        for line in block.splitlines()
        if line and not line.startswith(":")
    ]
    found = {str(page.relative_to(DOCS))[:-3] for page in PAGES} - {"index"}
    assert sorted(listed) == sorted(
        found | {name.removesuffix(".md") for name in MADE}
    )


@pytest.mark.parametrize("page", LINKING, ids=page_id)
def test_every_link_leads_to_a_file_and_a_heading(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        if name in MADE:
            continue
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


FOLDERS = "experiments|tests|examples|funcppo|ops"


@pytest.mark.parametrize("page", LINKING, ids=page_id)
def test_every_file_that_a_page_names_exists(page):
    text = page.read_text()
    named = re.findall(
        rf"`((?:{FOLDERS})/[\w./-]+(?:\.\w+|/))(?:::\w+)?`", text
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def commands_of(page):
    """The command lines of a page, in lines of code and in sentences; an option that a page only names has no value."""
    text = page.read_text()
    code = "\n".join(re.findall(r"^    (.*)$", text, re.MULTILINE))
    lines = code.replace("\\\n", " ").splitlines()
    found = [re.search(r"^(?:\w+=\S+ )*(funcppo .*)$", line) for line in lines]
    commands = [re.split(r" +#", match[1])[0] for match in found if match]
    commands += re.findall(r"`(?:\w+=\S+ )*(funcppo [^`]*)`", text)
    return [command.split()[1:] for command in commands]


@pytest.mark.parametrize("page", LINKING, ids=page_id)
def test_every_command_has_options_that_exist(page, capsys):
    for program, *words in commands_of(page):
        if program not in cli.PROGRAMS:
            continue
        # what follows a pipe; a run that is resumed would be read
        words = " ".join(words).partition(" | ")[0]
        given = [word for word in shlex.split(words) if word != "..."]
        if "--resume" in given or "--help" in given:
            continue
        try:
            cli.parse_program(program, given)
        except (SystemExit, ValueError) as stop:
            error = capsys.readouterr().err + str(stop)
            # of an example that leaves something out, or names a file
            is_known = "got none" in error or "No such file" in error
            assert is_known, (program, words, error)


def test_every_public_name_is_in_the_reference():
    pages = (DOCS / "reference").glob("*.md")
    text = "\n".join(page.read_text() for page in pages)
    left_out = {"Config", "__version__"}
    for name in set(fp.__all__) - left_out:
        pattern = rf"funcppo\.(core\.)?{name}$"
        assert re.search(pattern, text, re.MULTILINE), name


def coming_from() -> str:
    return (DOCS / "coming_from.md").read_text()


def run_code(blocks) -> dict:
    names = {"__name__": "docs"}
    exec("\n".join(blocks), names)
    return names


def test_the_code_for_users_of_other_libraries_runs(tmp_path, monkeypatch):
    """With fewer steps, and uncompiled."""
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", coming_from(), re.DOTALL)
    code = re.sub(r"\b\d+_000\b", "512", "\n".join(code))
    code = code.replace("(976)", "(1)").replace("=400", "=1")
    names = run_code([code.replace("seeds=30", "seeds=2")])
    assert int(names["state"].update) == int(names["result"].state.update) == 1
    assert len(names["many"].evaluations[-1]) == 2
    for settings in ("cleanrl", "purejaxrl", "sb3"):
        fp.PPOConfig(**names[settings])


def test_the_code_for_many_learners_runs(capsys):
    text = (DOCS / "many_learners.md").read_text()
    run_code(re.findall(r"^    (.*)$", text, re.MULTILINE))
    assert "torch.Size([3])" in capsys.readouterr().out


def test_the_code_of_the_rl_command_from_python_runs(capsys):
    """With fewer steps."""
    text = (DOCS / "rl_command.md").read_text()
    text = text.partition("## From Python")[2]
    code = "\n".join(re.findall(r"^    (.*)$", text, re.MULTILINE))
    assert "2048, seeds=2, evaluate_every=4" in code
    run_code([code.replace("2048", "256").replace("every=4", "every=1")])
    returns = capsys.readouterr().out.splitlines()
    assert len(returns) == 2, "one line for each seed"


def test_the_notebook_of_an_own_environment_runs(capsys):
    """The others, which take longer, are run by `make docs`."""
    text = (DOCS / "notebooks" / "own_environment.md").read_text()
    blocks = re.findall(r"```{code-cell} ipython3\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    run_code(blocks)
    told = capsys.readouterr().out
    assert "step_functional" in told  # what `fp.check` names
    lengths = [float(x) for x in re.findall(r"([\d.]+) steps", told)]
    assert lengths[-1] < lengths[0]
