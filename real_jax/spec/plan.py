"""Execution plans: for each call, which devices, which mesh axes, how many micro-batches. Plain data, no devices touched."""

import dataclasses
import functools
import math
from collections.abc import Mapping

from real_jax.spec import arch as arch_lib
from real_jax.spec.arch import Arch, Head, Weight
from real_jax.spec.dataflow import Graph
from real_jax.spec.errors import UsageError
from real_jax.spec.hardware import Cluster

# Mesh axes in the order in which they split a device range: the last varies fastest, so tensor groups are neighbours.
MESH_AXES = ("data", "fsdp", "tensor")

# Which mesh axes each logical axis is split over. This table is the only place that ties the two together; the planner
# reads it as data and `runtime.shardings` turns it into jax shardings.
AXIS_RULES: Mapping[str, tuple[str, ...]] = {
    arch_lib.BATCH: ("data", "fsdp"),
    arch_lib.LENGTH: (),
    arch_lib.HIDDEN: (),
    arch_lib.LAYERS: (),
    arch_lib.VOCAB: ("tensor",),
    arch_lib.EMBED: ("fsdp",),
    arch_lib.HEADS: ("tensor",),
    arch_lib.KV_HEADS: ("tensor",),
    arch_lib.HEAD_DIM: (),
    arch_lib.MLP: ("tensor",),
}

Spec = tuple[tuple[str, ...], ...]  # for each dimension the mesh axes it is split over


