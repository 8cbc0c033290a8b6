"""Measuring this machine: what is found loads as a cluster, whatever the machine's speed."""

import dataclasses

import jax.numpy as jnp
import pytest

from real_jax.cost import exchange, measure, timing
from real_jax.cost.measure import available_host_memory, cluster_name, probe_cluster, probe_key
from real_jax.spec.errors import UsageError
from real_jax.spec.files import load_cluster, save_cluster
from real_jax.spec.hardware import check_cluster


def test_host_memory(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 100 kB\nMemAvailable:    64 kB\n")
    assert available_host_memory(str(path)) == 64 * 1024
    assert available_host_memory(str(tmp_path / "absent")) > 2**20


def test_a_product_counts_its_operations_and_its_bytes():
    t = timing.product(4, 8, 16, jnp.float32, 1e-3, 1e9)
    assert (t.size, t.bytes) == (2 * 4 * 8 * 16, 4 * (4 * 8 + 8 * 16 + 4 * 16))
    assert t.shape == "4 x 8 x 16 float32" and t.seconds > 0
    assert timing.product(4, 8, 16, jnp.bfloat16, 1e-3, 1e9).bytes == t.bytes / 2


@pytest.mark.parametrize(("volume", "text"), [(8, "8 B"), (2**16, "64 KiB"), (3 * 2**19, "1.5 MiB"), (2**31, "2 GiB")])
def test_sizes_for_people(volume, text):
    assert timing.size_text(volume) == text


@pytest.mark.parametrize(("per_node", "groups"), [(1, []), (2, [2]), (6, [2, 6]), (8, [2, 4, 8])])
def test_groups(per_node, groups):
    assert exchange.groups_within(per_node) == groups


def ids(mesh):
    return [[d.id for d in group] for group in mesh.devices]


def test_groups_lie_within_a_node_or_across_nodes():
    assert ids(exchange.mesh_within(2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ids(exchange.mesh_between(2, 2)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert ids(exchange.mesh_between(4, 2)) == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize(("kind", "sent"), [("all-reduce", 6144), ("all-gather", 3072), ("reduce-scatter", 3072)])
def test_a_collective_counts_what_a_device_sends(kind, sent):
    t = exchange.collective(kind, exchange.mesh_within(4), 4096, 2)
    assert (t.what, t.group, t.size) == (kind, 4, sent)
    assert t.seconds > 0


def test_reallocations_move_whole_arrays():
    same, other = exchange.reallocations(2**16)
    assert same.size == other.size == 4 * 128**2
    assert "same" in same.shape and "other" in other.shape


@pytest.mark.parametrize(("parts", "share"), [((1, 2, 2), 1), ((1, 2, 2.5), 0.5), ((1, 2, 3.1), 0), ((1, 2, 1.9), 1)])
def test_what_overlaps(parts, share):
    assert exchange.hidden_share(*parts) == share
    assert exchange.overlap(2**12, 8, 1e9, jnp.float32) == 0  # a CPU hides nothing


@pytest.mark.parametrize("nodes", [3, -2, 16])
def test_devices_that_do_not_divide_among_nodes(nodes):
    with pytest.raises(UsageError, match=f"nodes is {nodes}, but there are 8 devices"):
        measure.measure(full=False, nodes=nodes)


def test_links_between_nodes_are_measured_between_devices_of_different_nodes():
    found = measure._Found()
    for _, job in measure._collectives(dataclasses.replace(measure._scale(False), arrays=(64,)), 2, False):
        job(found)
    assert [t.group for t in found.near] == [2, 2, 4, 4] and [t.group for t in found.far] == [2, 2]


def test_probing_this_machine(tmp_path):
    steps = []
    cluster = probe_cluster(lambda done, total, what: steps.append((done, total)))
    assert cluster.name == cluster_name() == "cpu-8"
    assert (cluster.platform, cluster.nodes, cluster.devices) == ("cpu", 1, 8)
    assert check_cluster(cluster) is cluster
    assert 0 <= cluster.shared_cores <= 8
    assert cluster.chip.launch_us > cluster.chip.step_us > 0
    assert min(len(c) for c in (cluster.chip.matrix_reach, cluster.chip.memory_reach, cluster.within_node.reach)) >= 1
    assert cluster.between_nodes == cluster.within_node
    assert cluster.source.startswith("measured") and "fitted" in cluster.source
    assert [done for done, _ in steps] == list(range(len(steps))) and {total for _, total in steps} == {len(steps) - 1}
    save_cluster(cluster, tmp_path / "c.yaml")
    assert load_cluster(tmp_path / "c.yaml") == cluster
    assert probe_key().startswith("cpu-8-")
