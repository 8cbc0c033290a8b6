import dataclasses

import pytest

from real_jax.cost.roofline import Seconds, collective_seconds, launch_seconds, moved, seconds, slowdown, volume_factor
from real_jax.cost.summary import Collective, Kernel, Linear, Summary
from real_jax.spec.hardware import Chip, Cluster, Link, Reach

NOTHING = Linear()
# Round numbers: 1 TFLOP/s, 100 GB/s, 10 us to start, 1 us a kernel; links 10 GB/s, 5 us and 1 GB/s, 50 us.
CLUSTER = Cluster(
    name="round", platform="gpu", nodes=2, devices_per_node=4, chip=Chip("round", 16, 1.0, 100.0, 10.0, 1.0),
    within_node=Link(10.0, 5.0), between_nodes=Link(1.0, 50.0), host_link=Link(10.0, 5.0),
)  # fmt: skip
SHARED = dataclasses.replace(CLUSTER, shared_cores=2.0)


def test_each_resource():
    summary = Summary(
        kernels=(
            # Two products bound by arithmetic (2e9 operations: 2 ms each), one by memory (1e8 bytes: 1 ms), and a copy.
            Kernel(Linear(2e9), Linear(1e6), 2),
            Kernel(Linear(1e6), Linear(1e8), 1),
            Kernel(NOTHING, Linear(3e8)),
        ),
        collectives=(Collective("all-reduce", 4, 1, Linear(4e6), 3), Collective("all-gather", 2, 1, Linear(2e6), 1)),
        steps=100,
    )
    s = seconds(summary, 1, 4, CLUSTER)
    assert s.matrix == pytest.approx(4e-3)
    assert s.memory == pytest.approx(1e-3 + 3e-3)
    assert s.overhead == pytest.approx(100e-6)
    # 3 x 4e6 x 2 x 3/4 + 2e6 x 1/2 bytes at 10 GB/s, and four times 5 us.
    assert s.within_node == pytest.approx(19e6 / 1e10 + 20e-6)
    assert s.between_nodes == 0
    assert s.total == pytest.approx(4e-3 + 4e-3 + 100e-6 + 1.9e-3 + 20e-6)


@pytest.mark.parametrize(
    ("group", "stride", "within", "between"),
    [
        (2, 1, 1e6 / 2 / 1e10 + 5e-6, 0.0),  # two neighbours
        (2, 4, 0.0, 1e6 / 2 / 1e9 + 50e-6),  # the same place on each node
        (4, 2, 0.0, 1e6 / 2 / 2 / 1e9 + 50e-6),  # two of each node: each carries half across, which takes longer
        (8, 1, 0.0, 1e6 / 4 / 2 / 1e9 + 50e-6),  # all: each carries a quarter across
    ],
)
def test_a_gather_pays_for_the_slower_of_the_links_that_it_crosses(group, stride, within, between):
    near, far = collective_seconds(Collective("all-gather", group, stride, Linear(1e6)), 0, CLUSTER)
    assert (near, far) == (pytest.approx(within), pytest.approx(between))


def test_latency_grows_with_the_group():
    cluster = dataclasses.replace(CLUSTER, within_node=Link(10.0, 5.0, hop_us=2.0))
    empty = [collective_seconds(Collective("all-gather", g, 1, NOTHING), 0, cluster)[0] for g in (2, 3, 4)]
    assert empty == [pytest.approx(5e-6), pytest.approx(7e-6), pytest.approx(9e-6)]


