"""The explorer as an application of Starlette: pages, the JSON API and its description. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources
from typing import Any
from urllib.parse import urlencode

import jinja2
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route
from starlette.types import ASGIApp

from funcppo.kg.run.subject import describe_numbers
from funcppo.kg.show.names import display, score_text
from funcppo.kg.show.serve import proof_tree
from funcppo.kg.show.serve.errors import RequestError
from funcppo.kg.show.serve.explorer import Explorer
from funcppo.kg.show.serve.resources import (
    RESOURCES,
    Resource,
    openapi,
    read_arguments,
    read_fields,
)
from funcppo.kg.show.serve.server import Guard, Worker, is_api
from funcppo.runtime.capture import CaptureError
from funcppo.version import VERSION

MAX_WAITING = 16
# of an answer in JSON; pages cut names that are very long
MAX_ANSWER_BYTES = 4_000_000
STATIC_TYPES = {
    "explorer.css": "text/css",
    "explorer.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_STATIC = resources.files("funcppo.kg.show.serve") / "static"

Endpoint = Callable[[Request], Awaitable[Response]]


class Site:
    """The pages and the API of an explorer.

    Attributes:
      explorer: answers.
      worker: ranks and proves.
      lookups: looks up names and facts meanwhile.
    """

    def __init__(self, explorer: Explorer, seconds: float) -> None:
        """Prepare the templates and start the worker.

        Args:
          seconds: that the work of a request may take.
        """
        self.explorer = explorer
        self.worker = Worker(seconds, MAX_WAITING)
        self.lookups = Worker(seconds, MAX_WAITING)
        self._templates = _make_templates(explorer)
        self._openapi = openapi(VERSION)

    def make_app(self, host: str) -> ASGIApp:
        """The application.

        Args:
          host: the name or address that is listened on.
        """
        routes = [
            Route("/", self._page_of(RESOURCES[0])),
            Route("/ask", self._ask),
            Route("/api", self._api_page),
            Route("/openapi.json", self._openapi_document),
            Route("/static/{name}", _static_file),
            # What a browser asks for beside JSON, which links no icon.
            Route("/favicon.ico", _icon),
        ]
        for resource in RESOURCES:
            api = self._api_of(resource)
            routes.append(Route(f"/api/{resource.name}", api))
            page = self._page_of(resource)
            if resource.name == "search":
                page = self._search
            routes.append(Route(f"/{resource.name}", page))

        app = Starlette(
            routes=routes,
            exception_handlers={
                RequestError: self._on_request_error,
                HTTPException: self._on_http_error,
                CaptureError: self._on_capture_error,
                Exception: self._on_error,
            },
        )
        app.router.redirect_slashes = False
        return Guard(app, host, self.problem)

    def problem(self, status: int, line: str, is_api: bool) -> Response:
        """The response of a request without an answer."""
        if is_api:
            return _json_response({"error": line}, status)
        return self._render("error.html", status, line=line, status=status)

    # -- answering

    async def _answer(
        self, resource: Resource, fields: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """The answer of a resource.

        Raises:
          RequestError: a parameter is wrong, or the work is too much.
        """

        def work() -> Mapping[str, Any]:
            arguments = read_arguments(resource, self.explorer, fields)
            return resource.answer(self.explorer, **arguments)

        worker = self.lookups if resource.is_lookup else self.worker
        return await asyncio.wrap_future(worker.submit(work))

    def _api_of(self, resource: Resource) -> Endpoint:
        """The endpoint of a resource that answers with JSON."""

        async def answer(request: Request) -> Response:
            fields = read_fields(request.scope["query_string"])
            return _json_response(await self._answer(resource, fields))

        return answer

    def _page_of(self, resource: Resource) -> Endpoint:
        """The endpoint of a resource that answers with a page."""

        async def answer(request: Request) -> Response:
            fields = read_fields(request.scope["query_string"])
            value = await self._answer(resource, fields)
            return await self._page(resource, value, fields)

        return answer

    async def _page(
        self,
        resource: Resource,
        value: Mapping[str, Any],
        fields: Mapping[str, str],
    ) -> Response:
        """The page of an answer."""
        api_query = urlencode(fields)
        return await run_in_threadpool(
            self._render,
            f"{resource.name}.html",
            api=f"/api/{resource.name}" + (f"?{api_query}" if fields else ""),
            fields=fields,
            value=value,
        )

    async def _search(self, request: Request) -> Response:
        """The page of a search; a query such as r(h, X) leads to its answers."""
        fields = read_fields(request.scope["query_string"])
        text = fields.get("q", "")
        resource = next(r for r in RESOURCES if r.name == "search")
        value = await self._answer(resource, fields)
        if value["names"] or "(" not in text:
            return await self._page(resource, value, fields)
        asked = await asyncio.wrap_future(
            self.lookups.submit(lambda: self.explorer.read(text))
        )
        return _question_response(*asked)

    async def _ask(self, request: Request) -> Response:
        """Lead to the answers of a question, or to the reasons of an atom, that a form asks for."""
        fields = read_fields(request.scope["query_string"])

        def read() -> tuple[int, int | None, int | None]:
            relation = self._read_name(fields, "relation")
            if relation is None:
                raise RequestError(400, "expected a relation, got nothing")
            head = self._read_name(fields, "head")
            tail = self._read_name(fields, "tail")
            if head is None and tail is None:
                raise RequestError(
                    400,
                    "expected a head or a tail (one that is left open is asked for), got neither",
                )
            return relation, head, tail

        asked = await asyncio.wrap_future(self.lookups.submit(read))
        return _question_response(*asked)

    def _read_name(self, fields: Mapping[str, str], kind: str) -> int | None:
        """The id of a name that was typed or chosen; None for an empty field.

        A script adds the id of what was chosen, which counts as long as the text is the one that is shown for it.
        """
        text = fields.get(kind)
        if text is None:
            return None
        dataset = self.explorer.dataset
        is_relation = kind == "relation"
        names = dataset.predicates if is_relation else dataset.entities
        chosen = fields.get(f"{kind}_id", "")
        if chosen.isascii() and chosen.isdigit() and len(chosen) < 10:
            number = int(chosen)
            is_name = 1 <= number <= len(names)
            if is_name and display(names[number - 1]) == text:
                return number
        find = (
            self.explorer.relation_id
            if is_relation
            else self.explorer.entity_id
        )
        return find(text)

    # -- the API

    async def _api_page(self, request: Request) -> Response:
        """The description of the API as a page."""
        return self._render("api.html", document=self._openapi)

    async def _openapi_document(self, request: Request) -> Response:
        """The description of the API as JSON."""
        return _json_response(self._openapi)

    # -- responses

    def _render(
        self, template: str, status_code: int = 200, **context: object
    ) -> HTMLResponse:
        """A page."""
        text = self._templates.get_template(template).render(context)
        # A name may hold what is no character.
        content = text.encode("utf-8", "backslashreplace")
        return HTMLResponse(content, status_code)

    async def _on_request_error(
        self, request: Request, error: Exception
    ) -> Response:
        """One line for a request without an answer."""
        assert isinstance(error, RequestError)
        response = self.problem(error.status, str(error), is_api(request.scope))
        if error.status == 503:
            response.headers["Retry-After"] = "5"
        return response

    async def _on_http_error(
        self, request: Request, error: Exception
    ) -> Response:
        """One line for a path that does not exist."""
        assert isinstance(error, HTTPException)
        line = f"{error.detail.lower()}: {display(request.url.path)}"
        return self.problem(error.status_code, line, is_api(request.scope))

    async def _on_capture_error(
        self, request: Request, error: Exception
    ) -> Response:
        """One line where --cuda-graphs demands a CUDA graph that cannot be recorded."""
        line = f"--cuda-graphs manual: expected a CUDA graph, got none: {error}"
        return self.problem(500, line, is_api(request.scope))

    async def _on_error(self, request: Request, error: Exception) -> Response:
        """One line for a defect, of which the server prints the traceback."""
        line = "internal error: the terminal of the server has the details"
        return self.problem(500, line, is_api(request.scope))


def _question_response(
    relation: int, head: int | None, tail: int | None
) -> Response:
    """A redirect to the page of a question, or of an atom."""
    ids = {"relation_id": relation, "head_id": head, "tail_id": tail}
    given = {name: value for name, value in ids.items() if value is not None}
    path = "answers" if len(given) < len(ids) else "why"
    return RedirectResponse(f"/{path}?{urlencode(given)}", 303)


def _json_response(value: Mapping[str, Any], status: int = 200) -> Response:
    """A value as JSON in ASCII, so that nothing invisible is in it.

    Raises:
      RequestError: it is too long.
    """
    content = json.dumps(value, allow_nan=False).encode()
    if len(content) > MAX_ANSWER_BYTES:
        raise RequestError(
            503,
            f"expected an answer of at most {MAX_ANSWER_BYTES:,} bytes, got {len(content):,}: ask for less",
        )
    return Response(content, status, media_type="application/json")


async def _static_file(request: Request) -> Response:
    """A file of style, script or picture."""
    name = request.path_params["name"]
    if name not in STATIC_TYPES:
        raise HTTPException(404)
    return _file_response(name)


async def _icon(request: Request) -> Response:
    """The picture of the site."""
    return _file_response("icon.svg")


def _file_response(name: str) -> Response:
    """The response with a static file."""
    content = (_STATIC / name).read_bytes()
    return Response(
        content,
        media_type=STATIC_TYPES[name],
        headers={"Cache-Control": "no-cache"},
    )


def _make_templates(explorer: Explorer) -> jinja2.Environment:
    """The environment of the templates, which escape every value."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("funcppo.kg.show.serve"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["display"] = display
    environment.filters["score"] = score_text
    environment.filters["draw"] = proof_tree.draw

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