@dataclasses.dataclass(frozen=True, order=True)
class Placement:
    """Where and how one call runs.

    Attributes:
      first: index of the first device.
      data: copies of the parameters, each given its share of the batch.
      fsdp: parts that both the parameters and the batch are split into.
      tensor: parts that heads, feed-forward width and vocabulary are split into.
      micro_batches: parts that the batch is run in, one after another.
      remat: whether a train call recomputes a block's activations in the backward pass.
      offload: whether a frozen model's parameters wait in host memory between its calls.
    """

    first: int = 0
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    micro_batches: int = 1
    remat: bool = False
    offload: bool = False

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # A search looks placements up millions of times.
        return hash((self.first, self.data, self.fsdp, self.tensor, self.micro_batches, self.remat, self.offload))

    @functools.cached_property
    def count(self) -> int:
        """Number of devices."""
        return self.data * self.fsdp * self.tensor

    @property
    def devices(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def mesh_shape(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def batch_split(self) -> int:
        """Parts that the batch dimension is split into."""
        return self.data * self.fsdp

    @functools.cached_property
    def layout(self) -> "Placement":
        """This placement without what does not move parameters: two calls with equal layouts share their weights."""
        return Placement(self.first, self.data, self.fsdp, self.tensor)

    def same_devices(self, other: "Placement") -> bool:
        return self.first == other.first and self.count == other.count

    def overlaps(self, other: "Placement") -> bool:
        return self.first < other.first + other.count and other.first < self.first + self.count

    def describe(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.mesh_shape.items() if size > 1) or "one device"


def partition(axes: tuple[str, ...], shape: tuple[int, ...], placement: Placement) -> Spec:
    """The mesh axes that each dimension of an array is split over under `placement`.

    Axes of size one are left out. Key and value heads that `tensor` does not divide are replicated, as every
    tensor rank then needs all of its group. Raises UsageError where two dimensions claim one mesh axis, or where a
    dimension cannot be divided.
    """
    used: set[str] = set()
    spec = []
    for name, size in zip(axes, shape, strict=True):
        wanted = tuple(axis for axis in AXIS_RULES[name] if placement.mesh_shape[axis] > 1)
        parts = math.prod(placement.mesh_shape[axis] for axis in wanted)
        if name == arch_lib.KV_HEADS and size % parts:
            wanted = ()
        elif size % parts:
            raise UsageError(f"{name} of size {size} cannot be split into {parts} equal parts ({' x '.join(wanted)}).")
        if used & set(wanted):
            raise UsageError(
                f"Two dimensions of {axes} would be split over mesh axis {sorted(used & set(wanted))[0]!r}."
            )
        used |= set(wanted)
        spec.append(wanted)
    return tuple(spec)


def shard_bytes(table: Mapping[str, Weight], placement: Placement, itemsize: int) -> int:
    """Bytes of parameters that one device holds under `placement`."""
    total = 0
    for weight in table.values():
        spec = partition(weight.axes, weight.shape, placement)
        total += weight.size // math.prod(placement.mesh_shape[a] for dim in spec for a in dim)
    return total * itemsize


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """Call name -> placement, for a named cluster. `origin` says where the plan came from, in words."""

    cluster: str
    placements: Mapping[str, Placement]
    origin: str = ""

    def __getitem__(self, call: str) -> Placement:
        return self.placements[call]


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a graph is run on: the models' shapes and the size of a batch.

    Attributes:
      archs: model -> its shape.
      heads: model -> its head.
      batch: sequences an iteration (B).
      prompt_length, response_length: P and R in tokens; a train or inference call sees P + R.
      minibatches: train call -> optimizer steps it takes per iteration, each on its own part of the batch.
      rows: token rows per sequence of the batch: 2 where each is a preference pair.
      compute_bytes: bytes of one number in the compute type.
    """

    archs: Mapping[str, Arch]
    heads: Mapping[str, Head]
    batch: int
    prompt_length: int
    response_length: int
    minibatches: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rows: int = 1
    compute_bytes: int = 4

    @property
    def length(self) -> int:
        return self.prompt_length + self.response_length

    def step_batch(self, call: str) -> int:
        """Sequences in one step of `call`: a minibatch of a train call, the whole batch of any other."""
        return self.batch // self.minibatches.get(call, 1)


def placement_error(call: str, placement: Placement, graph: Graph, work: Workload, cluster: Cluster) -> str | None:
    """Why `placement` cannot serve `call`, as a sentence that names the call and the number; None where it can."""
    p = placement
    where = f"Call {call!r}"
    for axis in (*MESH_AXES, "micro_batches"):
        if getattr(p, axis) < 1:
            return f"{where}: {axis} is {getattr(p, axis)}; it must be at least 1."
    if p.first < 0 or p.first + p.count > cluster.devices:
        return (
            f"{where}: the plan asks for devices {p.first} to {p.first + p.count - 1}, "
            f"but cluster {cluster.name!r} has {cluster.devices} (0 to {cluster.devices - 1})."
        )
    per_node = cluster.devices_per_node
    aligned = p.first % p.count == 0 if p.count <= per_node else p.first % per_node == 0 and p.count % per_node == 0
    if not aligned:
        return (
            f"{where}: {p.count} devices from device {p.first} on are not an aligned slice. "
            "Start at a multiple of the number of devices, or take whole nodes."
        )
    model = graph.call(call).model
    if not model:
        return None
    a = work.archs[model]
    if a.heads % p.tensor:
        return f"{where}: tensor is {p.tensor}, which does not divide the {a.heads} heads of model {model!r}."
    if a.kv_heads % p.tensor and p.tensor % a.kv_heads:
        return f"{where}: tensor is {p.tensor}, which neither divides nor is a multiple of the {a.kv_heads} key/value heads of model {model!r}."
    for weight in arch_lib.weights(a, work.heads[model]).values():
        try:
            partition(weight.axes, weight.shape, p)
        except UsageError as error:
            return f"{where}: {error} Model {model!r} cannot be laid out as {p.describe()}."
    minibatches = work.minibatches.get(call, 1)
    if work.batch % minibatches:
        return f"{where}: a batch of {work.batch} cannot be divided into {minibatches} minibatches."
    rows = work.step_batch(call)
    if rows % (p.batch_split * p.micro_batches):
        return (
            f"{where}: {rows} sequences a step cannot be divided by data x fsdp x micro_batches = "
            f"{p.data} x {p.fsdp} x {p.micro_batches} = {p.batch_split * p.micro_batches}."
        )
    if p.offload and graph.changes(model):
        kind = "is trained" if graph.trains(model) else "follows one that is trained"
        return f"{where}: offload is set, but model {model!r} {kind}; only frozen models can wait in host memory."
    return None


def validate(plan: ExecutionPlan, graph: Graph, work: Workload, cluster: Cluster) -> None:
    """Raises UsageError naming the call and the number where `plan` does not fit graph, models and cluster."""
    known = {c.name for c in graph.calls if c.kind != "host"}
    for call in sorted(known - set(plan.placements)):
        raise UsageError(f"The plan has no placement for call {call!r}. Add a line for it under 'calls'.")
    for call in sorted(known):
        if error := placement_error(call, plan[call], graph, work, cluster):
            raise UsageError(error)
