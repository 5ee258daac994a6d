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
from mlx_lm.models import gated_delta as stock

from .device import LANES, backend, device_floats, device_ints, kernel

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


@dataclass(frozen=True)
class Start:
    """Where a block begins: at `state`, or after the first `keep` steps of `tape`, which itself began at `state`.

    A kernel replays the kept steps on its way in, so that rolling back launches nothing of its own.
    """

    state: mx.array  # (B, Hv, dv, dk), fp32
    tape: Tape | None = None
    keep: int = 0


@dataclass(frozen=True)
class Mixed:
    """What a block leaves: outputs y (B, n, Hv, dv), the states before (`base`) and `after` it, its tape."""

    y: mx.array
    base: mx.array
    after: mx.array
    tape: Tape | None


@dataclass(frozen=True)
class Sizes:
    """Heads of a linear layer: `key_heads` of `dk` channels, `value_heads` of `dv`."""

    key_heads: int
    value_heads: int
    dk: int
    dv: int


@dataclass(frozen=True)
class Gates:
    """A linear layer's parameters: `a_log`, `dt_bias` (Hv,), and the epsilon added to the mean square of q and k."""

    a_log: mx.array
    dt_bias: mx.array
    norm_eps: float


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


def mix(
    mixed: mx.array,
    a: mx.array,
    b: mx.array,
    gates: Gates,
    sizes: Sizes,
    start: Start,
    *,
    taped: bool = True,
) -> Mixed:
    """A layer's whole recurrence from its convolution's output: normalise q and k, make the gates, run.

    Args:
        mixed: (B, n, 2 Hk dk + Hv dv), q, k and v side by side.
        a, b: (B, n, Hv), what the decay and the gate are made from.
        gates: the layer's own parameters; sizes: of its heads.
        start: the state to begin at, or how to come to it.
        taped: without a tape any number of steps runs.
    """
    if on := backend() if sizes.dk % LANES == 0 else None:
        return _launch_mix(on, mixed, a, b, gates, sizes, start, taped=taped)
    base = start.state if start.tape is None else replay(start.tape, start.state, start.keep)
    inputs = prepare(mixed, a, b, gates, sizes)
    if taped:
        y, after, tape = forward_with_tape(*inputs, base)
        return Mixed(y, base, after, tape)
    y, after = prefill(*inputs, base)
    return Mixed(y, base, after, None)


