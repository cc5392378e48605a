"""The matrix tells right from wrong, resumes, notices changes; its records and INVESTIGATION.md say the same."""

import copy
import inspect
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import full_step_matrix, paths
from experiments.matrix import (
    loops,
    measure,
    polyfills,
    pool,
    record,
    registry,
    steps,
    tables,
)
from funcppo.core import tree
from tests.forked import printed
from tests.ports import hold_ports, port_of

ROOT = Path(__file__).parents[2]
TEXT = paths.INVESTIGATION.read_text()
TABLES = paths.MATRIX_TABLES.read_text()
RECORDS = tables.records(record.RESULTS)
NAMES = [tables.label(r) for r in RECORDS]
LOOPS = {
    way.variant
    for way in registry.WAYS
    if way.build.__module__ == loops.__name__
}
EAGER = "0/eager, fused Adam/none/default"

needs_autograd_flag = pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"),
    reason="PyTorch before 2.11 has no trace_autograd_ops",
)
each_record = pytest.mark.parametrize("of", RECORDS, ids=NAMES)
each_gpu_record = pytest.mark.parametrize(
    "of", [of for of in RECORDS if of["device"] != "cpu"]
)


def assert_close(found, wanted):
    """1e-12 of params that move by 1e-3."""
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=0, atol=1e-12)


@pytest.fixture(autouse=True)
def default_dtype():
    """Cells change it."""
    yield
    torch.set_default_dtype(torch.float32)


# the verdicts


def verdict(build, compiled=True) -> str:
    """The status of an eager cell made of `build`."""
    registry.way("T", "", "", compiled=compiled)(build)
    cell = registry.Cell(registry.WAYS.pop(), "none", "default")
    return measure.examine(cell, "cpu")[0]["status"]


def test_a_cell_that_claims_a_graph_and_has_none_is_no_success():
    build = lambda given, _: steps.training(given, steps.pure_step(given))
    assert verdict(build) == "not compiled"
    assert verdict(build, compiled=False) == "eager"


def test_a_cell_that_forgets_to_clip_is_called_wrong():
    def build(given, _):
        loose = given.scalars._replace(max_grad_norm=torch.tensor(1e9))
        step = steps.pure_step(replace(given, scalars=loose))
        return steps.training(given, step)

    assert verdict(build) == "wrong"


# cells, processes, resuming


def test_every_cell_has_a_name_of_its_own_and_is_found_by_it():
    cells = registry.cells(True, ("*",))
    assert len({cell.id for cell in cells}) == len(cells)
    for cell in cells:
        assert registry.by_id(cell.id) == cell


def test_a_speed_up_is_that_of_the_rounds_and_not_of_the_medians():
    """A machine that slows down as the rounds go on: every round says 2x."""
    baseline = [{"us": 10.0 * i} for i in range(1, 12)]
    cell = [{"us": 5.0 * i} for i in range(1, 12)]
    got = pool.summarize(cell, baseline)
    assert got["step_us"] == 30.0 and got["step_us_quartiles"] == [15.0, 45.0]
    assert got["speedup"] == 2.0 and got["speedup_quartiles"] == [2.0, 2.0]
    assert pool.summarize([*cell[:10], {}], baseline) == {}
    assert "speedup" not in pool.summarize(cell, [{}] * 11)


def test_a_run_goes_on_where_it_stopped_and_tells_of_a_change_by_its_exit_status(
    tmp_path, monkeypatch, capsys
):
    args = ["--out", str(tmp_path), "--only", EAGER]
    here = record.path(record.RESULTS, torch.__version__, record.device())
    unchanged = 0 if here.exists() else 3
    assert full_step_matrix.main(args) == unchanged
    assert "1/1" in capsys.readouterr().out
    assert full_step_matrix.main(args) == unchanged
    assert "1 of them in the record already" in capsys.readouterr().out
    (file,) = tmp_path.glob("*.json")
    committed = json.loads(file.read_text())
    committed["cells"][EAGER]["status"] = "one graph"
    committed["cells"][EAGER]["step_us"] = 1.0
    (tmp_path / "committed").mkdir()
    (tmp_path / "committed" / file.name).write_text(json.dumps(committed))
    monkeypatch.setattr(record, "RESULTS", tmp_path / "committed")
    assert full_step_matrix.main(args) == 1
    assert f"changed: {EAGER}: status one graph" in capsys.readouterr().out


