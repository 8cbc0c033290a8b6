import numpy as np
import pytest

from real_jax.cost import measure, roofline
from real_jax.cost.hlo import Collective, Linear, Product, Summary
from real_jax.cost.measure import Sample, available_host_memory, cluster_name, fit, probe_cluster, probe_key
from real_jax.spec.files import load_cluster, save_cluster
from real_jax.spec.hardware import Chip, Cluster, Link, check_cluster

CLUSTER = Cluster(
    name="cpu-8", platform="cpu", nodes=1, devices_per_node=8, chip=Chip("cpu", 1.5, 0.1, 10.0, 50.0, 1.0),
    within_node=Link(1.0, 100.0), between_nodes=Link(1.0, 100.0), host_link=Link(5.0, 100.0), shared_cores=2.0,
)  # fmt: skip

# One program for each resource, and one of all.
PROGRAMS = [
    Summary(products=(Product(Linear(1e9), Linear(1e3), 1),)),
    Summary(bytes=Linear(1e8)),
    Summary(collectives=(Collective("all-reduce", 8, Linear(1e6), 20),)),
    Summary(kernels=10000),
    Summary((Product(Linear(1e8), Linear(1e3), 2),), Linear(2e7), 1000, (Collective("all-gather", 8, Linear(1e5), 5),)),
]


def test_fit_finds_the_rates_that_programs_reach():
    """Times made with other rates than the cluster's; the prior pulls them back a little."""
    true = {"matrix": 2.0, "memory": 0.5, "collectives": 3.0, "overhead": 4.0}

    def taken(summary, devices):
        s = roofline.seconds(summary, 0, devices, CLUSTER)
        s += roofline.Seconds(overhead=roofline.launch_seconds(devices, CLUSTER))
        return sum(getattr(s, r) * true[r] for r in roofline.RESOURCES)

    fitted = fit(CLUSTER, [Sample(p, 8, taken(p, 8)) for p in PROGRAMS])
    assert fitted.chip.matrix_tflops == pytest.approx(0.1 / 2, rel=0.1)
    assert fitted.chip.memory_gb_per_s == pytest.approx(10 / 0.5, rel=0.1)
    assert fitted.within_node.latency_us == pytest.approx(300, rel=0.1)
    assert fitted.within_node.gb_per_s == pytest.approx(1 / 3, rel=0.1)
    assert fitted.chip.step_us == pytest.approx(4, rel=0.1)
    assert fitted.between_nodes == fitted.within_node
    assert "fitted" in fitted.source


def test_fit_leaves_what_no_program_uses():
    seconds = 2 * roofline.seconds(PROGRAMS[0], 0, 1, CLUSTER).total
    fitted = fit(CLUSTER, [Sample(PROGRAMS[0], 1, seconds)])
    assert fitted.within_node == CLUSTER.within_node
    assert fitted.chip.memory_gb_per_s == CLUSTER.chip.memory_gb_per_s
    assert fitted.chip.matrix_tflops == pytest.approx(0.05, rel=0.1)


def test_one_disturbed_sample_does_not_decide():
    samples = [Sample(PROGRAMS[0], 8, roofline.seconds(PROGRAMS[0], 0, 8, CLUSTER).total) for _ in range(3)]
    samples.append(Sample(PROGRAMS[0], 8, 20 * samples[0].seconds))
    assert fit(CLUSTER, samples).chip.matrix_tflops == pytest.approx(0.1, rel=0.1)


def test_the_minimizer():
    target = np.array([0.3, -1.2, 2.0])
    found = measure._minimize(lambda x: float(np.abs(x - target).sum()), 3)
    np.testing.assert_allclose(found, target, atol=0.02)


def test_host_memory(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 100 kB\nMemAvailable:    64 kB\n")
    assert available_host_memory(str(path)) == 64 * 1024
    assert available_host_memory(str(tmp_path / "absent")) > 2**20


def test_probing_this_machine(tmp_path):
    steps = []
    cluster = probe_cluster(lambda done, total, what: steps.append((done, total)))
    assert cluster.name == cluster_name() == "cpu-8"
    assert (cluster.platform, cluster.devices) == ("cpu", 8)
    assert check_cluster(cluster) is cluster
    assert 0 <= cluster.shared_cores <= 8
    assert cluster.chip.launch_us > cluster.chip.step_us > 0
    assert cluster.source.startswith("measured")
    assert steps == [(i, 6) for i in range(7)]
    save_cluster(cluster, tmp_path / "c.yaml")
    assert load_cluster(tmp_path / "c.yaml") == cluster
    assert probe_key().startswith("cpu-8-")
