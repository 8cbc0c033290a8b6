"""What a run's rows say of its reallocations."""

import jax
import jax.numpy as jnp
from support import make_build

from real_jax.runtime.build import lower
from real_jax.runtime.moves import planned_moves
from real_jax.runtime.weights import WeightStore
from real_jax.spec.arch import weights
from real_jax.spec.experiment import PPOConfig
from real_jax.spec.hardware import Chip, Cluster, Link
from real_jax.spec.plan import Placement, partition

CLUSTER = Cluster(
    "two", "gpu", 2, 2, Chip("c", 80, 100, 1000), Link(gb_per_s=1.0, latency_us=0.0), Link(0.5, 0.0), Link(1.0, 0.0)
)


class Shapes(dict):
    """Programs that are only laid out, never compiled."""

    def __init__(self, build, placements):
        super().__init__()
        from real_jax.runtime.build import abstract_batch

        batch = abstract_batch(build)
        for call in build.algorithm.graph.calls:
            fields = lower(build, call, placements.get(call.name, Placement()), batch).fields
            self[call.name] = type("Laid", (), fields)


def test_a_moving_average_moves_float32_from_the_model_that_it_follows():
    build = make_build(PPOConfig(reference_eta=0.1), compute_type=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention mixes types on its way back
        programs = Shapes(build, {"reference_inference": Placement(first=1)})
    moves = planned_moves(programs, WeightStore(build.algorithm.graph, programs), CLUSTER)
    config = build.models["actor"]
    size = sum(w.size for w in weights(config.arch, config.head).values())
    assert moves["actor to reference_inference"]["bytes_within_node"] == 4 * size
    assert moves["reference to reference_inference"]["bytes_within_node"] == 0  # the same device, another type


def test_bytes_and_seconds_of_each_reallocation():
    build = make_build()
    programs = Shapes(build, {"actor_train": Placement(fsdp=4), "actor_generate": Placement(data=4)})
    store = WeightStore(build.algorithm.graph, programs)
    moves = planned_moves(programs, store, CLUSTER)
    assert set(moves) == {"actor to actor_generate"}
    config = build.models["actor"]
    split = sum(
        w.size
        for w in weights(config.arch, config.head).values()
        if any("fsdp" in axes for axes in partition(w.axes, w.shape, Placement(fsdp=4)))
    )
    # Each of 4 devices lacks three quarters; a quarter is with its neighbour, and half comes into the node once.
    about = moves["actor to actor_generate"]
    assert about["bytes_between_nodes"] == 2 * (split // 2) * 4
    assert about["bytes_within_node"] == (4 * 3 * split // 4 - 2 * (split // 2)) * 4
    assert about["predicted_seconds"] > 0
    assert "predicted_seconds" not in planned_moves(programs, store, None)["actor to actor_generate"]
