"""Every number of a block comes from a committed record, and a stale block is noticed."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import statistics
from statistics import mean, stdev

import pytest

from experiments import paths, tables
from funcppo.mining.config import MiningConfig

RECORDS = paths.RESULTS
ROUNDING = 6e-3  # three significant digits


def record(name: str) -> dict:
    """A committed record, read by the test itself."""
    return json.loads((RECORDS / f"{name}.json").read_text())


def cells(name: str) -> dict[str, dict]:
    return {row["cell"]: row for row in record(name)["rows"]}


def parse(text: str) -> list[list[str]]:
    """The cells of every line of the tables of a text, heads and rules left out."""
    rows = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows += [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in table.splitlines()[2:]
        ]
    return rows


def number(cell: str) -> float:
    """A number of a table."""
    return float(cell.replace(",", "").removesuffix(" MB").removesuffix(" %"))


def rounded(*values: float) -> list:
    return [pytest.approx(value, rel=ROUNDING) for value in values]


# small functions, by hand


def test_digits_are_significant_and_never_scientific():
    values = {
        2.2449: "2.24",
        8.6: "8.6",
        1484.2: "1,484",
        0.000347: "0.000347",
        278.27: "278",
        0.0: "0",
        42.04: "42",
    }
    assert {value: tables.digits(value) for value in values} == values
    assert tables.digits(0.9973, 2) == "1"


def test_an_upper_bound_is_never_below_the_value():
    assert [tables.at_most(x) for x in (4.1e-6, 4e-6, 9.2e-6, 0.0, 0.3)] == [
        "5e-06",
        "4e-06",
        "1e-05",
        "0",
        "3e-01",
    ]


def test_a_spread_is_the_mean_and_the_sample_deviation():
    assert tables.mean_and_spread([1.0, 2.0, 3.0]) == "2.0000 ± 1.0000"
    assert (
        tables.mean_and_spread([0.5, 0.5]) == "0.5000"
        and tables.mean_and_spread([]) == ""
    )


def test_the_best_untrained_score_is_of_scores_without_training():
    untrained = {
        "test": {"max-confidence": {"mrr": 0.3}, "noisy-or": {"mrr": 0.4}}
    }
    trained = {"success, trained": {"mrr": 0.9}}
    runs = [
        {
            "score": "success",
            "test": trained | {"success, untrained": {"mrr": value}},
        }
        for value in (0.3, 0.6)
    ]
    assert tables.best_untrained(runs, untrained, "mrr") == (
        pytest.approx(0.45),
        "untrained policy",
    )
    del (
        runs[0]["test"]["success, untrained"],
        runs[1]["test"]["success, untrained"],
    )
    assert tables.best_untrained(runs, untrained, "mrr") == (0.4, "noisy-or")


# the blocks


def test_the_documentation_names_every_block():
    assert set(
        re.findall(r"^    ([a-z]+(?:-[a-z]+)*)  ", tables.__doc__, re.MULTILINE)
    ) >= tables.BLOCKS.keys() - {"performance-cartpole-update"}
    assert all(name in tables.__doc__ for name in tables.BLOCKS)


@pytest.mark.parametrize(
    ("names", "block"),
    [
        (tables.PROVIDED_RULES, tables.results_provided_rules),
        (tables.MINED_RULES, tables.results_mined_rules),
    ],
    ids=["provided", "mined"],
)
def test_the_tables_of_results_hold_every_set(names, block):
    runs = record("main_results")["runs"]
    untrained = record("untrained_scores")["sets"]
    rows = parse(block())
    assert len(rows) == len(names)
    for name, row in zip(names, rows):
        results = [
            run["results"]
            for run in runs
            if run["set"] == name and not run["learning_rate_0"]
        ]
        metric = "auc_pr" if name.startswith("countries") else "mrr"
        trained = [
            result["test"][f"{result['score']}, trained"][metric]
            for result in results
        ]
        height = results[0]["height"]
        assert row[1:4] == [
            metric.upper().replace("_", "-"),
            str(height),
            f"{results[0]['rules']:,}",
        ]
        for cell, score in zip(
            row[4:7], (f"exists@{height}", "max-confidence", "noisy-or")
        ):
            assert float(cell) == pytest.approx(
                untrained[name]["test"][score][metric], abs=5.1e-5
            )
        shown_mean, *spread = row[8].split(" ± ")
        assert (
            float(shown_mean) == pytest.approx(mean(trained), abs=5.1e-5)
            and len(trained) == 3
        )
        assert (float(spread[0]) if spread else 0.0) == pytest.approx(
            stdev(trained), abs=5.1e-5
        )
        assert float(row[10]) == pytest.approx(
            results[0]["test"]["max-confidence"]["ceiling"], abs=5.1e-5
        )


def test_the_summary_has_at_most_eight_rows_of_the_tables_and_cites():
    block = tables.results_summary()
    rows = parse(block)
    assert 5 <= len(rows) <= 8
    whole = tables.results_provided_rules() + tables.results_mined_rules()
    for data, _, metric, ceiling, untrained, trained, published in rows:
        assert any(
            {metric, ceiling, trained} <= set(row) for row in parse(whole)
        ), data
        best = max(
            float(row[i])
            for row in parse(whole)
            if {ceiling, trained} <= set(row)
            for i in (4, 5, 6, 7)
        )
        assert float(untrained.split()[0]) == best
        assert published == "-" or re.fullmatch(
            r"(0\.\d+ \[[\w-]+\]\(https://\S+\)(, )?)+", published
        )
    assert len({row[4] for row in rows}) > 1 and {
        "WN18RR",
        "FB15k-237",
        "UMLS",
    } <= {row[0] for row in rows}


def test_options_of_mine_are_those_that_differ_from_its_defaults():
    defaults = dataclasses.asdict(MiningConfig())
    assert tables.mining_options(defaults) == "usual"
    # A setting of an older record, which there is no longer, is left out.
    former = defaults | {"time_limit": 60.0}
    assert tables.mining_options(former) == "usual"
    others = former | {"constants": True, "max_length": 2}
    expected = "`--max-length 2 --constants`"
    assert tables.mining_options(others) == expected


def test_joint_evidence():
    rows = record("joint_evidence")["rows"]
    lines = parse(tables.joint_evidence())
    assert [line[0] for line in lines] == sorted({r["set"] for r in rows})
    for name, n_rules, seeds, *cells in lines:
        of_set = [row for row in rows if row["set"] == name]
        assert number(n_rules) == of_set[0]["n_rules"]
        assert 2 * number(seeds) == len(of_set)
        means = [
            mean([row[stage] for row in of_set if row["is_joint"] == way])
            for stage in ("initial", "listwise")
            for way in (False, True)
        ]
        for cell, value in zip(cells, means, strict=True):
            assert float(cell.split(" ± ")[0]) == pytest.approx(value, abs=6e-5)


def test_misleading_rules():
    runs = record("misleading_rules")["runs"]
    others = record("default_results")["runs"]
    lines = parse(tables.misleading_rules())
    assert len(lines) == len({run["set"] for run in runs})
    for line in lines:
        valid = [
            {
                run["seed"]: run["results"]["best_valid_metric"]
                for run in table
                if run["set"] == line[0]
            }
            for table in (runs, others)
        ]
        gains = [valid[0][seed] - valid[1][seed] for seed in sorted(valid[0])]
        shown = [float(gain) for gain in line[6].split(", ")]
        assert shown == pytest.approx(gains, abs=6e-5)
        with_rules = float(line[5].split(" ± ")[0])
        assert with_rules == pytest.approx(
            mean(list(valid[0].values())), abs=6e-5
        )
        on_test = [
            run["results"]["test"]["evidence, trained"]["mrr"]
            for run in runs
            if run["set"] == line[0]
        ]
        shown_test = float(line[8].split(" ± ")[0])
        assert shown_test == pytest.approx(mean(on_test), abs=6e-5)


def test_general_rules():
    rows = record("general_rules")["rows"]
    lines = parse(tables.general_rules())
    assert len(lines) == 2 * len(rows)
    for line in lines:
        [row] = [row for row in rows if row["set"] == line[0]]
        mrr = {
            trial["way"]: trial["mrr"]
            for trial in row["valid"]
            if trial["score"] == line[4]
        }
        shown = [float(cell.split(" (")[0]) for cell in line[5:9]]
        order = ("without", "last", "zero", "general")
        assert shown == pytest.approx([mrr[way] for way in order], abs=6e-5)


def test_mining():
    sets = record("mining_results")["sets"]
    rows = parse(tables.mining())
    assert len(rows) == len(sets)
    by_label = {row[0]: row for row in rows}
    assert len(by_label) == len(rows)
    for name, result in sets.items():
        row = by_label[tables.MINING_SETS[name]]
        metric = "auc_pr" if name.startswith("countries") else "mrr"
        test = {
            way: result["rankings"][way]["test"] for way in ("plain", "chosen")
        }
        assert (
            number(row[3]) == result["rules"]
            and number(row[4])
            == result.get("mining_cpu_seconds", result.get("mining_seconds"))
            and row[-1] == result["commit"]
        )
        plain = [
            test["plain"][score][metric]
            for score in ("max-confidence", "noisy-or")
        ]
        scores = ("max-confidence", "max-plus", "noisy-or", "noisy-or@3")
        scores += ("noisy-or-top-5",)
        chosen = [test["chosen"].get(score, {}).get(metric) for score in scores]
        ceiling = test["chosen"]["max-confidence"]["ceiling"]
        values = (*plain, *chosen, ceiling)
        for cell, value in zip(row[5:-1], values, strict=True):
            if value is None:  # the record is older than the score
                assert cell == "-"
            else:
                assert float(cell) == pytest.approx(value, abs=5.1e-4)


def test_mined_counts():
    for row, result in zip(
        parse(tables.mined_counts()),
        record("check_mined_counts")["files"].values(),
        strict=True,
    ):
        assert [*map(number, row[1:5])] == [
            result[key] for key in ("rules", "paths", "equal", "circular")
        ]
        assert number(row[5]) == result["different"] == 0


def test_learning_control():
    for row, name in zip(
        parse(tables.learning_control()), ("cartpole", "pendulum"), strict=True
    ):
        result = record(f"learn_control-{name}")
        returns = [*result["last_100_returns"].values()]
        assert [*map(number, row[1:3])] == [
            len(returns),
            result["environment_steps"],
        ]
        assert [*map(float, row[3:])] == [
            pytest.approx(mean(returns), abs=0.051),
            pytest.approx(min(returns), abs=0.051),
        ]


def test_learning_curves_stand_beside_jax_where_it_was_run():
    others = {row[0]: row[-1] for row in parse(tables.learning_curves())}
    for env, name in (
        ("CartPole-v1", "time_to_score-h100"),
        ("MinAtar/Breakout-v1", "time_to_score-breakout"),
        ("MinAtar/Freeway-v1", "time_to_score-games"),
    ):
        curves = cells(name)[f"jax {env}"]["curves"]
        last = mean(curve[-1][-1] for curve in curves)
        assert others[env].endswith(f"{last:.1f} (JAX, {len(curves)} seeds)")
    assert others["MinAtar/Seaquest-v1"] == "-"


def test_compiled_learning():
    text = tables.compiled_learning()
    rows = record("check_learning-h200")["rows"]
    first = next(
        i
        for i, row in enumerate(rows)
        if any(x["rows"] for x in row["clip_differences"].values())
    )
    assert (
        f"minibatch {first} all" in text
        and f"At minibatch {first + 1} a row" in text
    )
    step, before = (
        float(x) for x in re.findall(r"(?:at most|within) (\d+e-\d+)", text)
    )
    assert max(row["step_difference"] for row in rows) <= step
    assert (
        max(max(row["difference_from_eager"].values()) for row in rows[:first])
        <= before
    )
    end = rows[-1]["difference_from_eager"]["compiled"]
    assert f"{end:.1%}".replace("%", " %") in text


def test_strategies():
    rows = record("strategies-h100")["rows"]
    shown = parse(tables.performance_strategies())
    assert len(shown) == 3
    for row, work in zip(
        shown, ("cartpole 4x128", "cartpole 2048x128", "prover 64x64")
    ):
        ms = {
            r["strategy"]: r["iteration_ms"] for r in rows if r["work"] == work
        }
        assert [*map(number, row[1:])] == rounded(
            *(ms[s] for s in ("eager", "forward", "two-graphs", "one-graph"))
        )


def test_cartpole():
    record = cells("cartpole-h100")
    precisions = ("highest", "high", "bfloat16")
    works = ("4x128", "2048x128", "64 learners", "1024 learners")
    for row, work in zip(
        parse(tables.performance_cartpole()), works, strict=True
    ):
        ours, theirs = (
            [
                record[f"{work} {mode} cuda {x}"]["iteration_ms"]
                for x in precisions
            ]
            for mode in ("captured", "jax")
        )
        n_kernels = record[f"{work} captured cuda highest"]["kernels"]
        want = rounded(*ours, n_kernels, *theirs)
        assert [*map(number, row[1:8])] == want
        assert float(row[8]) == tables.PUREJAXRL_MS[work]


def test_one_update():
    rows = cells("cartpole-h200-update")
    ms = [
        float(x)
        for x in re.findall(
            r"([\d.]+) ms", tables.performance_cartpole_update()
        )
    ]
    assert ms == rounded(
        *(
            rows[f"update {mode} cuda"]["iteration_ms"]
            for mode in ("captured", "forward", "eager")
        )
    )


def test_cartpole_on_a_cpu():
    ours, jax = cells("cartpole-cpu"), cells("cartpole-cpu-jax")
    for row, work in zip(
        parse(tables.performance_cartpole_cpu()),
        ("4x128", "2048x128"),
        strict=True,
    ):
        same_run = (
            ours[f"{work} {mode} cpu highest"]["iteration_ms"]
            for mode in ("whole-iteration", "forward", "sb3")
        )
        with_jax = (
            jax[f"{work} {mode} cpu highest"]["iteration_ms"]
            for mode in ("whole-iteration", "jax")
        )
        assert [*map(number, row[1:])] == rounded(*same_run, *with_jax)


def test_microbatches():
    cartpole = cells("cartpole-h200-microbatches")
    pairs = [[cartpole[f"2048x128 captured cuda highest {n}"] for n in (1, 8)]]
    for name, layout in (
        ("prover-h200-family-padded", "padded"),
        ("prover-h200-family", "packed"),
    ):
        works = ("family-130", "family-130-microbatches")
        pairs.append(
            [cells(name)[f"{work} captured cuda {layout}"] for work in works]
        )
    for row, pair in zip(
        parse(tables.performance_microbatches()), pairs, strict=True
    ):
        ms, megabytes = (
            [r[key] for r in pair] for key in ("iteration_ms", "peak_bytes")
        )
        assert [*map(number, row[1:])] == [
            *rounded(*ms),
            *(pytest.approx(x / 1e6, abs=0.51) for x in megabytes),
        ]


def test_capture():
    text, rows = tables.performance_capture(), record("capture-h200")["rows"]
    ways = [row for row in rows if "ready_ms" in row]
    for shown, row in zip(parse(text), ways, strict=True):
        times = (row[key] for key in ("ready_ms", "capture_ms", "replay_ms"))
        assert shown[0] == row["row"]
        assert [*map(number, shown[1:])] == [
            *rounded(*times),
            pytest.approx(row["memory_mb"], abs=0.51),
        ]
    captures = [row["capture_ms"] for row in rows if "pool" in row["row"]]
    assert f"Of {len(captures)} recordings" in text
    assert f"{min(captures):.0f} to {max(captures):.0f} ms" in text


def test_prover():
    for row, (name, cell) in zip(
        parse(tables.performance_prover()), tables.PROVER_ROWS, strict=True
    ):
        of = cells(name)[cell]
        want = (
            of["iteration_ms"],
            of["rollout_ms"],
            of["rollout_steps_per_s"],
            of["peak_bytes"] / 1e6,
        )
        assert [*map(number, row[1:5])] == rounded(*want)
        assert float(row[5]) == pytest.approx(
            of["difference_from_eager"], rel=0.06
        )


def test_prover_on_a_cpu():
    text, layouts, modes = (
        tables.performance_prover_cpu(),
        cells("prover-cpu"),
        cells("prover-cpu-s3"),
    )
    for row, work in zip(parse(text), ("s3", "family"), strict=True):
        padded, packed = (
            layouts[f"{work} eager cpu {layout}"]
            for layout in ("padded", "packed")
        )
        seconds = (of["processor_ms"] / 1e3 for of in (padded, packed))
        assert [*map(number, row[1:])] == rounded(
            100 * packed["filled"], *seconds
        )
    compiled, eager = (
        modes[f"s3 {mode} cpu packed"] for mode in ("compiled", "eager")
    )
    saved = (eager["processor_ms"] - compiled["processor_ms"]) / 128
    assert (
        f"{compiled['processor_ms']:.0f} ms of processor where eager takes {eager['processor_ms']:,.0f}"
        in text
    )
    assert (
        f"{saved:.1f} ms less" in text
        and f"after {compiled['cold_s']:.0f} s" in text
    )


def test_kernels_of_an_iteration_are_summed_by_kind():
    """What is listed and the rest are all kernels; the network of 2048 x 128 is products, and its own kernels."""
    rows = parse(tables.performance_cartpole_aims())
    assert [number(row[1]) for row in rows] == [1.5, 5.5, 10]
    for row in rows:
        parts = [number(x) for x in row[5:9]]
        assert sum(parts) == pytest.approx(number(row[4]), rel=ROUNDING)

    listed = cells("cartpole-h100")["2048x128 captured cuda highest"]
    of_network = re.findall(
        r"^(\d+) x ([\d.]+) us (?:sm80_xmma_gemm|forward_kernel|backward_kernel)",
        "\n".join(listed["costliest"]),
        re.MULTILINE,
    )
    assert len(of_network) == 2
    ms = sum(int(n) * float(us) for n, us in of_network) / 1e3
    assert number(rows[1][5]) == pytest.approx(ms, rel=ROUNDING)


def test_time_of_an_update():
    """By the last point of each curve: MinAtar's games have 64 x 128 steps an update."""
    rows = {
        row[0]: row[1:] for row in parse(tables.performance_time_of_update())
    }
    assert len(rows) == 5
    games = cells("time_to_score-games")
    ms = [
        statistics.median(
            1000 * curve[-1][1] * 64 * 128 / curve[-1][0]
            for curve in games[f"{library} MinAtar/Freeway-v1"]["curves"]
        )
        for library in ("funcppo", "jax")
    ]
    *shown, ratio = map(float, rows["MinAtar/Freeway-v1"])
    assert shown == pytest.approx(ms, rel=ROUNDING)
    assert ratio == pytest.approx(ms[1] / ms[0], abs=0.051)


