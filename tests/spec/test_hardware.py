"""Clusters: which link a collective crosses, and numbers in a wrong unit."""

import dataclasses

import pytest

from real_jax.spec import hardware
from real_jax.spec.errors import UsageError
from real_jax.spec.hardware import Chip, Cluster, Link, Reach, check_cluster, share

WITHIN, BETWEEN = Link(450.0, 5.0), Link(50.0, 20.0)
CLUSTER = Cluster("h100-16", "gpu", 2, 8, Chip("H100", 80.0, 989.0, 3350.0), WITHIN, BETWEEN, Link(64.0, 10.0))


def test_links():
    assert CLUSTER.devices == 16
    for first, count, link in [
        (0, 1, WITHIN),
        (0, 8, WITHIN),
        (8, 8, WITHIN),
        (15, 1, WITHIN),
        (0, 16, BETWEEN),
        (7, 2, BETWEEN),
    ]:
        assert CLUSTER.link(first, count) is link


def test_a_right_cluster_passes():
    assert check_cluster(CLUSTER) is CLUSTER


def test_what_is_reached_is_linear_in_the_logarithm():
    curve = (Reach(1e2, 0.2), Reach(1e4, 0.6), Reach(1e5, 0.5))
    assert [share(curve, 10.0**n) for n in (0, 2, 3, 4, 5, 9)] == [
        pytest.approx(x) for x in (0.2, 0.2, 0.4, 0.6, 0.5, 0.5)
    ]
    assert share((), 7.0) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chip": dataclasses.replace(CLUSTER.chip, memory_gib=85_899_345_920)}, r"chip.memory_gib is 85899345920, outside \[1, 4096\]"),
        ({"chip": dataclasses.replace(CLUSTER.chip, matrix_tflops=9.89e14)}, r"chip.matrix_tflops is 989000000000000.0"),
        ({"chip": dataclasses.replace(CLUSTER.chip, memory_gb_per_s=0.0)}, "chip.memory_gb_per_s is 0.0"),
        ({"chip": dataclasses.replace(CLUSTER.chip, launch_us=-1.0)}, "chip.launch_us is -1.0"),
        ({"chip": dataclasses.replace(CLUSTER.chip, memory_gib=float("nan"))}, "chip.memory_gib is nan"),
        ({"between_nodes": Link(5e10, 1.0)}, "between_nodes.gb_per_s is 50000000000.0"),
        ({"within_node": Link(450.0, -5.0)}, "within_node.latency_us is -5.0"),
        ({"host_link": Link(0.0, 1.0)}, "host_link.gb_per_s is 0.0"),
        ({"chip": dataclasses.replace(CLUSTER.chip, matrix_tflops=0.989)}, "chip.matrix_tflops is 0.989"),
        ({"chip": dataclasses.replace(CLUSTER.chip, memory_gb_per_s=3.35)}, "chip.memory_gb_per_s is 3.35"),
        ({"chip": dataclasses.replace(CLUSTER.chip, step_us=-1.0)}, "chip.step_us is -1.0"),
        ({"chip": dataclasses.replace(CLUSTER.chip, overlap=85.0)}, r"chip.overlap is 85.0, outside \[0, 1\]"),
        ({"chip": dataclasses.replace(CLUSTER.chip, matrix_reach=(Reach(1e9, 73.0),))}, r"chip.matrix_reach\[0\].share is 73.0"),
        ({"chip": dataclasses.replace(CLUSTER.chip, memory_reach=(Reach(1e6, 0.5), Reach(-1.0, 0.9)))}, r"chip.memory_reach\[1\].size is -1.0"),
        ({"chip": dataclasses.replace(CLUSTER.chip, memory_reach=(Reach(1e6, 0.5), Reach(1e6, 0.9)))}, "the sizes of chip.memory_reach do not rise"),
        ({"within_node": Link(450.0, 5.0, -1.0)}, "within_node.hop_us is -1.0"),
        ({"within_node": Link(450.0, 5.0, 0.0, (Reach(1e6, 0.0),))}, r"within_node.reach\[0\].share is 0.0"),
        ({"nodes": 0}, "nodes is 0"),
        ({"devices_per_node": 0}, "devices_per_node is 0"),
        ({"shared_cores": -2.0}, "shared_cores is -2.0"),
        ({"platform": "cuda"}, "platform is 'cuda'; it must be cpu, gpu or tpu"),
    ],
)  # fmt: skip
def test_a_number_in_a_wrong_unit_is_named(change, message):
    with pytest.raises(UsageError, match=f"Cluster 'h100-16': {message}"):
        check_cluster(dataclasses.replace(CLUSTER, **change))


def test_a_processor_may_have_numbers_that_no_accelerator_has():
    chip = Chip("cpu", 0.5, 0.05, 12.0, memory_reach=(Reach(1e4, 12.0),))
    assert check_cluster(Cluster("cpu-8", "cpu", 1, 8, chip, *[Link(1.0, 100.0)] * 3))
    with pytest.raises(UsageError, match="chip.matrix_tflops is 989.0"):
        check_cluster(Cluster("cpu-8", "cpu", 1, 8, CLUSTER.chip, *[Link(1.0, 100.0)] * 3))


def test_every_number_of_a_cluster_has_a_range():
    """A field that is added without one would be read unchecked."""
    for cls in (Cluster, Chip, Link, Reach):
        for field in dataclasses.fields(cls):
            if field.type in (int, float):
                assert field.name in hardware._RANGES, field.name
