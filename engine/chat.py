"""Chat templates: messages to the text, and the control tokens, that the model was trained on.

A template is a program from the model file, so it runs in a sandbox; messages are data, and stay text whatever they
spell (`engine.chat_marks`).
"""

import contextlib
import functools
import json
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.chat_marks import ControlNames, Marks
from engine.errors import ParamError, TemplateError

if TYPE_CHECKING:  # a process that only renders templates starts without numpy and without a tokenizer
    from engine.gguf import GGUFFile
    from engine.tokenizer import Tokenizer

TEMPLATE_KEY = "tokenizer.chat_template"


class Encoder(Protocol):
    """What a rendered chat needs of a tokenizer."""

    def encode(self, text: str, *, parse_special: bool = True, add_bos: bool | None = None) -> list[int]:
        """The token ids of `text`."""


class RenderedChat(msgspec.Struct, frozen=True):
    """A chat as the model sees it: text and the name of a control token in turn, beginning and ending with a text."""

    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        """For people to read; encoding it would turn what the messages spell into control tokens."""
        return "".join(self.pieces)

    def encode(self, tokenizer: Encoder) -> list[int]:
        """The token ids, begun by BOS if the tokenizer's rule wants one and the template did not put it there."""
        ids: list[int] = []
        for index, piece in enumerate(self.pieces):
            ids += tokenizer.encode(piece, parse_special=index % 2 == 1, add_bos=False)
        opening = tokenizer.encode("")
        return ids if ids[: len(opening)] == opening else opening + ids


class ChatTemplate:
    """A chat template, in the dialect of Hugging Face transformers.

    `bos_token` and `eos_token` are the names the template writes for them, `special_tokens` the names of all control
    tokens. Nothing of the template is computed yet; pickled, it is its source. Raises `TemplateError` if `source` is no
    template.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str, special_tokens: Collection[str]) -> None:
        self.source = source
        self._special_tokens = special_tokens
        self._control_names = ControlNames(special_tokens)
        self._constants = {"bos_token": bos_token, "eos_token": eos_token}
        self._environment = _environment()
        with _refusals_told():
            self._environment.parse(source)

    def __reduce__(self) -> tuple[Callable[[str], Self], tuple[str]]:
        rebuild = functools.partial(type(self), special_tokens=self._special_tokens, **self._constants)
        return rebuild, (self.source,)

    @classmethod
    def from_gguf(cls, file: "GGUFFile", tokenizer: "Tokenizer") -> Self | None:
        """The template in `file`, or None if there is none.

        Raises `TemplateError` if it does not parse, `ModelFileError` if it is no string.
        """
        if TEMPLATE_KEY not in file.metadata:
            return None

        def name(token_id: int | None) -> str:
            return "" if token_id is None else tokenizer.token_bytes(token_id).decode()

        return cls(
            file.require(TEMPLATE_KEY, str),
            bos_token=name(tokenizer.bos_id),
            eos_token=name(tokenizer.eos_id),
            special_tokens=[name(token_id) for token_id in tokenizer.special_ids],
        )

    def compile(self) -> None:
        """Make it ready to render, as the first rendering does otherwise. Constant expressions are computed here.

        Raises `TemplateError` if it names filters or tests that do not exist, or is too much for Python.
        """
        with _refusals_told():
            _ = self._template

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return self._environment.from_string(self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: Callable[[], datetime] | None = None,
        **template_kwargs: Any,
    ) -> RenderedChat:
        """The chat, ready to encode; `messages` are left as they are.

        Content may be text, None (as ""), or a list of text parts (joined). `add_generation_prompt` opens the
        assistant's turn; `continue_final_message` ends inside the final message instead, so that the model goes on
        with it. `now` is the clock a template may ask; `template_kwargs` are further variables.

        Raises `ParamError` for messages that cannot be taken, and `TemplateError` with the template's own words if it
        refuses them, or if it fails.
        """
        if not messages:
            raise ParamError("messages", "messages must not be empty")
        if continue_final_message and add_generation_prompt:
            raise ParamError(
                "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
            )
        chat = [_with_text_content(index, message) for index, message in enumerate(messages)]
        try:
            marks = Marks(self._control_names, (chat, tools, template_kwargs))
            chat, tools, further = marks.put_into([chat, tools, template_kwargs])
        except RecursionError as error:
            raise ParamError("messages", "messages or tools are nested too deeply") from error
        if continue_final_message:
            chat[-1]["content"] += marks.end + " "
        variables = {
            **self._constants,
            "messages": chat,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "raise_exception": lambda message: _refuse(marks.removed_from(str(message))),
            "strftime_now": lambda form: _now(now).strftime(form),
        }
        if taken := further.keys() & variables.keys():
            raise ParamError("chat_template_kwargs", f"chat_template_kwargs cannot set {min(taken)!r}")
        rendered = self._run({**variables, **further})
        if continue_final_message:
            rendered = _cut_at_end_mark(rendered, marks.end)
        return RenderedChat(marks.split(rendered))

    def _run(self, variables: Mapping[str, Any]) -> str:
        self.compile()
        try:
            return self._template.render(variables)
        except TemplateError:
            raise
        except Exception as error:
            lines = [
                frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"
            ]
            where = f" (line {lines[-1]} of the template)" if lines else ""
            raise TemplateError(f"the chat template cannot render these messages{where}") from error


def _with_text_content(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `message` whose content is a string."""
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_text_of_part(f"messages[{index}].content[{i}]", part) for i, part in enumerate(content))
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        raise ParamError("messages", f"messages[{index}].content must be text, text parts or null")
    return {**message, "content": content}


def _text_of_part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ParamError("messages", f'{where} must be {{"type": "text", "text": ...}}; other parts are not supported')
    text: str = part["text"]
    return text


def _cut_at_end_mark(rendered: str, mark: str) -> str:
    """`rendered` up to the end of the final message; if the template trimmed that message, trimmed as well."""
    text, found, rest = rendered.rpartition(mark)
    if not found:
        raise TemplateError("the chat template leaves the final message out, so it cannot be continued")
    return text if rest.startswith(" ") else text.rstrip()


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's text for training and changes nothing else."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@contextlib.contextmanager
def _refusals_told() -> Iterator[None]:
    """Say as `TemplateError` what Jinja, or Python's compiler behind it, refuses."""
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error
    except Exception as error:  # what Python's own compiler refuses: nested too deeply, too many blocks
        raise TemplateError("the chat template cannot be compiled") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives a template (its `utils/chat_template_utils.py`), but for what depends on the messages."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(clock: Callable[[], datetime] | None) -> datetime:
    if clock is None:
        raise TemplateError("the chat template asks for the time, and no clock was given")
    return clock()
