"""Logical axes x placement -> jax shardings, for weights, optimizer states, batches and activations."""

from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from real_jax.models.transformer import Constrain, no_constraint
from real_jax.runtime.meshes import named
from real_jax.spec.arch import BATCH, Weight
from real_jax.spec.plan import AXIS_RULES, Placement, partition


def weight_shardings(table: Mapping[str, Weight], placement: Placement, mesh: Mesh) -> dict[str, NamedSharding]:
    """Shardings of a model's weights, keyed like them."""
    return {name: named(mesh, partition(w.axes, w.shape, placement)) for name, w in table.items()}


def optimizer_shardings(state, weights: Mapping[str, NamedSharding], mesh: Mesh):
    """Shardings of an optax state: an array kept per weight is split like that weight, all else is replicated."""

    def one(path, leaf):
        key = getattr(path[-1], "key", None) if path else None
        return weights[key] if key in weights and leaf.ndim else replicated(mesh)

    return jax.tree_util.tree_map_with_path(one, state)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """An array whose axis number `leading` is the batch, split as the batch is."""
    return NamedSharding(mesh, PartitionSpec(*([None] * leading), AXIS_RULES[BATCH]))


def constrainer(placement: Placement, mesh: Mesh) -> Constrain:
    """Pins activations to the mesh by their logical axes; on one device it does nothing."""
    if placement.count == 1:
        return no_constraint

    def constrain(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, named(mesh, partition(axes, x.shape, placement)))

    return constrain
