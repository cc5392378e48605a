"""The settings of questions are read without PyTorch, and mean what their help says."""

import subprocess
import sys

import pytest

from funcppo.kg.config import ListwiseConfig, Penalty, QuestionConfig


def test_the_settings_import_no_torch():
    code = "import sys, funcppo.kg.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (lambda: QuestionConfig(n_best=0), "n_best"),
        (lambda: QuestionConfig(seconds=0.0), "seconds"),
        (lambda: ListwiseConfig(learning_rate=-1.0), "learning_rate"),
        (lambda: Penalty(rule_weight=-1.0), "rule_weight"),
    ],
)
def test_a_setting_out_of_range_is_named(config, field):
    with pytest.raises(ValueError, match=f"^{field}: expected "):
        config()