def test_time_to_score_has_dashes_for_what_no_seed_reached(
    tmp_path, monkeypatch
):
    """Of three seeds one reaches 5; JAX was stopped after two seeds."""
    shutil.copy(RECORDS / "time_to_score-h100.json", tmp_path)
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    block = _time_to_score()
    assert "time_to_score-breakout" not in block
    (before,) = re.findall(r"CartPole-v1, 475.*", block)

    def cell(library, *seeds):
        reached = [s for s in seeds if s is not None]
        target = {
            "n_reached": len(reached),
            "steps": list(seeds),
            "median_steps": reached[0] if reached else None,
            "median_seconds": reached[0] / 4 if reached else None,
        }
        return {"cell": f"{library} Game-v1", "targets": {"5.0": target}}

    other = record("time_to_score-h100")
    other["rows"] = [cell("funcppo", None, 8, None), cell("jax", None, None)]
    file = tmp_path / "time_to_score-breakout.json"
    file.write_text(json.dumps(other))
    rows = parse(_time_to_score())
    assert before in _time_to_score()
    assert rows[-1] == [
        "Game-v1, 5",
        "1 of 3, 0 of 2",
        "8",
        "2",
        "-",
        "-",
        "-",
    ]


def _time_to_score():
    return tables.BLOCKS["performance-time-to-score"]()


