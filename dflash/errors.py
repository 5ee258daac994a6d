"""Everything that can go wrong, as a tree. Each class is one published code.

    DFlashError                  1   internal_error        anything unforeseen
    ├── UsageError               2   bad_usage             the call itself is wrong
    │   ├── BadValue             2   bad_value             a value outside what its flag takes
    │   ├── EmptyPrompt          2   empty_prompt          nothing to answer
    │   └── ChatTemplateFailed   2   chat_template_failed  the model's template refused the messages
    ├── NotFound                 3   file_not_found        a file named by the user
    │   ├── ModelNotFound        3   model_not_found       neither a folder, nor a file, nor on the hub
    │   ├── DraftNotFound        3   draft_not_found       no draft is known for this target
    │   ├── GatedModel           3   model_gated           exists, needs accepted terms and a token
    │   └── BadCheckpoint        3   bad_checkpoint        found, but damaged or incomplete
    ├── Unsupported              4   unsupported           a feature this build does not have
    │   ├── UnsupportedModel     4   unsupported_model     no adapter runs this target
    │   ├── UnsupportedDraft     4   unsupported_draft     looks like DFlash, is not
    │   ├── DraftMismatch        4   draft_mismatch        a draft for another target
    │   └── ModelIsDraft         4   model_is_draft        a draft was given as the model
    ├── DoesNotFit               5   does_not_fit          more memory than there is
    │   ├── ContextExceeded      5   context_exceeded      the prompt is longer than the context
    │   └── DiskFull             5   disk_full             no room for a download or conversion
    ├── HubFailed                6   hub_failed            the hub answered with an error
    │   ├── HubUnreachable       6   hub_unreachable       no network, or offline mode
    │   └── IndexFailed          6   index_failed          the package index did not deliver
    └── Cancelled              130   cancelled             interrupted before anything was generated

A code keeps its meaning once published. `message` says what was received and what was expected; `hint`
is the next thing to do, as a command where one exists. Errors are raised where the cause is known and
turned into output in one place (`dflash.contract`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class DFlashError(Exception):
    """Base of every error this project raises on purpose.

    Args:
        message: what was received and what was expected, one or two sentences.
        hint: the next step; the class's `default_hint` where none is given.
        **details: JSON values for programs (numbers, names, absolute paths).
    """

    code = "internal_error"
    exit_status = 1
    default_hint = "this is a fault in dflash: report it with the traceback on stderr"

    def __init__(self, message: str, hint: str | None = None, **details: Any):
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.details = details


class UsageError(DFlashError):
    code = "bad_usage"
    exit_status = 2
    default_hint = "see --help for the flags and their values"


class BadValue(UsageError):
    code = "bad_value"


class EmptyPrompt(UsageError):
    code = "empty_prompt"
    default_hint = "give text with --prompt 'TEXT', --prompt-file FILE, --messages-file FILE, or - for stdin"


class ChatTemplateFailed(UsageError):
    code = "chat_template_failed"
    default_hint = "change the messages or --chat-template-args, or pass --no-chat-template"


class NotFound(DFlashError):
    code = "file_not_found"
    exit_status = 3
    default_hint = "check the path"


class ModelNotFound(NotFound):
    code = "model_not_found"
    default_hint = "give a hub name (owner/name), a folder with config.json, or a .gguf file"


class DraftNotFound(NotFound):
    code = "draft_not_found"
    default_hint = "pass --draft FOLDER_OR_HUB_NAME, or run without one: --mode lookup or --mode baseline"


class GatedModel(NotFound):
    code = "model_gated"
    default_hint = "accept the terms on the model's hub page, then run: hf auth login"


class BadCheckpoint(NotFound):
    code = "bad_checkpoint"
    default_hint = "delete the damaged file and fetch it again"


class Unsupported(DFlashError):
    code = "unsupported"
    exit_status = 4
    default_hint = "leave the option out"


class UnsupportedModel(Unsupported):
    code = "unsupported_model"
    default_hint = "run it without a draft: --mode baseline"


class UnsupportedDraft(Unsupported):
    code = "unsupported_draft"
    default_hint = "pass another --draft, or run without one: --mode baseline"


class DraftMismatch(Unsupported):
    code = "draft_mismatch"
    default_hint = "pass the draft that was trained for this target; resolve_draft.py names it"


class ModelIsDraft(Unsupported):
    code = "model_is_draft"
    default_hint = "pass the target as --model and this one as --draft"


class DoesNotFit(DFlashError):
    code = "does_not_fit"
    exit_status = 5
    default_hint = "use a smaller or quantised model, or a smaller --max-ctx"


class ContextExceeded(DoesNotFit):
    code = "context_exceeded"
    default_hint = "shorten the prompt or raise --max-ctx, up to the model's own limit"


class DiskFull(DoesNotFit):
    code = "disk_full"
    default_hint = "free some space, or point --cache-dir at another disk"


class HubFailed(DFlashError):
    code = "hub_failed"
    exit_status = 6
    default_hint = "try again later, or give a local folder"


class HubUnreachable(HubFailed):
    code = "hub_unreachable"
    default_hint = "connect to the network, or give a local folder, or run without --model (embedded pair)"


class IndexFailed(HubFailed):
    code = "index_failed"
    default_hint = "check pip's index settings and the network, then run the same command again"


class Cancelled(DFlashError):
    """Interrupted before any token was generated. `signal_number` decides 130 (INT) or 143 (TERM)."""

    code = "cancelled"
    exit_status = 130
    default_hint = "run the same command again; downloads resume"

    def __init__(self, message: str, signal_number: int = 2):
        super().__init__(message, signal=signal_number)
        self.exit_status = 128 + signal_number


def all_errors() -> Iterator[type[DFlashError]]:
    """Every published error class, the root first, depth first."""
    pending = [DFlashError]
    while pending:
        cls = pending.pop()
        yield cls
        pending.extend(reversed(cls.__subclasses__()))
