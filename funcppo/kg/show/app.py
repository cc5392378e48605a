"""The explorer as an application of FastAPI: pages, the JSON API and its description. Needs the extra `serve`.

A page and a path of the API are made of each method of `Explorer` that `RESOURCES` names, with the query string and the
answer that its annotations say.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import resources
from typing import Annotated, Any, get_type_hints
from urllib.parse import urlencode

import jinja2
from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
)
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from funcppo.core.files import shorten
from funcppo.kg.run.subject import describe_numbers
from funcppo.kg.show import values
from funcppo.kg.show.explorer import Explorer, proof_tree
from funcppo.kg.show.names import display, make_templates
from funcppo.kg.show.server import Guard, RequestError, Worker, is_api
from funcppo.kg.show.values import Name
from funcppo.runtime.capture import CaptureError
from funcppo.version import VERSION

# of an answer in JSON; pages cut names that are very long
MAX_ANSWER_BYTES = 4_000_000
RESOURCES = {
    "graph": "What is explored: sizes, score, notes, relations",
    "search": "Names that contain a text",
    "answers": "Ranked answers of relation(head, X) or relation(X, tail)",
    "why": "Why an atom is an answer: score, proof, evidence; or why not",
    "entity": "An entity and its neighbours, by relation",
    "relation": "A relation with its first facts and its best rules",
    "facts": "Known facts with some names in their places",
    "rules": "Rules, the most confident first",
    "rule": "A rule: what it derives, what it decides, what was learnt",
}
# these rank or prove, one after the other; all others do not wait for them
RANKING = ("answers", "why", "rule")
DESCRIPTION = (
    "Ranked, explained answers over a knowledge graph. Every request is a GET. Names may be given by their ids. "
    "An error is one line."
)
RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {
        "model": values.Problem,
        "description": "A parameter is missing or wrong.",
    },
    404: {
        "model": values.Problem,
        "description": "A name or an id is unknown.",
    },
    503: {
        "model": values.Problem,
        "description": "It takes too much work, or others wait.",
    },
    "4XX": {"model": values.Problem, "description": "It is refused."},
}
FAILURES = (
    RequestError,
    RequestValidationError,
    HTTPException,
    CaptureError,
    Exception,
)
_FILES = resources.files("funcppo.kg.show") / "static"


class AnswerResponse(JSONResponse):
    """An answer as JSON in ASCII, so that nothing invisible is in it."""

    def render(self, content: object) -> bytes:
        """The bytes of an answer.

        Raises:
          RequestError: it is too long.
        """
        text = json.dumps(content, allow_nan=False).encode()
        if len(text) > MAX_ANSWER_BYTES:
            raise RequestError(
                503,
                f"expected an answer of at most {MAX_ANSWER_BYTES:,} bytes, got {len(text):,}: ask for less",
            )
        return text


class Site:
    """The pages and the API of an explorer.

    Attributes:
      explorer: answers.
      worker: ranks and proves.
      lookups: looks up names and facts meanwhile.
    """

    def __init__(self, explorer: Explorer, seconds: float) -> None:
        """Prepare the templates and start the workers.

        Args:
          seconds: that the work of a request may take.
        """
        self.explorer = explorer
        self.worker = Worker(seconds)
        self.lookups = Worker(seconds)
        self._templates = _make_templates(explorer)

    def make_app(self, host: str) -> ASGIApp:
        """The application.

        Args:
          host: the name or address that is listened on.
        """
        app = FastAPI(
            title="funcppo serve",
            version=VERSION,
            description=DESCRIPTION,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            default_response_class=AnswerResponse,
            exception_handlers=dict.fromkeys(FAILURES, self._on_error),
            generate_unique_id_function=lambda route: route.name,
        )
        for name, summary in RESOURCES.items():
            app.get(
                f"/api/{name}",
                name=name,
                summary=summary,
                description=summary,
                responses=RESPONSES,
                response_model=get_type_hints(getattr(Explorer, name))[
                    "return"
                ],
            )(self._endpoint(name, lambda _, value: value))

        pages: dict[str, Callable[..., Any]] = {
            f"/{name}": self._endpoint(name, partial(self._respond, name))
            for name in RESOURCES
        }
        pages |= {
            "/": pages["/graph"],
            "/ask": self._ask,
            "/api": lambda: self._render("api", document=app.openapi()),
            # What a browser asks for beside JSON, which links no icon.
            "/favicon.ico": lambda: FileResponse(str(_FILES / "icon.svg")),
        }
        for path, page in pages.items():
            app.get(path, include_in_schema=False, response_model=None)(page)
        app.mount("/static", StaticFiles(directory=str(_FILES)))
        return Guard(app, host, self.problem)

    def problem(self, status: int, line: str, is_api: bool) -> Response:
        """The response of a request without an answer."""
        if is_api:
            return AnswerResponse({"error": line}, status)
        return self._render("error", status, line=line, status=status)

    # -- answering

    def _endpoint(
        self, name: str, respond: Callable[[Any, Any], object]
    ) -> Callable[..., Awaitable[object]]:
        """The endpoint of a resource.

        Args:
          respond: makes the response of the query and its answer, within the time of the request.
        """
        method = getattr(self.explorer, name)
        worker = self.worker if name in RANKING else self.lookups

        async def answer(query: Any) -> object:
            work = worker.submit(lambda: respond(query, method(query)))
            return await asyncio.wrap_future(work)

        query = get_type_hints(method)["query"]
        answer.__annotations__ = {"query": Annotated[query, Query()]}
        return answer

    def _respond(
        self, name: str, query: values.Query, value: BaseModel
    ) -> Response:
        """The page of an answer; a search for a query such as r(h, X) leads to its answers."""
        match value:
            case values.NameMatches(names=[], query=text) if "(" in text:
                return _redirect(self.explorer.read_text(text))
        fields = query.model_dump(exclude_unset=True)
        api = _link(f"/api/{name}", **fields)
        return self._render(name, api=api, query=query, value=value)

    async def _ask(
        self, query: Annotated[values.AtomQuery, Query()]
    ) -> Response:
        """Lead to the answers of a query, or to the reasons of an atom, that a form asks for."""
        work = self.lookups.submit(lambda: self.explorer.read_form(query))
        return _redirect(await asyncio.wrap_future(work))

    # -- responses

    def _render(
        self, template: str, status_code: int = 200, **context: object
    ) -> HTMLResponse:
        """A page."""
        page = self._templates.get_template(f"{template}.html")
        # A name may hold what is no character.
        content = page.render(context).encode("utf-8", "backslashreplace")
        return HTMLResponse(content, status_code)

    async def _on_error(self, request: Request, error: Exception) -> Response:
        """One line for a request without an answer; of a defect the server prints the traceback."""
        status = 500
        line = "internal error: the terminal of the server has the details"
        if isinstance(error, RequestError):
            status, line = error.status, str(error)
        elif isinstance(error, RequestValidationError):
            status, line = 400, describe_invalid(error.errors()[0])
        elif isinstance(error, HTTPException):
            status = error.status_code
            line = f"{error.detail.lower()}: {display(request.url.path)}"
        elif isinstance(error, CaptureError):
            line = f"--cuda-graphs manual: expected a CUDA graph, got none: {error}"
        response = self.problem(status, line, is_api(request.scope))
        if status == 503:
            response.headers["Retry-After"] = "5"
        return response


def describe_invalid(error: dict[str, Any]) -> str:
    """The line of a parameter that pydantic refuses."""
    name = error["loc"][-1]
    if error["type"] == "missing":
        return f"expected {name}, got nothing"
    if error["type"] == "extra_forbidden":
        return f"unknown parameter {shorten(name)}"
    expected = error["msg"].split(", unable")[0]
    expected = re.sub(
        "^Input should be (?=greater|less)", "a number ", expected
    )
    expected = expected.removeprefix("Input should be ")
    return f"{name}: expected {expected}, got {shorten(error['input'])}"


def _redirect(names: list[Name | None]) -> Response:
    """A redirect to the page of the answers of a query, or of the reasons of an atom."""
    fields = ("relation_id", "head_id", "tail_id")
    ids = {
        field: name.id for field, name in zip(fields, names) if name is not None
    }
    path = "/answers" if len(ids) < len(fields) else "/why"
    return RedirectResponse(_link(path, **ids), 303)


def _make_templates(explorer: Explorer) -> jinja2.Environment:
    """The environment of the templates, which escape every value."""
    environment = make_templates()
    environment.filters["tree"] = proof_tree

    subject = explorer.answerer.subject
    environment.globals |= {
        "link": _link,
        "graph_name": explorer.dataset.name,
        "is_trained": subject.policy_run is not None,
        "score_name": subject.score.name,
        "numbers": describe_numbers(subject),
        "smoothing": subject.task.cfg.smoothing or 0.0,
        "version": VERSION,
    }
    return environment


def _link(path: str, **fields: object) -> str:
    """A path of this site with its query string; fields of None are left out."""
    given = {name: value for name, value in fields.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path
