"""Attention of a few query rows over a long context, reading each key and value once for many rows.

In a verify pass every query head has `width` rows, and the G query heads of one key-value head share its keys: G *
width rows against the same memory. The stock kernels read keys once per head or leave most of the device idle when
there are so few rows. Here a thread group takes up to 64 rows of one key-value head and one *split* of the context;
each of its warps holds 16 rows in matrix-unit tiles; a second pass merges the splits. Sums and softmax are fp32.

    split pass: (rows, split) -> unnormalised output, running maximum and sum
    merge pass: output = sum_s e^(m_s - m) o_s / sum_s e^(m_s - m) l_s

Rows are causal among themselves: row w of `width` sees the context and the block up to itself. `reference` is the
stock attention, the definition; `kernels/measured.py` decides where the kernel is used.
"""

from __future__ import annotations

import mlx.core as mx

from .device import LANES, backend, device_ints, kernel

ROWS_PER_WARP = 16
MAX_WARPS = 4  # 64 rows: more would not fit the registers beside the output tiles
_GROUPS_IN_FLIGHT = 264  # twice the multiprocessors of the largest GPU at hand; more splits only cost merging
_LEAST_KEYS_PER_SPLIT = 128
_NEVER = -1.0e30  # a score that loses to every real one, finite so that differences stay numbers


def reference(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, total: int) -> mx.array:
    """The definition: stock attention over the first `total` positions, causal within the last `n`."""
    return mx.fast.scaled_dot_product_attention(
        queries, keys[..., :total, :], values[..., :total, :], scale=scale, mask="causal"
    )


def supports(head_dim: int, width: int, dtype: mx.Dtype) -> bool:
    """Whether a kernel exists for these sizes on this device: matrix units, half types, whole tiles."""
    sized = head_dim in (64, 128, 256) and 2 <= width <= 32
    return sized and dtype in (mx.float16, mx.bfloat16) and backend() is not None


def verify_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, total: int
) -> mx.array:
    """Attention for a verify block.

    Args:
        queries: (B, Hq, n, D), bf16 or fp16; the last n of `total` positions.
        keys, values: (B, Hkv, capacity, D), whole cache buffers: slices of them would be copied.
        scale: of the scores.
        total: positions in use, the block included.

    Returns:
        (B, Hq, n, D) in the queries' dtype.
    """
    batch, heads, width, dim = queries.shape
    kv_heads, capacity = keys.shape[1:3]
    plan = Plan(batch, heads, kv_heads, width, dim, total, capacity)
    on = backend()
    assert on is not None, "a kernel needs a GPU; see `supports`"
    partial, stats = kernel(on, "dflash_verify_attention", SPLIT_INPUTS, SPLIT_OUTPUTS, SPLIT)(
        inputs=[queries, keys, values, plan.sizes(), mx.array([scale], dtype=mx.float32)],
        template=plan.template(queries.dtype),
        **plan.split_grid(),
        output_shapes=list(plan.partial_shapes()),
        output_dtypes=[mx.float32, mx.float32],
    )
    (out,) = kernel(on, "dflash_merge_attention", MERGE_INPUTS, ("out",), MERGE)(
        inputs=[partial, stats, plan.sizes()],
        template=plan.template(queries.dtype),
        **plan.merge_grid(),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )
    return out


