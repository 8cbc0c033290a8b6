"""HLO text, read by hand: every number below was counted from the snippet, not taken from the code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from real_jax.cost.hlo import Array, arrays_of, first_group, summarize, trips
from real_jax.cost.summary import NOTHING, Collective, Kernel, Linear, Summary

# A matrix product of [6, 8] by [8, 4], a tanh of it, and the sum over pairs of devices.
PLAIN = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: f32[6,4]) -> f32[6,4] {
  %p = f32[6,4]{1,0} parameter(0)
  ROOT %t = f32[6,4]{1,0} tanh(%p)
}

ENTRY %main (x: f32[6,8], w: f32[8,4]) -> f32[6,4] {
  %x = f32[6,8]{1,0} parameter(0), metadata={op_name="x (first)"}
  %w = f32[8,4]{1,0} parameter(1)
  %dot.1 = f32[6,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %tanh_fusion = f32[6,4]{1,0} fusion(%dot.1), kind=kLoop, calls=%fused
  ROOT %all-reduce.2 = f32[6,4]{1,0} all-reduce(%tanh_fusion), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true, to_apply=%add
}
"""


def test_a_product_a_fusion_and_a_collective():
    s = summarize(PLAIN)
    # dot: 2 x 6 x 4 x 8 operations; it reads 48 + 32 numbers and writes 24. The fusion reads 24 and writes 24.
    assert s.kernels == (Kernel(Linear(384), Linear(4 * (48 + 32 + 24))), Kernel(NOTHING, Linear(4 * 48)))
    assert s.flops == Linear(384)
    assert s.bytes == Linear(4 * 48)
    assert s.steps == 2
    assert s.collectives == (Collective("all-reduce", 2, 1, Linear(96)),)


def test_rows_mark_what_grows_with_them():
    # Three rows: [6, ...] arrays hold multiples of 3 numbers, the weight's 32 numbers do not.
    s = summarize(PLAIN, rows=3)
    assert s.flops == Linear(0, 128)
    assert s.kernels[0].bytes == Linear(128, 4 * 72 / 3)
    assert s.bytes == Linear(0, 64)
    assert s.collectives[0].bytes == Linear(0, 32)
    assert s.flops.at(3) == 384


LOOP = """HloModule jit_g, num_partitions=4

%body (arg: (s32[], f32[4,8], f32[5,8])) -> (s32[], f32[4,8], f32[5,8]) {
  %arg = (s32[], f32[4,8]{1,0}, f32[5,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%arg), index=1
  %stack = f32[5,8]{1,0} get-tuple-element(%arg), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %row = f32[1,8]{1,0} dynamic-slice(%stack, %i, %i), dynamic_slice_sizes={1,8}
  %gathered = f32[4,8]{1,0} all-gather(%row), channel_id=3, replica_groups=[1,4]<=[4], dimensions={0}
  %moved = f32[4,8]{1,0} add(%x, %gathered)
  ROOT %out = (s32[], f32[4,8]{1,0}, /*index=2*/f32[5,8]{1,0}) tuple(%next, %moved, %stack)
}

%condition (arg.1: (s32[], f32[4,8], f32[5,8])) -> pred[] {
  %arg.1 = (s32[], f32[4,8]{1,0}, f32[5,8]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%i.1, %five), direction=LT
}

ENTRY %main (start: (s32[], f32[4,8], f32[5,8])) -> (s32[], f32[4,8], f32[5,8]) {
  %start = (s32[], f32[4,8]{1,0}, f32[5,8]{1,0}) parameter(0)
  ROOT %while.1 = (s32[], f32[4,8]{1,0}, f32[5,8]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_a_loop_counts_as_often_as_it_runs():
    s = summarize(LOOP)
    # A step: next (3 x 4 bytes), row (2 x 32), moved (3 x 128), less (4 + 4 + 1).
    assert s.bytes == Linear(5 * (12 + 64 + 384 + 9))
    assert s.steps == 5 * 4
    assert s.collectives == (Collective("all-gather", 4, 1, Linear(128), 5),)
    assert summarize(LOOP, scalars=False).steps == 5 * 2


def test_the_bound_of_a_counter_tells_the_trips_where_the_compiler_does_not():
    unknown = LOOP.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")
    assert summarize(unknown) == summarize(LOOP)
    in_twos = unknown.replace("%one = s32[] constant(1)", "%one = s32[] constant(2)")
    assert summarize(in_twos).steps == 3 * 4  # counts 0, 2, 4


def test_a_loop_over_rows_is_one_kernel():
    loop = LOOP.replace("%gathered = f32[4,8]{1,0} all-gather", "%gathered = f32[4,8]{1,0} broadcast")
    s = summarize(loop, rows=5)
    assert s.steps == 1
    # As above, and the broadcast (32 + 128 bytes) for each of 5 rows.
    assert s.bytes.fixed == 0
    assert s.bytes.at(5) == pytest.approx(5 * (12 + 64 + 384 + 9 + 160))


def test_a_fusion_that_updates_a_slice_in_place_moves_the_slice_only():
    text = """HloModule jit_h

