"""Peak bytes per device of an execution plan: what stays resident, plus the largest working set of a call."""

import dataclasses
import functools
import math

import numpy as np

from real_jax.spec import arch as arch_lib
from real_jax.spec.arch import Arch, Head
from real_jax.spec.costs import CostTable
from real_jax.spec.dataflow import Graph
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import ExecutionPlan, Placement, Workload, shard_bytes

GIB = 2**30
MASTER_BYTES = 4  # trained weights are float32, and so are Adam's two moments
STATE_BYTES = 3 * MASTER_BYTES


def gib(count: float) -> str:
    """Bytes as GiB with three digits, all digits of a thousand and more."""
    return f"{count / GIB:,.0f} GiB" if count >= 1000 * GIB else f"{count / GIB:.3g} GiB"


@dataclasses.dataclass(frozen=True)
class Holding:
    """Bytes on each device of `layout`: resident ones of a model, or those of a call while it runs."""

    name: str
    layout: Placement
    bytes: int


def home_call(model: str, graph: Graph) -> str:
    """The call in whose layout `model` lives: its last train call; where it has none, its first call."""
    calls = [c for c in graph.order if c.model == model]
    trains = [c for c in calls if c.kind == "train"]
    return (trains[-1:] or calls)[0].name


def home(model: str, graph: Graph, plan: ExecutionPlan) -> Placement:
    """The layout in which `model` lives."""
    return plan[home_call(model, graph)].layout


def is_offloaded(model: str, graph: Graph, plan: ExecutionPlan) -> bool:
    """Whether `model` waits in host memory between its calls: all of them are placed with `offload`."""
    return all(plan[c.name].offload for c in graph.calls if c.model == model)


def model_shard_bytes(model: str, work: Workload, layout: Placement, itemsize: int) -> int:
    """Bytes of `model`'s parameters on one device of `layout`."""
    return _shard_numbers(work.archs[model], work.heads[model], layout.layout) * itemsize


@functools.lru_cache(maxsize=65536)
def _shard_numbers(arch: Arch, head: Head, layout: Placement) -> int:
    return shard_bytes(arch_lib.weights(arch, head), layout, 1)


def resident(plan: ExecutionPlan, graph: Graph, work: Workload) -> list[Holding]:
    """What stays on the devices from call to call.

    A trained model holds float32 parameters and Adam's two moments wherever it trains, and one copy in the compute
    type per other layout that it is called in (also per train layout, where the compute type is not float32 and a
    call other than the train call runs there). A frozen model holds one copy per layout, and none while it is offloaded;
    a moving average holds a float32 copy in its home besides, where that is not the copy of a call.
    """
    held = []
    for model in graph.models:
        if is_offloaded(model, graph, plan):
            continue
        calls = [c for c in graph.order if c.model == model]
        trains = dict.fromkeys(plan[c.name].layout for c in calls if c.kind == "train")
        views = dict.fromkeys(plan[c.name].layout for c in calls if c.kind != "train")
        masters = list(trains)
        if graph.average(model):
            masters = [home(model, graph, plan)]
            held.append(
                Holding(
                    f"moving average of {model}", masters[0], model_shard_bytes(model, work, masters[0], MASTER_BYTES)
                )
            )
        for layout in trains:
            name = f"parameters and optimizer state of {model}"
            held.append(Holding(name, layout, model_shard_bytes(model, work, layout, STATE_BYTES)))
        for layout in views:
            if layout not in masters or work.compute_bytes != MASTER_BYTES:
                name = f"parameters of {model}"
                held.append(Holding(name, layout, model_shard_bytes(model, work, layout, work.compute_bytes)))
    return held


def working(plan: ExecutionPlan, graph: Graph, work: Workload, costs: CostTable) -> list[Holding]:
    """What each call adds while it runs: its `Cost.work_bytes`, and the parameters of an offloaded frozen model."""
    needs = []
    for call in graph.calls:
        if call.kind == "host":
            continue
        placement = plan[call.name]
        need = costs[call.name, placement].work_bytes
        layout = placement.layout
        if is_offloaded(call.model, graph, plan):
            need += model_shard_bytes(call.model, work, layout, work.compute_bytes)
        needs.append(Holding(call.name, layout, need))
    return needs


def peaks(plan: ExecutionPlan, graph: Graph, work: Workload, costs: CostTable) -> tuple[np.ndarray, np.ndarray]:
    """Resident bytes, and the largest working set of a call, per device: int64 [devices that the plan reaches]."""
    held, needs = resident(plan, graph, work), working(plan, graph, work, costs)
    devices = max((h.layout.first + h.layout.count for h in needs), default=1)
    base, top = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    for h in held:
        base[h.layout.first : h.layout.first + h.layout.count] += h.bytes
    for h in needs:
        part = top[h.layout.first : h.layout.first + h.layout.count]
        np.maximum(part, h.bytes, out=part)
    return base, top


