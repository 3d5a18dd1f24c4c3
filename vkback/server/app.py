"""The endpoints: an ASGI application on a worker."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import vkback
from vkback.api import ChatTemplateError, Chunk, GenerateOptions, LoadedAdapter, LoadedModel, ModelError, Result
from vkback.api.best_of import likeliest
from vkback.api.errors import ContextLengthError
from vkback.api.model import MOVED_SYSTEM, ChatPrompt
from vkback.errors import did_you_mean
from vkback.gguf.vocabularies import TokenizerError
from vkback.models.texts import Pooling
from vkback.server import anthropic_messages, replies, request_log, schema
from vkback.server.choices import Choices, Mail, Told, joined
from vkback.server.embeddings import Embeddings
from vkback.server.errors import (
    BadRequest,
    BodyTimeout,
    BodyTooLarge,
    ContextTooLong,
    NoEndpoint,
    NotJson,
    ServerError,
    Unauthorized,
    Unavailable,
    UnknownModel,
    WrongHost,
    WrongMethod,
)
from vkback.server.forms import OtherForms
from vkback.server.llama_cpp import Native, require_fill
from vkback.server.metrics import Collector
from vkback.server.queued import Event, QueuedRequest
from vkback.server.texts import RequestT, Texts
from vkback.server.worker import NO_TEXT, Worker

log = logging.getLogger("vkback.server")

MAX_SAID = 1000
"""Names of fields that are kept, so that each is said once."""

GRACE_S = 5.0
"""Above the time of a request, until it is answered without the worker: its step is hanging, or reads a long prompt."""

KEEP_ALIVE_S = 5.0
"""A stream for which nothing has come so long, since it waits for its turn or its prompt is being read, gets its head and then comments."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Limits:
    """body_bytes: of a request; tokens: that one may ask for (None: the context); request_s: from a request to its last token, waiting
    included; body_s: until its body is there."""

    body_bytes: int = 4 << 20
    tokens: int | None = None
    request_s: float = 600.0
    body_s: float = 30.0