TREES = st.recursive(
    st.builds(torch.tensor, st.integers(0, 9)),
    lambda inner: st.lists(inner).map(tuple) | st.lists(inner),
)


@given(TREES)
@settings(deadline=None)
def test_a_substitute_for_optree_does_what_optree_does(of):
    """The verbs of `funcppo.core.tree` made of either; a sum tells which leaves met."""
    double = lambda a, b: a + b
    assert polyfills.tree_leaves(of) == tree.leaves(of)
    assert polyfills.tree_map(double, of, of) == tree.map(double, of, of)
    leaves = [x + i for i, x in enumerate(tree.leaves(of))]
    assert polyfills.tree_unflatten(
        polyfills.tree_structure(of), leaves
    ) == tree.unflatten(of, leaves)


# what the text says of the records


def cells_of(of, prefix: str, backend="inductor") -> list[dict]:
    """The cells whose names begin so, in the default mode."""
    ending = f"/{backend}/default"
    return [
        cell
        for name, cell in of["cells"].items()
        if name.startswith(prefix) and name.endswith(ending)
    ]


@each_record
def test_as_written_the_report_is_right_that_these_fail(of):
    wanted = {"1": 0, "2": 0, "3": 0, "4": 1, "5": 2, "6": 3, "8": 3, "9": 3}
    wanted |= {"7": 3, "10": 3, "11": 3}
    for approach, cause in wanted.items():
        backend = "aot_eager" if approach == "7" else "inductor"
        cells = cells_of(of, f"{approach}/as written", backend)
        assert len(cells) == (2 if approach == "10" else 1)
        for cell in cells:
            assert cell["status"] == "fails", cell
            assert cell["error"]["cause"] == list(measure.CAUSES)[cause], cell


@each_record
def test_repaired_the_whole_step_is_one_graph(of):
    """Approaches 4 to 7 and 9 to 11 and route A on every version; 1, 3, B and C where the flag exists."""
    names = ["4/repaired", "5/repaired", "6/repaired", "9/around", "9/inside"]
    names += ["10/dict", "10/positional", "10/flat vector", "10/module + copy_"]
    names += ["11/inner", "A/written back outside"]
    is_late = tables.version(of) >= (2, 11)
    names += ["1/repaired", "3/repaired", "B/", "C/"] if is_late else []
    found = cells_of(of, "7/repaired", "aot_eager")
    found += [cell for name in names for cell in cells_of(of, name)]
    assert len(found) == (17 if is_late else 13)
    for cell in found:
        assert (cell["status"], cell["compiles"]) == ("one graph", "step"), cell
        assert cell["parity"]["float64"] <= 1e-10


@each_record
def test_what_depends_on_the_version(of):
    """The autograd engine is traced from 2.11, a scan from 2.10; packages crash on 2.11."""
    version = tables.version(of)
    for name in ("1/repaired", "3/repaired", "B/", "C/"):
        (cell,) = cells_of(of, name)
        cause = cell.get("error", {}).get("cause")
        is_refused = cause == "autograd engine not traced"
        assert is_refused == (version < (2, 11)), cell
    (cell,) = cells_of(of, "E/scan")
    assert cell["status"] == ("one graph" if version >= (2, 10) else "fails")
    wanted = "crash" if version[:2] == (2, 11) else "one graph"
    for name in ("D/make_fx + export + AOT", "I/AOTInductor package of the"):
        (cell,) = cells_of(of, name)
        assert cell["status"] == wanted