def test_what_is_reached_of_a_rate_depends_on_the_size():
    chip = dataclasses.replace(
        CLUSTER.chip, matrix_reach=(Reach(1e6, 0.1), Reach(1e8, 0.5)), memory_reach=(Reach(1e6, 2.0), Reach(1e8, 1.0))
    )
    link = Link(10.0, 0.0, reach=(Reach(1e6, 0.5),))
    cluster = dataclasses.replace(CLUSTER, chip=chip, within_node=link)

    def spent(*kernels, collectives=()):
        return seconds(Summary(kernels=kernels, collectives=collectives), 0, 1, cluster)

    assert spent(Kernel(Linear(1e5), NOTHING)).matrix == pytest.approx(1e5 / 1e12 / 0.1)
    assert spent(Kernel(Linear(1e7), NOTHING)).matrix == pytest.approx(1e7 / 1e12 / 0.3)  # half-way in the logarithm
    assert spent(Kernel(Linear(1e9), NOTHING)).matrix == pytest.approx(1e9 / 1e12 / 0.5)
    assert spent(Kernel(NOTHING, Linear(1e6))).memory == pytest.approx(1e6 / 2e11)
    gather = Collective("all-gather", 2, 1, Linear(2e6))
    assert spent(collectives=(gather,)).within_node == pytest.approx(1e6 / 5e9)


def test_rows():
    summary = Summary(kernels=(Kernel(NOTHING, Linear(1e8, 1e7)),))
    assert seconds(summary, 10, 1, CLUSTER).memory == pytest.approx(2e-3)
    assert seconds(summary, 20, 1, CLUSTER).memory == pytest.approx(3e-3)


def test_kernels_hide_the_share_of_a_collective_that_the_chip_can_overlap():
    cluster = dataclasses.replace(CLUSTER, chip=dataclasses.replace(CLUSTER.chip, overlap=0.8))
    gather = Collective("all-gather", 2, 1, Linear(2e7))  # 1 ms and 5 us

    def left(**cover):
        summary = Summary(collectives=(dataclasses.replace(gather, **cover),))
        return seconds(summary, 0, 2, cluster).within_node

    assert left() == pytest.approx(1005e-6)
    assert left(cover_flops=Linear(5e8)) == pytest.approx(1005e-6 - 0.8 * 500e-6)
    assert left(cover_bytes=Linear(1e7)) == pytest.approx(1005e-6 - 0.8 * 100e-6)
    assert left(cover_flops=Linear(5e9)) == 0


def test_devices_that_share_cores():
    assert [slowdown(n, SHARED) for n in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert slowdown(8, CLUSTER) == 1
    summary = Summary(kernels=(Kernel(NOTHING, Linear(1e8)),), steps=1000)
    alone, crowded = seconds(summary, 1, 2, SHARED), seconds(summary, 1, 8, SHARED)
    assert crowded == alone * 4
    assert launch_seconds(8, SHARED) == pytest.approx(4 * launch_seconds(1, SHARED)) == pytest.approx(40e-6)


def test_fewer_devices_that_share_cores_meet_sooner():
    """The link's latency is that with all devices at it, which are four times slower than two."""
    gather = Collective("all-gather", 2, 1, Linear(2e6))
    times = [collective_seconds(gather, 0, SHARED, slowdown(n, SHARED))[0] for n in (2, 4, 8)]
    assert times == [pytest.approx(s) for s in (100e-6 + 1.25e-6, 200e-6 + 2.5e-6, 400e-6 + 5e-6)]


@pytest.mark.parametrize(
    ("kind", "group", "factor"),
    [("all-reduce", 2, 1.0), ("all-reduce", 8, 1.75), ("all-gather", 4, 0.75), ("reduce-scatter", 4, 0.75),
     ("all-to-all", 2, 0.5), ("collective-permute", 2, 1.0)],
)  # fmt: skip
def test_bytes_sent(kind, group, factor):
    assert volume_factor(kind, group) == factor


def test_sums():
    assert Seconds(1, 2, 3, 4, 5) + Seconds(1, 1, 1, 1, 1) * 2 == Seconds(3, 4, 5, 6, 7)
    assert Seconds(1, 2, 3, 4, 5).total == 15
    assert seconds(moved(1e8), 0, 1, CLUSTER) == Seconds(memory=1e-3, overhead=1e-6)
