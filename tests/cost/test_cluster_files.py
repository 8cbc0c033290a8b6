"""The clusters that come with the project."""

from pathlib import Path

import pytest
import yaml

from real_jax.spec.files import load_cluster

FOLDER = Path(__file__).resolve().parents[2] / "tpu_gpu_configs"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_loads_and_is_named_after_its_file(path):
    cluster = load_cluster(path)  # checks every number against its range
    assert cluster.name == path.stem
    assert cluster.source


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_number_has_its_source_beside_it(path):
    for line in path.read_text().splitlines():
        if isinstance(yaml.safe_load(line.partition(":")[2].split("#")[0].strip() or "null"), float):
            assert "  # " in line, line


def test_the_h100_node():
    c = load_cluster(FOLDER / "h100-1x8.yaml")
    assert (c.platform, c.devices, c.shared_cores) == ("gpu", 8, 0)
    assert (c.chip.matrix_tflops, c.chip.memory_gb_per_s) == (989, 3350)
    assert c.chip.memory_gib * 2**30 == pytest.approx(80e9, rel=0.001)
    assert (c.within_node.gb_per_s, c.between_nodes.gb_per_s, c.host_link.gb_per_s) == (450, 50, 55)


def test_the_laptop():
    c = load_cluster(FOLDER / "cpu-8.yaml")
    assert (c.platform, c.devices) == ("cpu", 8)
    assert 0 < c.shared_cores < c.devices
