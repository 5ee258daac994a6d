"""Two ways to decode the same prompt, timed in turn: mlx-lm's own stream and this engine. Same weights, one process.

A contender answers a `Task` and says what it took (`Timed`). What it took is turned into figures elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, stream_generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..config import DFlashConfig
from ..errors import ContextExceeded
from ..events import Cycle, Notice, Prefilled
from ..models.loading import LoadedTarget
from ..runtime import DFlashRuntime
from .prompts import BenchPrompt

_WARM_UP_TOKENS = 16
_NO_TOKEN = -1


@dataclass(frozen=True)
class Task:
    """One prompt to answer with at most `length` tokens. `text` is None where the ids are no text."""

    id: str
    kind: str
    ids: list[int]
    length: int
    text: str | None = None


@dataclass(frozen=True)
class Timed:
    """One answer, and what it took.

    Attributes:
        tokens: ids, the end token included.
        prefill_s, decode_s: until the first token, and from it to the last, as the receiver saw them come.
        cycles: of this engine; empty for another.
        gaps_s: for each cycle, the time from the event before it.
        peak_bytes: most memory at once, weights included.
        notices: what the engine had to say.
    """

    tokens: tuple[int, ...]
    prefill_s: float
    decode_s: float
    peak_bytes: int
    cycles: tuple[Cycle, ...] = ()
    gaps_s: tuple[float, ...] = ()
    notices: tuple[Notice, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, over the time after the first; 0 for an answer of one token."""
        return (len(self.tokens) - 1) / self.decode_s if self.decode_s > 0 else 0.0


Contender = Callable[[Task], Timed]


@dataclass(frozen=True)
class Race:
    """Both contenders' answers to one task, repeat by repeat."""

    task: Task
    baseline: tuple[Timed, ...]
    dflash: tuple[Timed, ...]

    @property
    def ratios(self) -> list[float]:
        """Speed of this engine over the baseline's, of each repeat."""
        return [
            ours.tokens_per_s / stock.tokens_per_s
            for stock, ours in zip(self.baseline, self.dflash, strict=True)
        ]

    @property
    def ended(self) -> bool:
        """Whether the answer ended by itself, so that a longer one would be the same."""
        return len(self.baseline[0].tokens) < self.task.length


def start_alike() -> None:
    """Give back buffers that another contender left behind, and count peak memory anew."""
    mx.clear_cache()
    mx.reset_peak_memory()


class Stock:
    """`mlx_lm.stream_generate`, greedy."""

    name = "mlx_lm.stream_generate"

    def __init__(self, target: LoadedTarget, *, eos: bool):
        ends = target.end_tokens if eos else {_NO_TOKEN}
        self._model = target.model
        self._tokenizer = TokenizerWrapper(target.tokenizer._tokenizer, eos_token_ids=ends)

    def __call__(self, task: Task) -> Timed:
        start_alike()
        tokens, times = [], [time.perf_counter()]
        for answer in stream_generate(self._model, self._tokenizer, task.ids, max_tokens=task.length):
            tokens.append(int(answer.token))
            times.append(time.perf_counter())
        return Timed(tuple(tokens), times[1] - times[0], times[-1] - times[1], mx.get_peak_memory())


class StockSteps:
    """`mlx_lm.generate_step`, greedy, without text or an end: for replays, and targets without a tokenizer."""

    name = "mlx_lm.generate_step"

    def __init__(self, model: nn.Module):
        self._model = model

    def __call__(self, task: Task) -> Timed:
        start_alike()
        tokens, times = [], [time.perf_counter()]
        for token, _ in generate_step(mx.array(task.ids), self._model, max_tokens=task.length):
            tokens.append(int(token))
            times.append(time.perf_counter())
        return Timed(tuple(tokens), times[1] - times[0], times[-1] - times[1], mx.get_peak_memory())


def top_two_margin(model: nn.Module, ids: list[int]) -> float:
    """How far apart, in logits, mlx-lm finds the two likeliest tokens after `ids`."""
    _, scores = next(iter(generate_step(mx.array(ids), model, max_tokens=1)))
    best = mx.sort(scores.reshape(-1).astype(mx.float32))[-2:]
    return (best[1] - best[0]).item()


class Engine:
    """This engine, greedy, with its text stream."""

    def __init__(self, runtime: DFlashRuntime, *, eos: bool):
        self._runtime = runtime
        self._eos = eos

    def __call__(self, task: Task) -> Timed:
        return collect(
            self._runtime.events(task.text, max_tokens=task.length, temperature=0.0, ignore_eos=not self._eos)
        )


def collect(events: Iterable[object]) -> Timed:
    """Consume a request's events and time them."""
    start_alike()
    tokens: list[int] = []
    cycles, gaps, notices = [], [], []
    began = last = first = time.perf_counter()
    for event in events:
        match event:
            case Prefilled(token=token):
                tokens.append(token)
                first = last = time.perf_counter()
            case Cycle():
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
                cycles.append(event)
                tokens.extend(event.tokens)
            case Notice():
                notices.append(event)
    return Timed(
        tuple(tokens),
        first - began,
        last - first,
        mx.get_peak_memory(),
        tuple(cycles),
        tuple(gaps),
        tuple(notices),
    )


def tasks(
    runtime: DFlashRuntime, prompts: list[BenchPrompt], lengths: list[int]
) -> tuple[list[Task], list[dict[str, object]]]:
    """Every prompt at every length, and those left out because the context does not hold them.

    Raises:
        ContextExceeded: none is left.
    """
    limit = context_limit(runtime.config, runtime.target)
    fitting, left_out = [], []
    for prompt in prompts:
        ids = runtime.encode(prompt.text)
        for length in lengths:
            if limit is not None and len(ids) + length > limit:
                reason = f"{len(ids)} + {length} tokens are more than the context of {limit}"
                left_out.append({"id": prompt.id, "length": length, "reason": reason})
            else:
                fitting.append(Task(prompt.id, prompt.kind, ids, length, prompt.text))
    if not fitting:
        raise ContextExceeded(
            f"no prompt fits: {left_out[0]['reason']}",
            "ask for shorter answers (--lengths) or a larger --max-ctx",
        )
    return fitting, left_out


def context_limit(config: DFlashConfig, target: LoadedTarget) -> int | None:
    """Most tokens of prompt and answer, None if nothing limits them."""
    return min((x for x in (config.max_ctx, target.adapter.max_context) if x), default=None)


def warm_up(task: Task, contenders: Iterable[Contender]) -> None:
    """A short answer by each, untimed: kernels are compiled and costs measured before the first race."""
    short = Task(task.id, task.kind, task.ids, min(task.length, _WARM_UP_TOKENS), task.text)
    for contender in contenders:
        contender(short)


def races(
    todo: Iterable[Task], baseline: Contender, dflash: Contender, *, repeats: int, cooldown_s: float
) -> Iterator[Race]:
    """Run them all, who begins in turn. Answers that ended by themselves are not run again at greater lengths.

    A rest of `cooldown_s` seconds stands before every answer but the first: devices that are hot run slower.
    """
    ended: set[str] = set()
    turn = 0
    for task in todo:
        if task.id in ended:
            continue
        found: dict[bool, list[Timed]] = {True: [], False: []}
        for _ in range(repeats):
            for stock in (True, False) if turn % 2 else (False, True):
                if cooldown_s and (turn or found[True] or found[False]):
                    time.sleep(cooldown_s)
                found[stock].append((baseline if stock else dflash)(task))
            turn += 1
        race = Race(task, tuple(found[True]), tuple(found[False]))
        if race.ended:
            ended.add(task.id)
        yield race
