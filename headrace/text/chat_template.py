"""Messages to prompt tokens through the model's chat template.

Users' text never becomes a control token. Before rendering, special tokens' text inside messages and tools is
broken by a guard character (``special_text``); in the rendered text the special tokens still intact are the
template's own. Guards are removed, the template's tokens are taken as ids and everything else is encoded as
ordinary text. Where no user text spells a special token (nearly always) the prompt is encoded in one piece.
The beginning-of-sequence token is the template's business: it is in the prompt if the template writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Template, TemplateError, TemplateSyntaxError

from headrace.errors import InvalidRequest, ModelFileError
from headrace.text.chat_messages import Message, MessageForm, check_strings, normalise
from headrace.text.jinja_environment import TemplateRefusal, make_environment
from headrace.text.plain_calls import as_text
from headrace.text.special_text import unused_guards
from headrace.text.tokenizer import Tokenizer

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
_STRUCTURAL_KEYS = frozenset({"role", "type"})


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered prompt: its text, and the token ids (which may differ from those of parsing the text)."""

    text: str
    token_ids: list[int]


class ChatTemplate:
    """The chat template of one model, or several by name ("default", "tool_use", …); or none.

    Args:
        tokenizer: of the model.
        sources: name -> Jinja text. Empty: the model has no template and ``render`` refuses.
        origin: file or field the templates come from, for error messages.

    Raises ModelFileError for a template that cannot be parsed.
    """

    def __init__(self, tokenizer: Tokenizer, sources: Mapping[str, str], origin: str) -> None:
        self._tokenizer = tokenizer
        self._sources = dict(sources)
        environment = make_environment()
        self._templates: dict[str, Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except TemplateSyntaxError as error:
                raise ModelFileError(
                    f"{origin}: chat template '{name}' cannot be parsed, line {error.lineno}: {error.message}"
                ) from None
        self._forms = {name: self._probe_form(name) for name in self._templates}

    @property
    def is_available(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._templates)

    def source(self, with_tools: bool = False) -> str:
        """Jinja text of the template in use, "" when there is none."""
        return self._sources[self._select(with_tools)] if self._templates else ""

    @property
    def shows_tools(self) -> bool:
        """Whether a template knows tools, in a form of its own."""
        return any(not form.plain_tools for form in self._forms.values())

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, object] | None = None,
    ) -> RenderedPrompt:
        """Prompt of a chat.

        Args:
            messages: in the OpenAI chat form (``chat_messages``).
            tools: function tools in the OpenAI chat form.
            add_generation_prompt: open the assistant's turn at the end.
            continue_final_message: leave the last message open, so that the model continues it.
            kwargs: further template variables (``enable_thinking`` …).

        Raises InvalidRequest for messages that cannot be rendered, with the template's own words where it
        refuses them, and where the model has no template.
        """
        if not self._templates:
            raise InvalidRequest(
                "this model has no chat template; use the completions route, or start with --chat-template",
                param="messages",
            )
        name = self._select(bool(tools))
        variables = dict(kwargs or {})
        check_strings(variables, "chat_template_kwargs")
        check_strings(tools or [], "tools")
        for key in sorted(_RESERVED & variables.keys()):
            raise InvalidRequest(f"'{key}' is a field of its own", param="chat_template_kwargs")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "'continue_final_message' and 'add_generation_prompt' exclude each other",
                param="continue_final_message",
            )
        normal = normalise(messages, self._forms[name])
        if continue_final_message:
            _refuse_calls(normal[-1])
        if self._forms[name].plain_tools:
            normal, tools = as_text(normal, tools, takes_system=self._forms[name].system), None
        guards = _Guards(self._tokenizer, [normal, tools, variables])
        safe_messages = [guards.message(message) for message in normal]
        if continue_final_message:
            safe_messages[-1] = guards.marked(safe_messages[-1])
        text = self._render_text(
            name, safe_messages, guards.tools(tools), add_generation_prompt, guards.variables(variables)
        )
        if continue_final_message:
            text = guards.cut_at_mark(text)
        return guards.encode(text)

    def _select(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._templates:
            return "tool_use"
        return "default" if "default" in self._templates else next(iter(self._templates))

    def _render_text(
        self,
        name: str,
        messages: list[Message],
        tools: object,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        try:
            return self._templates[name].render(
                {
                    **self._tokenizer.named,
                    "documents": None,
                    **variables,
                    "messages": messages,
                    "tools": tools or None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateRefusal as refusal:
            raise InvalidRequest(str(refusal.message), param="messages") from None
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            # A template is a program over the client's data: whatever it stumbles over is in the request.
            reason = re.sub(r"\s+", " ", str(error))
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {reason}", param="messages"
            ) from None

    def _probe_form(self, name: str) -> MessageForm:
        """Find out by rendering small chats which form of messages this template reads."""

        def render(messages: list[Message]) -> str:
            try:
                return self._render_text(name, messages, None, False, {})
            except InvalidRequest:
                return ""

        probe = "headrace probe"
        plain: Message = {"role": "user", "content": probe}
        listed: Message = {"role": "user", "content": [{"type": "text", "text": probe}]}
        content_parts = probe not in render([plain]) and probe in render([listed])
        user = listed if content_parts else plain

        def with_call(arguments: object, content: object) -> str:
            function = {"name": "probe", "arguments": arguments}
            calls = [{"id": "call00000", "type": "function", "function": function}]
            return render([user, {"role": "assistant", "content": content, "tool_calls": calls}])

        def shows_argument(text: str) -> bool:
            # An object printed by a template that expects text shows Python's quotes.
            return "probe_value" in text and "{'probe_key'" not in text

        empty: object = [{"type": "text", "text": ""}] if content_parts else ""
        forms: list[object] = [{"probe_key": "probe_value"}, '{"probe_key": "probe_value"}']
        arguments = next((form for form in forms if shows_argument(with_call(form, empty))), forms[0])
        without_content = with_call(arguments, None)
        return MessageForm(
            content_parts=content_parts,
            arguments_text=isinstance(arguments, str),
            null_content=shows_argument(without_content) and "None" not in without_content,
            developer=re.search(r"""["']developer["']""", self._sources[name]) is not None,
            plain_tools="tool" not in self._sources[name],
            system=probe in render([{**user, "role": "system"}, {**user, "content": empty}]),
        )


def _refuse_calls(message: Message) -> None:
    """Calls stand behind a message's text, so a prompt that ends with the text would lose them."""
    if message.get("tool_calls"):
        raise InvalidRequest(
            "the last message has tool_calls, so it cannot be continued; send their results, or leave"
            " continue_final_message out",
            param="messages",
        )


class _Guards:
    """Guarding of one request's strings, and the way back. See ``special_text``."""

    def __init__(self, tokenizer: Tokenizer, data: object) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special
        try:
            self._guard, self._mark = unused_guards(_strings(data))
        except ValueError as error:
            raise InvalidRequest(f"these messages cannot be rendered: {error}", param="messages") from None
        self._changed = False

    def message(self, message: Message) -> Message:
        return {key: self._guarded(key, value) for key, value in message.items()}

    def tools(self, tools: object) -> object:
        return self._guarded("", tools)

    def variables(self, variables: Mapping[str, object]) -> dict[str, object]:
        return {key: self._guarded("", value) for key, value in variables.items()}

    def _guarded(self, key: str, value: object) -> object:
        if isinstance(value, str):
            if key in _STRUCTURAL_KEYS:
                return value
            text = self._special.guarded(value, self._guard)
            self._changed = self._changed or text != value
            return text
        if isinstance(value, Mapping):
            return {self._key(inner): self._guarded(str(inner), item) for inner, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._guarded(key, item) for item in value]
        return value

    def _key(self, key: object) -> object:
        """Templates look keys up by name, so only a key that spells a special token is touched."""
        if not isinstance(key, str):
            return key
        text = self._special.broken(key, self._guard)
        self._changed = self._changed or text != key
        return text

    def marked(self, message: Message) -> Message:
        """The message with a mark behind its content."""
        content = message["content"]
        if isinstance(content, list):
            return {
                **message,
                "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + self._mark}],
            }
        return {**message, "content": f"{content or ''}{self._mark}"}

    def cut_at_mark(self, text: str) -> str:
        before, mark, _ = text.rpartition(self._mark)
        if not mark:
            raise InvalidRequest(
                "the model's chat template does not show the final message, so it cannot be continued",
                param="continue_final_message",
            )
        return before.replace(self._mark, "")

    def encode(self, text: str) -> RenderedPrompt:
        clean = text.replace(self._guard, "") if self._changed else text
        if self._changed:
            pieces = self._special.split(text)
            parts = [part.replace(self._guard, "") if isinstance(part, str) else part for part in pieces]
            parts = [part for part in parts if part != ""]
            if parts != self._special.split(clean):
                return RenderedPrompt(clean, self._tokenizer.encode_parts(parts))
        token_ids = self._tokenizer.encode(clean, parse_special=True, add_bos=False, param="messages")
        return RenderedPrompt(clean, token_ids)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
