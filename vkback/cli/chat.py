"""vkback chat: a conversation with a model."""

from __future__ import annotations

import json
import secrets
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkback.cli.interrupts import NotedInterrupts
from vkback.cli.loading import ADAPTERS, ARITHMETIC, DRAFTS, PLACES, load_options, with_loading
from vkback.cli.sampling import (
    BiasOption,
    FrequencyOption,
    LastNOption,
    MinPOption,
    PresenceOption,
    RepeatOption,
    StopOption,
    TempOption,
    TopKOption,
    TopPOption,
    check_bias,
    generate_options,
    logit_bias,
    with_samplers,
)
from vkback.cli.shell import DevicesOption, ModelOption, UsageError, bars, load_model, model_path, read_text, unicode_text
from vkback.errors import VkbackError
from vkback.terminal import dim

if TYPE_CHECKING:
    from vkback.api import GenerateOptions, LoadedModel, Stream, Timings

HELP = '''\
"""          begins a message of several lines, and ends it
/retry       the last message again, with the next seed
/undo        forget the last message and its reply
/system TEXT what the model is told before the conversation
/reset       forget the conversation
/save FILE   write it to a file, with the model's state
/load FILE   go on with one from a file
/stats       tokens and speed of the last reply, and what is left of the context
/exit        end, as Ctrl-D does; Ctrl-C ends a reply
//TEXT       a message that begins with a slash'''

PROMPT = "> "
CONTINUED = "... "
"""Before further lines of a message."""
FENCE = '"""'

SEED_BITS = 31


TemplateOption = Annotated[
    str | None,
    typer.Option("--chat-template", "--chat-template-file", help="plain, chatml, or a file with a jinja2 template, for the model's own."),
]
TemplateKwargsOption = Annotated[
    str | None,
    typer.Option("--chat-template-kwargs", metavar="JSON", help="Variables of the chat template, as '{\"enable_thinking\": false}'."),
]


@with_samplers
@with_loading("ctx", *ARITHMETIC, "exact", *PLACES, *ADAPTERS, *DRAFTS, "spec_pinned", "spec_earlier")
def chat(
    model: ModelOption = None,
    system: Annotated[
        str | None, typer.Option("-sys", "--system", "--system-prompt", help="What the model is told before the conversation.")
    ] = None,
    template: TemplateOption = None,
    template_kwargs: TemplateKwargsOption = None,
    n: Annotated[
        int | None, typer.Option("-n", "--n-predict", "--predict", min=-2, help="Tokens of a reply at most; -1: as fit [default: -1].")
    ] = None,
    temp: TempOption = 0.8,
    top_k: TopKOption = 40,
    top_p: TopPOption = 0.95,
    min_p: MinPOption = 0.05,
    seed: Annotated[
        int | None,
        typer.Option(
            "-s", "--seed", min=-1, help="The same seed gives the same replies; -1 for any [default: another each time, printed]."
        ),
    ] = None,
    repeat_penalty: RepeatOption = 1.0,
    presence_penalty: PresenceOption = 0.0,
    frequency_penalty: FrequencyOption = 0.0,
    repeat_last_n: LastNOption = 64,
    bias: BiasOption = None,
    stop: StopOption = None,
    device: DevicesOption = None,
    *,
    loading: Mapping[str, Any],
    samplers: Mapping[str, Any],
) -> None:
    """Talk to a model: each line of stdin is a message, replies go to stdout as they are generated. Only what is new of a conversation is
    read. /help lists what else may be typed; Ctrl-C ends a reply and not the program."""
    added = logit_bias(bias)
    given = {
        "max_tokens": None if n is not None and n < 0 else n,
        "temperature": temp,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "stop": stop or [],
        "repeat_penalty": repeat_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "penalty_last_n": repeat_last_n,
        "logit_bias": dict(added),
        **samplers,
    }
    options = generate_options(given)
    chosen = template_text(template)
    variables = template_variables(template_kwargs)
    how = load_options(**loading, progress=bars())
    with load_model(model_path(model), device, how) as loaded:
        interrupts = NotedInterrupts()
        conversation = Conversation(loaded, chosen, system, options, interrupts, None if seed == -1 else seed, variables)
        check_bias(added, loaded.n_vocab)
        conversation.check()
        if told := told_format(loaded, chosen):
            print(f"vkback: {told}", file=sys.stderr)
        if sys.stdin.isatty():
            print(f"{loaded.title}, {loaded.n_ctx} tokens of context; /help lists commands", file=sys.stderr)
        conversation.begin()
        with interrupts:
            for line in messages(interrupts):
                conversation.take(line)
                if conversation.ended:
                    break


