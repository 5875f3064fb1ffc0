"""The application: its paths, and the middleware around them."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from overspill.server.access import Access
from overspill.server.chat import plan_chat
from overspill.server.completions import plan_completion, prompts_of
from overspill.server.errors import ApiError, failed
from overspill.server.failures import Failures
from overspill.server.limits import Limits
from overspill.server.metrics import CONTENT_TYPE
from overspill.server.page import page_response, part_names, part_response
from overspill.server.protocol import ChatRequest, CompletionRequest, parse
from overspill.server.request import ApiRequest
from overspill.server.requests_log import RequestLog
from overspill.server.service import Service


def create_app(service: Service) -> ASGIApp:
    """Return the server without its sockets. Middleware is plain ASGI: it does not copy streams."""
    config = service.config
    routes = _routes(service)
    app: ASGIApp = Failures(routes, config)
    app = Limits(app, config.limits, service.post)
    origins = config.allowed_origins
    app = Access(app, service.keys, config.address.host, origins)
    if origins:  # outside of the check of keys: a browser asks without one
        app = CORSMiddleware(
            app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"],
            expose_headers=["x-request-id"],
            allow_private_network=True,  # a browser asks for it before a page uses 127.0.0.1
        )  # fmt: skip
    logged = config.limits.body_bytes if config.access.log_requests else None
    paths = frozenset(getattr(route, "path", "") for route in routes.routes)
    return RequestLog(app, service.metrics.count_request, paths, logged)


def _routes(service: Service) -> FastAPI:
    app = FastAPI(title="Overspill", docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_errors(app, service)
    _add_answers(app, service)
    _add_models(app, service)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        status = "failed" if service.failed else "draining" if service.draining else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/stats")
    async def stats() -> Response:
        return JSONResponse(service.stats())

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return page_response()

    for name in part_names():  # each has its path: nothing of a request names a file
        app.get(f"/page/{name}", include_in_schema=False)(_part(name))
    return app


def _part(name: str) -> Callable[[], Awaitable[Response]]:
    async def part() -> Response:
        return part_response(name)

    return part


def _add_answers(app: FastAPI, service: Service) -> None:
    llm, name = service.llm, service.name

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest))
    async def chat(request: Request) -> Response:
        body = parse(ChatRequest, await request.body())
        service.check_model(body.model)
        answered = ApiRequest(service, body.n or 1)
        return await answered.run(request, partial(plan_chat, llm, body, name), bool(body.stream))

    @app.post("/v1/completions", openapi_extra=_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = parse(CompletionRequest, await request.body())
        service.check_model(body.model)
        answered = ApiRequest(service, len(prompts_of(body)) * (body.n or 1))
        plan = partial(plan_completion, llm, body, name, service.config.decoder.given)
        return await answered.run(request, plan, bool(body.stream))


def _body(kind: type[Any]) -> dict[str, Any]:
    """Return the description of a body for the API's schema: bodies are parsed here, not by
    FastAPI."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def _add_models(app: FastAPI, service: Service) -> None:
    card = {
        "id": service.name, "object": "model", "created": service.created,
        "owned_by": "overspill", "max_model_len": service.llm.context,
    }  # fmt: skip
    if service.adapter is not None:  # "parent" as in vLLM
        card |= {"adapter": service.adapter, "parent": service.base}

    if service.llm.has_encoder:  # no chats
        card |= {"encoder_decoder": True, "languages": service.llm.languages}

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        service.check_model(model)
        return JSONResponse(card)


def _add_errors(app: FastAPI, service: Service) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def http(request: Request, error: Exception) -> Response:
        """Answer a request for an unknown path or with a wrong method."""
        assert isinstance(error, HTTPException)
        path, method = request.scope["path"][:200], request.method[:20]
        messages = {
            404: f"there is no path {path!r}; the API has /v1/chat/completions, /v1/completions "
            "and /v1/models",
            405: f"{path!r} takes {(error.headers or {}).get('Allow')}, not {method}",
        }
        told = messages.get(error.status_code, error.detail)
        shown = ApiError(error.status_code, told, code="unknown_url", headers=error.headers)
        return shown.response()

    async def unexpected(request: Request, error: Exception) -> Response:
        return failed().response()  # and `Failures` logs it

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)
