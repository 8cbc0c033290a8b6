"""What a plan runs on: chips, the links between them, and a cluster of equal nodes. Units stand in the field names."""

import dataclasses
import itertools
import math

from real_jax.spec.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Reach:
    """A point of an efficiency curve: work of `size` runs at `share` of the nominal rate."""

    size: float
    share: float


Curve = tuple[Reach, ...]


def share(curve: Curve, size: float) -> float:
    """The share of a nominal rate that work of `size` reaches: linear in log(size) between the points of `curve`, held
    beyond its ends, 1 where there are none."""
    if not curve:
        return 1.0
    if size <= curve[0].size:
        return curve[0].share
    for low, high in itertools.pairwise(curve):
        if size <= high.size:
            part = math.log(size / low.size) / math.log(high.size / low.size)
            return low.share + part * (high.share - low.share)
    return curve[-1].share


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      name: the vendor's name.
      memory_gib: memory for arrays.
      matrix_tflops: nominal dense matrix rate in the compute type (bfloat16 on accelerators, float32 on a CPU).
      memory_gb_per_s: nominal rate of its own memory.
      launch_us: time to start one compiled program on it.
      step_us: fixed time of one operation inside a program (a fusion, a dot, a loop step).
      matrix_reach: by floating-point operations of one matrix product, the share of `matrix_tflops` that it reaches.
      memory_reach: by bytes that one kernel reads and writes, the share of `memory_gb_per_s` that it reaches; above 1
        where small arrays stay in a cache.
      overlap: share of an asynchronous collective that can run beside computation that does not need it; 0 to 1.
    """

    name: str
    memory_gib: float
    matrix_tflops: float
    memory_gb_per_s: float
    launch_us: float = 10.0
    step_us: float = 2.0
    matrix_reach: Curve = ()
    memory_reach: Curve = ()
    overlap: float = 0.0


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection as one device sees it.

    Attributes:
      gb_per_s: nominal bandwidth in one direction.
      latency_us: fixed time of one collective between two devices.
      hop_us: added to it for each further device of the group.
      reach: by bytes that one device sends in a collective, the share of `gb_per_s` that they reach.
    """

    gb_per_s: float
    latency_us: float
    hop_us: float = 0.0
    reach: Curve = ()


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
      topology: a TPU slice by the name that its compiler knows it by, "v5e:4x4".
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
    topology: str = ""

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
    "matrix_tflops": (1e-4, 100),
    "memory_gb_per_s": (0.1, 1e4),
    "launch_us": (0, 1e6),
    "step_us": (0, 1e5),
    "gb_per_s": (1e-3, 1e5),
    "latency_us": (0, 1e6),
    "hop_us": (0, 1e5),
    "size": (1, 1e18),
    "share": (1e-5, 100),
    "overlap": (0, 1),
    "nodes": (1, 1e5),
    "devices_per_node": (1, 1024),
    "shared_cores": (0, 1024),
}
# Where they differ on accelerators.
_ACCELERATOR_RANGES = {
    "memory_gib": (1, 4096),
    "matrix_tflops": (1, 1e5),
    "memory_gb_per_s": (20, 1e5),
    "share": (1e-5, 10),
}


def check_cluster(cluster: Cluster) -> Cluster:
    """Returns `cluster`, or raises UsageError naming the first field whose number cannot be right."""

    def refuse(text: str) -> None:
        raise UsageError(f"Cluster {cluster.name!r}: {text}")

    if cluster.platform not in ("cpu", "gpu", "tpu"):
        refuse(f"platform is {cluster.platform!r}; it must be cpu, gpu or tpu.")
    ranges = _RANGES if cluster.platform == "cpu" else _RANGES | _ACCELERATOR_RANGES

    def visit(value, path: str) -> None:
        for field in dataclasses.fields(value):
            inner, name = getattr(value, field.name), f"{path}.{field.name}" if path else field.name
            if dataclasses.is_dataclass(inner):
                visit(inner, name)
            elif isinstance(inner, tuple):
                for number, point in enumerate(inner):
                    visit(point, f"{name}[{number}]")
                if any(a.size >= b.size for a, b in itertools.pairwise(inner)):
                    refuse(f"the sizes of {name} do not rise from point to point. Sort them, one point a size.")
            elif field.name in ranges:
                low, high = ranges[field.name]
                if not low <= inner <= high:
                    remedy = "Give it in the unit that the field's name says."
                    refuse(f"{name} is {inner}, outside [{low:g}, {high:g}]. {remedy}")

    visit(cluster, "")
    return cluster