def template_text(given: str | None) -> str | None:
    """A name stays a name, a file becomes its text."""
    from vkback.api.chat_template import NAMED

    if given is None or given in NAMED:
        return given
    try:
        Path(given).stat()
    except OSError as e:
        raise UsageError(f"--chat-template {given}: neither {' nor '.join(NAMED)} nor a file that can be read: {e.strerror}") from e
    return read_text(Path(given), "--chat-template")


def template_variables(given: str | None) -> dict[str, Any]:
    """Raises UsageError for what is no JSON object."""
    try:
        found = json.loads(given or "{}")
    except ValueError as e:
        raise UsageError(f"--chat-template-kwargs {given}: is no JSON: {e}") from e
    if not isinstance(found, dict):
        raise UsageError(f'--chat-template-kwargs {given}: expected an object, as {{"enable_thinking": false}}')
    return found


def told_format(model: LoadedModel, template: str | None) -> str:
    """That a model which brings no template gets one all the same; "" where it does not."""
    stops = model.chat_format(template).stops
    ends = " and ".join(f'"{stop}"' for stop in stops)
    return f"{model.name} has no chat template: taken is --chat-template plain, and {ends} ends a reply" if stops else ""


def messages(interrupts: NotedInterrupts) -> Iterator[str]:
    """Lines of stdin until its end, those between two FENCEs as one; on a terminal with a prompt, and Ctrl-C drops what was typed."""
    shown = PROMPT if sys.stdin.isatty() else ""
    if shown:
        with suppress(ImportError):  # Windows has none, and its console edits lines itself
            import readline  # noqa: F401  lines can be edited, and called back
    fenced: list[str] | None = None
    while True:
        try:
            with interrupts.waiting():
                line = input(shown if fenced is None else CONTINUED) if shown else sys.stdin.readline()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if not shown:
                raise
            print("\n/exit or Ctrl-D ends the program", file=sys.stderr)
            fenced = None
            continue
        over = not line and not shown
        if fenced is None and line.lstrip().startswith(FENCE):
            fenced, line = [], line.lstrip().removeprefix(FENCE)
        if fenced is not None:
            text, fence, _ = line.rstrip("\n").partition(FENCE)
            fenced.append(text)
            if not fence and not over:
                continue
            line, fenced = "\n".join(fenced), None
            line = f"/{line.lstrip()}" if line.lstrip().startswith("/") else line  # no command
        if line.strip():
            yield line.strip()
        if over:
            return


