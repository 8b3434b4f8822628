"""A model's chat template, rendered. This file knows no files, no counts and no masks.

A template is a program that came with the model: whatever it fails with is told as one sentence.
"""

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from medusa_cli.data.conversations import BadRow, Message
from medusa_cli.errors import DataError

MARKER = "\ue000\ue001\ue000"  # stands for a text, to see where the template puts it
SILENT_HINT = "use the chat template that the model was trained with"
# Characters that a template may write of its own, and times that it may write what it is given: far more than any does.
OWN_WORDS, REPEATED = 1_000_000, 8
_MESSAGES = "messages"
_MEND = "mend chat_template.jinja in the model's folder; generate --no-chat takes a prompt as plain text"
# what an expression of a template can raise, and what jinja and Python raise of one that they can't compile
_FAULTS = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, AssertionError, RuntimeError,
    SyntaxError, MemoryError,
)  # fmt: skip


def template_text(tokenizer: Any) -> str:
    """The tokenizer's chat template as it is written. Raises DataError when it has none that can be taken."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        if not isinstance(template.get("default"), str):
            names = ", ".join(map(str, template)) or "none"
            raise DataError(
                f"the model has several chat templates ({names}), and none of them is the default",
                "write the one you want to chat_template.jinja in the model's folder; generate --no-chat uses none",
            )
        template = template["default"]
    if not isinstance(template, str):
        raise DataError(f"the chat template is no text, but {type(template).__name__}", _MEND)
    return template


def as_dicts(messages: Sequence[Message], *, parts: bool) -> list[dict[str, Any]]:
    """Messages as a chat template takes them: contents as text, or as lists of parts."""
    return [
        {"role": one.role, "content": [{"type": "text", "text": one.content}] if parts else one.content}
        for one in messages
    ]


def applied(tokenizer: Any, messages: Sequence[Message], *, parts: bool, **options: Any) -> Any:
    """What the tokenizer makes of the messages. Raises BadRow for messages that the template refuses, and for one that
    fails; DataError as `template_text`."""
    template_text(tokenizer)
    try:
        return tokenizer.apply_chat_template(as_dicts(messages, parts=parts), **options)
    except _FAULTS as error:
        told = " ".join(str(error).split())[:200] or type(error).__name__
        if type(error) is TemplateError:  # as raise_exception makes it
            hint = "the model takes no such sequence of roles"
            raise BadRow(f"the chat template refuses it ({told})", _MESSAGES, hint=hint) from error
        raise BadRow(f"the chat template fails ({type(error).__name__}: {told})", _MESSAGES, hint=_MEND) from error


def takes_parts(tokenizer: Any, messages: Sequence[Message]) -> bool:
    """Whether the template reads contents as lists of parts, as those of models that also see pictures may.

    Raises BadRow when it shows the user's words in neither form: any two prompts would be the same.
    """
    asked = next((place for place, message in enumerate(messages) if message.role == "user"), None)
    if asked is None:
        return False
    probe = [*messages[:asked], Message("user", MARKER)]
    refusal = BadRow("the chat template leaves the user's words out", _MESSAGES, hint=SILENT_HINT)
    for parts in (False, True):
        try:
            if MARKER in render(tokenizer, probe, opening=True, parts=parts):
                return parts
        except BadRow as fault:
            refusal = refusal if parts else fault
    raise refusal


def render(tokenizer: Any, messages: Sequence[Message], *, opening: bool, parts: bool) -> str:
    """The chat template's text; `opening` adds the words that open the assistant's turn. Raises as `applied`."""
    options = {"tokenize": False, "add_generation_prompt": opening, "return_dict": False}
    text = str(applied(tokenizer, messages, parts=parts, **options))
    given = sum(len(message.content) for message in messages)
    if len(text) > OWN_WORDS + REPEATED * given:
        raise BadRow(
            f"the chat template makes {len(text):,} characters of {given:,}, which would take for ever to read",
            _MESSAGES,
            hint=SILENT_HINT,
        )
    return text
