"""Costs of every call under every placement that a search may choose, for the machine that this process runs on.

  inference  micro-batches x forward
  train      optimizer steps x (micro-batches x (gradient + its sum over `data`) + optimizer)
  generate   micro-batches x (prefill + all decode steps)

A measurement of the same call under the same placement takes the place of the sum.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from real_jax.cost.compile import Compiled, Piece, compile_piece
from real_jax.cost.hlo import Collective, Linear, Summary
from real_jax.cost.roofline import RESOURCES, Seconds, launch_seconds, seconds
from real_jax.cost.store import Store
from real_jax.runtime.meshes import devices
from real_jax.spec.arch import weights
from real_jax.spec.costs import Cost, CostTable
from real_jax.spec.dataflow import Call, Graph
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import Placement, Workload, shard_bytes

Progress = Callable[[int, int, str], None]  # pieces done, pieces in all, what was done last

HOST_SECONDS = 1e-3  # of a host call: reading a few small arrays and running Python over them

# Of one optimizer step (clip by global norm, AdamW, accept or reject), counted in its compiled program: passes over each
# float32 weight's shard (gradient, two moments, weight, their updates), and kernels per weight.
_UPDATE_PASSES = 22
_UPDATE_KERNELS = 11
# The sum of gradients over `data`: one collective each for the stacked blocks, the embedding and what is left.
_GRADIENT_SUMS = 3
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
    progress: Progress = lambda done, total, what: None,
    threads: int = 2,
) -> CostTable:
    """Costs of all `options`, call -> placements; a host call is entered under `Placement()` whether listed or not.

    Placements that differ in `first` or `offload` alone cost the same. Layer programs that the store lacks are
    compiled, `threads` at a time, and kept there. Raises UsageError where a mesh is larger than this machine.
    """
    calls = [c for c in graph.calls if c.kind != "host" and c.name in options]
    needed = {
        piece for call in calls for placement in options[call.name] for piece in pieces(call, work, placement).values()
    }
    compiled = compile_all(sorted(needed), store, progress, threads)
    table, known = CostTable(), {}
    for call in graph.calls:
        if call.kind == "host":
            table.add(call.name, Placement(), host_cost(call, work, cluster, store))
            continue
        for placement in options.get(call.name, ()):
            shape = dataclasses.replace(placement, first=0, offload=False)
            if (call.name, shape) not in known:
                known[call.name, shape] = _with_measurement(
                    call_cost(call, work, shape, cluster, compiled), call, work, shape, cluster, store
                )
            table.add(call.name, placement, known[call.name, shape])
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


def compile_all(needed: Sequence[Piece], store: Store, progress: Progress, threads: int) -> dict[Piece, Compiled]:
    """Every piece's analysis, from the store or compiled now."""
    kind = devices()[0].device_kind
    found = {piece: known for piece in needed if (known := store.compiled(piece.key(kind))) is not None}
    missing = [piece for piece in needed if piece not in found]
    with ThreadPoolExecutor(threads) as pool:
        running = {pool.submit(compile_piece, piece): piece for piece in missing}
        try:
            for done, future in enumerate(as_completed(running), 1):
                piece = running[future]
                found[piece] = future.result()
                store.record_compiled(piece.key(kind), found[piece])
                progress(done, len(missing), f"{piece.kind} over {piece.placement.describe()}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def pieces(call: Call, work: Workload, placement: Placement) -> dict[str, Piece]:
    """The layer programs that a call under `placement` consists of, by the part they play.

    What remat adds does not depend on `fsdp`, so it is the difference of two gradients without it.
    """
    arch, head = work.archs[call.model], work.heads[call.model]

    def piece(kind, length=work.length, **more) -> Piece:
        mesh = {"fsdp": placement.fsdp, "tensor": placement.tensor} | more
        return Piece(kind, arch, head, length=length, compute_bytes=work.compute_bytes, **mesh)

    if call.kind == "generate":
        return {"generate": piece("generate", work.prompt_length, response=work.response_length)}
    if call.kind == "inference":
        return {"forward": piece("forward")}
    parts = {"gradient": piece("gradient")}
    if placement.remat and placement.fsdp == 1:
        return {"gradient": piece("gradient", remat=True)}
    if placement.remat:
        parts |= {"with remat": piece("gradient", fsdp=1, remat=True), "without": piece("gradient", fsdp=1)}
    return parts


def rows_per_device(call: Call, work: Workload, placement: Placement) -> float:
    """Token rows of one micro-batch on one device."""
    return work.step_batch(call.name) * work.rows / (placement.batch_split * placement.micro_batches)


def call_cost(
    call: Call, work: Workload, placement: Placement, cluster: Cluster, compiled: Mapping[Piece, Compiled]
) -> Cost:
    """Cost of a call from its layer programs."""
    parts = {part: compiled[piece] for part, piece in pieces(call, work, placement).items()}
    rows = rows_per_device(call, work, placement)
    launch = Seconds(overhead=launch_seconds(placement.count, cluster))

    def time(summary: Summary) -> Seconds:
        return seconds(summary, rows, placement.count, cluster)

    if call.kind != "train":
        (part,) = parts.values()
        spent = time(part.summary) * placement.micro_batches + launch
        return _cost(spent, part.temp_at(rows) + _results_bytes(call, work, placement))
    summary, temp = parts["gradient"].summary, parts["gradient"].temp_at(rows)
    if "with remat" in parts:
        summary += parts["with remat"].summary + parts["without"].summary * -1
        temp *= parts["with remat"].temp_at(rows) / parts["without"].temp_at(rows)
    micro = time(summary + gradient_sum(call, work, placement))
    step = micro * placement.micro_batches + time(optimizer_step(call, work, placement))
    spent = step * work.minibatches.get(call.name, 1) + launch
    table = weights(work.archs[call.model], work.heads[call.model])
    gradients = shard_bytes(table, placement, 4) * (2 if placement.micro_batches > 1 else 1)
    return _cost(spent, temp + gradients + _results_bytes(call, work, placement))


def gradient_sum(call: Call, work: Workload, placement: Placement) -> Summary:
    """The collectives that sum the gradients of a micro-batch over `data`."""
    if placement.data == 1:
        return Summary()
    table = weights(work.archs[call.model], work.heads[call.model])
    volume = Linear(shard_bytes(table, placement, 4))
    return Summary(collectives=(Collective("all-reduce", placement.data, volume, _GRADIENT_SUMS),))


def optimizer_step(call: Call, work: Workload, placement: Placement) -> Summary:
    """An optimizer step on each device's shard of float32 weights and moments."""
    table = weights(work.archs[call.model], work.heads[call.model])
    scalars = Collective("all-reduce", placement.count, Linear(4 * _SCALAR_SUMS), _SCALAR_SUMS)
    return Summary(
        bytes=Linear(_UPDATE_PASSES * shard_bytes(table, placement, 4)),
        kernels=_UPDATE_KERNELS * len(table),
        collectives=(scalars,) if placement.count > 1 else (),
    )


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
    measured = store.measured(measurement_key(call, work, placement, cluster.name))
    return cost if measured is None else dataclasses.replace(cost, seconds=measured, source="measured")