class Plan:
    """How one call is cut into thread groups.

    `rows` query rows per key-value head lie in groups of `warps` tiles; the context lies in `splits` of `per_split`
    positions, a whole number of key blocks.
    """

    def __init__(
        self, batch: int, heads: int, kv_heads: int, width: int, dim: int, total: int, capacity: int
    ):
        self.places = batch * kv_heads
        self.width, self.dim, self.total, self.capacity = width, dim, total, capacity
        self.rows = heads // kv_heads * width
        tiles = -(-self.rows // ROWS_PER_WARP)
        self.groups = -(-tiles // MAX_WARPS)
        self.warps = -(-tiles // self.groups)
        self.block = 32 if dim <= 128 else 16  # keys and values of a block fill at most 17 KB
        wanted = max(1, _GROUPS_IN_FLIGHT // (self.places * self.groups))
        per_split = max(-(-total // wanted), _LEAST_KEYS_PER_SPLIT)
        self.per_split = -(-per_split // self.block) * self.block
        self.splits = -(-total // self.per_split)

    def sizes(self) -> mx.array:
        """Numbers that change from call to call, so that no new kernel is compiled for them."""
        return device_ints(
            self.width, self.rows, self.total, self.capacity, self.per_split, self.splits, self.groups
        )

    def template(self, dtype: mx.Dtype) -> list[tuple[str, int | mx.Dtype]]:
        tiled = [("D", self.dim), ("KEYS", self.block), ("WARPS", self.warps)]
        return [*tiled, ("BF16", int(dtype == mx.bfloat16)), ("InT", dtype)]

    def partial_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rows = (self.places, self.splits, self.rows)
        return (*rows, self.dim), (*rows, 2)

    def split_grid(self) -> dict[str, tuple[int, int, int]]:
        return {
            "grid": (LANES, self.warps * self.splits, self.places * self.groups),
            "threadgroup": (LANES, self.warps, 1),
        }

    def merge_grid(self) -> dict[str, tuple[int, int, int]]:
        return {"grid": (LANES, self.rows, self.places), "threadgroup": (LANES, 1, 1)}


# Template: D, KEYS (positions of a block), WARPS, BF16, InT. A TILE_C holds 16 rows x 8 columns; its lane holds the
# columns COLUMN and COLUMN + 1 of row ROW (LOW) and of row ROW + 8 (HIGH). TILE_A is 16 x 8, TILE_B 8 x 8.
SPLIT_INPUTS = ("q", "k", "v", "sizes", "scale")
SPLIT_OUTPUTS = ("partial", "stats")
SPLIT = f"""
    const int width = sizes[0], rows = sizes[1], total = sizes[2], capacity = sizes[3];
    const int per_split = sizes[4], splits = sizes[5], groups = sizes[6];
    const int warp = row % WARPS, split = row / WARPS;
    const int place = head / groups;
    const int low = (head % groups * WARPS + warp) * 16 + ROW(lane), high = low + 8;
    const int column = COLUMN(lane);
    const int low_row = low < rows ? low : rows - 1, high_row = high < rows ? high : rows - 1;
    const int low_last = total - width + low_row % width, high_last = total - width + high_row % width;
    const int begin = split * per_split;
    const int end = begin + per_split < total ? begin + per_split : total;
    const float by = scale[0] * 1.44269504f;  // scores in powers of two

    constexpr int VECTORS = D / 8, STRIDE = D + 8;  // a padded row keeps lanes off each other's memory banks
    GROUP_ARRAY(uint4, key_store, KEYS * (VECTORS + 1));
    GROUP_ARRAY(uint4, value_store, KEYS * (VECTORS + 1));
    const GROUP_POINTER(InT) keys = reinterpret_cast<const GROUP_POINTER(InT)>(key_store);
    const GROUP_POINTER(InT) values = reinterpret_cast<const GROUP_POINTER(InT)>(value_store);
    const DEVICE_POINTER(uint4) all_keys = reinterpret_cast<const DEVICE_POINTER(uint4)>(k);
    const DEVICE_POINTER(uint4) all_values = reinterpret_cast<const DEVICE_POINTER(uint4)>(v);
    const DEVICE_POINTER(InT) low_query = q + (place * rows + low_row) * D + column;
    const DEVICE_POINTER(InT) high_query = q + (place * rows + high_row) * D + column;

    TILE_C out[D / 8];
    _Pragma("unroll") for (int d = 0; d < D / 8; ++d) CLEAR(out[d]);
    float low_max = {_NEVER}f, high_max = {_NEVER}f, low_sum = 0.0f, high_sum = 0.0f;
    for (int at = begin; at < end; at += KEYS) {{
      GROUP_BARRIER;
      for (int i = warp * 32 + lane; i < KEYS * VECTORS; i += 32 * WARPS) {{
        const int key = i / VECTORS, part = i % VECTORS;
        const int position = at + key < total ? at + key : total - 1;
        const long from = (long(place) * capacity + position) * VECTORS + part;
        key_store[key * (VECTORS + 1) + part] = all_keys[from];
        value_store[key * (VECTORS + 1) + part] = all_values[from];
      }}
      GROUP_BARRIER;
      TILE_C score[KEYS / 8];
      _Pragma("unroll") for (int n = 0; n < KEYS / 8; ++n) CLEAR(score[n]);
      _Pragma("unroll") for (int d = 0; d < D; d += 8) {{
        TILE_A query;
        SET_A(query, low_query[d], low_query[d + 1], high_query[d], high_query[d + 1]);
        _Pragma("unroll") for (int n = 0; n < KEYS / 8; ++n) {{
          TILE_B key;
          LOAD_B_TRANSPOSED(key, keys, n * 8 * STRIDE + d, STRIDE, lane);
          MULTIPLY_ADD(score[n], query, key);
        }}
      }}
      float low_top = low_max, high_top = high_max;
      _Pragma("unroll") for (int n = 0; n < KEYS / 8; ++n) {{
        _Pragma("unroll") for (int e = 0; e < 2; ++e) {{
          const int position = at + n * 8 + column + e;
          LOW(score[n], e) = position < end && position <= low_last ? LOW(score[n], e) * by : {_NEVER}f;
          HIGH(score[n], e) = position < end && position <= high_last ? HIGH(score[n], e) * by : {_NEVER}f;
          low_top = LOW(score[n], e) > low_top ? LOW(score[n], e) : low_top;
          high_top = HIGH(score[n], e) > high_top ? HIGH(score[n], e) : high_top;
        }}
      }}
      MAX_IN_ROW(low_top);
      MAX_IN_ROW(high_top);
      const float low_fade = EXP2(low_max - low_top), high_fade = EXP2(high_max - high_top);
      low_max = low_top;
      high_max = high_top;
      float low_add = 0.0f, high_add = 0.0f;
      TILE_A weight[KEYS / 8];
      _Pragma("unroll") for (int n = 0; n < KEYS / 8; ++n) {{
        _Pragma("unroll") for (int e = 0; e < 2; ++e) {{
          LOW(score[n], e) = LOW(score[n], e) > {_NEVER / 2}f ? EXP2(LOW(score[n], e) - low_top) : 0.0f;
          HIGH(score[n], e) = HIGH(score[n], e) > {_NEVER / 2}f ? EXP2(HIGH(score[n], e) - high_top) : 0.0f;
          low_add += LOW(score[n], e);
          high_add += HIGH(score[n], e);
        }}
        SET_A(weight[n], LOW(score[n], 0), LOW(score[n], 1), HIGH(score[n], 0), HIGH(score[n], 1));
      }}
      low_sum = low_sum * low_fade + low_add;
      high_sum = high_sum * high_fade + high_add;
      _Pragma("unroll") for (int d = 0; d < D / 8; ++d) {{
        _Pragma("unroll") for (int e = 0; e < 2; ++e) {{
          LOW(out[d], e) = LOW(out[d], e) * low_fade;
          HIGH(out[d], e) = HIGH(out[d], e) * high_fade;
        }}
        _Pragma("unroll") for (int n = 0; n < KEYS / 8; ++n) {{
          TILE_B value;
          LOAD_B(value, values, n * 8 * STRIDE + d * 8, STRIDE, lane);
          MULTIPLY_ADD(out[d], weight[n], value);
        }}
      }}
    }}
    SUM_IN_ROW(low_sum);
    SUM_IN_ROW(high_sum);
    const long low_to = (long(place) * splits + split) * rows + low, high_to = low_to + 8;
    if (low < rows && column == 0) {{
      stats[low_to * 2] = low_max;
      stats[low_to * 2 + 1] = low_sum;
    }}
    if (high < rows && column == 0) {{
      stats[high_to * 2] = high_max;
      stats[high_to * 2 + 1] = high_sum;
    }}
    _Pragma("unroll") for (int d = 0; d < D / 8; ++d) {{
      _Pragma("unroll") for (int e = 0; e < 2; ++e) {{
        if (low < rows) partial[low_to * D + d * 8 + column + e] = LOW(out[d], e);
        if (high < rows) partial[high_to * D + d * 8 + column + e] = HIGH(out[d], e);
      }}
    }}
"""

MERGE_INPUTS = ("partial", "stats", "sizes")
MERGE = f"""
    const int rows = sizes[1], splits = sizes[5];
    float top = {_NEVER}f, sum = 0.0f, merged[D / 32];
    for (int split = 0; split < splits; ++split) {{
      const float its = stats[((long(head) * splits + split) * rows + row) * 2];
      top = its > top ? its : top;
    }}
    for (int i = 0; i < D / 32; ++i) merged[i] = 0.0f;
    for (int split = 0; split < splits; ++split) {{
      const long from = (long(head) * splits + split) * rows + row;
      const float weight = EXP2(stats[from * 2] - top);
      sum = FMA(weight, stats[from * 2 + 1], sum);
      for (int i = 0; i < D / 32; ++i) merged[i] = FMA(weight, partial[from * D + lane + i * 32], merged[i]);
    }}
    for (int i = 0; i < D / 32; ++i)
      out[(long(head) * rows + row) * D + lane + i * 32] = static_cast<InT>(merged[i] / sum);
"""