def prepare(
    mixed: mx.array, a: mx.array, b: mx.array, gates: Gates, sizes: Sizes
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    """What `mix` makes of a convolution's output, in mlx ops: q, k, v, g and beta as the recurrence takes them."""
    rows, split = mixed.shape[:2], sizes.key_heads * sizes.dk
    q, k, v = mx.split(mixed, [split, 2 * split], axis=-1)
    q, k = (x.reshape(*rows, sizes.key_heads, sizes.dk) for x in (q, k))
    scale = sizes.dk**-0.5
    q = scale**2 * mx.fast.rms_norm(q, None, gates.norm_eps)
    k = scale * mx.fast.rms_norm(k, None, gates.norm_eps)
    decay = stock.compute_g(gates.a_log, a, gates.dt_bias)
    return q, k, v.reshape(*rows, sizes.value_heads, sizes.dv), decay, mx.sigmoid(b)


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
        # As products of matrices, S k and S q read the state once and make no copy of its size.
        seen = (state @ key.swapaxes(-1, -2))[..., 0]  # (B, Hv, dv)
        delta = gates[:, step] * (values[:, step] - seen)
        state = state + delta[..., None] * key
        outputs.append((state @ queries[:, step, ..., None])[..., 0])
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

# Bodies are put together from parts, so that the recurrence itself is written once. Template: HK, HV, DK, DV, PER
# (state values per lane), VECTOR (decay per channel), InT, OutT.
_PLACE = """
    const int batch = head / HV, hv = head % HV, hk = hv / (HV / HK);
    const int first = (head * DV + row) * DK + lane;
    float s[PER];
    for (int i = 0; i < PER; ++i) s[i] = state[first + i * 32];
"""
_BEGIN = """
    const int steps = count[0];
    float key[PER], query[PER], decay[PER];
    for (int t = 0; t < steps; ++t) {
      const int step = batch * steps + t;
      const int at = step * HV + hv;
"""
_LOAD = """
      const int from = (step * HK + hk) * DK + lane;
      for (int i = 0; i < PER; ++i) {
        decay[i] = static_cast<float>(VECTOR ? g[at * DK + lane + i * 32] : g[at]);
        key[i] = static_cast<float>(k[from + i * 32]);
        query[i] = static_cast<float>(q[from + i * 32]);
      }
      const float gate = static_cast<float>(beta[at]);
      const float value = static_cast<float>(v[at * DV + row]);
"""
# Straight from a layer's convolution: normalises and gates here, rounding to InT wherever mlx-lm's arrays do.
_LOAD_MIXED = """
      const int from = step * (2 * HK * DK + HV * DV) + hk * DK + lane;
      float qq = 0.0f, kk = 0.0f;
      for (int i = 0; i < PER; ++i) {
        query[i] = static_cast<float>(mixed[from + i * 32]);
        key[i] = static_cast<float>(mixed[from + HK * DK + i * 32]);
        qq = FMA(query[i], query[i], qq);
        kk = FMA(key[i], key[i], kk);
      }
      qq = RSQRT(SUM_LANES(qq) / DK + norm[0]);
      kk = RSQRT(SUM_LANES(kk) / DK + norm[0]);
      const float shifted = ROUNDED(static_cast<float>(a[at]) + static_cast<float>(dt_bias[hv]));
      const float rate = ROUNDED((shifted > 0.0f ? shifted : 0.0f) + LOG(1.0f + EXP(-ABS(shifted))));
      const float decayed = ROUNDED(EXP(-EXP(static_cast<float>(a_log[hv])) * rate));
      const float gate = ROUNDED(1.0f / (1.0f + EXP(-static_cast<float>(b[at]))));
      const float value = static_cast<float>(mixed[step * (2 * HK * DK + HV * DV) + 2 * HK * DK + hv * DV + row]);
      for (int i = 0; i < PER; ++i) {
        query[i] = ROUNDED(ROUNDED(query[i] * qq) * norm[1]);
        key[i] = ROUNDED(ROUNDED(key[i] * kk) * norm[2]);
        decay[i] = decayed;
        if (row == 0 && hv % (HV / HK) == 0) k[(step * HK + hk) * DK + lane + i * 32] = static_cast<InT>(key[i]);
      }
      if (row == 0 && lane == 0) g[at] = static_cast<InT>(decayed);
"""
_STEP = """
      float seen = 0.0f;
      for (int i = 0; i < PER; ++i) {
        s[i] = s[i] * decay[i];
        seen = FMA(s[i], key[i], seen);
      }
      const float delta = gate * (value - SUM_LANES(seen));
      float out = 0.0f;
      for (int i = 0; i < PER; ++i) {
        s[i] = FMA(delta, key[i], s[i]);
        out = FMA(s[i], query[i], out);
      }
      out = SUM_LANES(out);
      if (lane == 0) {
        y[at * DV + row] = static_cast<OutT>(out);
        RECORD(at * DV + row, delta);
      }
    }
    for (int i = 0; i < PER; ++i) after[first + i * 32] = s[i];
"""
# The first `taped[1]` of `taped[0]` steps of an earlier block; the state they end in is `base`.
_REPLAY = """
    for (int t = 0; t < taped[1]; ++t) {
      const int step = batch * taped[0] + t;
      const int at = step * HV + hv;
      const int from = (step * HK + hk) * DK + lane;
      const float delta = tape_innovation[at * DV + row];
      for (int i = 0; i < PER; ++i) {
        const float decay = static_cast<float>(VECTOR ? tape_g[at * DK + lane + i * 32] : tape_g[at]);
        s[i] = s[i] * decay;
        s[i] = FMA(delta, static_cast<float>(tape_k[from + i * 32]), s[i]);
      }
    }
    for (int i = 0; i < PER; ++i) base[first + i * 32] = s[i];
"""
FORWARD = _PLACE + _BEGIN + _LOAD + _STEP
MIX = _PLACE + _BEGIN + _LOAD_MIXED + _STEP
RESUMED_MIX = _PLACE + _REPLAY + _BEGIN + _LOAD_MIXED + _STEP
REPLAY = _PLACE + _REPLAY

MIX_INPUTS = ("mixed", "a", "b", "a_log", "dt_bias", "state", "count", "norm")
FORWARD_INPUTS = ("q", "k", "v", "g", "beta", "state", "count")
TAPE_INPUTS = ("tape_innovation", "tape_k", "tape_g", "taped")
REPLAY_INPUTS = ("state", *TAPE_INPUTS)
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
        inputs=[q, k, v, g, beta, state, device_ints(v.shape[1])],
        template=[*template(k, v, g), ("OutT", v.dtype)],
        **grid(v),
        output_shapes=list(shapes),
        output_dtypes=list(dtypes),
    )


