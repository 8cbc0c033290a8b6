"""The clusters that come with the project, and files that are refused."""

import math
import re
from pathlib import Path

import pytest

from real_jax.cost.roofline import collective_seconds, kernel_seconds
from real_jax.cost.summary import Collective, Linear
from real_jax.spec.errors import UsageError
from real_jax.spec.files import load_cluster

FOLDER = Path(__file__).resolve().parents[2] / "tpu_gpu_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
SHAPES = {
    "a100-80gb-1x8": (1, 8), "a100-80gb-8x8": (8, 8), "b200-1x8": (1, 8), "b200-8x8": (8, 8), "cpu-8": (1, 8),
    "h100-1x8": (1, 8), "h100-2x8": (2, 8), "h100-4x8": (4, 8), "h100-8x8": (8, 8), "h100-16x8": (16, 8),
    "h100-128x8": (128, 8), "h200-1x8": (1, 8), "h200-8x8": (8, 8), "tpu-v5e-16": (1, 16), "tpu-v5e-256": (1, 256),
    "tpu-v5p-128": (1, 128), "tpu-v6e-256": (1, 256),
}  # fmt: skip
# Nominal numbers of the data sheets: TFLOP/s, GB/s of memory, 1e9 bytes of memory, GB/s within a node and between nodes.
SHEETS = {
    "a100": (312, 2039, 80, 300, 25),
    "h100": (989, 3350, 80, 450, 50),
    "h200": (989, 4800, 141, 450, 50),
    "b200": (2250, 8000, 180, 900, 50),
    "tpu-v5e": (197, 819, 16, 200, 3.1),
    "tpu-v5p": (459, 2765, 95, 600, 6.25),
    "tpu-v6e": (918, 1638, 32, 400, 12.5),
}


def test_the_files():
    assert {p.stem for p in FILES} == set(SHAPES)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_loads_and_is_named_after_its_file(path):
    cluster = load_cluster(path)  # checks every number against its range
    assert cluster.name == path.stem
    assert cluster.source
    assert (cluster.nodes, cluster.devices_per_node) == SHAPES[path.stem]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_number_has_its_source_beside_it(path):
    numbers = [line for line in path.read_text().splitlines() if re.search(r"^[^#\"]*: -?\d", line)]
    assert len(numbers) > 15
    for line in numbers:
        assert re.search(r"  # \w", line), line


@pytest.mark.parametrize("path", [p for p in FILES if p.stem != "cpu-8"], ids=lambda p: p.stem)
def test_nominal_numbers_are_those_of_the_data_sheets(path):
    c = load_cluster(path)
    tflops, memory, size, within, between = next(v for k, v in SHEETS.items() if path.stem.startswith(k))
    assert (c.chip.matrix_tflops, c.chip.memory_gb_per_s) == (tflops, memory)
    assert c.chip.memory_gib * 2**30 == pytest.approx(size * 1e9, rel=0.005)
    assert (c.within_node.gb_per_s, c.between_nodes.gb_per_s) == (within, between)
    assert c.shared_cores == 0
    assert 0.8 <= c.chip.overlap <= 0.9


@pytest.mark.parametrize("chip", SHEETS)
def test_files_of_one_chip_agree(chip):
    clusters = [load_cluster(p) for p in FILES if p.stem.startswith(chip)]
    for c in clusters:
        for part in ("platform", "chip", "within_node", "between_nodes", "host_link"):
            assert getattr(c, part) == getattr(clusters[0], part), c.name


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_larger_work_takes_longer_and_reaches_more_of_an_accelerators_rates(path):
    cluster = load_cluster(path)
    sizes = [10.0**n for n in range(5, 14)]
    matrix, memory = zip(*(kernel_seconds(s, s, cluster) for s in sizes))
    gathers = [sum(collective_seconds(Collective("all-gather", 8, 1, Linear(s)), 0, cluster)) for s in sizes]
    for times in (matrix, memory, gathers):
        assert list(times) == sorted(times)
    if cluster.platform != "cpu":
        for curve in (cluster.chip.matrix_reach, cluster.chip.memory_reach, cluster.within_node.reach):
            shares = [p.share for p in curve]
            assert shares == sorted(shares) and shares[-1] <= 1


def test_a_large_product_on_an_h100():
    c = load_cluster(FOLDER / "h100-1x8.yaml")
    assert kernel_seconds(2 * 8192.0**3, 0, c)[0] == pytest.approx(2 * 8192**3 / (989e12 * 0.73), rel=1e-3)


def test_a_large_sum_over_an_h100_node():
    """1 GiB: 1.75 GiB sent at 0.8 of 450 GB/s, and 12 + 6 x 1.5 us."""
    c = load_cluster(FOLDER / "h100-1x8.yaml")
    within, between = collective_seconds(Collective("all-reduce", 8, 1, Linear(2**30)), 0, c)
    assert (within, between) == (pytest.approx(1.75 * 2**30 / 360e9 + 21e-6), 0)


@pytest.mark.parametrize("path", [p for p in FILES if "tpu" in p.stem], ids=lambda p: p.stem)
def test_tpu_slices_name_their_topology(path):
    cluster = load_cluster(path)
    kind, _, shape = cluster.topology.partition(":")
    assert kind in path.stem
    assert math.prod(int(n) for n in shape.split("x")) == cluster.devices


def test_the_laptop():
    c = load_cluster(FOLDER / "cpu-8.yaml")
    assert c.platform == "cpu" and 0 < c.shared_cores < c.devices


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  memory_gib: 74.5", "  memory_gib: -74.5", "chip.memory_gib is -74.5"),
        ("  memory_gib: 74.5", "  memory_gib: 80000000000.0", "chip.memory_gib is 80000000000.0"),
        ("  memory_gib: 74.5", "  memory_gib: lots", "chip.memory_gib is 'lots'; it must be of type float"),
        ("  matrix_tflops: 989.0", "  matrix_tflops: 0.989", "chip.matrix_tflops is 0.989"),
        ("  matrix_tflops: 989.0", "  matrix_tflops: .nan", "chip.matrix_tflops is nan"),
        ("  matrix_tflops: 989.0", "", "key 'chip.matrix_tflops' is missing"),
        ("  matrix_tflops:", "  matrix_flops:", "unknown key 'chip.matrix_flops'. Did you mean 'matrix_tflops'"),
        ("  gb_per_s: 450.0", "  gb_per_s: 450000000000.0", "within_node.gb_per_s is 450000000000.0"),
        ("  latency_us: 40.0", "  latency_us: -40.0", "between_nodes.latency_us is -40.0"),
        ("  overlap: 0.85", "  overlap: 85", "chip.overlap is 85.0"),
        ("share: 0.73}", "share: 73}", r"chip.matrix_reach\[4\].share is 73.0"),
        ("share: 0.73}", "}", r"chip.matrix_reach\[4\]"),
        ("size: 17000000000.0,", "size: 1.0,", "the sizes of chip.matrix_reach do not rise"),
        ("nodes: 1 ", "nodes: 0 ", "nodes is 0"),
        ("nodes: 1 ", "nodes: 1.5 ", "nodes is 1.5; it must be of type int"),
        ("platform: gpu", "platform: cuda", "platform is 'cuda'"),
    ],
)
def test_a_wrong_number_is_refused_by_the_name_of_its_field(old, new, message, tmp_path):
    text = (FOLDER / "h100-1x8.yaml").read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError, match=message):
        load_cluster(path)
