"""Every setting has a range, and what is outside it is refused by name: in configs and in the options of programs."""

import dataclasses
import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import numpy as np
import pytest

from funcppo.config import Config, PPOConfig, Schedule
from funcppo.core import settings
from tests.cli.runner import funcppo

PACKAGE = Path(settings.__file__).parents[1]
CONSTANT = Schedule()


@dataclass(frozen=True, kw_only=True)
class Example:
    """A config with a field of every kind."""

    size: settings.Size = 1
    count: settings.NonNegativeInt = 0
    rate: settings.PositiveFloat = 1.0
    decay: settings.DecayRate = 0.0
    fraction: settings.UnitInterval | None = None
    sizes: tuple[settings.Size, ...] = (1, 2)
    steps: settings.Size | Literal["all"] = "all"
    ddof: Literal[0, 1] = 1
    name: str = "a"
    flag: bool = False
    device: settings.DeviceName = "cpu"
    choice: settings.DeviceChoice = "auto"
    schedule: Schedule = CONSTANT
    path: Path | None = None

    def __post_init__(self) -> None:
        settings.check_fields(self)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("size", 0, "expected 1 or more, got 0"),
        ("size", 2**31, "expected at most 2147483647, got 2147483648"),
        ("size", 10**400, "expected at most 2147483647, got a number of 1329 bits"),
        ("size", 1.0, "expected an integer, got 1.0"),
        ("size", True, "expected an integer, got True"),
        ("size", None, "expected an integer, got None"),
        ("count", -1, "expected 0 or more, got -1"),
        ("rate", 0.0, "expected more than 0, got 0.0"),
        ("rate", math.nan, "expected more than 0, got nan"),
        ("rate", math.inf, "expected at most 3.40282e+38, got inf"),
        ("rate", "1", "expected a number, got '1'"),
        ("decay", 1.0, "expected 0 to below 1, got 1.0"),
        ("fraction", 1.5, "expected 0 to 1, got 1.5"),
        ("fraction", math.nan, "expected 0 to 1, got nan"),
        ("sizes", (1, 0), "expected 1 or more, got (1, 0)"),
        ("steps", 0, "expected 1 or more or all, got 0"),
        ("steps", "some", "expected an integer or all, got 'some'"),
        ("ddof", 2, "expected one of 0, 1, got 2"),
        ("ddof", True, "expected one of 0, 1, got True"),
        ("name", 5, "expected a text, got 5"),
        ("device", "tpu", "expected cpu, cuda or cuda:N, got 'tpu'"),
        ("device", "cuda:-1", "expected cpu, cuda or cuda:N, got 'cuda:-1'"),
        ("device", "cuda:1\n", "expected cpu, cuda or cuda:N, got 'cuda:1\\n'"),
        ("device", "auto", "expected cpu, cuda or cuda:N, got 'auto'"),
        ("device", 0, "expected a text, got 0"),
        ("choice", "gpu", "expected auto, cpu, cuda or cuda:N, got 'gpu'"),
        ("flag", 1, "expected true or false, got 1"),
        ("schedule", "linear", "expected a Schedule, got 'linear'"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_named(field, value, problem):
    with pytest.raises(settings.FieldError) as error:
        Example(**{field: value})
    assert str(error.value) == f"{field}: {problem}"
    assert (error.value.field, error.value.problem) == (field, problem)


def test_what_fits_is_accepted():
    """The bounds themselves, numbers of NumPy, an integer for a float; a type without a check fits anything."""
    Example(size=2**31 - 1, rate=1, decay=0.999, fraction=1.0, sizes=())
    Example(size=np.int64(3), rate=np.float32(0.5), steps=7, path=Path("x"))


def numeric_ranges(annotation):
    """The kind and range of each number in an annotation; None for a number without a range."""
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        found = [item for item in metadata if isinstance(item, settings.Range)]
        if kind in (int, float):
            return [(kind, found[0] if found else None)]
        return numeric_ranges(kind)
    if get_origin(annotation) is Literal:
        return []
    if annotation in (int, float):
        return [(annotation, None)]
    members = get_args(annotation)
    return [pair for member in members for pair in numeric_ranges(member)]


def config_types():
    """Every dataclass of settings of the package."""
    for path in PACKAGE.rglob("*.py"):
        if "Config:\n" in path.read_text() and path.stem != "settings":
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            module = importlib.import_module(".".join(parts))
            for name, value in vars(module).items():
                if name.endswith("Config") and dataclasses.is_dataclass(value):
                    yield value


def test_every_number_of_a_config_has_a_range():
    found = set(config_types()) - {Config}
    assert PPOConfig in found and len(found) > 20
    for config_type in found:
        for field, annotation in settings.field_types(config_type).items():
            for _, range_ in numeric_ranges(annotation):
                assert range_ is not None, (config_type, field)


PROGRAMS = {
    "train": ["countries_s1", "--out", "{tmp}/x"],
    "rl": ["CartPole-v1", "--out", "{tmp}/x"],
    "evaluate": ["countries_s1"],
    "predict": ["countries_s1", "locatedIn(france, X)"],
    "prove": ["countries_s1", "locatedIn(france, europe)"],
    "data": ["countries_s1"],
    "mine": ["countries_s1", "--out", "{tmp}/x"],
    "report": ["countries_s1", "--out", "{tmp}/x.html"],
    "serve": ["countries_s1"],
    "doctor": [],
    "check": ["countries_s1"],
}


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("train", "--steps", "-1"),
        ("train", "--seconds", "nan"),
        ("train", "--seed", "9" * 39),
        ("train", "--set ppo.gamma", "2"),
        ("train", "--set ppo.learning_rate", "nan"),
        ("train", "--set ppo.adam.b1", "1.5"),
        ("train", "--set ppo.learning_rate_schedule.end_factor", "-1"),
        ("train", "--set prover.smoothing", "nan"),
        ("rl", "--steps", "9" * 39),
        ("evaluate", "--max-queries", "0"),
        ("predict", "--set threads", "inf"),
        ("prove", "--height", "-1"),
        ("mine", "--min-confidence", "2"),
        ("mine", "--max-length", "-1"),
        ("serve", "--port", "65536"),
        ("check", "--seconds", "-1"),
    ],
)
def test_an_option_out_of_range_is_one_line_that_names_it(
    name, option, value, monkeypatch, capsys, tmp_path
):
    arguments = [text.format(tmp=tmp_path) for text in PROGRAMS[name]]
    words = [option, value]
    if option.startswith("--set "):
        words = ["--set", f"{option[6:]}={value}"]
    assert funcppo(monkeypatch, name, *arguments, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"funcppo: {option}: expected ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
