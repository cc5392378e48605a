"""What holds for all tests."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def compiled_code_of_its_own(tmp_path_factory):
    """Tests patch what they compile: nothing of that may be found by a program, or the other way round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
