"""The result contract: one JSON object on stdout, its schemas, and the only code that writes there.

An envelope is a plain dict. `success` and `failure` build one, `Stdout` prints it. Schemas are JSON Schema
(draft 2020-12); `schema(name)` returns one by the name that stands in the envelope's `schema` field.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from .errors import DFlashError, all_errors
from .version import __version__

Envelope = dict[str, Any]


def meta(started: float) -> dict[str, Any]:
    """What every envelope says about the run. `started` is a `time.perf_counter()` reading.

    MLX is asked for its device only if something already imported it: a usage error stays fast.
    """
    mlx = sys.modules.get("mlx.core")
    device = "none" if mlx is None else str(mlx.default_device().type).rpartition(".")[2]
    versions = {}
    for package in ("mlx", "mlx-lm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "version": __version__,
        "device": device,
        "packages": versions,
        "elapsed_s": round(time.perf_counter() - started, 4),
    }


def success(name: str, result: dict[str, Any], warnings: list[dict[str, str]], started: float) -> Envelope:
    return {"ok": True, "schema": name, "result": result, "warnings": warnings, "meta": meta(started)}


def failure(error: DFlashError, started: float) -> Envelope:
    body = {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "details": error.details,
    }
    return {"ok": False, "schema": "dflash.error/1", "error": body, "meta": meta(started)}


# JSON leaves these as they are, yet they end a line for some readers (Python's splitlines among them).
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def to_line(value: Any) -> str:
    """Compact JSON on one line. What JSON lacks (NaN, infinity, arrays) is a fault of ours: it raises
    ValueError or TypeError. Paths are written as text."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=os.fspath)
    return line.translate(_LINE_ENDS)


def encoded(text: str) -> bytes:
    """UTF-8, whatever the locale. A lone surrogate becomes `\\udxxx`, which JSON reads as what it was."""
    return text.encode("utf-8", errors="backslashreplace")


class Stdout:
    """A private handle on the real stdout, while everything else that prints lands on stderr.

    Redirects at the level of file descriptors, so that C code and child processes cannot print between
    the caller and the JSON either.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    @classmethod
    @contextlib.contextmanager
    def guarded(cls) -> Iterator[Stdout]:
        for descriptor in (0, 1, 2):
            _open_if_closed(descriptor)
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there may be no sys.stdout
            sys.stdout.flush()
        private = os.dup(1)
        os.dup2(2, 1)
        try:
            # Python's own prints share stderr's buffer, so that none is left behind for the real stdout.
            with contextlib.redirect_stdout(sys.stderr):
                yield cls(private)
        finally:
            os.dup2(private, 1)
            os.close(private)

    @property
    def terminal(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: str) -> None:
        """Print `text` at once. A reader that went away (closed pipe) is not an error of ours; a full disk
        behind a redirection is: OSError."""
        rest = memoryview(encoded(text))
        with contextlib.suppress(BrokenPipeError):
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:  # the other end of the pipe made it non-blocking; wait for room
                    select.select([], [self._descriptor], [])

    def write_line(self, value: Any) -> None:
        self.write(to_line(value) + "\n")


def _open_if_closed(descriptor: int) -> None:
    """A closed standard stream's number would go to the next file opened, and prints would end up in it."""
    try:
        os.fstat(descriptor)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)


# ---------------------------------------------------------------- schemas


def object_of(properties: dict[str, Any], optional: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """An object whose properties are all required, except the named ones, and that has no others."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
NUMBER = {"type": "number", "minimum": 0}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
_WARNINGS = {"type": "array", "items": object_of({"code": TEXT, "message": TEXT})}
_META = object_of(
    {
        "version": TEXT,
        "device": {"enum": ["cpu", "gpu", "none"]},
        "packages": {"type": "object", "additionalProperties": TEXT},
        "elapsed_s": NUMBER,
    }
)

_PROPOSALS = object_of({"drafted": COUNT, "accepted": COUNT})

_SAMPLING = object_of(
    {
        "temperature": NUMBER,
        "top_p": SHARE,
        "top_k": COUNT,
        "min_p": SHARE,
        "repetition_penalty": NUMBER,
        "presence_penalty": {"type": "number"},
        "frequency_penalty": {"type": "number"},
        "penalty_context": COUNT,
        "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
        "seed": nullable(COUNT),
    }
)

_GENERATE = object_of(
    {
        "text": TEXT,
        "tokens": {"type": "array", "items": COUNT},
        "finish_reason": {"enum": ["stop", "length", "stop_string", "cancelled"]},
        "mode": {"enum": ["dflash", "lookup", "baseline"]},
        "model": TEXT,
        "draft": nullable(TEXT),
        "draft_weights": nullable(object_of({"bits": COUNT, "reason": TEXT})),
        "sampling": _SAMPLING,
        "usage": object_of({"prompt_tokens": COUNT, "completion_tokens": COUNT}),
        "speed": object_of(
            {
                "prefill_s": NUMBER,
                "decode_s": NUMBER,
                "tokens_per_s": NUMBER,
                "prompt_tokens_per_s": NUMBER,
            }
        ),
        "speculation": object_of(
            {
                "block_size": COUNT,
                "cycles": COUNT,
                "accepted_length": NUMBER,
                "acceptance_rate": SHARE,
                "drafted_tokens": COUNT,
                "near_ties": COUNT,
                "exact": {"type": "boolean"},
                "proposals": object_of({"dflash": _PROPOSALS, "lookup": _PROPOSALS}),
                "width_histogram": {"type": "object", "additionalProperties": COUNT},
            }
        ),
        "memory": object_of({"peak_bytes": COUNT}),
    },
    optional=("tokens",),
)

_RESULTS: dict[str, dict[str, Any]] = {"dflash.generate/1": _GENERATE}


def register(name: str, result: dict[str, Any]) -> None:
    """Publish the schema of a `result`. Called once per script's result, at import, next to its writer."""
    _RESULTS[name] = result


def schema_names() -> list[str]:
    return sorted([*_RESULTS, "dflash.error/1"])


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a whole envelope, by the name in its `schema` field. Unknown names: KeyError."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": name}
    if name == "dflash.error/1":
        codes = sorted({cls.code for cls in all_errors()})
        error = object_of(
            {"code": {"enum": codes}, "message": TEXT, "hint": TEXT, "details": {"type": "object"}}
        )
        return head | object_of(
            {"ok": {"const": False}, "schema": {"const": name}, "error": error, "meta": _META}
        )
    return head | object_of(
        {
            "ok": {"const": True},
            "schema": {"const": name},
            "result": _RESULTS[name],
            "warnings": _WARNINGS,
            "meta": _META,
        }
    )
