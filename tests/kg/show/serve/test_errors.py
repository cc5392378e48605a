"""A refusal is one line, whatever it was made of."""

from funcppo.kg.show.serve.errors import RequestError


def test_a_refusal_is_one_line_with_a_status():
    error = RequestError(404, "unknown\n name")
    assert (error.status, str(error)) == (404, "unknown name")
