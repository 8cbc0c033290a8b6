"""Costs of every call under every placement that a search may choose.

  inference  micro-batches x forward
  train      optimizer steps x (micro-batches x (gradient + its sum over `data`) + optimizer)
  generate   micro-batches x (prefill + all decode steps)

A measurement of the same call under the same placement takes the place of the sum.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence

from real_jax.cost.compile import Compiled, Piece
from real_jax.cost.parallel import Progress, compile_all
from real_jax.cost.roofline import RESOURCES, Seconds, launch_seconds, seconds
from real_jax.cost.store import Store
from real_jax.cost.summary import Collective, Kernel, Linear, Summary
from real_jax.cost.targets import Target
from real_jax.spec.arch import weights
from real_jax.spec.costs import Cost, CostTable
from real_jax.spec.dataflow import Call, Graph
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import Placement, Workload, shard_bytes

HOST_SECONDS = 1e-3  # of a host call: reading a few small arrays and running Python over them

# Sums of single numbers over the mesh in an optimizer step: the loss, its normalizer, metrics, the gradient's norm.
_SCALAR_SUMS = 4
# The compiler's plan differs a little with every number of rows, so bytes err on the high side.
_BYTES_MARGIN = 1.1
# Arrays [B, T] of 4 bytes that a train call holds beside the model's: masks, advantages, returns and their like.
_BATCH_ARRAYS = 12


def fill_costs(
    graph: Graph,
    work: Workload,
    cluster: Cluster,
    options: Mapping[str, Sequence[Placement]],
    store: Store,
    target: Target,
    progress: Progress = lambda done, total, what: None,
    workers: int = 2,
) -> CostTable:
    """Costs of all `options`, call -> placements; a host call is entered under `Placement()` whether listed or not.

    Placements that differ in `first` or `offload` alone cost the same. Layer programs that the store lacks are
    compiled for `target`, `workers` at a time, and kept there; a placement that the compiler refuses is left out.
    Raises UsageError where a mesh is larger than the target.
    """
    shapes = {
        call: sorted({dataclasses.replace(p, first=0, offload=False) for p in placements})
        for call, placements in options.items()
        if graph.call(call).kind != "host"
    }
    needed = {
        piece
        for call, placements in shapes.items()
        for placement in placements
        for piece in pieces(graph.call(call), work, placement).values()
    }
    compiled = compile_all(sorted(needed), target, store, progress, workers)
    table = CostTable()
    for call in graph.calls:
        if call.kind == "host":
            table.add(call.name, Placement(), host_cost(call, work, cluster, store))
        for placement in shapes.get(call.name, ()):
            parts = {part: compiled.get(piece) for part, piece in pieces(call, work, placement).items()}
            if all(parts.values()):
                cost = call_cost(call, work, placement, cluster, parts)
                table.add(call.name, placement, _with_measurement(cost, call, work, placement, cluster, store))
    return table


def measurement_key(call: Call, work: Workload, placement: Placement, cluster: str) -> str:
    """Under which the seconds of a call are stored: equal where they must be equal, but for noise.

    Calls of one kind on equal models with equal work share it whatever they are called; `first` and `offload` do not
    matter. A host call counts by its name.
    """
    content: list = [call.kind, cluster, work.batch]
    if call.kind == "host":
        content.append(call.name)
    else:
        shape = dataclasses.replace(placement, first=0, offload=False)
        content += [
            dataclasses.asdict(work.archs[call.model]),
            work.heads[call.model],
            [work.prompt_length, work.response_length, work.rows, work.compute_bytes],
            work.minibatches.get(call.name, 1) if call.kind == "train" else 1,
            dataclasses.asdict(shape),
        ]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
    return f"{cluster}-{call.kind}-{digest}"


def pieces(call: Call, work: Workload, placement: Placement) -> dict[str, Piece]:
    """The layer programs that a call under `placement` consists of, by the part they play.

    A train call is made of "gradient", "optimizer" and, where gradients are summed over `data`, "sums": a gradient
    over at least two parts of `fsdp`, in which the compiler tells what has to be summed.
    """
    arch, head = work.archs[call.model], work.heads[call.model]

    def piece(kind, length=work.length, **more) -> Piece:
        mesh = {"fsdp": placement.fsdp, "tensor": placement.tensor, "compute_bytes": work.compute_bytes} | more
        return Piece(kind, arch, head, length=length, **mesh)

    if call.kind == "generate":
        return {"generate": piece("generate", work.prompt_length, response=work.response_length)}
    if call.kind == "inference":
        return {"forward": piece("forward")}
    parts = {
        "gradient": piece("gradient", remat=placement.remat),
        "optimizer": piece("optimizer", 0, fsdp=1, tensor=1, compute_bytes=4),
    }
    if placement.data > 1:
        parts["sums"] = piece("gradient", remat=placement.remat, fsdp=max(placement.fsdp, 2))
    return parts


def rows_per_device(call: Call, work: Workload, placement: Placement) -> float:
    """Token rows of one micro-batch on one device."""
    return work.step_batch(call.name) * work.rows / (placement.batch_split * placement.micro_batches)


def call_cost(
    call: Call, work: Workload, placement: Placement, cluster: Cluster, parts: Mapping[str, Compiled]
) -> Cost:
    """Cost of a call from its layer programs, `pieces(call, work, placement)` compiled."""
    rows = rows_per_device(call, work, placement)
    launch = Seconds(overhead=launch_seconds(placement.count, cluster))

    def time(summary: Summary) -> Seconds:
        return seconds(summary, rows, placement.count, cluster)

    if call.kind != "train":
        (part,) = parts.values()
        spent = time(part.summary) * placement.micro_batches + launch
        return _cost(spent, part.temp_at(rows) + _results_bytes(call, work, placement))
    gradient = parts["gradient"].summary
    if placement.data > 1:
        gradient = summed_over_data(gradient, parts["sums"].summary, placement)
    step = time(gradient) * placement.micro_batches
    step += time(optimizer_step(call, work, placement, parts["optimizer"].summary))
    spent = step * work.minibatches.get(call.name, 1) + launch
    gradients = _shard(call, work, placement) * 4 * (2 if placement.micro_batches > 1 else 1)
    return _cost(spent, parts["gradient"].temp_at(rows) + gradients + _results_bytes(call, work, placement))


def summed_over_data(gradient: Summary, sums: Summary, placement: Placement) -> Summary:
    """`gradient` of one copy of the parameters, with what `placement.data` copies add: sums of gradients over them.

    Args:
      sums: a gradient over `fsdp` parts, at least two. Whatever it reduces over those parts, and is no larger where
        there are more rows, is a gradient. Where it is scattered, the part that is left is reduced over `data` as well;
        where it is not, one reduction runs over both.
    """
    p, parts = placement, max(placement.fsdp, 2)

    def is_gradient(c: Collective) -> bool:
        reduces = c.kind in ("all-reduce", "reduce-scatter") and not c.bytes.per_row
        return reduces and (c.group, c.stride) == (parts, p.tensor)

    whole = [c for c in sums.collectives if is_gradient(c) and c.kind == "all-reduce"]
    scattered = [c for c in sums.collectives if is_gradient(c) and c.kind == "reduce-scatter"]
    kept = [c for c in gradient.collectives if not (is_gradient(c) and c.kind == "all-reduce")]
    added = [Collective("all-reduce", p.data * p.fsdp, p.tensor, c.bytes, c.count) for c in whole]
    across = p.fsdp * p.tensor
    added += [Collective("all-reduce", p.data, across, c.bytes * (1 / p.fsdp), c.count) for c in scattered]
    return dataclasses.replace(gradient, collectives=(*kept, *added))


def optimizer_step(call: Call, work: Workload, placement: Placement, whole: Summary) -> Summary:
    """An optimizer step on each device's shard of float32 weights and moments; `whole` is that on all of them."""
    share = _shard(call, work, placement) / _shard(call, work, Placement())
    kernels = tuple(Kernel(k.flops * share, k.bytes * share, k.count) for k in whole.kernels)
    scalars = Collective("all-reduce", placement.count, 1, Linear(4), _SCALAR_SUMS)
    return Summary(kernels, (scalars,) if placement.count > 1 else (), whole.steps)


