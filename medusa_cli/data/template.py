"""A model's chat template, rendered. This file knows no files, no counts and no masks.

A template is a program that came with the model: whatever it fails with is told as one sentence.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from medusa_cli.data.conversations import BadRow, Message
from medusa_cli.data.template_bounds import OutOfBounds, bounded, check_bounds
from medusa_cli.errors import DataError

MARKER = "\ue000\ue001\ue000"  # stands for a text, to see where the template puts it
SILENT_HINT = "use the chat template that the model was trained with"
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
    source = template_text(tokenizer)
    dicts = as_dicts(messages, parts=parts)
    try:
        _check_bounds(source, tokenizer, dicts, options)
        return tokenizer.apply_chat_template(dicts, **options)
    except OutOfBounds as bound:
        raise BadRow(f"the chat template {bound}", _MESSAGES, hint=SILENT_HINT) from bound
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
    return str(applied(tokenizer, messages, parts=parts, **options))


def _check_bounds(source: str, tokenizer: Any, dicts: list[dict[str, Any]], options: Mapping[str, Any]) -> None:
    """Raises OutOfBounds where the library's rendering would take for ever, or all memory."""
    given = len(str(dicts))
    template = bounded(source, _compile_jinja_template("").environment)  # compiling it there would fold constants
    variables = {
        "tools": None,
        "documents": None,
        **getattr(tokenizer, "special_tokens_map", {}),
        **options,
        "messages": dicts,
    }
    check_bounds(template, given, variables)
