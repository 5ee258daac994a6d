"""Which kernels can run here, and what a shared kernel body needs around it on each of them.

A body is C++ that both Metal and CUDA compile. It sees `lane` (0..31), `row` and `head` as its place in the grid,
and the macros SUM_LANES (over the 32 lanes, result in all), FMA (one rounding, never split or merged), EXP, LOG, ABS,
RSQRT, and ROUNDED (through the input's dtype and back, where mlx's own arrays would round).
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
#define ROUNDED(x) static_cast<float>(static_cast<InT>(x))
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
#define ROUNDED(x) static_cast<float>(static_cast<InT>(x))
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