def test_startup():
    shown = parse(tables.performance_startup())
    states = ("nothing compiled", "empty caches", "full caches")
    expected = []
    for name, machine in {
        "startup-h100": "H100",
        "startup-cpu": "2 CPU cores",
    }.items():
        medians = {
            row["row"]: statistics.median(row["seconds"])
            for row in record(name)["rows"]
        }
        for work in ("S3", "CartPole", "CartPole in JAX"):
            of_work = [medians.get(f"{work}, {state}") for state in states]
            if any(of_work):
                expected.append((machine, of_work))
        assert f"{medians['import torch']:.3g} s on {machine}" in (
            tables.performance_startup()
        )
    assert len(shown) == len(expected)
    for (label, *cells_shown), (machine, of_work) in zip(shown, expected):
        assert label.endswith(machine)
        assert [number(x) if x else None for x in cells_shown] == [
            x and pytest.approx(x, rel=0.01) for x in of_work
        ]


def test_scoring():
    rows = {
        row["row"]: row
        for name in ("scoring-h200", "scoring-h100", "scoring-cpu")
        for row in record(name)["rows"]
    }
    shown = parse(tables.performance_scoring())
    for cells_shown, name in zip(
        shown, ("replaced", "refilled", "refilled, not compiled", "prefiltered")
    ):
        keys = ("slots", "ms_per_candidate", "times_replaced", "warmup_seconds")
        assert [*map(number, cells_shown[1:])] == rounded(
            *(rows[name][key] for key in keys)
        )
    ranked = (
        "wn18rr, rules.txt",
        "wn18rr, rules_rnnlogic.tsv",
        "fb15k-237, rules_rnnlogic_top.tsv.gz",
    )
    assert len(shown) == 4 + len(ranked)
    for cells_shown, name in zip(shown[4:], ranked):
        row = rows[name]
        want = (
            row["queries"],
            row["prepared_seconds"],
            row["seconds"],
            row["peak_bytes"] / 1e9,
        )
        assert [*map(number, cells_shown[1:])] == [
            pytest.approx(value, rel=0.05) for value in want
        ]


