"""Verify attention: the Metal source (emulated) and the CUDA twin (on a GPU) against the stock attention."""

import emulate
import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.kernels import verify_attention as ours
from dflash.kernels.device import backend

needs_compiler = pytest.mark.skipif(emulate.COMPILER is None, reason="no g++ to compile the Metal body with")
needs_gpu = pytest.mark.skipif(backend() is None, reason="no GPU here")

SIZES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "kv_heads": st.sampled_from([1, 2]),
        "shared_by": st.sampled_from([1, 2, 3, 8]),
        "width": st.sampled_from([2, 3, 5, 16, 32]),
        "dim": st.sampled_from([64, 128, 256]),
        "context": st.integers(0, 600),
        "dtype": st.sampled_from([mx.float16, mx.bfloat16]),
        "seed": st.integers(0, 99),
    }
)


def problem(batch, kv_heads, shared_by, width, dim, context, dtype, seed):
    """Queries, whole cache buffers with rubbish after `total`, and `total`."""
    mx.random.seed(seed)
    total = context + width
    capacity = -(-total // 256) * 256
    queries = 3 * mx.random.normal((batch, kv_heads * shared_by, width, dim))
    keys, values = (mx.random.normal((batch, kv_heads, capacity, dim)) for _ in range(2))
    used = mx.arange(capacity)[:, None] < total
    keys, values = (mx.where(used, x, float("nan")) for x in (keys, values))
    return [x.astype(dtype) for x in (queries, keys, values)], total


def emulated(queries, keys, values, *, scale, total):
    batch, heads, width, dim = queries.shape
    plan = ours.Plan(batch, heads, keys.shape[1], width, dim, total, keys.shape[2])
    split = (queries, keys, values, plan.sizes(), mx.array([scale]))
    shapes = dict(zip(ours.SPLIT_OUTPUTS, plan.partial_shapes(), strict=True))
    partial, stats = emulate.run(
        ours.SPLIT,
        inputs=dict(zip(ours.SPLIT_INPUTS, split, strict=True)),
        outputs={name: (shape, mx.float32) for name, shape in shapes.items()},
        template=plan.template(queries.dtype),
        **plan.split_grid(),
    )
    return emulate.run(
        ours.MERGE,
        inputs=dict(zip(ours.MERGE_INPUTS, (partial, stats, plan.sizes()), strict=True)),
        outputs={"out": (queries.shape, queries.dtype)},
        template=plan.template(queries.dtype),
        **plan.merge_grid(),
    )[0]


def check(attend, arrays, total):
    """Not further from the exact result than twice the stock attention's own rounding."""
    scale = arrays[0].shape[-1] ** -0.5
    exact = ours.reference(*(x.astype(mx.float32) for x in arrays), scale=scale, total=total)

    def error(got):
        return mx.max(mx.abs(got.astype(mx.float32) - exact)).item()

    unit = {mx.float16: 2**-11, mx.bfloat16: 2**-8}[arrays[0].dtype]
    stock = error(ours.reference(*arrays, scale=scale, total=total))
    got = error(attend(*arrays, scale=scale, total=total))
    assert got <= 2 * stock + unit, (got, stock)


@needs_compiler
@settings(max_examples=6, deadline=None, derandomize=True)
@given(sizes=SIZES)
def test_the_metal_body_is_as_exact_as_the_stock_attention(sizes):
    check(emulated, *problem(**sizes))


@needs_gpu
@settings(max_examples=30, deadline=None, derandomize=True)
@given(sizes=SIZES)
def test_the_gpu_kernel_is_as_exact_as_the_stock_attention(sizes):
    check(ours.verify_attention, *problem(**sizes))


@pytest.mark.parametrize("context", [0, 1, 1024, 16384, 131072])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(32, 8, 16), (16, 4, 2), (64, 8, 32), (8, 8, 7)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_plan_covers_every_row_and_position_once(heads, kv_heads, width, context, dim):
    total = context + width
    plan = ours.Plan(2, heads, kv_heads, width, dim, total, total)
    assert plan.groups * plan.warps * ours.ROWS_PER_WARP >= plan.rows == heads // kv_heads * width
    assert plan.warps <= ours.MAX_WARPS
    assert plan.splits * plan.per_split >= total > (plan.splits - 1) * plan.per_split
    assert plan.per_split % plan.block == 0
    memory = 2 * plan.block * (dim + 8) * 2
    assert memory <= 32 * 1024, "a Metal thread group has 32 KB"