%fused (stack: f32[100,8], new: f32[1,8], at: s32[]) -> f32[100,8] {
  %stack = f32[100,8]{1,0} parameter(0)
  %new = f32[1,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %put = f32[100,8]{1,0} dynamic-update-slice(%stack, %new, %at, %at)
}

ENTRY %main (a: f32[100,8], b: f32[1,8], c: s32[]) -> f32[100,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %b = f32[1,8]{1,0} parameter(1)
  %c = s32[] parameter(2)
  ROOT %f = f32[100,8]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%fused
}
"""
    assert summarize(text).bytes == Linear(32 + 32 + 4)  # written, read, and the index


def test_a_fusion_that_scatters_into_an_array_moves_the_rows_only():
    """But all of an array that it makes itself, as the gradient of an embedding does."""
    text = """HloModule jit_h

%fused (cache: f32[100,8], new: f32[3,8], at: s32[3,1]) -> f32[100,8] {
  %cache = f32[100,8]{1,0} parameter(0)
  %new = f32[3,8]{1,0} parameter(1)
  %at = s32[3,1]{1,0} parameter(2)
  ROOT %put = f32[100,8]{1,0} scatter(%cache, %at, %new), update_window_dims={1}, to_apply=%add
}

ENTRY %main (a: f32[100,8], b: f32[3,8], c: s32[3,1]) -> f32[100,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %b = f32[3,8]{1,0} parameter(1)
  %c = s32[3,1]{1,0} parameter(2)
  ROOT %f = f32[100,8]{1,0} fusion(%a, %b, %c), kind=kInput, calls=%fused
}
"""
    assert summarize(text).bytes == Linear(96 + 96 + 12)
    made = text.replace("scatter(%cache,", "scatter(%zeros,").replace(
        "  ROOT %put", "  %zeros = f32[100,8]{1,0} broadcast(%cache)\n  ROOT %put"
    )
    assert summarize(made).bytes == Linear(3200 + 3200 + 96 + 12)


@pytest.mark.parametrize(
    "attributes, group",
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, x", (0, 1, 2, 3)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}, x", (0, 4)),
        ("replica_groups=[2,4]<=[8], x", (0, 1, 2, 3)),
        # Devices as [2, 4], transposed and cut into rows of two: 0 4, 1 5, ...
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", (0, 4)),
        # Devices as [2, 2, 2] = (a, b, c), in the order b, a, c: 0 1 4 5 2 3 6 7.
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", (0, 1, 4, 5)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(1,0,2)) {'axis_1'}, x", (0, 1, 4, 5)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, dimensions={0}", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=3] {'a','b'}", (0, 1, 2, 3, 4, 5)),
        ("replica_groups={}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("source_target_pairs={{0,4},{4,0}}, metadata={}", (0, 4)),
        ("source_target_pairs={{0,7},{1,0},{2,1},{3,2}}", (0, 1)),  # a ring
    ],
)
def test_the_first_group_of_a_collective(attributes, group):
    assert first_group(attributes, 8) == group


ASYNC = """HloModule jit_a, num_partitions=8

ENTRY %main (x: f32[4,8], w: f32[8,8]) -> f32[16,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %w = f32[8,8]{1,0} parameter(1)
  %start = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%x), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %beside = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %also = f32[4,8]{1,0} add(%beside, %x)
  %done = f32[16,8]{1,0} all-gather-done(%start)
  ROOT %after = f32[16,8]{1,0} negate(%done)
}
"""


def test_what_runs_beside_a_collective_is_its_cover():
    s = summarize(ASYNC)
    # Beside it: a product of 2 x 4 x 8 x 8 operations that moves 32 + 64 + 32 numbers, and a sum that moves 96.
    assert s.collectives == (Collective("all-gather", 4, 2, Linear(512), 1.0, Linear(512), Linear(4 * (128 + 96))),)
    sync = ASYNC.replace("dimensions={0}\n", 'dimensions={0}, backend_config={"is_sync":true}\n', 1)
    assert summarize(sync).collectives == (Collective("all-gather", 4, 2, Linear(512)),)


def test_types_and_trip_counts():
    assert arrays_of("(bf16[2,3]{1,0:T(8,128)}, pred[], s32[7]{0})") == (
        Array("bf16", (2, 3)), Array("pred", ()), Array("s32", (7,)),
    )  # fmt: skip
    assert [a.bytes for a in arrays_of("(bf16[2,3], pred[], s32[7], f8e4m3fn[4])")] == [12, 1, 28, 4]
    assert trips('backend_config={"known_trip_count":{"n":"12"}}', {}, {}) == 12
    assert trips("condition=%c, body=%b", {}, {}) == 1


def test_matrix_products_that_a_gpu_library_runs():
    text = """HloModule jit_k

