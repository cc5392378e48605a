"""What benchmarks call, by a process that need not import PyTorch first."""

from experiments.benchmarks.default_results import Cost
from tests.forked import printed_by


def call_forked(words: list[str]) -> Cost:
    """As `default_results.call`; the cost is not measured."""
    code = "import sys\nfrom funcppo.cli import main\n"
    printed_by(f"{code}sys.argv = {['funcppo', *words]!r}\nmain()\n")
    return Cost(seconds=1.0, peak_mb=1.0)
