import dataclasses

import pytest

from real_jax.cost.hlo import Collective, Linear, Product, Summary
from real_jax.cost.roofline import Seconds, launch_seconds, seconds, slowdown, volume_factor
from real_jax.spec.hardware import Chip, Cluster, Link

# Round numbers: 1 TFLOP/s, 100 GB/s, 10 us to start, 1 us a kernel; links 10 GB/s, 5 us and 1 GB/s, 50 us.
CLUSTER = Cluster(
    name="round", platform="gpu", nodes=2, devices_per_node=4, chip=Chip("round", 16, 1.0, 100.0, 10.0, 1.0),
    within_node=Link(10.0, 5.0), between_nodes=Link(1.0, 50.0), host_link=Link(10.0, 5.0),
)  # fmt: skip
SHARED = dataclasses.replace(CLUSTER, shared_cores=2.0)


def test_each_resource():
    summary = Summary(
        # Two products bound by arithmetic (2e9 operations: 2 ms each), one by memory (1e8 bytes: 1 ms).
        products=(Product(Linear(2e9), Linear(1e6), 2), Product(Linear(1e6), Linear(1e8), 1)),
        bytes=Linear(3e8),
        kernels=100,
        collectives=(Collective("all-reduce", 4, Linear(4e6), 3), Collective("all-gather", 2, Linear(2e6), 1)),
    )
    s = seconds(summary, 1, 4, CLUSTER)
    assert s.matrix == pytest.approx(5e-3)
    assert s.memory == pytest.approx(3e-3)
    assert s.overhead == pytest.approx(100e-6)
    # 4e6 x 2 x 3/4 + 2e6 x 1/2 bytes at 10 GB/s, and four times 5 us.
    assert s.collectives == pytest.approx(7e6 / 1e10 + 20e-6)
    assert s.total == pytest.approx(5e-3 + 3e-3 + 100e-6 + 7e-4 + 20e-6)


def test_a_mesh_over_two_nodes_pays_for_the_slower_link():
    summary = Summary(collectives=(Collective("collective-permute", 2, Linear(1e6), 1),))
    assert seconds(summary, 1, 4, CLUSTER).collectives == pytest.approx(1e-4 + 5e-6)
    assert seconds(summary, 1, 8, CLUSTER).collectives == pytest.approx(1e-3 + 50e-6)


def test_rows():
    summary = Summary(bytes=Linear(1e8, 1e7))
    assert seconds(summary, 10, 1, CLUSTER).memory == pytest.approx(2e-3)
    assert seconds(summary, 20, 1, CLUSTER).memory == pytest.approx(3e-3)


def test_devices_that_share_cores():
    assert [slowdown(n, SHARED) for n in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert slowdown(8, CLUSTER) == 1
    summary = Summary(bytes=Linear(1e8), kernels=1000)
    alone, crowded = seconds(summary, 1, 2, SHARED), seconds(summary, 1, 8, SHARED)
    assert crowded == alone * 4
    assert launch_seconds(8, SHARED) == pytest.approx(4 * launch_seconds(1, SHARED)) == pytest.approx(40e-6)


@pytest.mark.parametrize(
    "kind, group, factor",
    [("all-reduce", 2, 1.0), ("all-reduce", 8, 1.75), ("all-gather", 4, 0.75), ("reduce-scatter", 4, 0.75),
     ("all-to-all", 2, 0.5), ("collective-permute", 2, 1.0)],
)  # fmt: skip
def test_bytes_sent(kind, group, factor):
    assert volume_factor(kind, group) == factor


def test_sums():
    assert Seconds(1, 2, 3, 4) + Seconds(1, 1, 1, 1) * 2 == Seconds(3, 4, 5, 6)
