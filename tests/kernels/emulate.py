"""Metal kernels on a CPU: the source that Metal gets, compiled as C++ over an emulated thread grid.

What `mx.fast.metal_kernel` would wrap (place, body, header) is wrapped here instead: attributes become variables,
address spaces vanish, half types become small structs, and every thread is a fibre. A thread that reaches a
reduction over its SIMD group, or a barrier, waits until the others are there, as on the device. The body itself is
compiled character for character.

    run(body, inputs={"x": array}, outputs={"y": (shape, dtype)}, template=[...], grid=..., threadgroup=...)

Needs g++ and Linux or another system with `ucontext.h`.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np

from dflash.kernels import device

COMPILER = shutil.which("g++")
_BUILT = Path(tempfile.mkdtemp(prefix="emulated-kernels-"))

_TYPES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat", mx.int32: "int", mx.uint32: "uint"}

_PRELUDE = r"""
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
using uint = unsigned int;

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float x) {  // to nearest, ties to even
    uint32_t u; std::memcpy(&u, &x, 4);
    bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  operator float() const { uint32_t u = uint32_t(bits) << 16; float x; std::memcpy(&x, &u, 4); return x; }
};
using half = _Float16;

namespace metal {
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float exp(float x) { return std::exp(x); }
inline float log(float x) { return std::log(x); }
inline float abs(float x) { return std::fabs(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float exp2(float x) { return std::exp2(x); }
inline float max(float a, float b) { return a > b ? a : b; }
}
struct uint3 { uint x, y, z; };
struct uint4 { uint x, y, z, w; };
#define threadgroup
#define device

constexpr int LANES = 32;
struct Fibre { ucontext_t context; std::vector<char> stack; bool done; float deposit; float pairs[4]; };
static std::vector<Fibre> fibres;
static ucontext_t scheduler;
static int current;
static void pause_here() { swapcontext(&fibres[current].context, &scheduler); }

// Every live thread runs until it waits; a wait ends when all have been resumed once more.
inline float simd_reduce(float x, float (*join)(float, float)) {
  const int me = current, group = me / LANES * LANES, lane = me % LANES;
  for (int offset = LANES / 2; offset > 0; offset /= 2) {
    fibres[me].deposit = x;
    pause_here();
    const float other = fibres[group + (lane ^ offset)].deposit;
    pause_here();
    x = join(x, other);
  }
  return x;
}
inline float simd_sum(float x) { return simd_reduce(x, [](float a, float b) { return a + b; }); }
inline float simd_max(float x) { return simd_reduce(x, [](float a, float b) { return a > b ? a : b; }); }
inline float simd_shuffle_xor(float x, int mask) {
  fibres[current].deposit = x;
  pause_here();
  const float other = fibres[current ^ mask].deposit;
  pause_here();
  return other;
}

// 8 x 8 over a SIMD group, spread as in MLX's own Metal attention (steel/attn/mma.h, get_coord).
struct simdgroup_float8x8 {
  float elements[2];
  float* thread_elements() { return elements; }
};
static int tile_row(int lane) { return ((lane / 4) & 4) + (lane / 2) % 4; }
static int tile_column(int lane) { return ((lane / 4) & 2) * 2 + lane % 2 * 2; }
static int tile_lane(int row, int column) {
  for (int lane = 0; lane < LANES; ++lane)
    if (tile_row(lane) == row && tile_column(lane) == (column & ~1)) return lane;
  return -1;
}
inline void simdgroup_multiply_accumulate(
    simdgroup_float8x8& d, simdgroup_float8x8 a, simdgroup_float8x8 b, simdgroup_float8x8 c) {
  static int holder[8][8];
  static const bool filled = [] {
    for (int r = 0; r < 8; ++r) for (int n = 0; n < 8; ++n) holder[r][n] = tile_lane(r, n);
    return true;
  }();
  (void)filled;
  const int me = current, group = me / LANES * LANES, lane = me % LANES;
  float* mine = fibres[me].pairs;
  mine[0] = a.elements[0], mine[1] = a.elements[1], mine[2] = b.elements[0], mine[3] = b.elements[1];
  pause_here();
  for (int e = 0; e < 2; ++e) {
    float sum = c.elements[e];
    for (int i = 0; i < 8; ++i)
      sum += fibres[group + holder[tile_row(lane)][i]].pairs[i & 1] *
             fibres[group + holder[i][tile_column(lane) + e]].pairs[2 + ((tile_column(lane) + e) & 1)];
    d.elements[e] = sum;
  }
  pause_here();
}
enum class mem_flags { mem_none, mem_threadgroup, mem_device };
inline void threadgroup_barrier(mem_flags) { pause_here(); }

static uint3 thread_position_in_threadgroup_of(int index, const int* size) {
  return {uint(index % size[0]), uint(index / size[0] % size[1]), uint(index / size[0] / size[1])};
}
"""

_DRIVER = r"""
static void entry(int index) {
  body(index);
  fibres[index].done = true;
}
extern "C" void run(void** buffers, const int* grid, const int* size) {
  const int threads = size[0] * size[1] * size[2];
  buffer_list = buffers;
  group_size = size;
  fibres.assign(threads, {});
  for (int z = 0; z < grid[2]; z += size[2])
    for (int y = 0; y < grid[1]; y += size[1])
      for (int x = 0; x < grid[0]; x += size[0]) {
        origin = {uint(x), uint(y), uint(z)};
        for (int i = 0; i < threads; ++i) {
          Fibre& f = fibres[i];
          f.done = false;
          f.stack.resize(1 << 16);
          getcontext(&f.context);
          f.context.uc_stack.ss_sp = f.stack.data();
          f.context.uc_stack.ss_size = f.stack.size();
          f.context.uc_link = &scheduler;
          makecontext(&f.context, reinterpret_cast<void (*)()>(entry), 1, i);
        }
        for (bool alive = true; alive;) {
          alive = false;
          for (current = 0; current < threads; ++current) {
            if (fibres[current].done) continue;
            swapcontext(&scheduler, &fibres[current].context);
            alive = alive || !fibres[current].done;
          }
        }
      }
}
"""


def run(
    body: str,
    *,
    inputs: dict[str, mx.array],
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]],
    template: list[tuple[str, int | mx.Dtype]],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    header: str = "",
) -> list[mx.array]:
    """Run a kernel body as Metal would; arguments as for `mx.fast.metal_kernel`'s call."""
    assert all(total % part == 0 for total, part in zip(grid, threadgroup, strict=True)), "partial groups"
    types = {name: array.dtype for name, array in inputs.items()} | {n: d for n, (_, d) in outputs.items()}
    library = _compile(_source(body, header, types, list(inputs), template))
    held = [_bytes(array) for array in inputs.values()]
    held += [np.zeros(int(np.prod(shape)) * dtype.size, np.uint8) for shape, dtype in outputs.values()]
    pointers = (ctypes.c_void_p * len(held))(*[block.ctypes.data for block in held])
    library.run(pointers, (ctypes.c_int * 3)(*grid), (ctypes.c_int * 3)(*threadgroup))
    results = held[len(inputs) :]
    return [
        mx.array(block).view(dtype).reshape(shape)
        for block, (shape, dtype) in zip(results, outputs.values(), strict=True)
    ]


def _bytes(array: mx.array) -> np.ndarray:
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8))