@each_record
def test_nothing_that_the_report_hoped_for_works(of):
    """The exported usual step runs on 2.9, and is wrong."""
    cells = {
        cell["variant"]: cell
        for cell in of["cells"].values()
        if cell["approach"] == "H"
    }
    usual = cells.pop("export of the usual step")["status"]
    assert usual == ("fails" if tables.version(of) >= (2, 10) else "wrong")
    assert {cell["status"] for cell in cells.values()} == {"fails"}
    for name in ("trace_backward", "trace_grad_and_opt"):
        cell = cells.pop(f"torch.compile({name}=True)")
        assert cell["error"]["cause"] == "no such option"
    assert len(cells) == 2


@each_record
def test_every_silent_failure_is_in_the_tables(of):
    for name, cell in of["cells"].items():
        if cell["status"] in ("wrong", "not compiled"):
            assert f"| {name} |" in TABLES


@each_gpu_record
def test_graph_trees_record_one_graph_steps_and_lose_what_is_fed_back(of):
    """Once each, at several times the duration of a manual graph."""
    cells = of["cells"]
    way = "A/written back outside/inductor"
    trees, manual = (
        cells[f"{way}/{mode}"] for mode in ("reduce-overhead", "manual graph")
    )
    assert trees["recordings"] == 1 and not trees["skips"]
    assert trees["step_us"] > 2 * manual["step_us"]
    two = "8/repaired: gradient and update compiled apart"
    for name in ("A/fed back", two):
        error = cells[f"{name}/inductor/reduce-overhead"]["error"]
        assert "overwritten by a subsequent run" in error["message"]
    inside = cells["A/written back inside/inductor/reduce-overhead"]
    assert inside["recordings"] == 0
    assert "mutated inputs" in inside["skips"][0]


@each_gpu_record
def test_a_graph_gains_more_than_compiling_and_both_gain_most(of):
    """Of the ways in the decision table, by quartiles that do not overlap."""
    cells = of["cells"]
    graph = cells["0/eager, fused Adam/none/manual graph"]["speedup_quartiles"]
    ways = [f"{name}/inductor" for _, _, name in tables.DECISIONS]
    ways.remove("0/eager, fused Adam/inductor")
    for way in ways:
        compiled = cells[f"{way}/default"]["speedup_quartiles"]
        both = cells[f"{way}/manual graph"]["speedup_quartiles"]
        assert compiled[1] < graph[0] and graph[1] < both[0], way


def ends_of(of, is_loop: bool) -> dict[str, str]:
    """How each way of I ends, those of loops.py or all others."""
    return {
        variant: tables.by_backend(of, "I", variant)
        for _, _, variant in tables.variants([of], ("I",))
        if (variant in LOOPS) == is_loop
    }


@pytest.mark.parametrize(
    "of", [of for of in RECORDS if ends_of(of, is_loop=True)]
)
def test_what_a_training_loop_asks_of_a_step(of):
    """A gradient through a scan is right by hand alone before 2.13; a rate that is a number is compiled again."""
    ends = ends_of(of, is_loop=True)
    assert set(ends) == LOOPS
    whole = ["unrolled by the compiler", "a tensor of the step count"]
    whole += ["slice_scatter", "diagonal_scatter", "scatter_add"]
    whole += ["two scans, the gradient by hand"]
    assert {ends[name] for name in whole} == {"**one graph**"}
    assert ends["scan under func.grad"] == "fails: AssertionError"
    assert ends["a Python float"].startswith("3 graphs, 2 recompiles")
    assert "fails" in ends["aot_compile of the pure step, saved and loaded"]
    is_late = tables.version(of) >= (2, 13)
    in_loss = ends["scan in the compiled loss, eager backward"]
    assert ("**wrong result**" in in_loss) != is_late
    aligned = ends["torch's generator, align_random_eager"]
    assert (aligned == "**one graph**") == is_late
    if of["device"] != "cpu":
        by_hand = "I/two scans, the gradient by hand/inductor"
        replayed = of["cells"][f"{by_hand}/reduce-overhead"]
        assert replayed["status"] == "wrong"
        assert of["cells"][f"{by_hand}/manual graph"]["status"] == "one graph"


