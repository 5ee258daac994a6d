"""`benchmark`: this engine against mlx-lm's own decoding, on the user's pair and machine; and what belongs to that."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from ..bench import prompts as texts
from ..bench import schema  # noqa: F401  (registers the shapes of the results)
from ..bench.compare import compare as compared
from ..bench.settings import (
    DEFAULT_CONTEXTS,
    DEFAULT_LENGTHS,
    DEFAULT_PER_KIND,
    DEFAULT_REPEATS,
    BenchSettings,
    counts,
)
from ..cli import Console, Outcome
from ..cli.report import writable
from ..config import at_least
from ..errors import UsageError
from ..models.embedded import EMBEDDED
from ..models.store import cache_root


def benchmark(
    console: Console,
    *,
    model: str = EMBEDDED,
    draft: str | None = None,
    mode: Literal["dflash", "lookup"] = "dflash",
    block_size: int | None = None,
    lookup: bool = True,
    exact: bool = False,
    kinds: str | None = None,
    per_kind: int = DEFAULT_PER_KIND,
    prompts: Path | None = None,
    lengths: str = DEFAULT_LENGTHS,
    eos: bool = True,
    repeats: int = DEFAULT_REPEATS,
    cooldown_s: float = 0.0,
    max_ctx: int | None = None,
    report: Path | None = None,
    replay: str | None = None,
    replay_draft_ms: float | None = None,
    shape: str | None = None,
    contexts: str = DEFAULT_CONTEXTS,
    compare: list[Path] = (),
    curve: bool = False,
    clear_curves: bool = False,
    offline: bool = False,
    cache_dir: Path | None = None,
) -> Outcome:
    """Measure how much faster answers come than with mlx-lm alone: same weights, same prompts, in turn.

    Examples:
      benchmark.py --report report.html --output result.json
      benchmark.py --kinds code,edit --lengths 128,512,2048 --repeats 5 --cooldown-s 20
      benchmark.py --compare before.json after.json

    Args:
      model: hub name, folder, .gguf file, or the embedded pair
      draft: hub name or folder; without it the registry decides
      mode: lookup copies earlier text and needs no draft
      block_size: tokens checked per cycle; without it the width follows measured cost
      lookup: --no-lookup leaves all proposals to the draft
      exact: run near-ties of low precision again, as plain decoding does
      kinds: of text, as code,math; all are chat,code,math,edit,tools
      per_kind: most prompts of each kind
      prompts: a JSON list of {prompt, kind} in place of the package's own
      lengths: most tokens of an answer, as 128,512,2048
      eos: --no-eos goes on after the model's end token
      repeats: of every run; figures are medians
      cooldown_s: rest before every answer
      max_ctx: most tokens, prompt and answer together
      report: write an HTML page with plots to this file
      replay: propose the target's own tokens, accepted as 6 or 8,2,5 say
      replay_draft_ms: what a replayed proposal costs, in place of a draft's pass
      shape: replay on random weights; qwen3-8b, qwen3.5-9b or qwen3.5-tiny
      contexts: prompt lengths for --shape
      compare: two results written by --output
      curve: show what passes cost here, as kept from earlier runs
      clear_curves: remove what --curve shows
      offline: use only what is on this machine
      cache_dir: where downloads and curves are kept
    """
    given = dict(locals())
    if other := _other_job(given):
        return other
    settings = BenchSettings(
        **{name: given[name] for name in given.keys() & BenchSettings.__dataclass_fields__.keys()}
        | {"lengths": counts("--lengths", lengths), "contexts": counts("--contexts", contexts)}
    )
    return _measured(console, _Call(settings, **{name: given[name] for name in _Call.flags}))


@dataclass(frozen=True)
class _Call:
    """The flags that settings do not have."""

    settings: BenchSettings
    model: str
    draft: str | None
    kinds: str | None
    per_kind: int
    prompts: Path | None
    report: Path | None
    offline: bool
    cache_dir: Path | None

    flags = ("model", "draft", "kinds", "per_kind", "prompts", "report", "offline", "cache_dir")

    def __post_init__(self) -> None:
        at_least("per_kind", self.per_kind, 1)
        if self.draft is not None and self.settings.mode != "dflash":
            raise UsageError("--draft has no use in --mode lookup", "leave one of the two out")
        named = [f"--{name}" for name in ("draft", "kinds", "prompts") if getattr(self, name) is not None]
        named += ["--model"] if self.model != EMBEDDED else []
        if self.settings.shape is not None and named:
            raise UsageError(f"--shape has no use for {named[0]}: its weights and prompts are random")

    def texts(self) -> list[texts.BenchPrompt]:
        own = texts.shipped() if self.prompts is None else texts.from_file(self.prompts)
        return texts.chosen(own, self.kinds, self.per_kind)


def _other_job(given: dict[str, Any]) -> Outcome | None:
    """The outcome of a call that measures no speed; None for one that does."""
    jobs = {
        "--compare": bool(given["compare"]),
        "--curve": given["curve"],
        "--clear-curves": given["clear_curves"],
    }
    asked = [flag for flag, wanted in jobs.items() if wanted]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} exclude each other", "give one of them")
    match asked:
        case ["--compare"]:
            return _comparison(given["compare"])
        case ["--curve"]:
            return _curves(given["cache_dir"])
        case ["--clear-curves"]:
            return _cleared(given["cache_dir"])
    return None


def _comparison(files: list[Path]) -> Outcome:
    if len(files) != 2:
        raise UsageError(f"--compare takes two files, not {len(files)}", "write --compare A.json B.json")
    result = compared(*files)
    overall = result["ratio"]
    text = f"b over a: {overall['ratio_of_ratios']:.3f} (speed ratios {overall['a']:.3f} -> {overall['b']:.3f})\n"
    groups = result["by_kind"] | {
        f"{length} tokens": change for length, change in result["by_length"].items()
    }
    text += "".join(f"  {name:14} {change['ratio_of_ratios']:.3f}\n" for name, change in groups.items())
    text += "".join(f"  {one['what']}: {one['a']} -> {one['b']}\n" for one in result["differences"])
    return Outcome("dflash.benchmark-comparison/1", result, text=text)


def _curves(cache_dir: Path | None) -> Outcome:
    from .. import curves
    from ..bench.session import curve_ms

    found = []
    for file, curve in curves.saved(cache_root(cache_dir)):
        written = datetime.fromtimestamp(file.stat().st_mtime, timezone.utc).isoformat(timespec="seconds")
        found.append({"pair": curve.pair, "file": file.name, "time_utc": written, **curve_ms(curve)})
    lines = [
        f"{one['pair']}  {one['file']}  {one['time_utc']}\n  verify ms by width: {_pairs(one['verify_ms'])}\n"
        f"  draft ms by proposals: {_pairs(one['draft_ms'])}\n"
        for one in found
    ]
    result = {"folder": str(cache_root(cache_dir) / "curves"), "curves": found, "removed": 0}
    return Outcome("dflash.cost-curves/1", result, text="".join(lines) or "no curves are kept\n")


def _cleared(cache_dir: Path | None) -> Outcome:
    from .. import curves

    removed = curves.clear(cache_root(cache_dir))
    result = {"folder": str(cache_root(cache_dir) / "curves"), "curves": [], "removed": removed}
    return Outcome("dflash.cost-curves/1", result, text=f"{removed} curves removed\n")


def _pairs(points: dict[str, float]) -> str:
    return ", ".join(f"{at}: {value:g}" for at, value in points.items())


def _measured(console: Console, call: _Call) -> Outcome:
    asked = call.texts() if call.settings.shape is None else []
    report = call.report and writable(call.report)

    from ..bench import session  # imports MLX: only once the call is known to be right

    settings = call.settings
    if settings.shape is not None:
        bench = session.on_shape(settings)
    else:
        places = {"offline": call.offline, "cache_dir": call.cache_dir}
        bench = session.on_pair(settings, asked, call.model, call.draft, progress=console.progress, **places)

    def tell(run: dict[str, Any], number: int, most: int) -> None:
        console.event("run", **run)
        console.note(
            f"{number}/{most} {run['id']} {run['tokens']} tokens: {run['ratio']['median']:.3f} times "
            f"({run['dflash']['tokens_per_s']['median']:.1f} against "
            f"{run['baseline']['tokens_per_s']['median']:.1f} tokens/s)"
        )

    result, status = session.measure(bench, settings, tell)
    _warn(console, result)
    if report is not None:
        from ..bench.report import page

        report.write_text(page(result), encoding="utf-8")
        result["report"] = str(report)
    return Outcome(
        "dflash.benchmark/1", result, summary=summary(result), text=table(result), exit_status=status
    )


def _warn(console: Console, result: dict[str, Any]) -> None:
    tokens, replay = result["summary"]["tokens"], result["replay"]
    if replay is not None:
        console.warn("replay", replay["note"])
    elif tokens["verdict"] != "equal":
        console.warn(
            "tokens_differ" if tokens["verdict"] == "differs" else "near_ties",
            f"{tokens['different_runs']} of {len(result['runs'])} answers part from the baseline's; at the first "
            f"difference the baseline's two likeliest tokens are up to {tokens['largest_margin']:g} apart",
        )
    for left in result["left_out"]:
        console.warn("left_out", f"{left['id']} at {left['length']} tokens: {left['reason']}")
    if not result["complete"]:
        console.warn("incomplete", "interrupted: the figures are of the runs that were over")


def summary(result: dict[str, Any]) -> str:
    """The line a person sees last."""
    ratio = result["summary"]["ratio"]
    label = "REPLAY, no speed of answers: " if result["replay"] else ""
    return (
        f"{label}{ratio['mean']:.3f} times {result['baseline']} on average ({ratio['min']:.3f} at least, "
        f"{ratio['count']} runs), tokens: {result['summary']['tokens']['verdict']}"
    )


def table(result: dict[str, Any]) -> str:
    """Ratios by kind and length, for people."""
    found = result["summary"]
    rows = {**found["by_kind"], **{f"{length} tokens": group for length, group in found["by_length"].items()}}
    lines = [f"{'':14} {'ratio':>7} {'least':>7} {'tokens/s':>9} {'mlx-lm':>9} {'per cycle':>9}"]
    for name, group in rows.items():
        ratio = group["ratio"]
        lines.append(
            f"{name:14} {ratio['mean']:7.3f} {ratio['min']:7.3f} {group['dflash_tokens_per_s']['mean']:9.1f} "
            f"{group['baseline_tokens_per_s']['mean']:9.1f} {group['accepted_length']['mean']:9.2f}"
        )
    return "\n".join(lines) + "\n"
