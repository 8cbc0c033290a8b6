"""Clusters: which link a collective crosses, and numbers in a wrong unit."""

import dataclasses

import pytest

from real_jax.spec.errors import UsageError
from real_jax.spec.hardware import Chip, Cluster, Link, check_cluster

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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chip": dataclasses.replace(CLUSTER.chip, memory_gib=85_899_345_920)}, r"chip.memory_gib is 85899345920, outside \[0.05, 4096\]"),
        ({"chip": dataclasses.replace(CLUSTER.chip, matrix_tflops=9.89e14)}, r"chip.matrix_tflops is 989000000000000.0"),
        ({"chip": dataclasses.replace(CLUSTER.chip, memory_gb_per_s=0.0)}, "chip.memory_gb_per_s is 0.0"),
        ({"chip": dataclasses.replace(CLUSTER.chip, launch_us=-1.0)}, "chip.launch_us is -1.0"),
        ({"chip": dataclasses.replace(CLUSTER.chip, memory_gib=float("nan"))}, "chip.memory_gib is nan"),
        ({"between_nodes": Link(5e10, 1.0)}, "between_nodes.gb_per_s is 50000000000.0"),
        ({"within_node": Link(450.0, -5.0)}, "within_node.latency_us is -5.0"),
        ({"host_link": Link(0.0, 1.0)}, "host_link.gb_per_s is 0.0"),
        ({"nodes": 0}, "nodes is 0"),
        ({"devices_per_node": 0}, "devices_per_node is 0"),
        ({"shared_cores": -2.0}, "shared_cores is -2.0"),
        ({"platform": "cuda"}, "platform is 'cuda'; it must be cpu, gpu or tpu"),
    ],
)  # fmt: skip
def test_a_number_in_a_wrong_unit_is_named(change, message):
    with pytest.raises(UsageError, match=f"Cluster 'h100-16': {message}"):
        check_cluster(dataclasses.replace(CLUSTER, **change))
