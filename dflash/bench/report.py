"""A benchmark's result as one HTML page that needs nothing else: no script, no network, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import documents
from .numbers import share
from .plots import Bar, Series, bars, lines

Run = dict[str, Any]
_POINTS = 32  # of a curve along an answer, as `numbers.along` makes it


def page(result: dict[str, Any]) -> str:
    """The page for a result of `dflash.benchmark/1`."""
    runs = result["runs"]
    plots = [
        _ratios(result, "kind", "Speed by kind of text"),
        _ratios(result, "length", "Speed by answer length"),
        _speeds(result),
        _positions(runs),
        *_widths(runs),
        _costs(result),
    ]
    return documents.render(
        "report.html.j2", result=result, plots=[plot for plot in plots if plot], facts=_facts(result)
    )


def _plot(
    title: str, about: str, svg: str, head: Sequence[str], rows: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    return {"title": title, "about": about, "svg": svg, "head": head, "rows": rows}


def _ratios(result: dict[str, Any], group: str, title: str) -> dict[str, Any]:
    """Bars of the speed ratio, with a dot for each run."""
    found = result["summary"][f"by_{group}"]
    suffix = "" if group == "kind" else " tokens"
    rows = [
        Bar(
            name + suffix,
            entry["ratio"]["mean"],
            [run["ratio"]["median"] for run in result["runs"] if str(run[group]) == name],
        )
        for name, entry in found.items()
    ]
    said = "; ".join(f"{row.label} {row.value:.2f}" for row in rows)
    about = (
        f"Times as fast as {result['baseline']}: bars are means, dots single prompts, the line is 1. {said}."
    )
    table = [
        (
            row.label,
            f"{row.value:.3f}",
            f"{entry['ratio']['min']:.3f}",
            f"{entry['dflash_tokens_per_s']['mean']:.1f}",
            f"{entry['baseline_tokens_per_s']['mean']:.1f}",
            f"{entry['accepted_length']['mean']:.2f}",
        )
        for row, entry in zip(rows, found.values(), strict=True)
    ]
    head = (group, "mean ratio", "least ratio", "tokens/s", "baseline tokens/s", "accepted length")
    return _plot(
        title, about, bars(title, about, rows, "times the baseline's tokens per second", 1.0), head, table
    )


def _speeds(result: dict[str, Any]) -> dict[str, Any] | None:
    """Tokens per second of both by length, where there is more than one."""
    found = result["summary"]["by_length"]
    if len(found) < 2:
        return None
    ours = [(int(length), entry["dflash_tokens_per_s"]["mean"]) for length, entry in found.items()]
    stock = [(int(length), entry["baseline_tokens_per_s"]["mean"]) for length, entry in found.items()]
    title, about = (
        "Tokens per second by answer length",
        "Means over all prompts, of this engine and of the baseline.",
    )
    series = [Series("dflash", ours), Series(result["baseline"], stock)]
    svg = lines(title, about, series, across="most tokens of the answer", up="tokens per second", even=True)
    rows = [(at, f"{speed:.1f}", f"{other:.1f}") for (at, speed), (_, other) in zip(ours, stock, strict=True)]
    return _plot(title, about, svg, ("length", "dflash", "baseline"), rows)


def pooled_positions(runs: Sequence[Run], source: str) -> list[tuple[int, float, float]]:
    """Over all runs: (position, share that stood where reached, share of all cycles in which it stood)."""
    reached: dict[int, int] = {}
    stood: dict[int, int] = {}
    for run in runs:
        for slot in run["speculation"]["by_position"][source]:
            reached[slot["position"]] = reached.get(slot["position"], 0) + slot["reached"]
            stood[slot["position"]] = stood.get(slot["position"], 0) + slot["stood"]
    return [(at, share(stood[at], reached[at]), share(stood[at], reached[1])) for at in sorted(reached)]


def _positions(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Acceptance by position in the block, of the draft and of copies."""
    series, rows = [], []
    for source, name in (("dflash", "draft"), ("lookup", "copies")):
        if found := pooled_positions(runs, source):
            series.append(Series(f"{name}, where reached", [(at, part) for at, part, _ in found]))
            series.append(Series(f"{name}, of all cycles", [(at, part) for at, _, part in found]))
            rows += [(name, at, f"{one:.3f}", f"{other:.3f}") for at, one, other in found]
    if not series:
        return None
    title = "Acceptance by position"
    about = (
        "How often the first, second, ... proposed token of a cycle was right, over all runs: where all before it "
        "were, and of all cycles."
    )
    svg = lines(title, about, series, across="position after the anchor", up="share accepted", most=1.0)
    return _plot(title, about, svg, ("source", "position", "where reached", "of all cycles"), rows)


