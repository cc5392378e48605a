"""`warm`: a later `train` with the same options finds what it compiled."""

from __future__ import annotations

import json

import pytest
import torch

from funcppo import metrics_log
from funcppo.cli import evaluation_setup
from funcppo.cli.warm import Warm
from funcppo.core.settings import METRICS_FILE
from funcppo.kg.run import validation
from funcppo.runtime import compile as compilation
from funcppo.runtime import compile_cache
from funcppo.train_step import EAGER_PARTS
from tests.cli.runner import TRAINED, funcppo
from tests.runtime.test_capture import on_gpu

OPTIONS = [*TRAINED, "--strategy", "two-graphs"]


@pytest.fixture
def one_compiled(monkeypatch, tmp_path):
    """Of the functions of a training step only Adam is compiled, which takes the least time."""
    compile_function = compilation.compile_function

    def compile_adam(fn, *args):
        is_adam = fn is EAGER_PARTS.minibatch_parts.apply_gradients
        return compile_function(fn, *args) if is_adam else fn

    monkeypatch.setattr(compilation, "compile_function", compile_adam)
    monkeypatch.setattr(compilation.parallel_compile, "MAX_WORKERS", 0)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "set by --cache-dir, and restored")
    return tmp_path / "cache"


@pytest.fixture
def restore_precision():
    """Makes the precision of products what it is in a new process, where no program has set it."""

    def restore():
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "none"

    yield restore
    torch.set_float32_matmul_precision("highest")


def warm(monkeypatch, capsys, *words) -> dict:
    capsys.readouterr()
    assert funcppo(monkeypatch, "warm", *words, "--json", "-") == 0
    return json.loads(capsys.readouterr().out)


def test_training_finds_what_was_compiled_before(
    one_compiled, trained, monkeypatch, capsys, tmp_path, restore_precision
):
    """By the counters of the cache: one function compiled, then none; of other sizes it is another one."""
    # what other tests of this process left there
    monkeypatch.setattr(compile_cache, "uncached_reasons", {})
    cache = ("--cache-dir", one_compiled)
    restore_precision()
    first = warm(monkeypatch, capsys, "countries_s1", *OPTIONS, *cache)
    assert list(first["compiled"]) == ["apply_gradients"]
    assert (first["found"], first["uncached_reasons"]) == ({}, {})
    assert first["strategy"]["strategy"] == "two-graphs"
    assert first["cache_dir"] == str(one_compiled / "inductor")
    assert first["seconds"] > first["compiled"]["apply_gradients"] > 0.0

    restore_precision()
    out = tmp_path / "run"
    words = ("countries_s1", "--out", out, *OPTIONS, *cache)
    assert funcppo(monkeypatch, "train", *words) == 0
    last = metrics_log.read(out / METRICS_FILE)[-1]
    assert (last["compiles"], last["cache_hits"]) == (0, 1)

    restore_precision()
    of_run = warm(monkeypatch, capsys, out, *cache)
    assert list(of_run["found"]) == ["apply_gradients"]
    assert of_run["compiled"] == {}


# Above height 1 a policy searches.
SEARCHED = [*TRAINED, "--prover.max-height", "2"]


