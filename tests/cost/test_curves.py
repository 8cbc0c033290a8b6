"""Rates over sizes and links from timings that a known machine would give."""

import pytest

from real_jax.cost.curves import Timing, bound_by_arithmetic, curve, link, sent
from real_jax.spec.hardware import Reach


def timing(size, seconds, **more):
    return Timing("product", "", size, seconds, **more)


def test_a_rate_is_size_over_time():
    assert timing(1e9, 0.5).rate == 2e9


def test_a_curve_leaves_out_what_counts_elsewhere():
    """1 us of each operation is the start of a kernel; the rest is at a tenth and at half of 1e12."""
    timings = [timing(1e6, 1e-6 + 1e-5), timing(1e9, 1e-6 + 2e-3)]
    assert curve(timings, 1e12, 1e-6) == (Reach(1e6, 0.1), Reach(1e9, 0.5))


def test_at_most_half_of_a_time_is_left_out():
    assert curve([timing(1e6, 1e-6)], 1e12, 5e-6) == (Reach(1e6, 2.0),)


def test_sizes_close_to_each_other_make_one_point():
    """Geometric means: of the sizes 1e6 and 2.25e6, and of the shares 0.2 and 0.45."""
    timings = [timing(2.25e6, 2.25e6 / 0.45e9), timing(1e8, 0.1), timing(1e6, 1e6 / 0.2e9)]
    assert curve(timings, 1e9) == (Reach(1.5e6, 0.3), Reach(1e8, 1.0))


def test_products_that_wait_for_memory_tell_nothing_of_arithmetic():
    thin = timing(1e6, 1e-3, bytes=1e6)  # 1 ms at 1 GB/s
    square = timing(1e9, 1e-2, bytes=1e6)
    assert bound_by_arithmetic([thin, square], (), 1e9) == [square]
    assert bound_by_arithmetic([thin, square], (Reach(1e6, 10.0),), 1e9) == [thin, square]
    assert bound_by_arithmetic([thin], (), 1e9) == [thin]


def collectives(groups, arrays, seconds):
    return [
        Timing(kind, "", sent(kind, g, a), seconds(g, sent(kind, g, a)), g)
        for kind in ("all-reduce", "all-gather")
        for g in groups
        for a in arrays
    ]


def test_a_link_is_found_again():
    """2 GB/s, 10 us for two devices and 3 us for each further one."""
    timings = collectives((2, 4, 8), (8, 1e7, 1e8), lambda g, s: 10e-6 + 3e-6 * (g - 2) + s / 2e9)
    found = link(timings)
    assert found.gb_per_s == pytest.approx(2, rel=1e-3)
    assert found.latency_us == pytest.approx(10, rel=1e-2)
    assert found.hop_us == pytest.approx(3, rel=1e-2)
    assert all(p.share == pytest.approx(1, rel=1e-2) for p in found.reach)


def test_one_group_tells_no_hops():
    found = link(collectives((2,), (8, 1e7), lambda g, s: 10e-6 + s / 2e9))
    assert (found.latency_us, found.hop_us) == (pytest.approx(10, rel=1e-2), 0)


def test_devices_that_slow_each_other_have_faster_links_alone():
    timings = collectives((2, 4), (8, 1e8), lambda g, s: 1e-6 + 4 * s / 2e9)
    assert link(timings, slow=4).gb_per_s == pytest.approx(2, rel=1e-2)


def test_another_rate_as_the_nominal_one():
    found = link(collectives((2, 4), (8, 1e8), lambda g, s: 1e-6 + s / 2e9), nominal=1e9)
    assert found.gb_per_s == 1
    assert found.reach[-1].share == pytest.approx(2, rel=1e-2)


def test_bytes_that_a_device_sends():
    assert sent("all-reduce", 4, 1000) == 1500
    assert sent("all-gather", 4, 1000) == 750
