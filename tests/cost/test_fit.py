"""Correcting a measured cluster by layer programs: times made with known factors are found again."""

import dataclasses

import numpy as np
import pytest

from real_jax.cost import fit
from real_jax.cost.fit import Factors, Sample, predict, scaled
from real_jax.cost.summary import Collective, Kernel, Linear, Summary
from real_jax.spec.hardware import Chip, Cluster, Link, Reach, check_cluster

NOTHING = Linear()
CLUSTER = Cluster(
    name="cpu-8", platform="cpu", nodes=1, devices_per_node=8,
    chip=Chip("cpu", 1.5, 0.1, 10.0, 50.0, 1.0, memory_reach=(Reach(1e4, 3.0), Reach(1e7, 1.0))),
    within_node=Link(1.0, 100.0, 10.0), between_nodes=Link(1.0, 100.0), host_link=Link(5.0, 100.0), shared_cores=2.0,
)  # fmt: skip

MATRIX = Summary(kernels=(Kernel(Linear(1e9), Linear(1e3)),))
# One program for each kind of time, and one of all; on one device and on eight.
PROGRAMS = [
    MATRIX,
    Summary(kernels=(Kernel(NOTHING, Linear(1e8)),)),
    Summary(collectives=(Collective("all-reduce", 8, 1, Linear(1e8), 20),)),
    Summary(collectives=(Collective("all-gather", 8, 1, Linear(8), 1000),)),
    Summary(steps=100_000),
    Summary(
        (Kernel(Linear(1e8), Linear(1e3), 2), Kernel(NOTHING, Linear(2e7))),
        (Collective("all-gather", 8, 1, Linear(1e5), 5),),
        1000,
    ),
]


def samples(cluster, count=8):
    made = [Sample(p, count, 0.0) for p in PROGRAMS]
    return [dataclasses.replace(s, seconds=predict(s, cluster)) for s in made]


def test_numbers_are_multiplied():
    changed = scaled(CLUSTER, Factors(matrix=2, memory=0.5, volume=4, latency=3, overhead=5, cores=0.75))
    chip, link = changed.chip, changed.within_node
    assert (chip.matrix_tflops, chip.memory_gb_per_s, link.gb_per_s) == (0.1, 10.0, 1.0)  # nominal
    assert chip.matrix_reach == (Reach(1.0, 0.5),)
    assert chip.memory_reach == (Reach(1e4, 6.0), Reach(1e7, 2.0))
    assert (link.latency_us, link.hop_us, link.reach) == (300, 30, (Reach(1.0, 0.25),))
    assert (chip.launch_us, chip.step_us, changed.shared_cores) == (250, 5, 1.5)
    assert check_cluster(changed) is changed


def test_times_of_a_slower_machine_are_told_after_the_fit():
    true = scaled(CLUSTER, Factors(matrix=2.0, memory=0.5, volume=1.5, latency=0.7, overhead=2.0))
    wanted = [*samples(true), *samples(true, 1)]
    fitted = fit.fit(CLUSTER, wanted)
    for sample in wanted:
        assert predict(sample, fitted) == pytest.approx(sample.seconds, rel=0.1)
    assert fitted.chip.matrix_reach[0].share == pytest.approx(0.5, rel=0.15)
    assert fitted.chip.memory_reach[-1].share == pytest.approx(2.0, rel=0.15)
    assert "fitted" in fitted.source


def test_what_no_program_uses_stays():
    taken = 2 * predict(Sample(MATRIX, 1, 0.0), CLUSTER)
    fitted = fit.fit(CLUSTER, [Sample(MATRIX, 1, taken)])
    assert fitted.within_node.latency_us == CLUSTER.within_node.latency_us
    assert fitted.chip.memory_reach == CLUSTER.chip.memory_reach
    assert fitted.chip.matrix_reach[0].share == pytest.approx(0.5, rel=0.1)


def test_one_disturbed_sample_does_not_decide():
    good = Sample(MATRIX, 1, predict(Sample(MATRIX, 1, 0.0), CLUSTER))
    fitted = fit.fit(CLUSTER, [good, good, good, dataclasses.replace(good, seconds=20 * good.seconds)])
    assert fitted.chip.matrix_reach[0].share == pytest.approx(1.0, rel=0.1)


def test_cores_that_devices_share():
    """Eight times the work in four times the time: two cores' worth of devices. (This machine's own number of cores is
    the most that is believed.)"""
    alone = Sample(MATRIX, 1, 1.0)
    assert fit.shared_cores([alone, Sample(MATRIX, 8, 8.0)]) == 1
    assert fit.shared_cores([alone, Sample(MATRIX, 8, 20.0)]) == 1
    assert fit.shared_cores([alone, Sample(MATRIX, 1, 1.0)]) == 0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("full", [False, True])
def test_programs_for_any_number_of_devices(count, full):
    wanted = fit.wanted_samples(count, full)
    assert all(w.placement.count <= count for w in wanted)
    assert wanted[0].placement.count == 1 and wanted[1].placement.count == count
    assert {w.piece.kind for w in wanted} == {"forward", "gradient", "generate"}


def test_the_minimizer():
    target = np.array([0.3, -1.2, 2.0])
    found = fit._minimize(lambda x: float(np.abs(x - target).sum()), 3)
    np.testing.assert_allclose(found, target, atol=0.05)