@each_record
def test_what_else_a_step_may_hold(of):
    """Where the other end of a row is torch's own: random numbers of a generator, and a wrapper inside."""
    ends = ends_of(of, is_loop=False)
    n_whole = list(ends.values()).count("**one graph**")
    assert n_whole == (7 if of["device"] == "cpu" else 6), ends
    around = "the wrapped loss compiled, eager backward, fused Adam"
    assert ends[around] == "fails: Unsupported"
    if tables.label(of) == "2.14.1, cpu":  # beside which it was installed
        (program,) = cells_of(of, "I/ExecuTorch", "eager")
        assert "execute() failed" in program["error"]["message"]
        assert program["error"]["dtype"] == "float64"
    inside = "the compiled loss wrapped, eager backward, fused Adam"
    assert ends[inside] == "one graph, of the loss only"
    if of["device"] != "cpu":
        assert "inductor: **wrong result**" in ends["torch's generator"]
        cells = of["cells"]
        graphed = cells["I/make_graphed_callables/none/graphed callables"]
        by_hand = cells["0/eager, fused Adam/none/manual graph"]
        assert graphed["status"] == "eager"
        assert by_hand["step_us"] < graphed["step_us_quartiles"][0]
        kernel = cells[
            "I/one Triton kernel, backward written by hand/none/manual graph"
        ]
        compiled = cells["A/written back outside/inductor/manual graph"]
        assert kernel["status"] == "one graph"
        assert kernel["speedup_quartiles"][0] < compiled["speedup"]


# the text


def test_its_tables_are_those_of_the_records():
    for text in (TEXT, TABLES):
        assert tables.rewritten(text, RECORDS) == text


def test_every_record_has_every_cell():
    """Records of 2.9, 2.10 and 2.12 were made before the ways of loops.py, and have none of them."""
    for of in RECORDS:
        cells = registry.cells(of["device"] != "cpu", ("*",))
        wanted = {cell.id for cell in cells}
        if tables.version(of)[:2] in ((2, 9), (2, 10), (2, 12)):
            wanted = {c.id for c in cells if c.way.variant not in LOOPS}
        assert set(of["cells"]) == wanted


def test_every_section_ends_in_the_name_of_a_test_that_exists():
    for section in TEXT.split("\n## ")[1:]:
        line = section.strip().splitlines()[-1]
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", line)
        assert named, section.splitlines()[0]
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(), test


def run_printed(title: str, monkeypatch, **names) -> dict:
    """What the code printed in a section leaves behind, compiled by aot_eager in float64."""
    torch.set_default_dtype(torch.float64)
    section = TEXT.split(f"\n## {title}", 1)[1].split("\n## ")[0]
    code = "\n".join(re.findall(r"^(?: {4}(.*))?$", section, re.MULTILINE))
    compile_ = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    exec(code, names)
    return names


def random_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Observations and actions of three minibatches."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return [(3 * torch.randn(32, 4), torch.randint(2, (32,))) for _ in range(3)]


