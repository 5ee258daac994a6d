"""A whole benchmark: contenders on a pair or a shape, every race, and the result of `dflash.benchmark/1`."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..config import DFlashConfig
from ..decoding.costs import CostCurve
from ..drafts.base import Draft
from ..errors import Cancelled, UsageError
from ..models.loading import LoadedTarget
from ..runtime import DFlashRuntime
from . import environment, figures, numbers
from .efficiency import cycle_efficiency
from .prompts import BenchPrompt
from .race import (
    Contender,
    Engine,
    Race,
    Stock,
    StockSteps,
    Task,
    context_limit,
    races,
    tasks,
    top_two_margin,
    warm_up,
)
from .replay import Replay, parse
from .settings import BenchSettings
from .shapes import random_draft
from .verify_cost import build

_REPLAY_WIDTH = 16  # the block of most published drafts, where there is no draft to ask
Tell = Callable[[dict[str, Any], int, int], None]  # a run's record, its number, and the number of tasks


@dataclass
class Bench:
    """Everything that a benchmark needs, loaded.

    Attributes:
        model, draft_name: what runs, for the result.
        todo, left_out: what to answer, and what no context holds.
        replay: the contender `dflash` when it replays.
        curve: costs that the width follows, None where it is fixed.
        tie_margin: logits that a pass's width may change.
    """

    model: str
    draft_name: str | None
    target: LoadedTarget
    draft: Draft | None
    todo: list[Task]
    left_out: list[dict[str, Any]]
    baseline: Stock | StockSteps
    dflash: Contender
    replay: Replay | None = None
    curve: CostCurve | None = None
    tie_margin: float = 0.0


def on_pair(
    settings: BenchSettings,
    prompts: list[BenchPrompt],
    model: str,
    draft: str | None,
    *,
    progress: bool = False,
    **places: Any,
) -> Bench:
    """Load a pair and make its contenders. `places` are further fields of `DFlashConfig`. Raises `DFlashError`."""
    config = DFlashConfig(
        draft_block_size=settings.block_size,
        mode=settings.mode,
        lookup=settings.lookup,
        max_ctx=settings.max_ctx,
        exact=settings.exact,
        **places,
    )
    runtime = DFlashRuntime.from_pretrained(model, draft, config, progress=progress)
    todo, left_out = tasks(runtime, prompts, list(settings.lengths))
    common = (runtime.model, runtime.draft_name, runtime.target)
    if settings.replay is not None:
        return _replaying(settings, *common, runtime.draft, todo, left_out)
    baseline = Stock(runtime.target, eos=settings.eos)
    dflash = Engine(runtime, eos=settings.eos)
    adapts = runtime.block_size > 1 and settings.block_size is None
    curve = runtime.measured.curve if adapts else None
    return Bench(
        *common,
        runtime.draft,
        todo,
        left_out,
        baseline,
        dflash,
        curve=curve,
        tie_margin=runtime.measured.tie_margin,
    )


def on_shape(settings: BenchSettings) -> Bench:
    """A target of a published geometry with random weights, to replay on."""
    model, adapter = build(settings.shape)
    target = LoadedTarget(model, adapter, None, frozenset())
    draft = random_draft(settings.shape) if settings.replay_draft_ms is None else None
    limit = context_limit(DFlashConfig(max_ctx=settings.max_ctx), target)
    draw = random.Random(0)
    todo, left_out = [], []
    for context in settings.contexts:
        ids = [draw.randrange(adapter.vocab_size) for _ in range(context)]
        for length in settings.lengths:
            if limit is not None and context + length > limit:
                reason = f"{context} + {length} tokens are more than the context of {limit}"
                left_out.append({"id": f"random-{context}", "length": length, "reason": reason})
            else:
                todo.append(Task(f"random-{context}", "random", ids, length))
    if not todo:
        raise UsageError(f"nothing fits: {left_out[0]['reason']}", "give smaller --contexts or --lengths")
    names = (f"{settings.shape} (random weights)", draft and f"{settings.shape} draft (random weights)")
    return _replaying(settings, *names, target, draft, todo, left_out)


def _replaying(
    settings: BenchSettings,
    model: str,
    draft_name: str | None,
    target: LoadedTarget,
    draft: Draft | None,
    todo: list[Task],
    left_out: list[dict[str, Any]],
) -> Bench:
    width = settings.block_size or (draft.block_size if draft is not None else _REPLAY_WIDTH)
    paid = draft if settings.replay_draft_ms is None else None
    waited_s = (settings.replay_draft_ms or 0.0) / 1000
    replay = Replay(target.adapter, paid, parse(settings.replay, width), width, waited_s)
    baseline = StockSteps(target.model)
    return Bench(
        model,
        draft_name,
        target,
        paid,
        todo,
        left_out,
        baseline,
        replay,
        replay,
        tie_margin=replay.tie_margin,
    )


def measure(bench: Bench, settings: BenchSettings, tell: Tell) -> tuple[dict[str, Any], int]:
    """Run every race. Returns the result, and 0 or the exit status of an interruption that cut it short.

    Raises:
        Cancelled: interrupted before the first race was over.
    """
    where = environment.describe(bench.target.model)
    margin = partial(top_two_margin, bench.target.model)
    found: list[Race] = []
    runs: list[dict[str, Any]] = []
    status = 0
    began = time.perf_counter()
    try:
        warm_up(bench.todo[0], (bench.baseline, bench.dflash))
        if bench.replay is not None:
            bench.replay.forget()
        for race in races(
            bench.todo,
            bench.baseline,
            bench.dflash,
            repeats=settings.repeats,
            cooldown_s=settings.cooldown_s,
        ):
            if min(len(race.baseline[0].tokens), len(race.dflash[0].tokens)) < 2:
                reason = "the answer has one token: there is no decode speed"
                bench.left_out.append({"id": race.task.id, "length": race.task.length, "reason": reason})
                continue
            found.append(race)
            runs.append(figures.record(race, margin))
            tell(runs[-1], len(runs), len(bench.todo))
    except KeyboardInterrupt as stop:
        number = int(getattr(stop, "signal_number", 2))
        if not runs:
            raise Cancelled("interrupted before the first measurement was over", number) from stop
        status = 128 + number
    if not runs:
        raise UsageError(
            f"nothing was measured: {bench.left_out[0]['reason']}", "ask other prompts, or add --no-eos"
        )
    return _result(bench, settings, where, found, runs, status, time.perf_counter() - began), status


def _result(
    bench: Bench,
    settings: BenchSettings,
    where: dict[str, Any],
    found: list[Race],
    runs: list[dict[str, Any]],
    status: int,
    seconds: float,
) -> dict[str, Any]:
    waited_s = (settings.replay_draft_ms or 0.0) / 1000
    efficiency = None if status else cycle_efficiency(bench.target.adapter, bench.draft, found, waited_s)
    return {
        "replay": _replay(bench, settings, found),
        "complete": status == 0,
        "summary": figures.summary(runs, where["dtype"], bench.tie_margin),
        "model": bench.model,
        "draft": bench.draft_name,
        "baseline": bench.baseline.name,
        "settings": settings.as_json(),
        "runs": runs,
        "left_out": bench.left_out,
        "cycle_efficiency": efficiency,
        "curve": bench.curve and curve_ms(bench.curve),
        "environment": where | {"load_average_after": environment.load_average()},
        "measured_s": round(seconds, 3),
        "report": None,
    }


def _replay(bench: Bench, settings: BenchSettings, found: list[Race]) -> dict[str, Any] | None:
    """What makes this a replay and no measurement of answers; None where it is one."""
    if bench.replay is None:
        return None
    if bench.draft is not None:
        cost = f"a real pass of {bench.draft_name}, its tokens put aside"
    else:
        cost = f"no draft pass; the host waits {settings.replay_draft_ms or 0:g} ms per proposal"
    return {
        "accepted_lengths": [int(word) for word in settings.replay.split(",")],
        "draft_cost": cost,
        "plain_tokens_per_s": numbers.centre([bench.replay.plain(race.task).tokens_per_s for race in found]),
        "ratio_to_plain": numbers.centre([_over_plain(bench.replay, race) for race in found]),
        "agreement": round(sum(bench.replay.agreements) / len(bench.replay.agreements), 4),
        "note": (
            "replayed proposals with a given acceptance: this measures the engine's cost, not the speed of answers"
        ),
    }


def _over_plain(replay: Replay, race: Race) -> float:
    """The replay's speed over that of this engine's own plain decoding, which was timed once."""
    return statistics.median(one.tokens_per_s for one in race.dflash) / replay.plain(race.task).tokens_per_s


def curve_ms(curve: CostCurve) -> dict[str, Any]:
    """Milliseconds of a verify pass by width, and of a draft pass by proposals; the tie margin in logits."""
    return {
        "verify_ms": {str(width): round(seconds * 1000, 3) for width, seconds in curve.verify_s},
        "draft_ms": {str(count): round(seconds * 1000, 3) for count, seconds in curve.draft_s},
        "tie_margin": round(curve.tie_margin, 6),
    }
