"""The pages lead to each other, quote what the programs say, and hold code that runs."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import re
import shlex
from pathlib import Path

import pytest

import funcppo as fp
from funcppo import cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = {"_made/investigation.md", "_made/investigation_tables.md"}
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


def test_links_of_pages_that_are_made_lead_to_made_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # which conf.py sets
    spec = importlib.util.spec_from_file_location("conf", DOCS / "conf.py")
    assert spec is not None and spec.loader is not None
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    monkeypatch.setattr(conf, "MADE", tmp_path)
    conf.write_investigation(None)

    pages = {path.name: path for path in tmp_path.glob("*.md")}
    assert {f"_made/{name}" for name in pages} == MADE
    for page in pages.values():
        text = FENCE.sub("", page.read_text())
        for target in re.findall(r"\]\(([^)\s:]+)\)", text):
            name, _, anchor = target.partition("#")
            linked = pages[name] if name else page
            assert not anchor or anchor in anchors(linked), target


def test_every_program_has_its_help_on_the_page_of_the_command_line():
    text = (DOCS / "reference" / "cli.md").read_text()
    for name, summary in cli.PROGRAMS.items():
        assert f"## funcppo {name}\n\n{summary}\n" in text
        assert f"../_made/{name}.txt" in text


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
        except SystemExit:
            error = capsys.readouterr().err
            assert "Missing" in error, (program, words, error)


def test_every_public_name_is_in_the_reference():
    text = (DOCS / "reference" / "api.md").read_text()
    left_out = {"Config", "__version__"}
    for name in set(fp.__all__) - left_out:
        if name.isupper():  # a distribution
            continue
        pattern = rf"funcppo\.(core\.)?{name}$"
        assert re.search(pattern, text, re.MULTILINE), name


def source_texts() -> str:
    """Every text in the code of the package; what is filled in is left out."""
    texts = []
    for path in (ROOT / "funcppo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (getattr(value, "value", "") for value in node.values)
                texts.append(
                    "".join(
                        part if isinstance(part, str) else "\0"
                        for part in parts
                    )
                )
    return "\n".join(texts)


def test_what_troubleshooting_quotes_is_what_programs_say():
    said = source_texts()
    rows = re.findall(
        r"^\| (`.*?) \| ", (DOCS / "troubleshooting.md").read_text(), re.M
    )
    assert len(rows) > 40
    for row in rows:
        for quoted in re.findall(r"`([^`]+)`", row):
            for part in quoted.split("..."):
                assert part.strip() in said, quoted


OTHER_LIBRARIES = {
    "coming_from_cleanrl.md": "cleanrl_continuous",
    "coming_from_sb3.md": "sb3",
    "coming_from_purejaxrl.md": "purejaxrl",
}


@pytest.mark.parametrize("page", OTHER_LIBRARIES)
def test_the_options_of_other_libraries_are_told_by_options_that_exist(page):
    """The second column of the table of options; the last column is our defaults."""
    text = (DOCS / page).read_text()
    table = re.search(
        r"^\|.*`fp\.ppo\(\.\.\.\)`.*\n\|-.*\n((\|.*\n)+)", text, re.M
    )
    assert table is not None
    rows = [row.split(" | ") for row in table[1].splitlines()]
    assert len(rows) >= 10
    defaults = fp.PPOConfig()
    names = {field.name for field in dataclasses.fields(fp.PPOConfig)}
    for _, ours, _, default in rows:
        options = re.findall(r"`([a-z_]+)[=`]", ours)
        assert options and {*options} <= names, ours
        stated = re.findall(r"(?<![\w.])[\d.]+(?:e-\d)?", default)
        for option, number in zip(options, stated):
            assert getattr(defaults, option) == float(number), (option, default)


def run_code(blocks) -> None:
    exec("\n".join(blocks), {"__name__": "docs"})


@pytest.mark.parametrize(("page", "settings"), OTHER_LIBRARIES.items())
def test_the_code_beside_that_of_other_libraries_runs(
    page, settings, tmp_path, monkeypatch
):
    """With fewer steps, and uncompiled: in the order of the page, that beside theirs first by itself."""
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text()
    fenced = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (beside,) = [block for block in fenced if "import funcppo" in block]
    lines = re.findall(r"^    (.*)$", FENCE.sub("", text), re.MULTILINE)
    code = [short(beside), short("\n".join(lines))]
    names = {}
    exec(code[0], names)
    states = [
        *(names[name] for name in ("state",) if name in names),
        *(names[n].state for n in ("result", "one", "many") if n in names),
    ]
    assert states
    for state in states:
        assert int(state.update.flatten()[0]) == 1
    exec(code[1], names)
    fp.PPOConfig(**names[settings])


def short(code):
    """The code of a page with fewer steps."""
    code = re.sub(r"\b\d+_000\b", "512", code)
    code = code.replace("(976)", "(1)").replace("seeds=30", "seeds=2")
    code = code.replace("(ppo, state)", "(ppo, state, strategy='eager')")
    return code.replace("compile_step=True", "compile_step=False")


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


def test_every_test_that_the_requirements_of_cuda_graphs_name_exists():
    text = (DOCS / "cuda_graphs.md").read_text()
    text = text.replace(
        "symptoms::", "tests/runtime/test_cudagraph_symptoms.py::"
    )
    named = re.findall(r"(tests/\S+?\.py)(?:::(\w+))?", text)
    assert len(named) > 25
    for file, name in named:
        code = (ROOT / file).read_text()
        assert not name or f"def {name}(" in code, (file, name)
