"""What an iteration computes, and what limits how fast: useful operations, tokens, and where the devices' time goes."""

import dataclasses

from real_jax.planner.simulate import simulate
from real_jax.spec.arch import forward_flops
from real_jax.spec.costs import CostTable
from real_jax.spec.dataflow import Graph
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import ExecutionPlan, Workload

# Forward passes that a call is worth: a gradient is twice a forward pass, and comes after one.
PASSES = {"generate": 1, "inference": 1, "train": 3}
REALLOCATION, IDLE = "reallocation", "idle"

# What a resource is called in a sentence.
WORDS = {
    "matrix": "matrix units",
    "memory": "memory bandwidth",
    "within_node": "links within a node",
    "between_nodes": "links between nodes",
    "overhead": "kernel starts",
    REALLOCATION: "moving parameters",
    IDLE: "waiting for other calls",
}


def iteration_flops(graph: Graph, work: Workload, recompute: bool = False) -> float:
    """Floating-point operations of the models' matrix products in one iteration.

    `recompute` counts the second forward pass of training with rematerialization, as hardware rates do; without it
    these are the operations that the result needs.
    """
    total = 0.0
    for call in graph.calls:
        if call.kind != "host":
            passes = PASSES[call.kind] + (recompute and call.kind == "train")
            total += passes * forward_flops(
                work.archs[call.model], work.batch * work.rows, work.length, work.heads[call.model]
            )
    return total


def iteration_tokens(work: Workload) -> int:
    """Tokens of one iteration's batch, prompts included."""
    return work.batch * work.rows * work.length


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of all device time of an iteration: `share` of it goes to `resource` in `what` (a call, or IDLE)."""

    what: str
    resource: str
    share: float

    def describe(self) -> str:
        place = "" if self.what in (IDLE, REALLOCATION) else f" in {self.what}"
        return f"{self.share:.0%} {WORDS[self.resource]}{place}"


def device_time(plan: ExecutionPlan, graph: Graph, work: Workload, cluster: Cluster, costs: CostTable) -> list[Share]:
    """Where the devices' time goes in the steady state, the largest part first; the shares sum to one.

    Without shared cores, a call's time is split as its cost is. Idle time is what is left: devices that wait for a call
    on other devices, or that the plan does not use.
    """
    timeline = simulate(plan, graph, work, cluster, costs)
    period = timeline.iteration_seconds * cluster.devices
    last = max(e.iteration for e in timeline.events)
    spent: dict[tuple[str, str], float] = {}
    for event in timeline.events:
        if event.iteration != last or not event.devices or event.kind == "host":
            continue
        used = (event.end - event.start) * len(event.devices)
        if event.kind == REALLOCATION:
            spent[REALLOCATION, REALLOCATION] = spent.get((REALLOCATION, REALLOCATION), 0.0) + used
            continue
        parts = dict(costs[event.name, plan[event.name]].parts) or {"overhead": 1.0}
        whole = sum(parts.values()) or 1.0
        for resource, seconds in parts.items():
            spent[event.name, resource] = spent.get((event.name, resource), 0.0) + used * seconds / whole
    busy = sum(spent.values())
    spent[IDLE, IDLE] = max(0.0, period - busy)
    whole = max(period, busy)
    shares = [Share(*key, value / whole) for key, value in spent.items() if value > 0]
    return sorted(shares, key=lambda s: (-s.share, s.what, s.resource))


def limit(shares: list[Share], count: int = 3) -> str:
    """What limits an iteration, in one line: the largest shares of device time."""
    return "; ".join(s.describe() for s in shares[:count])
