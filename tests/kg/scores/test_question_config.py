"""The settings of questions are read without PyTorch, and mean what their help says."""

import subprocess
import sys

import pytest

from funcppo.kg.scores.question_config import (
    ListwiseConfig,
    Penalty,
    QuestionConfig,
    batch_size,
)


def test_the_settings_import_no_torch():
    code = "import sys, funcppo.kg.scores.question_config; sys.exit('torch' in sys.modules)"
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


def test_few_questions_make_smaller_steps():
    """128 of them below 12,800, however many epochs there is time for, unless their number is set."""
    for n_epochs in (1, 8):
        cfg = ListwiseConfig(n_epochs=n_epochs)
        assert batch_size(cfg, 12_799) == batch_size(cfg, 1) == 128
        assert batch_size(cfg, 12_800) == 256
    assert batch_size(ListwiseConfig(batch_size=32), 10**6) == 32
