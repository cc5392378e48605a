"""Nothing searches for cycles in a pause; afterwards it is as before."""

import gc

import pytest

from funcppo.core import garbage_collection


def test_a_pause_ends_as_it_began():
    assert gc.isenabled()
    with garbage_collection.paused():
        assert not gc.isenabled()
        with garbage_collection.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_ends_a_pause():
    with pytest.raises(KeyError), garbage_collection.paused():
        raise KeyError
    assert gc.isenabled()


def test_a_paused_function_returns_its_result():
    @garbage_collection.paused()
    def add(a: int, b: int) -> tuple[int, bool]:
        return a + b, gc.isenabled()

    assert add(1, 2) == add(2, 1) == (3, False)
    assert gc.isenabled()