class Conversation:
    """Messages so far, and what one line more does. ended: it was the last one."""

    def __init__(
        self,
        model: LoadedModel,
        template: str | None,
        system: str | None,
        options: GenerateOptions,
        interrupts: NotedInterrupts,
        seed: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """seed: None for another one in each conversation; variables: of the template."""
        self._seed, self._variables = seed, variables
        self.interrupts = interrupts
        self.model, self.template, self.options = model, template, options
        self.session = model.session()
        self.ended = False
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = [*self._system]
        self._last: Timings | None = None

    def begin(self) -> None:
        """Draw a seed where none was given, and print it: with it the conversation can be had again."""
        self.options["seed"] = secrets.randbits(SEED_BITS) if self._seed is None else self._seed
        if self._seed is None and self.options.get("temperature"):
            print(f"vkback: seed {self.options['seed']}", file=sys.stderr)

    def check(self) -> None:
        """Raises ChatTemplateError before anybody has typed anything."""
        from vkback.api.model import MOVED_SYSTEM

        prompt = self.model.chat_prompt([*self._system, {"role": "user", "content": "Hello"}], self.template, self._variables)
        if prompt.moved_system:
            print(f"vkback: {MOVED_SYSTEM}", file=sys.stderr)

    def take(self, line: str) -> None:
        """A message, or a command. Errors are printed, and the conversation goes on as if the line had not come."""
        try:
            unicode_text(line, "this message")
            if line.startswith("//"):
                self.reply(line[1:])
            elif line.startswith("/"):
                self._command(*line.split(maxsplit=1))
            else:
                self.reply(line)
        except VkbackError as error:
            print(f"vkback: error: {error}", file=sys.stderr)

    def reply(self, text: str) -> None:
        """What the model says to `text`, shown as it comes, and kept with it in the conversation."""
        asked = [*self.messages, {"role": "user", "content": text}]
        with warnings.catch_warnings(action="ignore"):  # `check` has told
            stream = self.session.stream_chat(asked, template=self.template, template_kwargs=self._variables, **self.options)
        interrupted = show(stream, self.interrupts)
        result = stream.result
        self._last = result.timings
        thoughts = {"reasoning_content": result.reasoning} if result.reasoning else {}
        self.messages = [*asked, {"role": "assistant", "content": result.text, **thoughts}]
        if interrupted:
            print("vkback: the reply was ended by Ctrl-C", file=sys.stderr)
        elif result.finish_reason == "context":
            print("vkback: the context is full; /reset begins anew", file=sys.stderr)

    def _command(self, name: str, rest: str = "") -> None:
        if name in ("/save", "/load") and not rest:
            raise UsageError(f"{name} needs a file: {name} FILE")
        if name == "/save":
            self.session.save(rest, notes={"messages": self.messages})
            print(f"saved {len(self.session)} tokens to {rest}", file=sys.stderr)
        elif name == "/load":
            self.messages = self.session.load(rest).get("messages", [])
            print(f"loaded {len(self.session)} tokens, {len(self.messages)} messages", file=sys.stderr)
        elif name == "/reset":
            self.session.reset()
            self.messages = [*self._system]
            self.begin()
        elif name == "/system":
            if not rest:
                raise UsageError("/system needs a text: /system TEXT")
            spoken = [message for message in self.messages if message["role"] != "system"]
            self._system = [{"role": "system", "content": rest}]
            self.messages = [*self._system, *spoken]
        elif name == "/undo":
            self._take_back(name)
        elif name == "/retry":
            self._retry(name)
        elif name == "/stats":
            print(self.stats(), file=sys.stderr)
        elif name == "/help":
            print(HELP, file=sys.stderr)
        elif name in ("/exit", "/quit"):
            self.ended = True
        else:
            raise UsageError(f"{name}: no such command; /help lists them, and //{name[1:]} is a message that begins with a slash")

    def _retry(self, name: str) -> None:
        """Another reply to the last message; where it fails the old one stays."""
        before, asked = self.messages, self._take_back(name)
        self.options["seed"] = ((self.options.get("seed") or 0) + 1) % (1 << SEED_BITS)
        if self.options.get("temperature"):
            print(f"vkback: seed {self.options['seed']}", file=sys.stderr)
        try:
            self.reply(asked)
        except VkbackError:
            self.messages = before
            raise

    def _take_back(self, name: str) -> str:
        """Forget the last message and its reply; the message. Raises UsageError where there is none."""
        at = next((i for i in reversed(range(len(self.messages))) if self.messages[i]["role"] == "user"), None)
        if at is None:
            raise UsageError(f"{name}: nothing has been said yet; expected a message before it")
        asked: str = self.messages[at]["content"]
        self.messages = self.messages[:at]
        return asked

    def stats(self) -> str:
        """The last reply in numbers."""
        context = f"context  {len(self.session)} of {self.model.n_ctx} tokens"
        t = self._last
        if t is None:
            return context
        return (
            f"prompt   {t.prompt_tokens} tokens read in {t.prompt_s:.2f} s, {t.reused_tokens} known before\n"
            f"reply    {t.decode_tokens} tokens in {t.decode_s:.2f} s, {t.decode_tokens_per_s:.2f} t/s\n"
            + (f"drafts   {t.draft_tokens} tokens, {t.draft_accepted} accepted\n" if t.draft_tokens else "")
            + context
        )


def show(stream: Stream, interrupts: NotedInterrupts) -> bool:
    """Print a reply as it comes, what the model thinks on stderr; whether Ctrl-C ended it. The device is left to end what it does."""
    thinking = False
    for piece in stream:
        if piece.reasoning:
            thinking = True
            print(dim(piece.reasoning, sys.stderr), end="", file=sys.stderr, flush=True)
        if piece.text and thinking:
            thinking = False
            print("\n", file=sys.stderr, flush=True)
        print(piece.text, end="", flush=True)
        if interrupts.came:
            break
    print()
    stream.close()
    return interrupts.came
