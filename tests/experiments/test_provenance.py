"""What a record says of its origin."""

import pytest
import torch

from experiments.provenance import describe_machine


@pytest.mark.parametrize(
    ("device", "value", "is_told"),
    [("cuda", "1", True), ("cuda", "0", False), ("cpu", "1", False)],
)
def test_a_record_under_launch_blocking_says_so(
    monkeypatch, device, value, is_told
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    machine = describe_machine(device)
    assert machine.get("launch_blocking", False) == is_told
    assert ("launch_blocking" in machine) == is_told