def train_eagerly(model, batches) -> None:
    """The updates by autograd, clip_grad_norm_ and torch.optim.Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for obs, action in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(obs), action).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def test_the_recipe_is_one_graph_and_equals_torch(monkeypatch):
    batches = random_batches()
    names = run_printed("The recipe\n", monkeypatch, batches=batches)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

    model = names["model"]  # still as it began: the recipe overwrites nothing
    train_eagerly(model, batches)
    state = names["state"][0]
    assert_close(
        [state[n] for n, _ in model.named_parameters()], model.parameters()
    )


@needs_autograd_flag
def test_the_recipe_with_an_optimizer_is_one_graph_and_equals_torch(
    monkeypatch,
):
    """The code as printed."""
    batches = random_batches()
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)
    )
    expected = copy.deepcopy(model)
    with torch._dynamo.config.patch(trace_autograd_ops=False):
        names = run_printed(
            "The recipe for a script", monkeypatch, torch=torch, model=model
        )
        for obs, action in batches:
            names["update"](obs, action)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1

    train_eagerly(expected, batches)
    assert_close(model.parameters(), expected.parameters())


@needs_autograd_flag
def test_a_bare_step_after_backward_is_refused():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    bare_step = inspect.unwrap(torch.optim.Adam.step)

    def update(obs):
        model(obs).sum().backward()
        with torch.no_grad():
            bare_step(optimizer)

    torch._dynamo.reset()
    compiled = torch.compile(update, backend="aot_eager", fullgraph=True)
    with (
        torch._dynamo.config.patch(trace_autograd_ops=True),
        pytest.raises(Exception, match="pending mutation on parameter"),
    ):
        compiled(torch.ones(3, 4))


# the four causes, and write-backs


def said(name: str, *args: str) -> list[str]:
    """What a reproducer prints."""
    folder = ROOT / "experiments" / "reproducers"
    return printed(folder / f"{name}.py", *args)


@needs_autograd_flag
def test_the_autograd_engine_is_traced_only_where_the_flag_says_so():
    off, on = said("autograd_engine_not_traced")
    assert "trace_autograd_ops=False" in off
    assert on == "flag True: tensor([0., 1., 2.])"


def test_functional_call_reaches_forward_only():
    method, wrapper = said("functional_call_reaches_forward_only")
    assert "unexpected keyword argument 'actions'" in method
    assert wrapper.startswith("Judge tensor(")


def test_an_in_place_write_destroys_what_backward_needs_compiled_or_not():
    over, beside = said("in_place_over_saved_tensor")
    assert "modified by an inplace operation" in over
    assert beside.startswith("in place False: tensor([")


def test_an_eager_transform_cannot_see_into_a_compiled_function():
    refused, silent, inside = said("transform_over_compiled_function")
    assert "Unsupported functorch tracing attempt" in refused
    assert silent.endswith("graphs 0")
    assert inside.endswith("graphs 1")


def test_the_storage_of_a_transformed_tensor_cannot_be_read():
    """By a copy; no compiled function reads it."""
    copied, tried, *_ = said("storage_of_tensor_wrapper", "eager")
    assert copied.endswith("Cannot access storage of TensorWrapper")
    assert re.search(r": 0 of [1-9]\d* raise it$", tried)


def test_no_compiled_function_reads_that_storage_in_any_recorded_version():
    rows = json.loads((record.RESULTS / "compiler_faults.json").read_text())
    tried = {row["torch"]: row["n_tried"] for row in rows["rows"]}
    assert min(tried.values()) > 200 and "2.9.1" in tried  # the report's own
    assert all(row["n_raising"] == 0 for row in rows["rows"])


def test_a_collective_under_vmap_is_wrong_in_silence():
    """The rank's own numbers, or memory that nobody wrote, and no error, which PyTorch 2.10 raises.

    Nothing waits for the sums: where the collective happens to end first, they are there. Not in five runs of five.
    """
    results: list[str] = []
    while len(results) < 5 and set(results) <= {"[3.0, 30.0]"}:
        with hold_ports(1) as held:
            lines = said("vmap_over_collective", str(port_of(held[0])))
        told = next(line for line in lines if "vmap" in line)
        by_row, mapped = told.split(", under vmap ")
        assert by_row == "all-reduce row by row [3.0, 30.0]"
        if torch.__version__ < "2.11":
            assert mapped.startswith("NotImplementedError: Cannot access")
            return
        assert mapped.startswith("[")
        results.append(mapped)
    assert set(results) != {"[3.0, 30.0]"}


def test_a_reset_of_dynamo_clears_the_callbacks_of_others():
    told, removed = said("callbacks_cleared")
    assert told.startswith("compilations told of: 1 before reset, 0 after it")
    assert removed.startswith("callback not removed: ValueError")


def test_write_backs_inside_a_compiled_function_may_be_lost():
    """A line that no longer fits is good news: the fault is gone, and the text may say from which version."""
    eager, aot, inductor = said("write_backs_lost")
    wanted = "wanted [1, 1], [0, 0]"
    assert f"[1.0, 1.0], [0.0, 0.0], {wanted}; count = 1.0" in eager
    assert f"[1.0, 1.0], [0.0, 0.0], {wanted}; count = 0.0" in aot
    assert f"[1.0, 1.0], [1.0, 1.0], {wanted}; count = 0.0" in inductor
