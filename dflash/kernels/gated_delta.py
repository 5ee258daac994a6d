"""The gated delta rule with an innovation tape, and the replay of a tape.

Per head and step, with state S (dv, dk), decay g, gate beta, unit-length q and k:

    S <- g S;   delta = beta (v - S k);   S <- S + delta k^T;   y = S q

`forward_with_tape` runs up to `MAX_TAPE_STEPS` steps and keeps delta, k and g: per step and layer Hv * dv fp32 values
plus references to k and g, which exist anyway. `replay` redoes only S <- g S + delta k^T for the first steps, so a
rejected tail is undone without projections, queries or values. State arithmetic is fp32 throughout and in the same
order everywhere: on every back end `replay(tape, S, n)` is, bit for bit, the state after running n steps alone.

One warp (32 lanes) owns one row of one head's state and keeps it in registers over all steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .device import LANES, backend, device_int, kernel

MAX_TAPE_STEPS = 32
_ROWS_PER_GROUP = 4  # warps in a thread group; divides every head size in use


@dataclass(frozen=True)
class Tape:
    """What `replay` needs of a block of n steps.

    Attributes:
        innovation: (B, n, Hv, dv), fp32, beta (v - S k).
        k: (B, n, Hk, dk) as it went in.
        g: (B, n, Hv), or (B, n, Hv, dk) where every key channel decays by itself.
    """

    innovation: mx.array
    k: mx.array
    g: mx.array


def forward_with_tape(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array, Tape]:
    """Run a block.

    Args:
        q, k: (B, n, Hk, dk), normalised, the readout scale folded into q. Each key head serves Hv / Hk value heads.
        v: (B, n, Hv, dv).
        g: (B, n, Hv) or (B, n, Hv, dk), in (0, 1].
        beta: (B, n, Hv).
        state: (B, Hv, dv, dk), fp32.

    Returns:
        y (B, n, Hv, dv) in v's dtype, the new state, and the tape.
    """
    if on := _backend_for(k):
        y, after, innovation = _launch_forward(on, q, k, v, g, beta, state, taped=True)
    else:
        y, after, innovation = reference_forward(q, k, v, g, beta, state)
    return y, after, Tape(innovation, k, g)


def prefill(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """As `forward_with_tape` for any number of steps, without a tape."""
    if on := _backend_for(k):
        y, after = _launch_forward(on, q, k, v, g, beta, state, taped=False)
        return y, after
    return reference_forward(q, k, v, g, beta, state)[:2]


def replay(tape: Tape, state: mx.array, keep: int) -> mx.array:
    """The state after the first `keep` steps of the taped block that began at `state`."""
    if on := _backend_for(tape.k):
        return _launch_replay(on, tape, state, keep)
    return reference_replay(tape, state, keep)


# ---------------------------------------------------------------- the definition, in mlx ops


def reference_forward(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Outputs (B, n, Hv, dv), new state, innovations (B, n, Hv, dv). Vectorised over batch, heads and channels."""
    queries, keys, decays = _per_head(q, v), _per_head(k, v), _decays(g)
    values, gates = v.astype(mx.float32), beta.astype(mx.float32)[..., None]
    outputs, innovations = [], []
    for step in range(v.shape[1]):
        key = keys[:, step, :, None]  # (B, Hv, 1, dk)
        state = state * decays[:, step]
        delta = gates[:, step] * (values[:, step] - (state * key).sum(axis=-1))  # (B, Hv, dv)
        state = state + delta[..., None] * key
        outputs.append((state * queries[:, step, :, None]).sum(axis=-1))
        innovations.append(delta)
    return mx.stack(outputs, axis=1).astype(v.dtype), state, mx.stack(innovations, axis=1)


def reference_replay(tape: Tape, state: mx.array, keep: int) -> mx.array:
    keys, decays = _per_head(tape.k, tape.innovation), _decays(tape.g)
    for step in range(keep):
        state = state * decays[:, step]
        state = state + tape.innovation[:, step, ..., None] * keys[:, step, :, None]
    return state


