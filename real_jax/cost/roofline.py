"""What one device executes -> seconds, by resource. Pure."""

import dataclasses

from real_jax.cost.hlo import Summary
from real_jax.spec.hardware import Cluster

RESOURCES = ("matrix", "memory", "collectives", "overhead")


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Seconds that a program keeps each resource busy; together, its run time.

    Attributes:
      matrix: kernels with a matrix product.
      memory: all other kernels.
      collectives: data exchanged between devices.
      overhead: starting the program, and the fixed time of each kernel.
    """

    matrix: float = 0.0
    memory: float = 0.0
    collectives: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        return self.matrix + self.memory + self.collectives + self.overhead

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, r) + getattr(other, r) for r in RESOURCES))

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(*(getattr(self, r) * times for r in RESOURCES))


def slowdown(devices: int, cluster: Cluster) -> float:
    """By how much a device's rate falls while `devices` compute: 1, or more where virtual devices share cores."""
    return max(1.0, devices / cluster.shared_cores) if cluster.shared_cores > 0 else 1.0


def volume_factor(kind: str, group: int) -> float:
    """Bytes that one device sends per byte of the full array, by the usual ring (or pairwise) algorithms.

    An all-reduce of n devices is a reduce-scatter and an all-gather, each of which sends (n - 1) / n of the array;
    an all-to-all keeps one n-th at home; a permutation sends all of its operand.
    """
    if kind in ("all-reduce",):
        return 2 * (group - 1) / group
    if kind in ("all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return (group - 1) / group
    return 1.0


def seconds(summary: Summary, rows: float, devices: int, cluster: Cluster) -> Seconds:
    """Time of `summary` at `rows` rows per device, on an idle machine, without the start of the program.

    A kernel with a matrix product takes the longer of its arithmetic and its memory traffic, any other kernel its memory
    traffic; each kernel and each collective has a fixed time beside. Nothing of it is taken to overlap.

    Args:
      devices: of the whole mesh; they all compute at the same time.
    """
    chip, slow = cluster.chip, slowdown(devices, cluster)
    link = cluster.link(0, devices)
    memory_rate = chip.memory_gb_per_s * 1e9 / slow
    matrix_rate = chip.matrix_tflops * 1e12 / slow
    products = sum(
        p.count * max(p.flops.at(rows) / matrix_rate, p.bytes.at(rows) / memory_rate) for p in summary.products
    )
    sent = sum(c.bytes.at(rows) * volume_factor(c.kind, c.group) for c in summary.collectives)
    count = sum(c.count for c in summary.collectives)
    return Seconds(
        matrix=products,
        memory=summary.bytes.at(rows) / memory_rate,
        collectives=sent * slow / (link.gb_per_s * 1e9) + count * link.latency_us * 1e-6,
        overhead=summary.kernels * chip.step_us * 1e-6 * slow,
    )


def launch_seconds(devices: int, cluster: Cluster) -> float:
    """Time to start a program on `devices` devices."""
    return cluster.chip.launch_us * 1e-6 * slowdown(devices, cluster)
