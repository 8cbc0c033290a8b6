"""What one device executes -> seconds, by resource. Pure."""

import dataclasses

from real_jax.cost.summary import Collective, Kernel, Linear, Summary
from real_jax.spec.hardware import Cluster, Link, share

RESOURCES = ("matrix", "memory", "within_node", "between_nodes", "overhead")


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Seconds that a program spends on each resource; together, its run time.

    Attributes:
      matrix: kernels bound by the arithmetic of a matrix product.
      memory: kernels bound by what they read and write.
      within_node, between_nodes: collectives, as far as nothing else runs meanwhile, by the slower link that they use.
      overhead: starting the program, and the fixed time of each kernel.
    """

    matrix: float = 0.0
    memory: float = 0.0
    within_node: float = 0.0
    between_nodes: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        return self.matrix + self.memory + self.within_node + self.between_nodes + self.overhead

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
    if kind == "all-reduce":
        return 2 * (group - 1) / group
    if kind in ("all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return (group - 1) / group
    return 1.0


def neighbours(collective: Collective, cluster: Cluster) -> int:
    """How many devices of a group are on one node."""
    return max(1, min(collective.group, cluster.devices_per_node // collective.stride))


def collective_seconds(collective: Collective, rows: float, cluster: Cluster, slow: float = 1.0) -> tuple[float, float]:
    """Seconds of one collective, nothing else running: on the links within a node, and on those between nodes.

    `slow` is the mesh's `slowdown` where devices share cores. The latency of a link is that with all devices at it; fewer
    of them meet sooner.

    A group of several nodes works in two steps that overlap: the devices of a node exchange all of the array, and each
    of them carries an equal share of what its node exchanges with others. The slower of the two counts.
    """
    near = neighbours(collective, cluster)
    far = collective.group // near
    volume, wait = collective.bytes.at(rows), slow / slowdown(cluster.devices, cluster)
    within = between = 0.0
    if near > 1:
        within = _over(cluster.within_node, volume * volume_factor(collective.kind, near), near, slow, wait)
    if far > 1:
        between = _over(cluster.between_nodes, volume / near * volume_factor(collective.kind, far), far, slow, wait)
    return (within, 0.0) if within >= between else (0.0, between)


def _over(link: Link, volume: float, group: int, slow: float, wait: float) -> float:
    rate = link.gb_per_s * 1e9 * share(link.reach, max(volume, 1.0))
    return volume * slow / rate + (link.latency_us + link.hop_us * (group - 2)) * 1e-6 * wait


def kernel_seconds(flops: float, volume: float, cluster: Cluster) -> tuple[float, float]:
    """Seconds of one kernel's arithmetic, and of its reads and writes, on a device that computes alone."""
    chip = cluster.chip
    matrix = memory = 0.0
    if flops > 0:
        matrix = flops / (chip.matrix_tflops * 1e12 * share(chip.matrix_reach, flops))
    if volume > 0:
        memory = volume / (chip.memory_gb_per_s * 1e9 * share(chip.memory_reach, volume))
    return matrix, memory


def seconds(summary: Summary, rows: float, devices: int, cluster: Cluster) -> Seconds:
    """Time of `summary` at `rows` rows per device, on an idle machine, without the start of the program.

    A kernel takes the longer of its arithmetic and its memory traffic, and a fixed time. Of a collective that has
    kernels beside it, `cluster.chip.overlap` of their time is hidden.

    Args:
      devices: of the whole mesh; they all compute at the same time.
    """
    slow = slowdown(devices, cluster)
    matrix = memory = within = between = 0.0
    for kernel in summary.kernels:
        arithmetic, traffic = _kernel(kernel, rows, cluster)
        if arithmetic >= traffic:
            matrix += arithmetic * kernel.count
        else:
            memory += traffic * kernel.count
    for collective in summary.collectives:
        near, far = collective_seconds(collective, rows, cluster, slow)
        hidden = min(near + far, cluster.chip.overlap * slow * _cover(collective, rows, cluster))
        within += collective.count * max(0.0, near - hidden)
        between += collective.count * max(0.0, far - hidden)
    return Seconds(matrix * slow, memory * slow, within, between, summary.steps * cluster.chip.step_us * 1e-6 * slow)


def _kernel(kernel: Kernel, rows: float, cluster: Cluster) -> tuple[float, float]:
    return kernel_seconds(kernel.flops.at(rows), kernel.bytes.at(rows), cluster)


def _cover(collective: Collective, rows: float, cluster: Cluster) -> float:
    """Seconds of the kernels beside one collective."""
    if not collective.cover_bytes and not collective.cover_flops:
        return 0.0
    return max(kernel_seconds(collective.cover_flops.at(rows), collective.cover_bytes.at(rows), cluster))


def launch_seconds(devices: int, cluster: Cluster) -> float:
    """Time to start a program on `devices` devices."""
    return cluster.chip.launch_us * 1e-6 * slowdown(devices, cluster)


def moved(volume: float) -> Summary:
    """One kernel that reads and writes `volume` bytes in all."""
    return Summary(kernels=(Kernel(Linear(), Linear(volume)),), steps=1.0)
