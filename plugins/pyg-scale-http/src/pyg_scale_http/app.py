"""The ASGI application: predictions, health, metrics, and a page to try it."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from torch import Tensor

from pyg_scale.errors import OverloadError, PredictionTimeoutError
from pyg_scale.serving import Predictor
from pyg_scale_http import messages
from pyg_scale_http.messages import BadRequest

_log = logging.getLogger("pyg_scale_http")
MAX_BODY = 1 << 20
BODY_SECONDS = 10.0


class Service:
    """The endpoints of a predictor.

    Args:
        predictor: Is closed when the application ends.
        token: What requests must bring as ``Authorization: Bearer TOKEN``; ``None``: nothing.
        max_body: Bytes of a request at most.
        body_seconds: Seconds within which the body of a request must have come.
    """

    def __init__(
        self,
        predictor: Predictor,
        token: str | None = None,
        max_body: int = MAX_BODY,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self.predictor = predictor
        self._token = None if token is None else token.encode()
        self._max_body, self._body_seconds = max_body, body_seconds
        self._answers: dict[int, int] = {}  # how many of each status
        self.draining = False

    def app(self) -> Starlette:
        """The ASGI application."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            self.draining = True
            await asyncio.to_thread(self.predictor.close)

        routes = [
            Route("/", self.page, methods=["GET"]),
            Route("/predict", self.predict, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    # Endpoints #############################################################################

    async def page(self, request: Request) -> Response:
        """A page from which predictions can be tried."""
        text = files("pyg_scale_http").joinpath("page.html").read_text(encoding="utf-8")
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        return HTMLResponse(
            text, headers={"Content-Security-Policy": policy + "connect-src 'self'"}
        )

    async def health(self, request: Request) -> Response:
        """200 while requests are taken, 503 once the server is ending."""
        status = 503 if self.draining else 200
        return _json({"status": "ending" if self.draining else "ok"}, status)

    async def metrics(self, request: Request) -> Response:
        """Counts and latencies in the text format of Prometheus."""
        if not self._is_allowed(request):
            return self._refused()
        return PlainTextResponse(_prometheus(self.predictor.stats(), self._answers))

    async def predict(self, request: Request) -> Response:
        """Predictions for the nodes of a request."""
        try:
            answer = await self._predict(request)
        except Exception:
            _log.exception("a request failed")
            answer = _error("the server failed; its log says why", 500)
        self._answers[answer.status_code] = self._answers.get(answer.status_code, 0) + 1
        return answer

    async def _predict(self, request: Request) -> Response:
        if not self._is_allowed(request):
            return self._refused()
        try:
            body = await self._body(request)
            asked = messages.read(body, request.headers.get("content-type", ""), self.predictor)
            future = self.predictor.submit(asked.ids, asked.time, asked.new_rows)
        except BadRequest as error:
            return _error(str(error), error.status)
        except IndexError as error:
            return _error(str(error), 404)
        except (ValueError, TypeError, NotImplementedError) as error:
            return _error(str(error), 400)
        except OverloadError as error:
            return _error(str(error), 429, {"Retry-After": "1"})
        except ClientDisconnect:
            return Response(status_code=499)
        except RuntimeError as error:  # the predictor was closed
            return _error(str(error), 503)
        try:
            rows = await self._rows(request, future)
        except PredictionTimeoutError as error:
            return _error(str(error), 504)
        except Exception:
            _log.exception("a request failed")
            return _error("the model could not answer; the server's log says why", 500)
        if rows is None:
            return Response(status_code=499)
        try:
            content, kind = messages.write(rows, request.headers.get("accept", ""))
        except BadRequest as error:
            return _error(str(error), 406)
        return Response(content, media_type=kind)

    async def _rows(self, request: Request, future: Future[Tensor]) -> Tensor | None:
        """The predictions; ``None`` if the client leaves first, whose request is then given up."""
        answer = asyncio.ensure_future(asyncio.wrap_future(future))
        left = asyncio.ensure_future(_left(request))
        try:
            limit = self.predictor.timeout
            done, _ = await asyncio.wait(
                {answer, left}, timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
            if answer in done:
                return answer.result()
            if left in done:
                return None
            raise PredictionTimeoutError(f"no prediction within {limit:g} seconds")
        finally:
            left.cancel()
            if not answer.done():
                answer.cancel()  # and with it the future, if it still waits

    async def _body(self, request: Request) -> bytes:
        length = request.headers.get("content-length", "0")
        too_large = BadRequest(f"the body exceeds {self._max_body} bytes", 413)
        if length.isdecimal() and int(length) > self._max_body:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_seconds):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self._max_body:
                        raise too_large
        except TimeoutError:
            text = f"the body did not come within {self._body_seconds:g} seconds"
            raise BadRequest(text, 408) from None
        return bytes(body)

    def _is_allowed(self, request: Request) -> bool:
        if self._token is None:
            return True
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(given.encode(), self._token)

    def _refused(self) -> Response:
        return _error(
            "a token is needed: Authorization: Bearer TOKEN", 401, {"WWW-Authenticate": "Bearer"}
        )


async def _left(request: Request) -> None:
    """Wait until the client closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(content: Any, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, messages.JSON)


def _error(text: str, status: int, headers: dict[str, str] | None = None) -> Response:
    return _json({"error": text}, status, headers)


_HELP = {
    "requests": "Requests that got a prediction.",
    "nodes": "Nodes of these requests.",
    "batches": "Batches that were computed.",
    "failed": "Requests for which the model raised.",
    "refused": "Requests refused because too many waited.",
    "expired": "Requests that waited beyond their limit.",
    "cancelled": "Requests whose callers left.",
}


def _prometheus(stats: dict[str, Any], answers: dict[int, int]) -> str:
    """Counts as text, one metric after the other."""
    lines = []
    for name, text in _HELP.items():
        lines += [f"# HELP pyg_scale_{name}_total {text}", f"# TYPE pyg_scale_{name}_total counter"]
        lines.append(f"pyg_scale_{name}_total {stats[name]}")
    lines += ["# HELP pyg_scale_waiting Nodes that wait now.", "# TYPE pyg_scale_waiting gauge"]
    lines.append(f"pyg_scale_waiting {stats['waiting']}")
    if stats["snapshot"] is not None:
        lines += ["# HELP pyg_scale_snapshot Of the graph.", "# TYPE pyg_scale_snapshot gauge"]
        lines.append(f"pyg_scale_snapshot {stats['snapshot']}")
    name = "pyg_scale_latency_seconds"
    lines.append(f"# HELP {name} From request to prediction, of the last 10,000.")
    lines.append(f"# TYPE {name} summary")
    for key, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        if stats["latency"][key] is not None:
            lines.append(f'{name}{{quantile="{quantile}"}} {stats["latency"][key]}')
    lines += ["# HELP pyg_scale_http_answers_total Answers to /predict, by status."]
    lines += ["# TYPE pyg_scale_http_answers_total counter"]
    for status, count in sorted(answers.items()):
        lines.append(f'pyg_scale_http_answers_total{{status="{status}"}} {count}')
    return "\n".join(lines) + "\n"
