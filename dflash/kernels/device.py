"""Which kernels can run here, and what a shared kernel body needs around it on each of them.

A body is C++ that both Metal and CUDA compile. It sees `lane` (0..31), `row` and `head` as its place in the grid,
and the macros SUM_LANES (over the 32 lanes, result in all), FMA (one rounding, never split or merged), EXP, LOG, ABS,
RSQRT, EXP2, and ROUNDED (through the input's dtype and back, where mlx's own arrays would round).

Matrix units are seen as tiles spread over a warp: TILE_C (16 x 8, fp32) and TILE_A (16 x 8) are two 8 x 8 tiles, LOW
and HIGH; a lane holds columns COLUMN and COLUMN + 1 of one ROW in each. Metal and CUDA spread lanes over rows and
columns differently, but both give a lane two neighbours of a row, which is all a body needs. TILE_B is 8 x 8.
MULTIPLY_ADD(c, a, b) is c += a b. Metal's spread is the one that MLX's own attention kernels rely on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import mlx.core as mx

Backend = Literal["metal", "cuda"]

LANES = 32

_METAL_PLACE = """
    const int lane = thread_position_in_threadgroup.x;
    const int row = thread_position_in_grid.y;
    const int head = thread_position_in_grid.z;
"""
_CUDA_PLACE = """
    const int lane = threadIdx.x;
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    const int head = blockIdx.z * blockDim.z + threadIdx.z;
"""
_METAL_HEADER = """
#define SUM_LANES(x) simd_sum(x)
#define FMA(a, b, c) metal::fma(a, b, c)
#define EXP(x) metal::exp(x)
#define LOG(x) metal::log(x)
#define ABS(x) metal::abs(x)
#define RSQRT(x) metal::rsqrt(x)
#define EXP2(x) metal::exp2(x)
#define ROUNDED(x) static_cast<float>(static_cast<InT>(x))
#define GROUP_ARRAY(type, name, count) threadgroup type name[count]
#define GROUP_POINTER(type) threadgroup type*
#define DEVICE_POINTER(type) device type*
#define GROUP_BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define ROW(lane) (((lane) >> 4 & 1) * 4 + ((lane) >> 1 & 3))
#define COLUMN(lane) (((lane) >> 3 & 1) * 4 + ((lane) & 1) * 2)
#define MAX_IN_ROW(x) x = metal::max(x, simd_shuffle_xor(x, 1)), x = metal::max(x, simd_shuffle_xor(x, 8))
#define SUM_IN_ROW(x) x += simd_shuffle_xor(x, 1), x += simd_shuffle_xor(x, 8)
struct DFlashTile { simdgroup_float8x8 low, high; };
#define TILE_C DFlashTile
#define TILE_A DFlashTile
#define TILE_B simdgroup_float8x8
#define LOW(tile, e) tile.low.thread_elements()[e]
#define HIGH(tile, e) tile.high.thread_elements()[e]
#define CLEAR(tile) LOW(tile, 0) = 0.0f, LOW(tile, 1) = 0.0f, HIGH(tile, 0) = 0.0f, HIGH(tile, 1) = 0.0f
#define SET_A(tile, l0, l1, h0, h1) \
  LOW(tile, 0) = static_cast<float>(l0), LOW(tile, 1) = static_cast<float>(l1), \
  HIGH(tile, 0) = static_cast<float>(h0), HIGH(tile, 1) = static_cast<float>(h1)
#define LOAD_B(tile, array, at, stride, lane) \
  tile.thread_elements()[0] = static_cast<float>(array[(at) + ROW(lane) * (stride) + COLUMN(lane)]), \
  tile.thread_elements()[1] = static_cast<float>(array[(at) + ROW(lane) * (stride) + COLUMN(lane) + 1])
#define LOAD_B_TRANSPOSED(tile, array, at, stride, lane) \
  tile.thread_elements()[0] = static_cast<float>(array[(at) + COLUMN(lane) * (stride) + ROW(lane)]), \
  tile.thread_elements()[1] = static_cast<float>(array[(at) + (COLUMN(lane) + 1) * (stride) + ROW(lane)])
#define MULTIPLY_ADD(c, a, b) \
  simdgroup_multiply_accumulate(c.low, a.low, b, c.low), simdgroup_multiply_accumulate(c.high, a.high, b, c.high)