ENTRY %main (x: bf16[2,6,8], w: bf16[8,4], q: bf16[3,16,2,8], k: bf16[3,16,2,8]) -> bf16[2,6,4] {
  %x = bf16[2,6,8]{2,1,0} parameter(0)
  %w = bf16[8,4]{1,0} parameter(1)
  %q = bf16[3,16,2,8]{3,2,1,0} parameter(2)
  %k = bf16[3,16,2,8]{3,2,1,0} parameter(3)
  %attention = (bf16[3,16,2,8]{3,2,1,0}, u8[64]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %gemm = (bf16[2,6,4]{2,1,0}, s8[128]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["0"]}}}
}
"""
    # gemm: 2 x 48 x 8. Attention: two products, each 2 x (3 rows x 2 heads) x 16 x 16 x 8.
    assert sorted(k.flops.fixed for k in summarize(text).kernels) == [2 * 48 * 8, 2 * 2 * 6 * 16 * 16 * 8]


@pytest.mark.parametrize(
    "left, right, out, attributes, summed",
    [
        ("6,8", "8,4", "6,4", "dim_labels=bf_io->bf", 8),
        # [B, T, D] by [D, H, K]: heads are a window that slides over nothing and is padded.
        ("1,6,8", "3,8,2", "3,6,2", "window={size=3 pad=2_2 rhs_reversal=1}, dim_labels=0bf_0io->0bf", 8),
        # [B, T, H, K] by [H, K, D]: heads are summed over.
        ("3,6,2", "3,2,8", "1,6,8", "window={size=3}, dim_labels=0bf_0io->0bf", 3 * 2),
        # Attention: one product for each head.
        ("3,6,2", "3,2,5", "3,6,5", "window={size=3 stride=2 lhs_dilate=3}, dim_labels=0bf_0io->0bf", 2),
    ],
)
def test_products_as_the_tpu_compiler_writes_them(left, right, out, attributes, summed):
    text = f"""HloModule jit_c

ENTRY %main (x: bf16[{left}], w: bf16[{right}]) -> bf16[{out}] {{
  %x = bf16[{left}] parameter(0)
  %w = bf16[{right}] parameter(1)
  ROOT %product = bf16[{out}] convolution(%x, %w), {attributes}
}}
"""
    assert summarize(text).flops == Linear(2 * summed * np.prod([int(n) for n in out.split(",")]))


def test_sums_and_multiples():
    one = summarize(PLAIN)
    both = one + one * 2
    assert both.flops == Linear(3 * 384)
    assert both.steps == 6
    assert both.collectives == (Collective("all-reduce", 2, 1, Linear(96), 3),)
    assert len(both.kernels) == 2
    assert both + one * -3 == Summary()


def test_text_that_is_no_module():
    with pytest.raises(ValueError, match="entry"):
        summarize("nothing here")


def test_against_the_compiler_where_nothing_loops():
    x, w = jnp.zeros((32, 64)), jnp.zeros((64, 16))
    compiled = jax.jit(lambda x, w: x @ w).lower(x, w).compile()
    summary, analysis = summarize(compiled.as_text()), compiled.cost_analysis()
    assert summary.flops.fixed == analysis["flops"] == 2 * 32 * 64 * 16
    np.testing.assert_allclose(summary.kernels[0].bytes.fixed, analysis["bytes accessed"])


def test_a_scan_counts_every_layer():
    """The compiler's own count of a scan is that of one step; see PITFALLS."""
    w = jnp.zeros((7, 16, 16))
    compiled = jax.jit(lambda x, w: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]).lower(jnp.zeros((4, 16)), w)
    assert summarize(compiled.compile().as_text()).flops.fixed == 7 * 2 * 4 * 16 * 16