def test_evaluator():
    rows = record("evaluator")["rows"]
    for shown, row in zip(
        parse(tables.performance_evaluator()), rows, strict=True
    ):
        if "exit_status" in row:
            needed = int(re.search(r"at least (\d+)", row["line"])[1])
            assert f"needs {needed / 1e6:.0f} MB" in shown[2]
        else:
            want = (
                row["n_queries"],
                row["peak_bytes"] / 1e6,
                int(row["slots"].split()[0]),
                100 * row["active_share"],
            )
            assert [*map(number, shown[1:])] == rounded(*want)


def test_index():
    rows = {row["row"]: row for row in record("logic")["rows"]}
    text, build = tables.performance_index(), rows["build_large"]
    assert (
        f"{build['seconds']:.0f} s" in text
        and f"{build['peak_bytes'] / 1e9:.2f} GB" in text
    )
    ratios = {
        batch: max(
            r["ratio"] for r in rows["lookup"]["rows"] if r["batch"] <= batch
        )
        for batch in (1024, 16384)
    }
    assert (
        f"at most 1,024 atoms then takes at most {ratios[1024]:.2f} times"
        in text
    )
    assert f"16,384 atoms {ratios[16384]:.2f} times" in text


def test_lookup():
    rows = record("lookup")["rows"]
    shown = parse(tables.performance_lookup())
    order = [
        {
            pages: next(
                r
                for r in rows
                if (r["pages"], r["batch"], r["reads"]) == (pages, batch, reads)
            )
            for pages in ("small", "huge")
        }
        for batch in (1024, 16384)
        for reads in (
            "key",
            "buckets",
            "words",
            "columns",
            "perfect",
            "facts_for",
        )
    ]
    for cells_shown, pair in zip(shown, order, strict=True):
        want = [
            pair[pages][key]
            for pages in ("small", "huge")
            for key in ("small_us", "large_us", "ratio")
        ]
        assert [*map(number, cells_shown[1:])] == [
            pytest.approx(value, rel=0.01, abs=0.51) for value in want
        ]