def device_bytes(plan: ExecutionPlan, graph: Graph, work: Workload, costs: CostTable) -> dict[int, int]:
    """Device -> peak bytes under `plan`.

    Calls that share a device run on it one after another, so only the largest working set counts; parameters of all
    models that live there add up. Raises UsageError where a call's cost is not known.
    """
    base, top = peaks(plan, graph, work, costs)
    return {device: int(total) for device, total in enumerate(base + top)}


def least_bytes(call: str, placement: Placement, graph: Graph, work: Workload, costs: CostTable) -> int:
    """Bytes per device that any plan needs which runs `call` under `placement`: its own weights and working set."""
    kind, model = graph.call(call).kind, graph.call(call).model
    itemsize = STATE_BYTES if kind == "train" else work.compute_bytes
    return model_shard_bytes(model, work, placement, itemsize) + costs[call, placement].work_bytes


def infeasible(graph: Graph, work: Workload, cluster: Cluster) -> str | None:
    """Why no plan at all can fit `cluster`, before anything is compiled: what the models' states need if they are split over
    all devices and frozen models wait in host memory. None where that fits.
    """
    needs = {
        m: arch_lib.parameter_count(work.archs[m], work.heads[m]) * STATE_BYTES for m in graph.models if graph.trains(m)
    }
    total, have = sum(needs.values()), cluster.chip.memory_gib * GIB * cluster.devices
    if total <= have:
        return None
    nodes = math.ceil(total / (cluster.chip.memory_gib * GIB * cluster.devices_per_node))
    nodes = 1 << (nodes - 1).bit_length()
    parts = ", ".join(f"{m} {gib(need)}" for m, need in sorted(needs.items(), key=lambda item: -item[1]))
    return (
        f"Training needs {gib(total)} of parameters and optimizer state ({parts}; float32 weights and two moments), but "
        f"the {cluster.devices} x {cluster.chip.memory_gib:g} GiB of {cluster.name!r} hold {gib(have)}: "
        f"{gib(total - have)} are short. The smallest cluster of such nodes that can hold them has "
        f"{nodes * cluster.devices_per_node} devices ({nodes} nodes); or train smaller models."
    )


def check(plan: ExecutionPlan, graph: Graph, work: Workload, cluster: Cluster, costs: CostTable) -> str | None:
    """None where `plan` fits the memory of `cluster`'s chips; else what is short, by how much, and what would fit."""
    base, top = peaks(plan, graph, work, costs)
    limit = cluster.chip.memory_gib * GIB
    worst = int(np.argmax(base + top))
    total = int(base[worst] + top[worst])
    if total <= limit:
        return None
    shares = [h for h in resident(plan, graph, work) if worst in h.layout.devices]
    largest = max(
        (h for h in working(plan, graph, work, costs) if worst in h.layout.devices), key=lambda h: h.bytes, default=None
    )
    parts = [f"{h.name} {gib(h.bytes)}" for h in sorted(shares, key=lambda h: -h.bytes)]
    if largest is not None:
        parts.append(f"working memory of {largest.name} {gib(largest.bytes)}")
    return (
        f"Device {worst} would need {gib(total)}, {gib(total - limit)} more than the "
        f"{gib(limit)} of a {cluster.chip.name} ({'; '.join(parts)}). " + _remedy(plan, graph, work, costs, base, limit)
    )


def _remedy(plan, graph, work, costs, base: np.ndarray, limit: float) -> str:
    """The micro-batches (and remat) with which the calls that are too large would fit in their own layouts."""
    changes = []
    for need in working(plan, graph, work, costs):
        room = limit - base[need.layout.first : need.layout.first + need.layout.count].max()
        if need.bytes <= room:
            continue
        placement = plan[need.name]
        extra = need.bytes - costs[need.name, placement].work_bytes
        fits = [
            p
            for p in costs.placements(need.name)
            if dataclasses.replace(p, micro_batches=placement.micro_batches, remat=placement.remat) == placement
            and costs[need.name, p].work_bytes + extra <= room
        ]
        if not fits:
            return "Split the models over more devices (fsdp or tensor), or train on shorter or fewer sequences."
        best = min(fits, key=lambda p: (costs[need.name, p].seconds, p))
        remat = f" and remat {str(best.remat).lower()}" if best.remat != placement.remat else ""
        changes.append(f"micro_batches {best.micro_batches}{remat} for {need.name}")
    return f"It would fit with {' and '.join(changes)}."
