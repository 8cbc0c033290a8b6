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
    for call, program in programs.items():
        home = programs[store.home_call[program.call.model]]
        if store.is_home(call) or home.placement.offload:
            continue
        table = weights(program.config.arch, program.config.head)
        size = min(np.dtype(p.stored_type).itemsize for p in (home, program))
        moved = plan_transfers(table, home.placement, program.placement, size, per_node)
        about = {"bytes_within_node": moved.bytes_within_node, "bytes_between_nodes": moved.bytes_between_nodes}
        if cluster:
            about["predicted_seconds"] = round(transfer_seconds(moved, cluster), 6)
        found[f"{program.call.model} to {call}"] = about
    return found