def test_the_search_of_a_run_is_compiled_at_the_sizes_of_its_evaluation(
    monkeypatch, capsys, tmp_path
):
    """In place of the compiler one that counts; the real one takes minutes on a CPU."""
    run, sizes = tmp_path / "run", []
    words = ("train", "countries_s1", "--out", run, *SEARCHED)
    assert funcppo(monkeypatch, *words) == 0

    def compile_nothing(fn):
        def counted(cfg, *args):
            if cfg not in sizes:
                sizes.append(cfg)
                event = compile_cache.CompileEvent(fn.__name__, 1.0, False, "")
                compile_cache.compile_events.append(event)
            return fn(cfg, *args)

        return counted

    monkeypatch.setattr(compilation, "compile_function", compile_nothing)
    monkeypatch.setattr(
        evaluation_setup, "_tune_batch_size", untuned_batch_size
    )
    report = warm(monkeypatch, capsys, run, "--search")
    assert list(report["compiled"]) == ["evaluate_step"]
    assert "the search is compiled, ready in" in report["notes"][-1]

    compiled_for = list(sizes)
    words = ("evaluate", run, "--compile", "on", "--queries", 1)
    assert funcppo(monkeypatch, *words, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["compiled"]
    assert compiled_for and sizes == compiled_for


def untuned_batch_size(run, score, split, memory_limit):
    return validation.run_search_config(run, score), []


@on_gpu
def test_an_evaluation_finds_the_search_that_was_compiled_before(
    monkeypatch, capsys, tmp_path
):
    run, cache = tmp_path / "run", ("--cache-dir", tmp_path / "cache")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "set by --cache-dir, and restored")
    monkeypatch.setattr(compile_cache, "uncached_reasons", {})
    monkeypatch.setattr(
        evaluation_setup, "_tune_batch_size", untuned_batch_size
    )
    words = ("train", "countries_s1", "--out", run, "--device", "cuda")
    assert funcppo(monkeypatch, *words, *SEARCHED) == 0
    first = warm(monkeypatch, capsys, run, "--search", *cache)
    assert list(first["compiled"]) == ["evaluate_step"]

    n_before = len(compile_cache.compile_events)
    words = ("evaluate", run, "--device", "cuda", "--compile", "on", *cache)
    metrics = tmp_path / "funcppo.prom"
    assert funcppo(monkeypatch, *words, "--metrics-file", metrics) == 0
    samples = dict(
        line.split()
        for line in metrics.read_text().splitlines()
        if line.startswith("funcppo_stage_copy_seconds_")
    )
    assert float(samples["funcppo_stage_copy_seconds_count"]) > 0
    later = compile_cache.compile_events[n_before:]
    assert later and all(event.cache_hit for event in later)


def test_only_the_search_of_a_policy_is_compiled(trained, monkeypatch, capsys):
    words = ("warm", "countries_s1", "--search")
    assert funcppo(monkeypatch, *words) == 2
    line = "--search: expected a trained run, whose policy searches"
    assert line in capsys.readouterr().err
    assert funcppo(monkeypatch, "warm", trained, "--search") == 2
    line = "follows from the rules that derive a candidate"
    assert line in capsys.readouterr().err


def test_a_run_too_short_to_be_compiled_says_so(monkeypatch, capsys):
    words = ("countries_s1", *TRAINED, "--strategy", "auto")
    assert funcppo(monkeypatch, "warm", *words) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "nothing to compile: compiling would take longer" in output


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_code_is_compiled_for_the_precision_of_the_run(
    monkeypatch, capsys, precision, restore_precision
):
    """Train sets it; a cache key has it, and tells one that was set from the default."""
    seen = []

    def observe(fn, *args):
        seen.append(compile_cache._global_torch_settings())
        return fn

    restore_precision()
    default = compile_cache._global_torch_settings()
    monkeypatch.setattr(compilation, "compile_function", observe)
    words = ("countries_s1", *OPTIONS, "--precision", precision)
    warm(monkeypatch, capsys, *words)
    torch.set_float32_matmul_precision(precision)
    assert {*seen} == {compile_cache._global_torch_settings()}
    assert default not in seen


def test_a_run_is_compiled_for_with_its_own_settings(
    trained, monkeypatch, capsys
):
    for words, message in (
        ((trained, "--ppo.n-envs", 16), "--ppo.n-envs: expected 8 as in "),
        ((trained, "--config", "x"), "--config: "),
        ((), "RUN|DATASET: expected a run or a data set"),
    ):
        assert funcppo(monkeypatch, "warm", *words) == 2
        assert f"funcppo: {message}" in capsys.readouterr().err


def test_options_of_training_alone_are_none_of_it():
    assert "out" in Warm.HIDDEN_OPTIONS
    assert set(Warm.__dataclass_fields__) > Warm.HIDDEN_OPTIONS
