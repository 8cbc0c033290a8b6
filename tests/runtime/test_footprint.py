"""What the calls of a plan need of memory by the compiler of a cluster that is not here."""

import dataclasses
import importlib.util

import pytest

from real_jax.cost import targets
from real_jax.cost.store import Store
from real_jax.runtime.footprint import footprints
from real_jax.runtime.prepare import make_stages, model_archs
from real_jax.spec.files import load_experiment
from real_jax.spec.hardware import Chip, Cluster, Link
from real_jax.spec.plan import Placement

CUDA = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13")
LINK = Link(50.0, 10.0)
H100 = Cluster("h100-1x8", "gpu", 1, 8, Chip("NVIDIA H100 80GB HBM3", 74.5, 989.0, 3350.0), LINK, LINK, LINK)


@pytest.mark.skipif(not CUDA, reason="jax-cuda13-plugin is not installed: no compiler for GPUs")
def test_calls_are_compiled_for_a_gpu_without_cudnn(tmp_path):
    """In half precision, where a GPU at hand would fuse attention; a call's bytes are then found again."""
    experiment = dataclasses.replace(load_experiment("ppo-reviews"), compute_type="bfloat16")
    stage = make_stages(experiment, model_archs(experiment))[-1]
    target = dataclasses.replace(targets.choose(H100, here=False), attention="xla")
    store, asked = Store(tmp_path), {"reference_inference": Placement(data=2)}
    found = footprints(experiment, stage, asked, target, store)
    assert found["reference_inference"] > 0
    heard = []
    assert footprints(experiment, stage, asked, target, store, lambda *x: heard.append(x)) == found
    assert not heard