def _per_head(x: mx.array, like: mx.array) -> mx.array:
    """(B, n, Hk, dk) -> fp32 (B, n, Hv, dk): each key head repeated for its value heads."""
    return mx.repeat(x.astype(mx.float32), like.shape[2] // x.shape[2], axis=2)


def _decays(g: mx.array) -> mx.array:
    """(B, n, Hv) or (B, n, Hv, dk) -> fp32, to be multiplied with (B, n, Hv, dv, dk)."""
    g = g.astype(mx.float32)
    return g[..., None, None] if g.ndim == 3 else g[..., None, :]


# ---------------------------------------------------------------- kernels

# Template: HK, HV, DK, DV, PER (state values per lane), VECTOR (decay per channel), OutT.
FORWARD = """
    const int steps = count[0];
    const int batch = head / HV, hv = head % HV, hk = hv / (HV / HK);
    const int first = (head * DV + row) * DK + lane;
    float s[PER];
    float key[PER];
    for (int i = 0; i < PER; ++i) s[i] = state[first + i * 32];
    for (int t = 0; t < steps; ++t) {
      const int step = batch * steps + t;
      const int at = step * HV + hv;
      const int from = (step * HK + hk) * DK + lane;
      float seen = 0.0f;
      for (int i = 0; i < PER; ++i) {
        const float decay = static_cast<float>(VECTOR ? g[at * DK + lane + i * 32] : g[at]);
        key[i] = static_cast<float>(k[from + i * 32]);
        s[i] = s[i] * decay;
        seen = FMA(s[i], key[i], seen);
      }
      seen = SUM_LANES(seen);
      const float delta = static_cast<float>(beta[at]) * (static_cast<float>(v[at * DV + row]) - seen);
      float out = 0.0f;
      for (int i = 0; i < PER; ++i) {
        s[i] = FMA(delta, key[i], s[i]);
        out = FMA(s[i], static_cast<float>(q[from + i * 32]), out);
      }
      out = SUM_LANES(out);
      if (lane == 0) {
        y[at * DV + row] = static_cast<OutT>(out);
        RECORD(at * DV + row, delta);
      }
    }
    for (int i = 0; i < PER; ++i) after[first + i * 32] = s[i];
"""

REPLAY = """
    const int kept = keep[0];
    const int steps = count[0];
    const int batch = head / HV, hv = head % HV, hk = hv / (HV / HK);
    const int first = (head * DV + row) * DK + lane;
    float s[PER];
    for (int i = 0; i < PER; ++i) s[i] = state[first + i * 32];
    for (int t = 0; t < kept; ++t) {
      const int step = batch * steps + t;
      const int at = step * HV + hv;
      const int from = (step * HK + hk) * DK + lane;
      const float delta = innovation[at * DV + row];
      for (int i = 0; i < PER; ++i) {
        const float decay = static_cast<float>(VECTOR ? g[at * DK + lane + i * 32] : g[at]);
        s[i] = s[i] * decay;
        s[i] = FMA(delta, static_cast<float>(k[from + i * 32]), s[i]);
      }
    }
    for (int i = 0; i < PER; ++i) after[first + i * 32] = s[i];
"""

FORWARD_INPUTS = ("q", "k", "v", "g", "beta", "state", "count")
REPLAY_INPUTS = ("innovation", "k", "g", "state", "count", "keep")
RECORD = "#define RECORD(index, delta) innovation[index] = delta\n"
NO_RECORD = "#define RECORD(index, delta)\n"


def template(k: mx.array, v: mx.array, g: mx.array) -> list[tuple[str, int]]:
    """Compile-time constants of both kernels, from (B, n, Hk, dk), (B, n, Hv, dv) and the decays."""
    return [
        ("HK", k.shape[2]),
        ("HV", v.shape[2]),
        ("DK", k.shape[3]),
        ("DV", v.shape[3]),
        ("PER", k.shape[3] // LANES),
        ("VECTOR", int(g.ndim == 4)),
    ]


def grid(v: mx.array) -> dict[str, tuple[int, int, int]]:
    """One warp per row of each head's state."""
    batch, _, heads, rows = v.shape
    return {"grid": (LANES, rows, batch * heads), "threadgroup": (LANES, _ROWS_PER_GROUP, 1)}


def _backend_for(k: mx.array) -> str | None:
    """The back end whose kernel takes keys of this size; rows of a state must fill whole warps."""
    return backend() if k.shape[-1] % LANES == 0 else None


def _launch_forward(
    on: str,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    *,
    taped: bool,
) -> list[mx.array]:
    outputs = [("y", v.shape, v.dtype), ("after", state.shape, mx.float32)]
    if taped:
        outputs.append(("innovation", v.shape, mx.float32))
    names, shapes, dtypes = zip(*outputs, strict=True)
    name = "dflash_gated_delta_taped" if taped else "dflash_gated_delta"
    run = kernel(on, name, FORWARD_INPUTS, names, FORWARD, RECORD if taped else NO_RECORD)
    return run(
        inputs=[q, k, v, g, beta, state, device_int(v.shape[1])],
        template=[*template(k, v, g), ("OutT", v.dtype)],
        **grid(v),
        output_shapes=list(shapes),
        output_dtypes=list(dtypes),
    )


def _launch_replay(on: str, tape: Tape, state: mx.array, keep: int) -> mx.array:
    run = kernel(on, "dflash_gated_delta_replay", REPLAY_INPUTS, ("after",), REPLAY)
    values = tape.innovation
    (after,) = run(
        inputs=[values, tape.k, tape.g, state, device_int(values.shape[1]), device_int(keep)],
        template=template(tape.k, values, tape.g),
        **grid(values),
        output_shapes=[state.shape],
        output_dtypes=[mx.float32],
    )
    return after
