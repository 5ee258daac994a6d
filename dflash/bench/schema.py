"""The published shapes of the benchmark's results. Imported by its command, so that they are registered. No MLX."""

from __future__ import annotations

from typing import Any

from .. import contract
from ..contract import COUNT, NUMBER, SHARE, TEXT, nullable, object_of


def _list_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


def _map_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": schema}


_FLAG = {"type": "boolean"}
_COUNTS = _list_of(COUNT)
_SPREAD = object_of({"median": NUMBER, "min": NUMBER, "max": NUMBER, "values": _list_of(NUMBER)})
_CENTRE = object_of({"mean": NUMBER, "median": NUMBER, "min": NUMBER, "count": COUNT})
_TOOK = object_of({"tokens_per_s": _SPREAD, "decode_s": _SPREAD, "prefill_s": _SPREAD, "peak_bytes": COUNT})
_SLOTS = _list_of(object_of({"position": COUNT, "reached": COUNT, "stood": COUNT, "share": SHARE}))
_SPECULATION = object_of(
    {
        "cycles": COUNT,
        "accepted_length": NUMBER,
        "acceptance_rate": SHARE,
        "drafted_tokens": COUNT,
        "accepted_tokens": COUNT,
        "near_ties": COUNT,
        "width_histogram": _map_of(COUNT),
        "by_position": object_of({"dflash": _SLOTS, "lookup": _SLOTS}),
        "along": _list_of(object_of({"token": COUNT, "width": NUMBER, "tokens_per_cycle": NUMBER})),
    }
)
_DIFFERENCE = object_of(
    {"index": COUNT, "baseline": nullable(COUNT), "dflash": nullable(COUNT), "margin": NUMBER}
)
_RUN = object_of(
    {
        "id": TEXT,
        "kind": TEXT,
        "length": COUNT,
        "prompt_tokens": COUNT,
        "tokens": COUNT,
        "ended": _FLAG,
        "ratio": _SPREAD,
        "dflash": _TOOK,
        "baseline": _TOOK,
        "mode": {"enum": ["dflash", "lookup", "baseline"]},
        "speculation": _SPECULATION,
        "first_difference": nullable(_DIFFERENCE),
    }
)
_GROUP = {
    "ratio": _CENTRE,
    "accepted_length": _CENTRE,
    "dflash_tokens_per_s": _CENTRE,
    "baseline_tokens_per_s": _CENTRE,
}
_SUMMARY = object_of(
    {
        **_GROUP,
        "below_one": COUNT,
        "by_kind": _map_of(object_of(_GROUP)),
        "by_length": _map_of(object_of(_GROUP)),
        "tokens": object_of(
            {
                "verdict": {"enum": ["equal", "near_ties", "differs"]},
                "equal_runs": COUNT,
                "different_runs": COUNT,
                "near_tie_below": NUMBER,
                "largest_margin": nullable(NUMBER),
            }
        ),
    }
)
_ENVIRONMENT = object_of(
    {
        "time_utc": TEXT,
        "machine": TEXT,
        "system": TEXT,
        "processor": TEXT,
        "cores": COUNT,
        "memory_bytes": COUNT,
        "device": {"enum": ["cpu", "gpu"]},
        "gpu": nullable(TEXT),
        "blas": TEXT,
        "load_average": nullable(NUMBER),
        "load_average_after": nullable(NUMBER),
        "python": TEXT,
        "versions": _map_of(nullable(TEXT)),
        "dtype": TEXT,
        "quantised": _FLAG,
        "weight_bytes": COUNT,
    }
)
_SETTINGS = object_of(
    {
        "mode": {"enum": ["dflash", "lookup"]},
        "block_size": nullable(COUNT),
        "lookup": _FLAG,
        "exact": _FLAG,
        "lengths": _COUNTS,
        "repeats": COUNT,
        "cooldown_s": NUMBER,
        "eos": _FLAG,
        "max_ctx": nullable(COUNT),
        "replay": nullable(TEXT),
        "replay_draft_ms": nullable(NUMBER),
        "shape": nullable(TEXT),
        "contexts": _COUNTS,
    }
)
_REPLAY = object_of(
    {
        "accepted_lengths": _COUNTS,
        "draft_cost": TEXT,
        "plain_tokens_per_s": _CENTRE,
        "ratio_to_plain": _CENTRE,
        "agreement": SHARE,
        "note": TEXT,
    }
)
_EFFICIENCY = object_of(
    {
        "width": COUNT,
        "context": COUNT,
        "cycles": COUNT,
        "cycle_s": NUMBER,
        "verify_s": NUMBER,
        "draft_s": NUMBER,
        "ratio": NUMBER,
    }
)
_CURVE = {"verify_ms": _map_of(NUMBER), "draft_ms": _map_of(NUMBER), "tie_margin": NUMBER}
_BENCHMARK = object_of(
    {
        "replay": nullable(_REPLAY),
        "complete": _FLAG,
        "summary": _SUMMARY,
        "model": TEXT,
        "draft": nullable(TEXT),
        "baseline": TEXT,
        "settings": _SETTINGS,
        "runs": _list_of(_RUN),
        "left_out": _list_of(object_of({"id": TEXT, "length": COUNT, "reason": TEXT})),
        "cycle_efficiency": nullable(_EFFICIENCY),
        "curve": nullable(object_of(_CURVE)),
        "environment": _ENVIRONMENT,
        "measured_s": NUMBER,
        "report": nullable(TEXT),
    }
)
_CHANGE = object_of({"ratio_of_ratios": NUMBER, "a": NUMBER, "b": NUMBER})
_COMPARISON = object_of(
    {
        "a": TEXT,
        "b": TEXT,
        "ratio": _CHANGE,
        "by_kind": _map_of(_CHANGE),
        "by_length": _map_of(_CHANGE),
        "by_run": _list_of(
            object_of({"id": TEXT, "length": COUNT, "ratio_of_ratios": NUMBER, "a": NUMBER, "b": NUMBER})
        ),
        "only_in_a": _list_of(TEXT),
        "only_in_b": _list_of(TEXT),
        "differences": _list_of(object_of({"what": TEXT, "a": {}, "b": {}})),
    }
)
_CURVES = object_of(
    {
        "folder": TEXT,
        "curves": _list_of(object_of({"pair": TEXT, "file": TEXT, "time_utc": TEXT, **_CURVE})),
        "removed": COUNT,
    }
)
contract.register("dflash.benchmark/1", _BENCHMARK)
contract.register("dflash.benchmark-comparison/1", _COMPARISON)
contract.register("dflash.cost-curves/1", _CURVES)
