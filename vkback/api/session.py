"""A conversation, or any text that grows: its tokens, and what the device keeps of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from vkback.api import given
from vkback.api.adapters import Chosen
from vkback.api.errors import too_long
from vkback.api.given import Prompt
from vkback.api.message import MessageReader
from vkback.api.messages import Message
from vkback.api.options import GenerateOptions, Options, with_keywords
from vkback.api.result import Result
from vkback.api.shared import SharedText, TextRequest
from vkback.api.stream import EngineText, Stream
from vkback.api.tools.functions import run
from vkback.api.tools.use import ToolLike, tool_use
from vkback.engine.constraint import Constraint
from vkback.engine.engine import Engine
from vkback.engine.snapshot import Snapshot, StateError, differences, read_state, write_state

if TYPE_CHECKING:
    from vkback.api.model import LoadedModel


class Session:
    """A text of one model, for one thread at a time. Several sessions of a model may be used by several threads: they take turns, where the
    one in use has its state on the device and the others on the host, or, where the model was loaded for several sequences, share the
    steps of a batch.

    Made by `LoadedModel.session`. `tokens` is all of the text. The last token may not have gone through the model yet.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokens: Sequence[int] = (),
        snapshot: Snapshot | None = None,
        *,
        lasting: bool = True,
        shared: bool | None = None,
        lora: Chosen | None = None,
        adapters: tuple[float, ...] | None = None,
    ) -> None:
        """Use `LoadedModel.session`. lasting: its state is worth keeping while others have the device. shared: its texts are made in the
        model's batch; None: as the model was loaded. lora: adapters of its calls that choose none. adapters: that a snapshot was read with.
        """
        self.model = model
        self._lasting = lasting
        self._shared = model.shared if shared is None else shared
        self._tokens = list(tokens)
        self._snapshot = snapshot
        self._stream: weakref.ref[Stream] | None = None
        self._went_on = False  # in a batch: the engine's state may be of another text
        self._lora = lora
        self.adapters = () if adapters is None else adapters
        """What its state was read with, each adapter's scale."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    @property
    def text(self) -> str:
        return self.model.tokenizer.decode(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @with_keywords
    def generate(self, prompt: Prompt = "", **options: Unpack[GenerateOptions]) -> Result:
        """Append a prompt to the text and go on from there. Without one, go on where the text stands: an empty one begins with the
        beginning-of-text token."""
        return self.stream(prompt, **options).finished()

    @with_keywords
    def stream(self, prompt: Prompt = "", **options: Unpack[GenerateOptions]) -> Stream:
        """As `generate`, piece by piece."""
        checked = self._checked(options)
        self.model.require_room(prompt)
        nothing = isinstance(prompt, Sized) and not len(prompt)
        what = "session.stream"
        if self._shared:
            self.model.require_open(what)
            self.end_stream(what)
            new = [] if nothing and self._tokens else self.model.ids(prompt, start=not self._tokens)
            return self._shared_stream([*self._tokens, *new], checked, self.model.constraint(checked.form))
        constraint = self.model.constraint(checked.form)
        with self.model.using(what, self) as engine:
            self._settle(engine)
            self._adapt(engine, checked)
            new = [] if nothing and self._tokens else self.model.ids(prompt, start=not self._tokens)
            self._check_room(len(self._tokens) + len(new))
            reused = engine.n_past
            self._tokens += new
            return self._engine_stream(engine, reused, checked, constraint)

    @with_keywords
    def chat(
        self,
        messages: str | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Iterable[ToolLike] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        max_rounds: int = 0,
        **options: Unpack[GenerateOptions],
    ) -> Result:
        """The next message of the assistant; `stream_chat` has the other parameters.

        max_rounds  how often calls of Python functions among the tools are run, and the model goes on with their results, until it calls
                    none; `tool_choice` is that of the first reply. 0: calls are given back, in `tool_calls`. `messages` of the result has
                    all that the conversation gains. That arguments do not fit is a result, too; what a function raises is raised
        """
        rounds = given.whole("max_rounds", max_rounds, "a whole number, 0 or more", 0)
        given_tools = None if tools is None else list(tools)
        functions = {each.__name__: each for each in given_tools or () if callable(each)}
        added: list[Message] = []
        choice: str | Mapping[str, Any] = tool_choice
        while True:
            conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
            result = self.stream_chat(
                [*conversation, *added],
                template=template,
                template_kwargs=template_kwargs,
                tools=given_tools,
                tool_choice=choice,
                **options,
            ).finished()
            added.append(message_of(result))
            if not result.tool_calls or not rounds:
                return replace(result, messages=tuple(added))
            for call in result.tool_calls:
                added.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": run(functions, call)})
            rounds -= 1
            choice = "auto" if choice != "none" else choice

    @with_keywords
    def stream_chat(
        self,
        messages: str | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Iterable[ToolLike] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """The whole conversation as `messages`, or one message of the user. Of the text that the session has, what the conversation begins
        with is kept and not read again (`Timings.reused_tokens`). If the last message is the assistant's, the reply goes on with it. What a
        model thinks before it answers is in `reasoning` of pieces and result, not in `text`; not so with a schema or grammar.

        template         a jinja2 template, or "plain" or "chatml", in the place of the file's own. The built-in models have none: without
                         one they take `plain`, and stop at "User:"
        template_kwargs  variables that the template knows, as {"enable_thinking": False} or {"documents": [...]}
        tools            what the reply may call: Python functions, whose schema is made of type hints and docstring; classes of pydantic;
                         dicts as OpenAI's clients write them, in which `strict` holds arguments to their schema. Calls are in `tool_calls`
        tool_choice      "auto", "none", "required", or the name of the tool that must be called; the latter two need `vkback[json]`
        Raises ChatTemplateError for a model without a template, and for what the template refuses.
        """
        checked = self._checked(options)
        prompt, checked = self.model.chat_asked(messages, template, template_kwargs, tool_use(tools, tool_choice), checked)
        constraint = self.model.constraint_of(prompt, checked)
        return self.stream_of("session.chat", prompt.ids, checked, constraint, prompt.reader_for(checked))

    @with_keywords
    def stream_from(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Go on from a prompt in the place of the session's text; what both begin with is kept and not read again."""
        checked = self._checked(options)
        self.model.require_room(prompt)
        constraint = self.model.constraint(checked.form)
        return self.stream_of("session.stream_from", self.model.ids(prompt, start=True), checked, constraint)

    def stream_of(
        self, what: str, ids: list[int], checked: Options, constraint: Constraint | None = None, reader: MessageReader | None = None
    ) -> Stream:
        """As `stream_from`, of ids and options that are checked. what: the call, for errors. constraint: what the text is held to. reader:
        of a reply that has thoughts beside the answer."""
        if self._shared:
            self.model.require_open(what)
            self.end_stream(what)
            return self._shared_stream(ids, checked, constraint, reader)
        with self.model.using(what, self) as engine:
            self._settle(engine)
            self._adapt(engine, checked)
            self._check_room(len(ids))
            common = next((i for i, (a, b) in enumerate(zip(self._tokens, ids, strict=False)) if a != b), min(len(self._tokens), len(ids)))
            reused = min(common, engine.n_past, len(ids) - 1)  # one token must go through the model, to give the first logits
            if not engine.rewind(reused):
                reused = 0
                engine.rewind(0)
            self._tokens = ids
            return self._engine_stream(engine, reused, checked, constraint, reader)

    def reset(self) -> None:
        """Forget the text."""
        if self._shared:
            self.model.require_open("session.reset")
            self.end_stream("session.reset")
        else:
            with self.model.using("session.reset", self) as engine:
                engine.reset()
        self._tokens = []

    def rewind(self, n: int) -> None:
        """Keep the first n tokens of the text; below 0: all but the last -n. What of them has gone through the model is not read again but
        where states are recurrent, which hold all tokens or none. Raises ModelError for more than there
        are."""
        length = len(self._tokens)
        expected = f"a whole number, from {-length} to {length}: how many of the session's tokens stay"
        n = given.whole("n", n, expected, -length)
        if n > length:
            raise given.wrong("n", n, expected)
        n = n + length if n < 0 else n
        if self._shared:
            self.model.require_open("session.rewind")
            self.end_stream("session.rewind")
        else:
            with self.model.using("session.rewind", self) as engine:
                self._settle(engine)
                kept = max(n - 1, 0)  # the last token goes through the model once more, to give the logits of the next
                if engine.n_past > kept and not engine.rewind(kept):
                    engine.rewind(0)
        self._went_on = self._went_on or self._shared
        del self._tokens[n:]

    def fork(self) -> Session:
        """A second session with the same text; what one appends the other never sees."""
        if self._shared:
            self.model.require_open("session.fork")
            self.end_stream("session.fork")
            return Session(self.model, self._tokens, lasting=True, shared=True, lora=self._lora)
        with self.model.using("session.fork", self) as engine:
            self._settle(engine)
            return Session(self.model, self._tokens, engine.snapshot(), shared=False, lora=self._lora, adapters=self.adapters)

    def save(self, path: str | Path, *, notes: Mapping[str, Any] | None = None) -> None:
        """Write text and state to a file, in the place of an older one only once all is written (vkback/engine/snapshot.py has the form).
        notes: what JSON can hold, which `load` gives back."""
        file = given.path("path", path, "session")
        with self.model.using("session.save", self) as engine:
            self._settle(engine)
            if self._shared:
                self._adapt(engine, Options(lora=self._lora))
                engine.prompt(self._tokens[engine.n_past : -1])
            snapshot = engine.snapshot()
            waiting = self._tokens[len(snapshot.tokens) :]
            write_state(file, snapshot, self.model.settings_of(self.adapters), {"waiting": waiting, "notes": dict(notes or {})})

    def load(self, path: str | Path, *, exact: bool = True) -> dict[str, Any]:
        """Take text and state from a file, in the place of this session's; gives the notes that were saved with it.

        exact  only where model, device, driver and settings are those that made the file: what follows then has the bits that it would
               have had there. False: the model alone must be the same
        Raises StateError saying what is wrong or differs; the session is then as it was.
        """
        file = given.path("path", path, "session")
        snapshot, settings, extra = read_state(file)
        adapters = self.model.adapter_scales(Options(lora=self._lora))
        own = self.model.settings_of(adapters)
        wrong = differences(settings, own)
        if settings.get("model") != own["model"]:
            same = settings.get("name") == own["name"]
            with_adapters = [f"{of.get('name')}" + (f" with {of['lora']}" if of.get("lora") else "") for of in (settings, own)]
            differ = "; the weights or adapters differ" if same else ""
            raise StateError(f"[state] {file}: is of another model, {with_adapters[0]}; this one is {with_adapters[1]}{differ}")
        if wrong and exact:
            raise StateError(
                f"[state] {file}: was made otherwise, so the text after it could be another one: {'; '.join(wrong)}. "
                "Use the same settings, or exact=False to go on all the same"
            )
        with self.model.using("session.load", self) as engine:
            engine.use_adapters(adapters)
            engine.restore(snapshot)
            self.adapters = adapters
            self._tokens = [*snapshot.tokens, *extra["waiting"]]
        notes: dict[str, Any] = extra["notes"]
        return notes

    def keep_on_host(self, snapshot: Snapshot) -> None:
        """Others have the device now."""
        self._snapshot = snapshot

    def from_host(self) -> Snapshot | None:
        """What was kept, to be put onto the device; None for an empty text."""
        kept, self._snapshot = self._snapshot, None
        return kept

    def end_stream(self, by: str) -> None:
        """The text goes another way: its stream, if one is running, is cut off."""
        stream, self._stream = self._stream() if self._stream else None, None
        if stream is not None:
            stream.cut_off(by)

    @property
    def keeps_state(self) -> bool:
        """Whether its state is worth keeping while others have the device: so it is of a text that a stream still makes."""
        stream = self._stream() if self._stream else None
        return self._lasting or (stream is not None and not stream.ended)

    def _checked(self, options: Mapping[str, Any]) -> Options:
        checked = Options.of(options, self.model.n_vocab)
        return checked if checked.lora is not None else replace(checked, lora=self._lora)

    def _adapt(self, engine: Engine, checked: Options) -> None:
        """With other adapters than before the text is read anew."""
        self.adapters = self.model.adapter_scales(checked)
        engine.use_adapters(self.adapters)

    def _engine_stream(
        self, engine: Engine, reused: int, checked: Options, constraint: Constraint | None, reader: MessageReader | None = None
    ) -> Stream:
        model = self.model

        def using(keep: bool) -> AbstractContextManager[Engine]:
            return model.using("stream", self, keep=keep, text=text)

        text = EngineText(engine, self._tokens, reused, checked, using, model.warm, constraint, reader, model.drafts(checked))
        stream = Stream(text)
        self._stream = weakref.ref(stream)
        return stream

    def _shared_stream(
        self, ids: list[int], checked: Options, constraint: Constraint | None, reader: MessageReader | None = None
    ) -> Stream:
        self._check_room(len(ids))
        self._tokens, self._went_on = ids, True
        asked = TextRequest(list(ids), checked, lambda: constraint, lambda: reader)
        stream = Stream(SharedText(self.model.texts, asked, self._tokens))
        self._stream = weakref.ref(stream)
        return stream

    def _settle(self, engine: Engine) -> None:
        """What the device has of the text, where a batch went on with it meanwhile."""
        if not self._went_on or engine.tokens == tuple(self._tokens[: engine.n_past]):
            return
        common = next(i for i, (a, b) in enumerate(zip([*self._tokens, -1], engine.tokens, strict=False)) if a != b)
        if not engine.rewind(common):
            engine.rewind(0)

    def _check_room(self, count: int) -> None:
        n_ctx = self.model.n_ctx
        if count > n_ctx:
            raise too_long(count, n_ctx)

    def __repr__(self) -> str:
        return f"<Session of {self.model.name}, {len(self._tokens)} tokens>"


def message_of(result: Result) -> Message:
    """A reply as a message of the conversation."""
    message: Message = {"role": "assistant", "content": result.text}
    if result.reasoning:
        message["reasoning_content"] = result.reasoning
    if result.tool_calls:
        message["tool_calls"] = [call.plain() for call in result.tool_calls]
    return message
