"""A cluster as a file for people reads back as the same cluster."""

from real_jax.spec.cluster_file import cluster_text
from real_jax.spec.files import load_cluster
from real_jax.spec.hardware import Chip, Cluster, Link, Reach

CLUSTER = Cluster(
    "two", "tpu", 2, 4, Chip("TPU: a kind", 16.5, 197.0, 819.0, matrix_reach=(Reach(1e5, 0.25), Reach(1e18, 0.5))),
    Link(100.0, 1e-5, reach=(Reach(64.0, 1.5),)), Link(12.5, 20.0), Link(16.0, 5.0), source='a "quote" # and: more',
    topology="v5e:2x4",
)  # fmt: skip


def test_round_trip(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(cluster_text(CLUSTER, {}, "A header,\nof two lines."))
    assert load_cluster(path) == CLUSTER
    assert path.read_text().startswith("# A header,\n# of two lines.\nname: two\n")


def test_the_comment_of_the_innermost_field_stands_beside_a_number():
    notes = {
        "nodes": "counted", "chip": "a chip", "chip.memory_gib": "its memory", "chip.matrix_reach": "products",
        "chip.matrix_reach[1]": "large ones", "within_node.reach": "sums",
    }  # fmt: skip
    lines = [line.strip() for line in cluster_text(CLUSTER, notes).splitlines()]
    for line in (
        "nodes: 2  # counted",
        "memory_gib: 16.5  # its memory",
        "matrix_tflops: 197.0  # a chip",
        "- {size: 100000.0, share: 0.25}  # products",
        "- {size: 1e+18, share: 0.5}  # large ones",
        "- {size: 64.0, share: 1.5}  # sums",
        "memory_reach: []",
    ):
        assert line in lines