def _launch_mix(
    on: str,
    mixed: mx.array,
    a: mx.array,
    b: mx.array,
    gates: Gates,
    sizes: Sizes,
    start: Start,
    *,
    taped: bool,
) -> Mixed:
    batch, steps = mixed.shape[:2]
    resumed = start.tape is not None
    outputs = mix_outputs(mixed, sizes, start, taped)
    name = f"dflash_gated_delta_mix{'_taped' * taped}{'_resumed' * resumed}"
    names = MIX_INPUTS + (TAPE_INPUTS if resumed else ())
    body, header = RESUMED_MIX if resumed else MIX, RECORD if taped else NO_RECORD
    values = [mixed, a, b, gates.a_log, gates.dt_bias, start.state, device_ints(steps)]
    values += [norm_constants(gates, sizes), *(tape_inputs(start.tape, start.keep) if resumed else ())]
    written = kernel(on, name, names, tuple(outputs), body, header)(
        inputs=values,
        template=mix_template(mixed, sizes),
        grid=(LANES, sizes.dv, batch * sizes.value_heads),
        threadgroup=(LANES, _ROWS_PER_GROUP, 1),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
    )
    out = dict(zip(outputs, written, strict=True))
    tape = Tape(out["innovation"], out["k"], out["g"]) if taped else None
    return Mixed(out["y"], out.get("base", start.state), out["after"], tape)


def tape_inputs(tape: Tape, keep: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """In the order of `TAPE_INPUTS`."""
    return tape.innovation, tape.k, tape.g, device_ints(tape.innovation.shape[1], keep)


def mix_outputs(
    mixed: mx.array, sizes: Sizes, start: Start, taped: bool
) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
    """Names, shapes and dtypes of what the kernel writes."""
    rows, value = mixed.shape[:2], (*mixed.shape[:2], sizes.value_heads, sizes.dv)
    outputs = {
        "y": (value, mixed.dtype),
        "after": (start.state.shape, mx.float32),
        "k": ((*rows, sizes.key_heads, sizes.dk), mixed.dtype),
        "g": ((*rows, sizes.value_heads), mixed.dtype),
    }
    if start.tape is not None:
        outputs["base"] = (start.state.shape, mx.float32)
    return outputs | ({"innovation": (value, mx.float32)} if taped else {})


def mix_template(mixed: mx.array, sizes: Sizes) -> list[tuple[str, int | mx.Dtype]]:
    heads = [("HK", sizes.key_heads), ("HV", sizes.value_heads), ("DK", sizes.dk), ("DV", sizes.dv)]
    return [*heads, ("PER", sizes.dk // LANES), ("VECTOR", 0), ("InT", mixed.dtype), ("OutT", mixed.dtype)]


def norm_constants(gates: Gates, sizes: Sizes) -> mx.array:
    """Epsilon, and the factors of normalised queries and keys."""
    return device_floats(gates.norm_eps, sizes.dk**-1.0, sizes.dk**-0.5)


def _launch_replay(on: str, tape: Tape, state: mx.array, keep: int) -> mx.array:
    run = kernel(on, "dflash_gated_delta_replay", REPLAY_INPUTS, ("base",), REPLAY)
    (base,) = run(
        inputs=[state, *tape_inputs(tape, keep)],
        template=template(tape.k, tape.innovation, tape.g),
        **grid(tape.innovation),
        output_shapes=[state.shape],
        output_dtypes=[mx.float32],
    )
    return base
