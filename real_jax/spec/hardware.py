"""What a plan runs on: chips, the links between them, and a cluster of equal nodes. Units stand in the field names."""

import dataclasses

from real_jax.spec.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      name: the vendor's name.
      memory_gib: memory for arrays.
      matrix_tflops: dense matrix rate in the compute type (bfloat16 on accelerators, float32 on a CPU).
      memory_gb_per_s: rate of its own memory.
      launch_us: time to start one compiled program on it.
      step_us: fixed time of one operation inside a program (a fusion, a dot, a loop step).
    """

    name: str
    memory_gib: float
    matrix_tflops: float
    memory_gb_per_s: float
    launch_us: float = 10.0
    step_us: float = 2.0


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection as one device sees it: bandwidth in one direction, and the latency of one collective over it."""

    gb_per_s: float
    latency_us: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """`nodes` equal machines of `devices_per_node` chips.

    Attributes:
      platform: JAX's name of the backend: "cpu", "gpu" or "tpu".
      within_node, between_nodes: the links of one device.
      host_link: between a device and its host's memory.
      shared_cores: 0 where each device computes on its own. For virtual devices, which share their host's cores: how
        many of them can compute at full speed at the same time.
      source: where the numbers come from, in words.
    """

    name: str
    platform: str
    nodes: int
    devices_per_node: int
    chip: Chip
    within_node: Link
    between_nodes: Link
    host_link: Link
    shared_cores: float = 0.0
    source: str = ""

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def link(self, first: int, count: int) -> Link:
        """The slowest link that a collective over devices [first, first + count) crosses."""
        same = first // self.devices_per_node == (first + count - 1) // self.devices_per_node
        return self.within_node if same else self.between_nodes


# The range in which a number of each field can be right; outside it the unit is surely wrong.
_RANGES = {
    "memory_gib": (0.05, 4096),
    "matrix_tflops": (1e-4, 1e5),
    "memory_gb_per_s": (0.1, 1e5),
    "launch_us": (0, 1e6),
    "step_us": (0, 1e5),
    "gb_per_s": (1e-3, 1e5),
    "latency_us": (0, 1e6),
    "nodes": (1, 1e5),
    "devices_per_node": (1, 1024),
    "shared_cores": (0, 1024),
}


def check_cluster(cluster: Cluster) -> Cluster:
    """Returns `cluster`, or raises UsageError naming the first field whose number cannot be right."""

    def visit(value, path: str) -> None:
        for field in dataclasses.fields(value):
            inner, name = getattr(value, field.name), f"{path}.{field.name}" if path else field.name
            if dataclasses.is_dataclass(inner):
                visit(inner, name)
            elif field.name in _RANGES:
                low, high = _RANGES[field.name]
                if not low <= inner <= high:
                    raise UsageError(
                        f"Cluster {cluster.name!r}: {name} is {inner}, outside [{low:g}, {high:g}]. "
                        "Give it in the unit that the field's name says."
                    )

    visit(cluster, "")
    if cluster.platform not in ("cpu", "gpu", "tpu"):
        raise UsageError(f"Cluster {cluster.name!r}: platform is {cluster.platform!r}; it must be cpu, gpu or tpu.")
    return cluster
