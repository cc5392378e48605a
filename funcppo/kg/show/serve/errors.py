"""What a request can be refused for: a status of HTTP and one line."""

from __future__ import annotations


class RequestError(Exception):
    """A request that has no answer.

    Attributes:
      status: 400 bad request, 404 nothing of that name, 503 too much work now, and others of HTTP.
    """

    def __init__(self, status: int, message: str) -> None:
        """A refusal with its one line."""
        super().__init__(" ".join(message.split()))
        self.status = status