def _source(body: str, header: str, types: dict[str, mx.Dtype], inputs: list[str], template: list) -> str:
    constants = [
        f"constexpr int {name} = {value};" if isinstance(value, int) else f"using {name} = {_TYPES[value]};"
        for name, value in template
    ]
    bindings = [
        f"  {'const ' if name in inputs else ''}{_TYPES[dtype]}* {name} = "
        f"static_cast<{_TYPES[dtype]}*>(buffer_list[{index}]);"
        for index, (name, dtype) in enumerate(types.items())
    ]
    place = """
  const uint3 thread_position_in_threadgroup = thread_position_in_threadgroup_of(index, group_size);
  const uint3 thread_position_in_grid = {origin.x + thread_position_in_threadgroup.x,
                                         origin.y + thread_position_in_threadgroup.y,
                                         origin.z + thread_position_in_threadgroup.z};
"""
    return "\n".join(
        [
            _PRELUDE,
            # Memory of a thread group is one array for all its fibres.
            device._METAL_HEADER.replace(
                "threadgroup type name[count]", "alignas(16) static type name[count]"
            ),
            header,
            *constants,
            "static void** buffer_list; static const int* group_size; static uint3 origin;",
            "static void body(int index) {",
            *bindings,
            place,
            device.metal_source(body),
            "}",
            _DRIVER,
        ]
    )


def _compile(source: str) -> ctypes.CDLL:
    name = hashlib.sha256(source.encode()).hexdigest()[:20]
    library = _BUILT / f"{name}.so"
    if not library.exists():
        file = _BUILT / f"{name}.cpp"
        file.write_text(source)
        # Contraction off: only what the body calls FMA may be fused, as in Metal's safe math mode.
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
        subprocess.run(
            [COMPILER, *flags, str(file), "-o", str(library)], check=True, capture_output=True, text=True
        )
    return ctypes.CDLL(str(library))
