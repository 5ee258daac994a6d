"""From a prompt or messages to token ids, through the model's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import BadValue, ChatTemplateFailed, EmptyPrompt

Message = dict[str, Any]


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    has_chat_template: bool
    bos_token: str | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(self, messages: Sequence[Message], **kwargs: Any) -> list[int]: ...


def chat_ids(tokenizer: ChatTokenizer, messages: Sequence[Message], arguments: dict[str, Any]) -> list[int]:
    """The prompt's ids for `messages`, up to where the assistant begins to speak.

    `arguments` pass through to the template (`enable_thinking`, ...).

    Raises:
        BadValue: not a list of messages with a role each.
        ChatTemplateFailed: the template's own error, with the roles it was given.
    """
    _check(messages)
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, **arguments))
    except Exception as error:  # whatever a template raises: its language is open-ended
        roles = [message["role"] for message in messages]
        raise ChatTemplateFailed(
            f"the model's chat template refused messages with the roles {', '.join(roles)}: {error}",
            roles=roles,
            arguments=arguments,
        ) from error


def text_ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """The ids of bare text, with the tokenizer's own beginning-of-text unless `text` brings it."""
    begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return list(tokenizer.encode(text, add_special_tokens=not begins))


def _check(messages: Sequence[Message]) -> None:
    if isinstance(messages, (str, dict)) or not isinstance(messages, Sequence):
        raise BadValue("messages must be a list of {role, content} objects")
    if not messages:
        raise EmptyPrompt("the list of messages is empty")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadValue(f"message {index} must be an object with a role, not {message!r:.80}")
