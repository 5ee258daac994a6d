"""`DFlashRuntime`: loaded parts wired to the loop. It has no policy of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from . import blas, curves
from .config import NEUTRAL, DFlashConfig, SamplingParams
from .decoding.acceptance import rule_for
from .decoding.loop import decode
from .decoding.proposing import CPU_COSTS, GPU_COSTS, LOOKUP_WIDTH, Costs, DraftOnly, Proposing, WithLookup
from .decoding.state import DecodeState
from .decoding.stopping import StopTexts
from .decoding.width import AdaptiveWidth, FixedWidth, WidthPolicy
from .drafts.base import Draft
from .drafts.lookup import Lookup
from .errors import BadCheckpoint, BadValue, ContextExceeded, EmptyPrompt, UnsupportedModel
from .events import Cycle, Event, Finished, Notice, Prefilled, Started, Text
from .models import sources
from .models.draft_bits import check_place, running_bits
from .models.fitting import fit
from .models.loading import LoadedTarget, load_draft, load_target
from .models.registry import lookup
from .models.store import cache_root, say
from .result import GenerationResult, ResultFold
from .text.detokenize import TextStream
from .text.template import Message, chat_ids, text_ids

Prompt = str | Sequence[Message]


class DFlashRuntime:
    """A target, its draft, and how they run. One generation at a time; requests share only weights.

    Attributes:
        model, draft_name: what was loaded, as the user named it or as the registry resolved it.
        draft_reason: why the draft's weights run in the width that they have; None without a draft.
        block_size: most tokens verified in a cycle, anchor included; 1 without a draft.
        measured: what passes of this pair cost on this machine.
        notices: what the loading had to say; every request's events begin with them.
    """

    def __init__(
        self,
        target: LoadedTarget,
        draft: Draft | None = None,
        config: DFlashConfig | None = None,
        *,
        model: str = "",
        draft_name: str | None = None,
        draft_reason: str = "as it was loaded",
        notices: tuple[Notice, ...] = (),
        curve_file: Path | None = None,
    ):
        self.config = config or DFlashConfig()
        self.target = target
        self.draft = draft if self.config.mode == "dflash" else None
        self.model = model
        self.draft_name = draft_name if self.draft is not None else None
        self.draft_reason = draft_reason if self.draft is not None else None
        copying = self.config.mode == "lookup"
        if copying and target.adapter.max_block == 1:
            raise UnsupportedModel(f"this target cannot verify copies of earlier text: {target.adapter.why}")
        self._copy_width = _copy_width(self.config, target.adapter.max_block)
        drafted = _width(None if copying else self.config.draft_block_size, self.draft)
        self.block_size = self._copy_width if copying else drafted
        self.notices = notices
        widest = max(self.block_size, self._copy_width)
        pair = f"{model} with {self.draft_name}" if self.draft_name else model
        self.measured = curves.Measurements(target.adapter, self.draft, widest, curve_file, pair)

    @classmethod
    def from_pretrained(
        cls,
        model: str = sources.EMBEDDED,
        draft: str | None = None,
        config: DFlashConfig | None = None,
        *,
        progress: bool = False,
    ) -> DFlashRuntime:
        """Find, fetch and load a pair.

        Args:
            model: hub name, folder, GGUF file or the embedded pair's name.
            draft: the same for the draft; None asks the registry. A target that no adapter runs refuses a
                named draft, and goes without one that nobody named.
            config: how to run; modes "lookup" and "baseline" load no draft at all.
            progress: show download progress on stderr.

        Raises:
            DFlashError: with the code that says why (see `dflash.errors`).
        """
        config = config or DFlashConfig()
        where = {"cache_dir": config.cache_dir, "offline": config.offline, "progress": progress}
        drafted, named = config.mode == "dflash", draft is not None
        if config.save_draft is not None:
            check_place(config.save_draft)
        if drafted and draft is None and sources.is_on_the_hub(model):
            draft = lookup(model).draft  # a model without a draft is refused before it is downloaded
        source = sources.locate(model, revision=config.revision, what="model", **where)
        found = None
        if drafted:
            draft = draft or lookup(model).draft
            found = sources.locate(draft, revision=config.draft_revision, what="draft", **where)
        how = fit(source.folder, found and found.folder, context=config.max_ctx, draft_bits=config.draft_bits)
        target = load_target(source.folder, widen=how.widen)
        plainly = None
        if found and not named and target.why_plain:
            plainly = Notice("no_adapter", f"decoding is plain: {target.why_plain}")
            found = None
        bits = config.draft_bits if isinstance(config.draft_bits, int) else how.draft_bits
        packing = {"widen": how.widen, "bits": bits, "save_to": config.save_draft}
        loaded = found and load_draft(found.folder, target.adapter, **packing)
        names = {"model": source.name, "draft_name": found and found.name, "draft_reason": how.draft_reason}
        notices = tuple(notice for notice in (how.notice, _blas_notice(), plainly) if notice)
        file = curves.file_for(cache_root(config.cache_dir), _identity(target, loaded, names))
        runtime = cls(target, loaded, config, **names, notices=notices, curve_file=file)
        runtime.measured.tell = partial(say, progress)
        return runtime

    @property
    def draft_bits(self) -> int | None:
        """Bits of one weight of the draft's linear layers, as they run; None without a draft."""
        return None if self.draft is None else running_bits(self.draft)

    def generate(self, prompt: Prompt, **options: Any) -> GenerationResult:
        """The whole answer to `prompt`. Takes what `events` takes."""
        fold = ResultFold()
        for event in self.events(prompt, **options):
            fold.push(event)
        return fold.result()

    def stream_generate(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """The answer in pieces, each as soon as it is verified; joined they are `generate`'s text."""
        for event in self.events(prompt, **options):
            if isinstance(event, Text):
                yield event.piece

    def events(
        self,
        prompt: Prompt,
        *,
        use_chat_template: bool = True,
        chat_template_args: dict[str, Any] | None = None,
        params: SamplingParams | None = None,
        **settings: Any,
    ) -> Iterator[Event]:
        """Everything that happens while answering `prompt`.

        Args:
            prompt: text (one user message), or a list of {role, content} messages.
            use_chat_template: False feeds the text to the model as it is.
            chat_template_args: passed through to the template, e.g. {"enable_thinking": False}.
            params: or its fields as keywords: max_tokens, stop, temperature, seed, ...

        Raises:
            UsageError: an empty prompt, bad messages or settings.
            ContextExceeded: the prompt leaves no room for an answer.
        """
        params = self._settled(_params(params, settings))
        ids, notices = self._encode(prompt, use_chat_template, chat_template_args or {})
        state, limits = self._open(ids, params)
        return self._run(state, params, [*self.notices, *notices, *limits, *_unused(params)])

    def _settled(self, params: SamplingParams) -> SamplingParams:
        """The settings with none left open, checked against the model."""
        vocab = self.target.adapter.vocab_size
        if beyond := [token for token in params.logit_bias if token >= vocab]:
            raise BadValue(f"logit_bias names token {beyond[0]}, but the model has {vocab} tokens")
        try:
            return params.effective(self.target.generation_defaults)
        except BadValue as error:
            raise BadCheckpoint(
                f"the model's generation_config.json cannot be used: {error.message}",
                "give the setting yourself, or leave the model's defaults out",
            ) from error

    def encode(self, prompt: Prompt, **arguments: Any) -> list[int]:
        """The ids that `prompt` becomes, through the chat template with `arguments`."""
        return self._encode(prompt, True, arguments)[0]

    def _encode(
        self, prompt: Prompt, templated: bool, arguments: dict[str, Any]
    ) -> tuple[list[int], list[Notice]]:
        tokenizer = self.target.tokenizer
        if isinstance(prompt, str) and not prompt.strip():
            raise EmptyPrompt("the prompt is empty")
        if not templated:
            if not isinstance(prompt, str):
                raise BadValue("messages need a chat template", "leave out --no-chat-template")
            return text_ids(tokenizer, prompt), []
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if tokenizer.has_chat_template:
            return chat_ids(tokenizer, messages, arguments), []
        if not isinstance(prompt, str):
            raise BadValue("this model has no chat template, so it takes text, not messages")
        return text_ids(tokenizer, prompt), [
            Notice("no_chat_template", "the model has no chat template; the prompt was used as plain text")
        ]

    def _open(self, ids: list[int], params: SamplingParams) -> tuple[DecodeState, list[Notice]]:
        """A fresh state for one request; nothing of an earlier request is in it."""
        if not ids:
            raise EmptyPrompt("the prompt has no tokens")
        adapter = self.target.adapter
        limit = min((x for x in (self.config.max_ctx, adapter.max_context) if x), default=None)
        budget, notices = params.max_tokens, []
        if limit is not None:
            if len(ids) >= limit:
                raise ContextExceeded(
                    f"the prompt has {len(ids)} tokens, the context holds {limit} with the answer",
                    prompt_tokens=len(ids),
                    context_tokens=limit,
                )
            budget = min(budget, limit - len(ids))
        draft = self.draft
        if draft is not None and len(ids) + 2 > draft.max_context:
            notices.append(
                Notice(
                    "draft_context_limit",
                    f"the prompt has {len(ids)} tokens, the draft was made for {draft.max_context}: "
                    "decoding went without it",
                )
            )
            draft = None
        state = DecodeState(
            target=adapter,
            session=adapter.start(draft.taps if draft else ()),
            drafter=draft.start(adapter) if draft else None,
            prompt=ids,
            budget=budget,
            end_tokens=frozenset() if params.ignore_eos else self.target.end_tokens,
            draft_limit=draft.max_context if draft else 0,
            proposing=self._proposing(ids),
            tie_margin=0.0 if self.block_size < 2 else self.measured.tie_margin,
            exact=self.config.exact,
            rule=rule_for(params, adapter.vocab_size, self.config.acceptance, self.config.proposals),
        )
        return state, notices

    def _run(self, state: DecodeState, params: SamplingParams, notices: list[Notice]) -> Iterator[Event]:
        """The loop's events with the text they make, cut at the first stop text."""
        yield Started(params)
        yield from notices
        text = TextStream(lambda ids: self.target.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        stops = StopTexts(params.stop)
        for event in decode(state, self._policy(), self.config.prefill_chunk):
            match event:
                case Prefilled(token=token):
                    tokens: tuple[int, ...] = (token,)
                case Cycle(tokens=tokens):
                    pass
                case Finished():
                    if piece := stops.push(text.finish()) + stops.finish():
                        yield Text(piece)
                    yield from self._context_notice(state, params, event)
                    yield Finished("stop_string") if stops.hit else event
                    return
                case _:
                    yield event
                    continue
            piece, used = self._shown(tokens, state, text, stops)
            yield replace(event, tokens=tokens[:used]) if isinstance(event, Cycle) else event
            if piece:
                yield Text(piece)
            if stops.hit:
                yield Finished("stop_string")
                return

    @staticmethod
    def _shown(
        tokens: tuple[int, ...], state: DecodeState, text: TextStream, stops: StopTexts
    ) -> tuple[str, int]:
        """The text of `tokens` that may be shown, and how many of them an answer ending here has."""
        piece = ""
        for used, token in enumerate(tokens, start=1):
            if token not in state.end_tokens:
                piece += stops.push(text.push(token))
            if stops.hit:
                return piece, used
        return piece, len(tokens)

    def _context_notice(self, state: DecodeState, params: SamplingParams, end: Finished) -> Iterator[Notice]:
        if end.reason == "length" and state.budget < params.max_tokens:
            total = len(state.prompt) + state.budget
            yield Notice("context_full", f"the answer ended where the context of {total} tokens was full")

    def _proposing(self, prompt: list[int]) -> Proposing:
        """Who proposes, in a request with these ids."""
        copied = self.config.mode == "lookup" or (self.draft is not None and self.config.lookup)
        if not copied or self._copy_width == 1:
            return DraftOnly()
        costs = CPU_COSTS if _on_cpu() else GPU_COSTS
        if self.config.draft_block_size is None:
            costs = Costs.measured(self.measured.curve)
        return WithLookup(Lookup(prompt), costs, self._copy_width)

    def _policy(self) -> WidthPolicy:
        return (
            AdaptiveWidth(self.measured.curve, self.block_size)
            if self._adapts
            else FixedWidth(self.block_size)
        )

    @property
    def _adapts(self) -> bool:
        """Whether the draft's width follows what is observed."""
        return self.draft is not None and self.block_size > 1 and self.config.draft_block_size is None


def _params(params: SamplingParams | None, settings: dict[str, Any]) -> SamplingParams:
    try:
        return replace(params or SamplingParams(), **settings)
    except TypeError as error:
        known = ", ".join(SamplingParams.__dataclass_fields__)
        raise BadValue(f"unknown setting: {error}", f"known settings: {known}") from error


def _unused(params: SamplingParams) -> Iterator[Notice]:
    """A remark where settings of drawing were given to a request that draws nothing."""
    names = ("top_p", "top_k", "min_p")
    if not params.temperature and (given := [n for n in names if getattr(params, n) != NEUTRAL[n]]):
        yield Notice("greedy", f"at temperature 0 {', '.join(given)} changes nothing; set a temperature")


def _width(asked: int | None, draft: Draft | None) -> int:
    """The most that a cycle verifies: what was asked for, checked against the draft, or the draft's own block."""
    if draft is None:
        return 1
    if asked is not None:
        if asked > draft.block_size:
            raise BadValue(f"draft_block_size is {asked}, but this draft was trained for {draft.block_size}")
        return asked
    return draft.block_size


def _identity(target: LoadedTarget, draft: Draft | None, names: dict[str, str | None]) -> dict[str, Any]:
    """What a cost curve belongs to: the pair by name, and what would change its cost under the same name."""
    sizes = {
        name: getattr(target.adapter, name) for name in ("kind", "hidden_size", "num_layers", "vocab_size")
    }
    stored = [
        sum(array.nbytes for _, array in tree_flatten(m.parameters())) for m in (target.model, draft) if m
    ]
    return {
        **names,
        **sizes,
        "block_size": draft.block_size if draft else None,
        "stored_bytes": stored,
        "blas": blas.preload().missing,
    }


def _copy_width(config: DFlashConfig, max_block: int | None) -> int:
    """Most tokens of a cycle with copied text: what was asked for, within what the target can roll back."""
    widest = min(LOOKUP_WIDTH, max_block or LOOKUP_WIDTH)
    asked = config.draft_block_size
    if config.mode == "lookup" and asked is not None and asked > widest:
        raise BadValue(
            f"draft_block_size is {asked}, but copies are verified {widest} tokens at a time at most"
        )
    return min(widest, asked or widest)


def _on_cpu() -> bool:
    return mx.default_device() == mx.Device(mx.cpu)


def _blas_notice() -> Notice | None:
    found = blas.preload()
    return Notice("no_openblas", found.note) if found.missing and _on_cpu() else None