def _shard(call: Call, work: Workload, placement: Placement) -> int:
    """Numbers of the model's parameters on one device."""
    return shard_bytes(weights(work.archs[call.model], work.heads[call.model]), placement, 1)


def host_cost(call: Call, work: Workload, cluster: Cluster, store: Store) -> Cost:
    cost = Cost(HOST_SECONDS, 0, "analytic", (("overhead", HOST_SECONDS),))
    return _with_measurement(cost, call, work, Placement(), cluster, store)


def _results_bytes(call: Call, work: Workload, placement: Placement) -> float:
    """Arrays [B, T] of the whole batch on one device: what a train call prepares, what micro-batches are cut from."""
    arrays = _BATCH_ARRAYS if call.kind == "train" else 2 if placement.micro_batches > 1 else 0
    return 4 * arrays * work.batch * work.rows * work.length / placement.batch_split


def _cost(spent: Seconds, work_bytes: float) -> Cost:
    parts = tuple((resource, getattr(spent, resource)) for resource in RESOURCES)
    return Cost(spent.total, math.ceil(work_bytes * _BYTES_MARGIN), "compiled", parts)


def _with_measurement(cost: Cost, call: Call, work, placement, cluster: Cluster, store: Store) -> Cost:
    """`cost` with the seconds of the same call as it ran before, else as its layers ran, where either is known."""
    key = measurement_key(call, work, placement, cluster.name)
    for source, known in (("measured", store.measured(key)), ("layers", store.measured(layers_key(key)))):
        if known is not None:
            return dataclasses.replace(cost, seconds=known, source=source)
    return cost


def layers_key(key: str) -> str:
    """Under which the seconds are stored that follow from a run with few layers; `key` is the call's own."""
    return f"layers-{key}"
