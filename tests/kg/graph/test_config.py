"""DataConfig: its defaults ask for nothing; every setting that is none is named."""

import pytest

from funcppo.core.settings import FieldError
from funcppo.kg.graph.config import DEFAULT_CONFIG, DataConfig


def test_by_default_files_have_three_columns_and_are_not_split():
    assert DataConfig() == DEFAULT_CONFIG
    assert (DEFAULT_CONFIG.columns, DEFAULT_CONFIG.split_ratios) == (None, None)


@pytest.mark.parametrize(
    "settings",
    [
        {"columns": "s,p,o"},
        {"columns": "1,3,2"},
        {"split_ratios": "0.8,0.1,0.1"},
        {"split_ratios": "1,0,0", "split_seed": -3},
        {"split_ratios": ".5, .5, 0", "split_seed": 7},
    ],
)
def test_settings_that_mean_something_are_kept(settings):
    cfg = DataConfig(**settings)
    assert {name: getattr(cfg, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"columns": "a,b"}, "columns"),
        ({"columns": "a,b,b"}, "columns"),
        ({"columns": "a,b,"}, "columns"),
        ({"columns": "1,2,c"}, "columns"),
        ({"columns": "0,1,2"}, "columns"),
        ({"columns": "1,01,2"}, "columns"),
        ({"split_ratios": ""}, "split_ratios"),
        ({"split_ratios": "0.8,0.2"}, "split_ratios"),
        ({"split_ratios": "0.8,0.1,0.2"}, "split_ratios"),
        ({"split_ratios": "0,0.5,0.5"}, "split_ratios"),
        ({"split_ratios": "1.2,-0.1,-0.1"}, "split_ratios"),
        ({"split_ratios": "nan,0.1,0.1"}, "split_ratios"),
        ({"split_ratios": "inf,0,0"}, "split_ratios"),
        ({"split_ratios": "a,b,c"}, "split_ratios"),
        ({"split_seed": 1}, "split_seed"),
        ({"split_ratios": "1,0,0", "split_seed": 1.5}, "split_seed"),
    ],
)
def test_a_setting_that_is_none_is_named(settings, field):
    with pytest.raises(FieldError) as caught:
        DataConfig(**settings)
    assert caught.value.field == field
