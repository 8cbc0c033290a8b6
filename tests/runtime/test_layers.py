"""Calls with few layers: they run, and what follows for more layers is the line through two depths."""

import numpy as np
import pytest
from support import make_build

from real_jax.runtime.build import abstract_batch
from real_jax.runtime.layers import DEPTHS, LayerTiming, at_depth, time_layers
from real_jax.spec.plan import Placement


def test_a_line_through_two_depths():
    low, high = LayerTiming(1, 0.25, 100), LayerTiming(3, 0.75, 300)
    assert at_depth([low, high], 1) == (0.25, 100)
    assert at_depth([low, high], 2) == (0.5, 200)
    assert at_depth([low, high], 80) == (20.0, 8000)


def test_noise_never_makes_a_deeper_model_faster():
    assert at_depth([LayerTiming(1, 0.5, 100), LayerTiming(3, 0.4, 300)], 40) == (0.5, 4000)


@pytest.mark.parametrize(
    "call, placement",
    [
        ("actor_generate", Placement(data=2)),
        ("reference_inference", Placement(tensor=2, micro_batches=2)),
        ("critic_train", Placement(fsdp=2, remat=True)),
    ],
)
def test_calls_of_every_kind_are_timed_at_both_depths(call, placement):
    build = make_build()
    timings = time_layers(build, build.algorithm.graph.call(call), placement)
    assert [t.layers for t in timings] == list(DEPTHS)
    assert all(t.seconds > 0 for t in timings)
    # What the backward pass keeps, and the cache, grow with the depth; a forward pass needs one layer at a time.
    assert timings[1].work_bytes > timings[0].work_bytes or call == "reference_inference"


def test_shapes_of_all_batch_keys():
    build = make_build()
    batch = abstract_batch(build)
    written = {key for c in build.algorithm.graph.calls for key in c.writes}
    assert written <= set(batch)
    assert batch["tokens"].shape == (16, 6 + 8) and batch["tokens"].dtype == np.int32