def _widths(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Width and yield along the answer, one plot a kind, of the longest answers."""
    longest = max(run["length"] for run in runs)
    plots = []
    for kind in dict.fromkeys(run["kind"] for run in runs):
        along = [
            run["speculation"]["along"] for run in runs if run["kind"] == kind and run["length"] == longest
        ]
        if not any(along):
            continue
        rows = pooled_along(along)
        title = f"Width over time: {kind}"
        about = f"Tokens verified and gained per pass along answers of up to {longest} tokens, means of {len(along)}."
        series = [
            Series("width", [(at, width) for at, width, _ in rows]),
            Series("tokens per cycle", [(at, gained) for at, _, gained in rows]),
        ]
        svg = lines(
            title, about, series, across="tokens of the answer so far", up="tokens per pass", height=220
        )
        shown = [(at, f"{width:.2f}", f"{gained:.2f}") for at, width, gained in rows]
        plots.append(_plot(title, about, svg, ("token", "width", "tokens per cycle"), shown))
    return plots


def pooled_along(curves: Sequence[Sequence[dict[str, float]]]) -> list[tuple[float, float, float]]:
    """Curves along answers as one: (token, mean width, mean tokens per cycle), in stretches as fine as the coarsest."""
    stretch = max(1.0, max(curve[-1]["token"] for curve in curves if curve) / (_POINTS - 1))
    bins: dict[int, list[dict[str, float]]] = {}
    for curve in curves:
        for point in curve:
            bins.setdefault(int(point["token"] / stretch), []).append(point)
    return [
        (round(_mean(found, "token")), _mean(found, "width"), _mean(found, "tokens_per_cycle"))
        for _, found in sorted(bins.items())
    ]


def _mean(found: Sequence[dict[str, float]], name: str) -> float:
    return sum(one[name] for one in found) / len(found)


def _costs(result: dict[str, Any]) -> dict[str, Any] | None:
    """The cost curve that the width followed."""
    if result["curve"] is None:
        return None
    points = [(int(width), ms) for width, ms in result["curve"]["verify_ms"].items()]
    title, about = (
        "Cost of a pass",
        "Milliseconds of a target pass by its width, as measured once on this machine.",
    )
    svg = lines(title, about, [Series("target pass", points)], across="width in tokens", up="milliseconds")
    return _plot(title, about, svg, ("width", "milliseconds"), [(at, f"{ms:g}") for at, ms in points])


def _facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The environment and what ran, line by line."""
    where, settings = result["environment"], result["settings"]
    width = settings["block_size"] or "follows measured cost"
    dtype = where["dtype"] + (", packed weights" if where["quantised"] else "")
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    return [
        ("Model", result["model"]),
        ("Draft", result["draft"] or "none"),
        ("Baseline", result["baseline"]),
        (
            "Mode",
            settings["mode"]
            + ("" if settings["lookup"] else ", without copies")
            + (", exact" if settings["exact"] else ""),
        ),
        ("Width", str(width)),
        ("Lengths", ", ".join(map(str, settings["lengths"]))),
        ("Repeats", f"{settings['repeats']}, in turn, {settings['cooldown_s']:g} s of rest between"),
        ("Measured", f"{where['time_utc']}, {result['measured_s']:.0f} s"),
        ("Device", f"{where['device']}{', ' + where['gpu'] if where['gpu'] else ''}"),
        ("Processor", f"{where['processor']}, {where['cores']} cores, {where['machine']}"),
        ("Memory", f"{where['memory_bytes'] / 2**30:.1f} GiB"),
        ("System", f"{where['system']}, Python {where['python']}"),
        ("BLAS", where["blas"]),
        ("Weights", f"{dtype}, {where['weight_bytes'] / 2**30:.2f} GiB"),
        ("Versions", versions),
        ("Load average", f"{where['load_average']} before, {where['load_average_after']} after"),
    ]
