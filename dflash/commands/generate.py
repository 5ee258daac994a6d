"""`generate`: answer one prompt and report what it took."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..cli import Console, Interrupted, Outcome
from ..config import DEFAULT_MAX_TOKENS, DEFAULT_PENALTY_CONTEXT, NEUTRAL, DFlashConfig, SamplingParams
from ..errors import BadValue, Cancelled, EmptyPrompt, NotFound, UsageError
from ..models.embedded import EMBEDDED

if TYPE_CHECKING:
    from ..events import Source
    from ..result import GenerationResult
    from ..runtime import DFlashRuntime


def generate(
    console: Console,
    *,
    prompt: str | None = None,
    model: str = EMBEDDED,
    draft: str | None = None,
    prompt_file: str | None = None,
    messages_file: str | None = None,
    system: str | None = None,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    eos: bool = True,
    stop: list[str] = (),
    chat_template: bool = True,
    chat_template_args: str = "{}",
    max_ctx: int | None = None,
    block_size: int | None = None,
    exact: bool = False,
    mode: Literal["dflash", "lookup", "baseline"] = "dflash",
    lookup: bool = True,
    draft_bits: Literal["auto", "none", 8, 4] = "auto",
    save_draft: Path | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    penalty_context: int = DEFAULT_PENALTY_CONTEXT,
    logit_bias: str = "{}",
    seed: int | None = None,
    model_defaults: bool = False,
    acceptance: Literal["matching", "residual"] = "matching",
    tokens: bool = False,
    revision: str | None = None,
    draft_revision: str | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
) -> Outcome:
    """Answer a prompt, with a draft that makes it faster and leaves the answer as it is.

    Examples:
      generate.py "Explain how rainbows form."
      generate.py --model Qwen/Qwen3-4B --prompt-file question.txt --format json
      git diff | generate.py --prompt - --system "Summarise this change."

    Args:
      prompt: the question; - reads it from standard input
      model: hub name, folder, .gguf file, or the embedded pair
      draft: hub name or folder; without it the registry decides
      prompt_file: read the prompt from a file
      messages_file: a JSON list of {role, content} messages, in place of a prompt
      system: text of a system message put first
      max_tokens: most tokens of the answer
      eos: --no-eos goes on after the model's end token
      stop: text that ends the answer
      chat_template: --no-chat-template feeds the text as it is
      chat_template_args: JSON object for the template, e.g. '{"enable_thinking": false}'
      max_ctx: most tokens, prompt and answer together
      block_size: tokens checked per cycle, 1 to the draft's own (lookup: to 32)
      exact: decide near-ties as plain decoding does, in low precision too
      mode: lookup copies earlier text, baseline does not even that
      lookup: --no-lookup leaves all proposals to the draft
      draft_bits: pack the draft (auto: if memory is short)
      save_draft: folder to make and keep the packed draft in
      temperature: 0, the default, takes the likeliest token; above it tokens are drawn
      top_p: draw from the likeliest tokens with this probability together
      top_k: draw from this many of the likeliest tokens
      min_p: draw from tokens with this share of the likeliest one's probability
      repetition_penalty: divides logits of recent tokens; 1 is none
      presence_penalty: lowers logits of recent tokens
      frequency_penalty: lowers them once per occurrence
      penalty_context: how many tokens are recent
      logit_bias: JSON object of token ids and numbers added to their logits
      seed: of the random numbers; without one, one is drawn and reported
      model_defaults: settings not given come from the model's generation_config.json
      acceptance: which proposals stand when tokens are drawn
      tokens: put the token ids into the result
      revision: branch, tag or commit of the model on the hub
      draft_revision: the same for the draft
      offline: use only what is on this machine
      cache_dir: where downloads and conversions go
    """
    given = dict(locals())
    question = _question(prompt, prompt_file, messages_file, system)
    arguments = _json_object("--chat-template-args", chat_template_args)
    if draft is not None and mode != "dflash":
        raise UsageError(f"--draft has no use in --mode {mode}", "leave one of the two out")
    if save_draft is not None and (mode != "dflash" or not isinstance(draft_bits, int)):
        raise UsageError("--save-draft writes a packed draft", "add --draft-bits 8 or 4")
    config = DFlashConfig(draft_block_size=block_size, **_named(DFlashConfig, given))
    bias = _json_object("--logit-bias", logit_bias)
    texts = {"stop": tuple(stop), "ignore_eos": not eos, "logit_bias": bias}
    params = SamplingParams(**_named(SamplingParams, given) | texts)

    from ..runtime import DFlashRuntime  # imports MLX: only once the call is known to be right

    runtime = DFlashRuntime.from_pretrained(model, draft, config, progress=console.progress)
    request = {"use_chat_template": chat_template, "chat_template_args": arguments, "params": params}
    result, status = _run(console, runtime, question, request)
    for notice in result.notices:
        console.warn(notice.code, notice.message)
    return Outcome(
        schema="dflash.generate/1",
        result=envelope(runtime, result, with_tokens=tokens),
        summary=summary(result),
        exit_status=status,
    )


def _run(
    console: Console, runtime: DFlashRuntime, question: Any, request: dict[str, Any]
) -> tuple[GenerationResult, int]:
    """Generate, showing pieces and events as they come. An interruption keeps what there is."""
    from ..result import ResultFold

    fold, status = ResultFold(), 0
    try:
        for event in runtime.events(question, **request):
            fold.push(event)
            _show(console, event)
    except Interrupted as stop:
        if not fold.tokens:
            raise Cancelled("interrupted before the first token", stop.signal_number) from stop
        status = 128 + stop.signal_number
    return fold.result(), status


def _show(console: Console, event: Any) -> None:
    from ..events import Cycle, Prefilled, Prefilling, Text

    match event:
        case Text(piece):
            console.piece(piece)
            console.event("text", text=piece)
        case Prefilling(done, total):
            console.event("prefilling", done_tokens=done, total_tokens=total)
        case Prefilled(count, _, seconds):
            console.event("prefilled", prompt_tokens=count, seconds=round(seconds, 4))
        case Cycle(kept, drafted, accepted, width, seconds, source):
            console.event(
                "cycle",
                tokens=len(kept),
                drafted=drafted,
                accepted=accepted,
                width=width,
                source=source if drafted else None,
                seconds=round(seconds, 5),
            )


def envelope(runtime: DFlashRuntime, result: GenerationResult, *, with_tokens: bool) -> dict[str, Any]:
    """The `result` object of `dflash.generate/1`."""
    import mlx.core as mx

    return {
        "text": result.text,
        **({"tokens": list(result.tokens)} if with_tokens else {}),
        "finish_reason": result.finish_reason,
        "mode": result.mode,
        "model": runtime.model,
        "draft": runtime.draft_name,
        "draft_weights": runtime.draft and {"bits": runtime.draft_bits, "reason": runtime.draft_reason},
        "sampling": sampling(result.params),
        "usage": {"prompt_tokens": result.prompt_tokens, "completion_tokens": len(result.tokens)},
        "speed": {
            "prefill_s": round(result.prefill_seconds, 4),
            "decode_s": round(result.decode_seconds, 4),
            "tokens_per_s": round(result.tokens_per_second, 3),
            "prompt_tokens_per_s": round(result.prompt_tokens_per_second, 3),
        },
        "speculation": {
            "block_size": runtime.block_size,
            "cycles": result.cycles,
            "accepted_length": round(result.accepted_length, 4),
            "acceptance_rate": round(result.acceptance_rate, 4),
            "drafted_tokens": result.drafted_tokens,
            "near_ties": result.near_ties,
            "exact": runtime.config.exact,
            "proposals": {source: _proposals(result, source) for source in ("dflash", "lookup")},
            "width_histogram": {str(width): count for width, count in result.width_histogram.items()},
        },
        "memory": {"peak_bytes": mx.get_peak_memory()},
    }


def _proposals(result: GenerationResult, source: Source) -> dict[str, int]:
    """What one source proposed, and what of it is part of the answer, in tokens."""
    made = result.proposals.get(source)
    return {"drafted": made.drafted if made else 0, "accepted": made.accepted if made else 0}


def sampling(params: SamplingParams) -> dict[str, Any]:
    """The settings that a request ran with, as JSON values."""
    return {
        **{name: getattr(params, name) for name in NEUTRAL},
        "penalty_context": params.penalty_context,
        "logit_bias": {str(token): value for token, value in params.logit_bias.items()},
        "seed": params.seed,
    }


def summary(result: GenerationResult) -> str:
    """The line a person sees under the text."""
    line = f"{len(result.tokens)} tokens, {result.tokens_per_second:.1f}/s, {result.mode}"
    if result.mode != "baseline":
        line += f", {result.accepted_length:.2f} tokens per cycle"
    if result.params.temperature:
        line += f", seed {result.params.seed}"
    return f"{line}, finished by {result.finish_reason}"


def _named(settings: type, given: dict[str, Any]) -> dict[str, Any]:
    """Of the flags of a call, those that are called like a field of the dataclass `settings`."""
    return {name: value for name, value in given.items() if name in settings.__dataclass_fields__}


def _question(
    prompt: str | None, prompt_file: str | None, messages_file: str | None, system: str | None
) -> str | list[dict[str, Any]]:
    """Text or messages, from whichever one source was named."""
    named = {"--prompt": prompt, "--prompt-file": prompt_file, "--messages-file": messages_file}
    given = [flag for flag, value in named.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", "give one of them")
    if not given:
        raise EmptyPrompt("no prompt was given")
    if messages_file is not None:
        messages = _messages(messages_file)
        return [{"role": "system", "content": system}, *messages] if system is not None else messages
    text = _stdin() if prompt == "-" else _read(prompt_file) if prompt_file is not None else prompt
    if not text.strip():
        raise EmptyPrompt(f"the text of {given[0]} is empty")
    if any("\ud800" <= character <= "\udfff" for character in text):  # how bytes that are no text arrive
        raise BadValue(f"the text of {given[0]} is not UTF-8", "give it as UTF-8, or through --prompt-file")
    if system is None:
        return text
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _messages(file: str) -> list[dict[str, Any]]:
    try:
        messages = json.loads(_read(file))
    except json.JSONDecodeError as error:
        raise BadValue(f"{_where(file)} is not valid JSON: {error}") from error
    if not isinstance(messages, list):
        raise BadValue(f"{_where(file)} must hold a JSON list of messages, not a {type(messages).__name__}")
    return messages


def _read(file: str) -> str:
    if file == "-":
        return _stdin()
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadValue(f"{_where(file)} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise NotFound(f"cannot read {_where(file)}: {error.strerror}") from error


def _stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise EmptyPrompt("- reads the prompt from standard input, but nothing is piped in")
    return sys.stdin.buffer.read().decode("utf-8", errors="replace")


def _where(file: str) -> str:
    return "standard input" if file == "-" else str(Path(file).expanduser().absolute())


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadValue(f"{flag} takes a JSON object, not {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise BadValue(f"{flag} takes a JSON object, not a JSON {type(value).__name__}")
    return value