"""
_CUDA_HEADER = """
__device__ inline float dflash_sum_lanes(float x) {
  for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
#define SUM_LANES(x) dflash_sum_lanes(x)
#define FMA(a, b, c) __fmaf_rn(a, b, c)
#define EXP(x) expf(x)
#define LOG(x) logf(x)
#define ABS(x) fabsf(x)
#define RSQRT(x) rsqrtf(x)
#define EXP2(x) exp2f(x)
#define ROUNDED(x) static_cast<float>(static_cast<InT>(x))
#define GROUP_ARRAY(type, name, count) __shared__ type name[count]
#define GROUP_POINTER(type) type*
#define DEVICE_POINTER(type) type*
#define GROUP_BARRIER __syncthreads()
#define ROW(lane) ((lane) >> 2)
#define COLUMN(lane) (((lane) & 3) * 2)
#define OTHER_LANE(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)
#define MAX_IN_ROW(x) x = fmaxf(x, OTHER_LANE(x, 1)), x = fmaxf(x, OTHER_LANE(x, 2))
#define SUM_IN_ROW(x) x += OTHER_LANE(x, 1), x += OTHER_LANE(x, 2)
struct DFlashSums { float low[2], high[2]; };
struct DFlashPairs { unsigned low, high; };
template <typename T>
__device__ inline unsigned dflash_pair(T first, T second) {
  const T both[2] = {first, second};
  return *reinterpret_cast<const unsigned*>(both);
}
template <bool BFLOAT>
__device__ inline void dflash_multiply_add(DFlashSums& c, DFlashPairs a, unsigned b) {
  if constexpr (BFLOAT)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
                 : "+f"(c.low[0]), "+f"(c.low[1]), "+f"(c.high[0]), "+f"(c.high[1])
                 : "r"(a.low), "r"(a.high), "r"(b));
  else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
                 : "+f"(c.low[0]), "+f"(c.low[1]), "+f"(c.high[0]), "+f"(c.high[1])
                 : "r"(a.low), "r"(a.high), "r"(b));
}
#define TILE_C DFlashSums
#define TILE_A DFlashPairs
#define TILE_B unsigned
#define LOW(tile, e) tile.low[e]
#define HIGH(tile, e) tile.high[e]
#define CLEAR(tile) LOW(tile, 0) = 0.0f, LOW(tile, 1) = 0.0f, HIGH(tile, 0) = 0.0f, HIGH(tile, 1) = 0.0f
#define SET_A(tile, l0, l1, h0, h1) \
  tile.low = dflash_pair(static_cast<InT>(l0), static_cast<InT>(l1)), \
  tile.high = dflash_pair(static_cast<InT>(h0), static_cast<InT>(h1))
#define LOAD_B(tile, array, at, stride, lane) \
  tile = dflash_pair(array[(at) + COLUMN(lane) * (stride) + ROW(lane)], \
                     array[(at) + (COLUMN(lane) + 1) * (stride) + ROW(lane)])
#define LOAD_B_TRANSPOSED(tile, array, at, stride, lane) \
  tile = *reinterpret_cast<const unsigned*>(&array[(at) + ROW(lane) * (stride) + COLUMN(lane)])
#define MULTIPLY_ADD(c, a, b) dflash_multiply_add<BF16>(c, a, b)
"""


def backend() -> Backend | None:
    """The kind of kernel that the default device runs; None on a CPU."""
    if mx.default_device() != mx.Device(mx.gpu):
        return None
    return "metal" if mx.metal.is_available() else "cuda"


def metal_source(body: str) -> str:
    """The function body that `mx.fast.metal_kernel` gets."""
    return _METAL_PLACE + body


@lru_cache(maxsize=2048)
def device_ints(*values: int) -> mx.array:
    """Numbers (n,) on the device. Kept: copying them there anew for every layer cost more than the kernels.

    Numbers that vary are inputs rather than template constants, which would compile a kernel for each.
    """
    return _resident(mx.array(values))


@lru_cache(maxsize=64)
def device_floats(*values: float) -> mx.array:
    return _resident(mx.array(values, dtype=mx.float32))


def _resident(array: mx.array) -> mx.array:
    mx.eval(array)
    return array


@lru_cache(maxsize=64)
def kernel(
    on: Backend, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], body: str, header: str = ""
) -> Callable[..., list[mx.array]]:
    """The kernel around `body` for one back end. Compiled by MLX at its first call per template."""
    arguments = {"name": name, "input_names": list(inputs), "output_names": list(outputs)}
    if on == "metal":
        return mx.fast.metal_kernel(**arguments, source=metal_source(body), header=_METAL_HEADER + header)
    return mx.fast.cuda_kernel(**arguments, source=_CUDA_PLACE + body, header=_CUDA_HEADER + header)