def build_app(
    worker: Worker,
    *,
    api_key: str | None = None,
    limits: Limits | None = None,
    template: str | None = None,
    hosts: Sequence[str] = ("*",),
    strict: bool = False,
    strict_model: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    cors: Sequence[str] = (),
    pooling: Pooling | None = None,
    defaults: GenerateOptions | None = None,
) -> Starlette:
    """The application. The worker is closed when it ends.

    template         of chats, in the place of the model's own
    template_kwargs  its variables, which requests may change
    pooling          of /v1/embeddings, in the place of what the model's file says
    strict           fields that there are not are refused
    strict_model     so are names of models but the server's
    hosts            names that the Host header may have, `*.example.com` for all below one, `*` for any: a page of another site whose name
                     was made to mean this machine has none of them
    cors             origins of pages that may use the server through a browser, as https://example.com; `*` for any
    defaults         of sampling, where a request says nothing
    """
    server = Server(
        worker,
        api_key,
        limits or Limits(),
        template,
        strict=strict,
        strict_model=strict_model,
        variables=template_kwargs,
        defaults=defaults,
    )
    forms = OtherForms(server)
    texts = Texts(worker, server.authorize, server.parsed, server.composed, template, defaults or {})
    vectors = Embeddings(worker, server.parsed, server.require_model, (limits or Limits()).request_s, pooling)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(worker.close)

    return Starlette(
        routes=[
            Route("/", server.page),
            Route("/health", server.health),
            Route("/v1/health", server.health),
            Route("/metrics", server.metrics),
            Route("/v1/models", server.models),
            Route("/v1/models/{name:path}", server.model),
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/chat/completions", server.chat, methods=["POST"]),  # of clients whose address ends before /v1, as llama-server has it
            Route("/completions", server.completions, methods=["POST"]),
            Route("/responses", forms.responses, methods=["POST"]),
            Route("/models", server.models),
            Route("/v1/responses", forms.responses, methods=["POST"]),
            Route("/v1/responses/{id}", forms.response, methods=["GET", "DELETE"]),
            Route("/v1/messages", forms.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", forms.count_tokens, methods=["POST"]),
            *(Route(f"{path}/input_tokens", texts.count, methods=["POST"]) for path in ("/v1/chat/completions", "/chat/completions")),
            Route("/completion", server.native.completion, methods=["POST"]),
            Route("/infill", server.native.infill, methods=["POST"]),
            Route("/slots", server.native.slots),
            Route("/props", texts.props),
            Route("/lora-adapters", server.adapters),
            Route("/lora-adapters", server.set_adapters, methods=["POST"]),
            *(Route(path, vectors.embeddings, methods=["POST"]) for path in ("/v1/embeddings", "/embeddings")),
            Route("/embedding", vectors.of_content, methods=["POST"]),
            *(Route(path, vectors.rerank, methods=["POST"]) for path in ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")),
            Route("/tokenize", texts.tokenize, methods=["POST"]),
            Route("/detokenize", texts.detokenize, methods=["POST"]),
            Route("/apply-template", texts.apply_template, methods=["POST"]),
        ],
        exception_handlers={ServerError: on_error, HTTPException: on_http_error, Exception: on_fault},
        middleware=[
            Middleware(request_log.RequestLog),
            *([Middleware(CORSMiddleware, allow_origins=list(cors), allow_methods=["*"], allow_headers=["*"])] if cors else []),
            Middleware(HostCheck, hosts=tuple(hosts)),
        ],
        lifespan=lifespan,
    )


class HostCheck:
    """Refuses requests whose Host header is another one, with an error of the API's form."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, [host.lower() for host in hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._knows(given := host_of(Headers(scope=scope).get("host", ""))):
            error = WrongHost(
                f"[server] the Host header says {given!r}, this server answers to {', '.join(self._hosts)} alone. Start it with "
                f"--allowed-hosts {given or 'NAME'}, or with --host 0.0.0.0 if all who reach this machine may use it"
            )
            response = await on_error(Request(scope), error)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, given: str) -> bool:
        return any(host in ("*", given) or (host.startswith("*.") and given.endswith(host[1:])) for host in self._hosts)


def host_of(header: str) -> str:
    """The name in a Host header, without the port. An IPv6 address keeps its brackets."""
    name, _, port = header.rpartition(":")
    return (name if name and port.isdigit() and (":" not in name or name.endswith("]")) else header).lower()


async def on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServerError)
    request_log.of(request).error = error
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    form = anthropic_messages if request.url.path.startswith("/v1/messages") else replies
    return JSONResponse(form.error_body(error), error.status, headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    """No such path, or another method."""
    assert isinstance(error, HTTPException)
    path, takes = request.url.path, (error.headers or {}).get("Allow", "")
    if error.status_code == 405:
        said: BadRequest = WrongMethod(f"[server] {request.method} {path}: this endpoint takes {takes}")
    elif error.status_code == 404:
        own = [route.path for route in request.app.routes if "{" not in route.path]
        openai = ", ".join(sorted(each for each in own if each.startswith("/v1/")))
        near = did_you_mean(path, own)
        if path.startswith("/api/"):
            near = " Ollama's API is not served: let a client of OpenAI's API use this address, with /v1 behind it."
        said = NoEndpoint(f"[server] {request.method} {path}: there is no such endpoint.{near} There are {openai}, and llama-server's own")
    else:
        said = BadRequest(f"[server] {request.method} {path}: {error.detail}")
    form = anthropic_messages if path.startswith("/v1/messages") else replies
    return JSONResponse(form.error_body(said), error.status_code, error.headers)


async def on_fault(request: Request, error: Exception) -> Response:
    """A fault of the server: its log has the traceback, the client has not."""
    return JSONResponse(replies.error_body(ServerError("[server] the request failed inside the server; its log says more")), 500)


class Server:
    """What the endpoints share."""

    def __init__(
        self,
        worker: Worker,
        api_key: str | None,
        limits: Limits,
        template: str | None,
        *,
        strict: bool = False,
        strict_model: bool = False,
        variables: Mapping[str, Any] | None = None,
        defaults: GenerateOptions | None = None,
    ) -> None:
        self.worker, self._key, self._limits, self._template = worker, api_key, limits, template
        self._strict, self._strict_model = strict, strict_model
        self._variables = variables or {}
        self._defaults: dict[str, Any] = dict(defaults or {})
        self._said: set[str] = set()
        self._facts = facts_of(worker.model)
        self._created = int(time.time())
        self._fingerprint = fingerprint_of(worker.model)
        self._page = resources.files("vkback.server").joinpath("page.html").read_text(encoding="utf-8")
        self._registry = CollectorRegistry()
        self._registry.register(Collector(worker))
        self._mail: Mail | None = None
        self.native = Native(self)

    async def page(self, request: Request) -> Response:
        """The chat page: one file, which asks nobody but this server."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'"
        return HTMLResponse(self._page, headers={"Content-Security-Policy": policy})

    async def health(self, request: Request) -> Response:
        """200 while the device answers, idle or busy; 503 while it is lost or the server ends."""
        worker = self.worker
        body = {
            "status": worker.state,
            "model": worker.model_name,
            "device": worker.device_name,
            "queued": worker.queued,
            "step_s": round(worker.step_s, 3),
            "lost": worker.counts.lost,
        }
        return JSONResponse(body, 200 if worker.state in ("idle", "busy") else 503)

    async def metrics(self, request: Request) -> Response:
        self.authorize(request)
        return Response(generate_latest(self._registry), headers={"Content-Type": METRICS_TYPE})

    async def models(self, request: Request) -> Response:
        self.authorize(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self.authorize(request)
        if (name := request.path_params["name"]) not in self.worker.model_names:
            raise self._unknown_model(name)
        return JSONResponse(self._model())

    async def adapters(self, request: Request) -> Response:
        """Adapters beside the weights, and what requests multiply them by that do not say."""
        self.authorize(request)
        files = {i: adapter.file.metadata for i, adapter in enumerate(self.worker.facts.engine.model.adapters)}

        def said(adapter: LoadedAdapter, key: str) -> str:
            return str(files[adapter.id].get(f"adapter.lora.{key}", ""))

        told = [
            {"id": each.id, "path": str(each.path), "scale": each.scale} | {key: said(each, key) for key in ("task_name", "prompt_prefix")}
            for each in self.worker.facts.adapters
        ]
        return JSONResponse(told)

    async def set_adapters(self, request: Request) -> Response:
        """Change those numbers, for requests that come from here on. Adapters that are left out are off."""
        asked = await self.parsed(request, schema.AdapterRequest)
        self.worker.set_adapters({each.id: each.scale for each in asked.root})
        return JSONResponse({"success": True})

    async def completions(self, request: Request) -> Response:
        asked = await self.parsed(request, schema.CompletionRequest)
        options = asked.options(self.worker.n_vocab, self.token_limit)
        prompts, tokenizer = asked.prompts(), self.worker.tokenizer
        shape = self._shape("cmpl-", options, chat=False)
        if asked.echo:
            shape = replace(
                shape, texts=asked.n or 1, echo=[p if isinstance(p, str) else tokenizer.decode(p, special=True) for p in prompts]
            )
        if asked.suffix:
            fill = require_fill(self.native.fill, "suffix")
            prompts = [fill.ids(tokenizer, prompt, asked.suffix) for prompt in prompts if isinstance(prompt, str)]
        return await self.answer(request, asked, prompts, options, shape, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self.answer_chat(request, await self.parsed(request, schema.ChatRequest))

    async def answer_chat(
        self, request: Request, asked: schema.ChatRequest, shape: Callable[[ChatPrompt], replies.ReplyShape] | None = None
    ) -> Response:
        """shape: of the reply; that of OpenAI's chats where there is none."""
        options = asked.options(self.worker.n_vocab, self.token_limit)
        self.require_model(asked.model)
        prompt = await self.composed(asked)
        if shape is not None:
            return await self.answer(request, asked, [prompt], options, shape(prompt), chat=True)
        own = self._shape("chatcmpl-", options, chat=True)
        legacy = bool(asked.functions) and not asked.tools
        own = replace(own, reader=partial(prompt.reader, thoughts=asked.reads_thoughts), legacy=legacy)
        return await self.answer(request, asked, [prompt], options, own, chat=True)

    # -- parts

    async def parsed(self, request: Request, kind: type[RequestT]) -> RequestT:
        """The body of a request, authorized and checked."""
        return schema.parse(kind, await self._body(request), None if self._strict else self._leave_out)

    def _leave_out(self, field: str) -> None:
        """Say once that a field is not known."""
        if field not in self._said and len(self._said) < MAX_SAID:
            self._said.add(field)
            log.info("%r is no field of this server; it is left out, now and later (--strict refuses it)", field)

    async def composed(self, asked: schema.ChatRequest) -> ChatPrompt:
        """The prompt of a chat. Raises BadRequest for what the template refuses."""
        self._require_text()
        messages = [m.plain() for m in asked.messages]
        variables = {**self._variables, **asked.variables()}
        try:
            prompt = await asyncio.to_thread(self.worker.facts.chat_prompt, messages, self._template, variables, asked.use())
        except ContextLengthError as e:
            raise ContextTooLong(e.tokens, e.n_ctx, chat=True) from e
        except (ModelError, ChatTemplateError, TokenizerError) as e:
            raise BadRequest(str(e)) from e
        if prompt.moved_system and MOVED_SYSTEM not in self._said:
            self._said.add(MOVED_SYSTEM)
            log.info("%s", MOVED_SYSTEM)
        return prompt

    @property
    def token_limit(self) -> int:
        """Of a reply."""
        return self._limits.tokens or self.worker.n_ctx

    def _model(self) -> dict[str, Any]:
        worker = self.worker
        return {
            "id": worker.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "vkback",
            "meta": {"description": worker.description, "n_ctx": worker.n_ctx, "n_vocab": worker.n_vocab, **self._facts},
        }

    def _require_text(self) -> None:
        if not self.worker.makes_text:
            raise BadRequest(NO_TEXT)

    def require_model(self, name: str | None) -> None:
        if self._strict_model and name is not None and name not in self.worker.model_names:
            raise self._unknown_model(name)

    def _unknown_model(self, name: str) -> UnknownModel:
        return UnknownModel(f"[server] no model is called {name!r} here; there is {self.worker.model_name!r}", "model")

    def authorize(self, request: Request) -> None:
        """In a time that does not depend on how much of the key is right."""
        if self._key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._key.encode()):
            raise Unauthorized("[server] the API key is missing or wrong; send the header Authorization: Bearer KEY, or X-Api-Key: KEY")

    async def _body(self, request: Request) -> bytes:
        """Authorized, JSON, within the limits. A page of another site cannot send this content type without asking first."""
        self.authorize(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise NotJson("[server] the body must be JSON: send the header Content-Type: application/json")
        limit = self._limits.body_bytes
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise BodyTooLarge(f"[server] the body is above {limit} bytes, the limit of this server")
        except TimeoutError as e:
            raise BodyTimeout(f"[server] the body did not come within {self._limits.body_s:g} s") from e
        except ClientDisconnect as e:
            raise BadRequest("[server] the client left before its request was there") from e
        return bytes(body)

    def _shape(self, kind: str, options: GenerateOptions, *, chat: bool) -> replies.Shape:
        spell = self.worker.tokenizer.token_bytes
        return replies.Shape(
            kind + uuid.uuid4().hex,
            self.worker.model_name,
            chat,
            lambda token: spell(token, special=True),
            options["logprobs"] is not None,
            ids=not self.worker.has_text,
            fingerprint=self._fingerprint,
        )

    async def answer(
        self, request: Request, asked: Any, prompts: Sequence[Any], options: Any, shape: replies.ReplyShape, *, chat: bool
    ) -> Response:
        """n choices for each prompt."""
        self.require_model(asked.model)
        self._require_text()
        if asked.stream_options is not None and not asked.stream:
            raise BadRequest("[server] stream_options needs stream: true", "stream_options")
        deadline = time.monotonic() + self._limits.request_s
        logged = request_log.of(request)
        texts, n = asked.texts, asked.n or 1
        options = self._defaults | options
        if texts > n and options["logprobs"] is None:
            options["logprobs"] = 0  # of the tokens that are chosen, to tell the best
        client = request.client.host if request.client else ""

        def queued(index: int, put: Callable[[Event], None]) -> QueuedRequest:
            own = options | {"seed": options["seed"] + index % texts}
            return QueuedRequest(prompts[index // texts], chat, own, client, deadline, put, pieces=bool(asked.stream))

        choices = Choices(self.worker, self._mail_of(asyncio.get_running_loop()), queued, len(prompts) * texts)
        logged.texts = texts
        if asked.stream:
            with _cancelled_on_error(choices):
                first = await self._next(request, choices, KEEP_ALIVE_S)
            usage = asked.stream_options is not None and asked.stream_options.include_usage
            return StreamingResponse(self._stream(choices, first, texts, shape, usage, logged), media_type="text/event-stream")
        with _cancelled_on_error(choices):
            while choices.left:
                told = await self._next(request, choices)
                if told is not None and isinstance(told[1], Result):
                    choices.ended(told[0], told[1])
        logged.results += (results := choices.whole())
        best = [r for at in range(0, len(results), texts) for r in likeliest(results[at : at + texts], n)]
        return JSONResponse(shape.whole(best, replies.usage(results, texts)))

    def _mail_of(self, loop: asyncio.AbstractEventLoop) -> Mail:
        if self._mail is None or self._mail.loop is not loop:
            self._mail = Mail(loop)
        return self._mail

    async def _next(self, request: Request, choices: Choices, seconds: float | None = None) -> Told | None:
        """The next event; None where it does not come within so many seconds. Raises the error that it is, BadRequest when the client
        leaves first, Unavailable when nothing comes in the time of the request."""
        event = asyncio.ensure_future(choices.events.get())
        left = asyncio.ensure_future(request.receive())
        late = _time_left(choices.deadline)
        try:
            done, _ = await asyncio.wait(
                {event, left}, timeout=late if seconds is None else min(late, seconds), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                if seconds is not None and seconds < late:
                    return None
                raise _too_late()
            if not event.done():
                raise BadRequest("[server] the client has left")
            found = event.result()
        finally:
            event.cancel()
            left.cancel()
            await asyncio.wait({event, left})  # until both have ended: nobody else may read from the connection meanwhile
        if isinstance(found[1], ServerError):
            raise found[1]
        return found

    async def _stream(
        self, choices: Choices, first: Told | None, texts: int, shape: replies.ReplyShape, usage: bool, logged: request_log.LoggedRequest
    ) -> AsyncIterator[str]:
        """Events of a reply, those of its choices as they come. An error comes as the last one, since the status is sent. While nothing
        comes, comments do."""
        shapes = [shape.choice(index) for index in range(choices.left)]
        told = first
        try:
            if started := "".join(each.first() for each in shapes):
                yield started
            while choices.left:
                if told is None:
                    yield replies.WAITING
                else:
                    lines: list[str] = []
                    for index, event in joined([told, *choices.waiting()]):
                        if isinstance(event, ServerError):
                            if lines:
                                yield "".join(lines)
                            raise event
                        if isinstance(event, Result):
                            lines.append(shapes[index].last(event))
                            logged.results.append(event)
                            choices.ended(index, event)
                        elif isinstance(event, Chunk):
                            lines.append(shapes[index].piece(event))
                    yield "".join(lines)
                if choices.left:
                    told = await _event_of(choices)
            used = replies.usage(choices.whole(), texts)
            if usage:
                yield shape.usage(used)
            if ending := shapes[-1].done(used):
                yield ending
        except ServerError as e:
            logged.error = e
            yield shapes[-1].error(e)
        finally:
            choices.cancel()


def facts_of(model: LoadedModel) -> dict[str, Any]:
    """Of a model's file, by llama-server's names."""
    f, hp = model.engine.model.file, model.engine.model.hp
    return {
        "n_ctx_train": f.metadata.get(f"{hp.arch}.context_length", 0),
        "n_embd": hp.n_embd,
        "n_params": sum(math.prod(t.shape) for t in f.tensors.values()),
        "size": sum(t.nbytes for t in f.tensors.values()),
    }


def fingerprint_of(model: LoadedModel) -> str:
    """Of all that a text depends on beside its request: model, device, driver, settings, version."""
    told = json.dumps([vkback.__version__, dict(model.settings)], sort_keys=True, default=str)
    return f"fp_{hashlib.sha256(told.encode()).hexdigest()[:12]}"


@contextmanager
def _cancelled_on_error(choices: Choices) -> Iterator[None]:
    try:
        yield
    except BaseException:
        choices.cancel()
        raise


async def _event_of(choices: Choices) -> Told | None:
    """The next one; None where nothing has come for KEEP_ALIVE_S. Raises Unavailable when nothing comes in the time of the request."""
    late = _time_left(choices.deadline)
    try:
        return await asyncio.wait_for(choices.events.get(), max(0.0, min(late, KEEP_ALIVE_S)))
    except TimeoutError:
        if late < KEEP_ALIVE_S:
            raise _too_late() from None
        return None


def _time_left(deadline: float) -> float:
    return max(0.0, deadline + GRACE_S - time.monotonic())


def _too_late() -> Unavailable:
    return Unavailable("[server] the time of the request is over and the device has not answered; /health says what it does")
