"""What each reallocation of a stage moves, over which links, and how long the planner says that it takes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from real_jax.reallocation.transfers import plan_transfers, transfer_seconds
from real_jax.runtime.calls import Program
from real_jax.runtime.meshes import own_count
from real_jax.runtime.weights import WeightStore
from real_jax.spec.arch import weights
from real_jax.spec.hardware import Cluster

Moves = dict[str, dict[str, Any]]


def planned_moves(programs: Mapping[str, Program], store: WeightStore, cluster: Cluster | None) -> Moves:
    """Name of a reallocation, as in the timeline -> its bytes within and between nodes, and predicted seconds.

    Without a `cluster` a process counts as a node, and nothing is predicted.
    """
    per_node = cluster.devices_per_node if cluster else own_count()
    found: Moves = {}

    def add(name: str, source: Program, target: Program, size: int) -> None:
        table = weights(target.config.arch, target.config.head)
        moved = plan_transfers(table, source.placement, target.placement, size, per_node)
        about = {"bytes_within_node": moved.bytes_within_node, "bytes_between_nodes": moved.bytes_between_nodes}
        if cluster:
            about["predicted_seconds"] = round(transfer_seconds(moved, cluster), 6)
        found[name] = about

    for model in store.averages:
        followed, home = store.follows(model), store.home_call[model]
        size = store.home_type(model).itemsize
        add(f"{followed} to {home}", programs[store.home_call[followed]], programs[home], size)
    for call, program in programs.items():
        home = programs[store.home_call[program.call.model]]
        if store.is_home(call) or home.placement.offload:
            continue
        size = min(store.home_type(program.call.model).itemsize, np.dtype(program.stored_type).itemsize)
        add(f"{program.call.model} to {call}", home, program, size)
    return found