def larger(value, key=""):
    """A record with every measured number larger: those with a fraction, some counts, and a reason."""
    if isinstance(value, dict):
        return {name: larger(member, name) for name, member in value.items()}
    if isinstance(value, list):
        return [larger(member, key) for member in value]
    if isinstance(value, float):
        return 1.4 * value
    if key == "loop" and isinstance(value, str):  # why something failed
        return f"{value}: other"
    return (
        3 * value
        if key in ("equal", "rules", "n_tried", "n_passed")
        and isinstance(value, int)
        else value
    )


PRINTED = ("readme-ppo", "readme-train")


@pytest.mark.parametrize("name", PRINTED)
def test_a_printed_block_is_the_text_of_its_record(name, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    record = {"ppo": "a\n\nb\n", "train": "a\n\nb\n"}
    (tmp_path / "readme_outputs.json").write_text(json.dumps(record))
    assert tables.BLOCKS[name]() == "    a\n\n    b\n"


@pytest.mark.parametrize(
    "name", [name for name in tables.BLOCKS if name not in PRINTED]
)
def test_a_block_changes_with_its_records(name, tmp_path, monkeypatch):
    """Every record that a block names is one that it reads."""
    for file in RECORDS.glob("*.json"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    block = tables.BLOCKS[name]
    before = block()
    sources = re.findall(r"`([\w-]+)` \(|results/([\w-]+)\.json`", before)
    assert sources
    for source in (a or b for a, b in sources):
        file = tmp_path / f"{source}.json"
        text = file.read_text()
        file.write_text(json.dumps(larger(json.loads(text))))
        assert block() != before, source
        file.write_text(text)
    assert block() == before


def graph_run(n_triples: int, **fields) -> dict:
    """The row of one generated graph."""
    sizes = {"n_entities": 1000, "n_relations": 5, "n_triples": n_triples}
    ended = {"status": 0, "answer_seconds": None, "error": ""}
    return sizes | ended | {"seconds": 61.4, "peak_mb": 951.2} | fields


def test_the_graphs_are_counted_by_how_they_ended():
    mrr = {
        "exists@1": 0.1,
        "max-confidence": 0.3,
        "noisy-or": 0.2,
        "success, untrained": 0.25,
        "success, trained": 0.35,
    }
    chosen = {
        "rule_score": "noisy-or",
        "notes": ["answers are ranked by the trained policy"],
    }
    note = "answers are ranked by the rule score noisy-or, mrr 0.3 on valid"
    by_rules = {"rule_score": "noisy-or", "notes": [note]}
    wrong = {"status": 2, "error": "funcppo: expected a b"}
    empty = (
        "funcppo: graph: no rules given, and the data hold none with support 5"
    )
    runs = [
        graph_run(1500, mrr=mrr, n_rules=1200, ceiling=0.9, **chosen),
        graph_run(1600, mrr=mrr, n_rules=1, ceiling=0.9, **by_rules),
        graph_run(500, **wrong),
        graph_run(600, **wrong),
        graph_run(700, status=2, error=empty),
        graph_run(800, status=130, answer_seconds=0.5, error="interrupted"),
    ]
    text = tables.fifty_graphs_table({"runs": runs})
    sizes = ["1,000", "5"]
    cost = ["61", "0.95"]
    *without, last, by_rule_score = parse(text)
    assert [row[2] for row in without] == ["500", "600", "700", "800"]
    assert without[0] == [*sizes, "500", "", *cost, "", "", "", "", ""]
    scores = ["0.9000", "0.1000", "0.3000 (max-confidence)", "0.3500"]
    assert last == [*sizes, "1,500", "1,200", *cost, *scores, "0.3500"]
    assert by_rule_score[-2:] == ["0.3500", "0.2000"]
    assert "6 runs; 1 over the time limit; 2 failed; 1 without a rule." in text
    assert text.endswith("- 2 failed: `funcppo: expected a b`\n")


def test_small_graphs_by_hand():
    def graph(name, seed, error, larger, **mrr):
        cost = {"n_rules": 10 * seed, "seconds": 30.0, "ceiling": 0.5}
        row = {"set": name, "triples": 1500, "seed": seed} | cost
        gain = {"mean": mrr["trained"] - mrr["untrained"], "error": error}
        answers = {"mean": -larger, "error": 0.002}
        larger_gain = {"mean": larger, "error": 0.002}
        of_larger = {"trained": larger_gain, "answers": answers}
        return row | {
            "mrr": {"rule_score": 0.2, "answers": 0.3} | mrr,
            "gain": {"trained": gain},
            "large_test": {"n_test_queries": 400 * seed, "gain": of_larger},
        }

    rows = [
        graph("umls", 4, 0.004, 0.003, untrained=0.25, trained=0.26),
        graph("umls", 5, 0.006, 0.005, untrained=0.25, trained=0.24),
        graph("wn18rr", 4, 0.01, -0.005, untrained=0.4, trained=0.43),
        graph("wn18rr", 5, 0.01, 0.001, untrained=0.4, trained=0.40004),
    ]
    text = tables.small_graphs_table(rows)
    sizes = ["1,500", "2", "45", "30", "0.5000"]
    umls = ["0.2000", "0.2500", "0.2500", "0.3000"]
    umls += ["+0.0100 ± 0.0040, -0.0100 ± 0.0060", "1,800"]
    umls += ["+0.0030 ± 0.0020, +0.0050 ± 0.0020"]
    wn18rr = ["0.2000", "0.4000", "0.4150", "0.3000"]
    wn18rr += ["+0.0300 ± 0.0100, +0.0000 ± 0.0100", "1,800"]
    wn18rr += ["-0.0050 ± 0.0020, +0.0010 ± 0.0020"]
    assert parse(text) == [
        ["UMLS", *sizes, *umls],
        ["WN18RR", *sizes, *wn18rr],
    ]
    lines = text.split("\n\n")[1].splitlines()
    first, samples, parts, *_ = lines
    expected = "above on 2 of 4 graphs, equal on 1, below on 1; mean +0.0075 ± 0.0085 (standard error)."
    assert first == f"- Trained against the untrained policy: {expected}"
    expected = "above on 1 of 2 graphs, equal on 0, below on 1; mean +0.0000 ± 0.0100 (standard error)."
    assert samples == f"- the same, random samples: {expected}"
    expected = "above on 1 of 2 graphs, equal on 1, below on 0; mean +0.0150 ± 0.0150 (standard error)."
    assert parts == f"- the same, connected parts: {expected}"

    beyond_errors = [line.split(": ")[1] for line in lines[-3:]]
    assert beyond_errors == [
        "beyond two standard errors above on 2 of 4 graphs, below on 0; mean +0.0075 ± 0.0085.",
        "beyond two standard errors above on 1 of 4 graphs, below on 1; mean +0.0010 ± 0.0022.",
        "beyond two standard errors above on 1 of 4 graphs, below on 1; mean -0.0010 ± 0.0022.",
    ]


def test_small_graphs():
    rows = record("small_graphs-cpu")["rows"]
    lines = parse(tables.small_graphs())
    assert sum(int(line[2]) for line in lines) == len(rows)
    names = {label: name for name, label in tables.MINING_SETS.items()}
    for line in lines:
        key = (names[line[0]], number(line[1]))
        graphs = [row for row in rows if (row["set"], row["triples"]) == key]
        ways = ("rule_score", "untrained", "trained", "answers")
        means = [mean([row["mrr"][way] for row in graphs]) for way in ways]
        shown = [float(cell) for cell in line[6:10]]
        assert shown == pytest.approx(means, abs=6e-5)
        for cell, tests in (
            (line[10], graphs),
            (line[12], [row["large_test"] for row in graphs]),
        ):
            gains = [float(gain.split(" ")[0]) for gain in cell.split(", ")]
            of_tests = [test["gain"]["trained"]["mean"] for test in tests]
            assert gains == pytest.approx(of_tests, abs=6e-5)


# documents


def test_no_block_of_a_document_is_stale():
    for file in tables.documents():
        text = file.read_text()
        assert tables.rewrite(text) == text, (
            f"{file}: run python experiments/tables.py"
        )


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a README and a page of documentation."""
    (tmp_path / "docs" / "more").mkdir(parents=True)
    page = "before\n<!-- results:performance-startup -->\n<!-- /results:performance-startup -->\nafter\n"
    (tmp_path / "README.md").write_text(page)
    (tmp_path / "docs" / "more" / "page.md").write_text(page)
    for name, file in (
        ("README", "README.md"),
        ("INVESTIGATION", "none.md"),
        ("NOTES", "none.md"),
        ("MATRIX_TABLES", "none.md"),
        ("DOCS", "docs"),
    ):
        monkeypatch.setattr(paths, name, tmp_path / file)
    return tmp_path


def test_a_stale_block_fails_the_check_and_is_rewritten(project, capsys):
    assert tables.main(["--check"]) == 1
    assert "README.md: stale: performance-startup" in capsys.readouterr().err
    assert "s with empty caches" not in (project / "README.md").read_text()
    assert tables.main([]) == 0
    for file in ("README.md", "docs/more/page.md"):
        text = (project / file).read_text()
        assert text.startswith("before\n") and text.endswith("after\n")
        assert tables.performance_startup() in text
    assert tables.main(["--check"]) == 0
    changed = (
        (project / "README.md")
        .read_text()
        .replace(" s with empty", "0 s with empty")
    )
    (project / "README.md").write_text(changed)
    assert tables.main(["--check"]) == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "<!-- results:none -->\n<!-- /results:none -->\n",
            "results:none: expected one of",
        ),
        (
            "<!-- results:mining -->\n",
            "results:mining: expected an opening and a closing marker",
        ),
        (
            "<!-- /results:mining -->\n<!-- results:mining -->\n",
            "results:mining: expected an opening and a closing",
        ),
    ],
)
def test_a_wrong_marker_is_an_error_of_one_line(project, capsys, text, error):
    (project / "README.md").write_text(text)
    assert tables.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert error in line and "README.md" in line
    assert (project / "README.md").read_text() == text


def test_one_block_is_printed(capsys):
    assert tables.main(["--print", "performance-startup"]) == 0
    assert capsys.readouterr().out == tables.performance_startup()


def test_rule_scores_are_shown_with_their_variants_too():
    test = {
        "noisy-or": {"mrr": 0.25},
        "noisy-or-linked-last": {"mrr": 0.5},
        "noisy-or-other-facts": {"mrr": 0.375},
        "evidence, trained": {"mrr": 0.75},
    }
    assert tables.rule_scores_text(test, "noisy-or") == (
        "0.2500 (noisy-or), 0.5000 (noisy-or-linked-last), "
        "0.3750 (noisy-or-other-facts)"
    )
    del test["noisy-or-other-facts"]
    last = tables.rule_scores_text(test, "noisy-or-linked-last")
    assert last == "0.5000 (noisy-or-linked-last)"
