"""Calls run with few layers: what they take with all of theirs follows, as every layer is the same.

After ReaL (arXiv 2406.14088, section 5.1), which times one layer of each kind; here a call is run whole, with the mesh,
the micro-batches and the optimizer steps of its placement, at two depths. A call of a model that is too large to be
tried, or that takes minutes, is timed in seconds.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from real_jax.models.transformer import initialize
from real_jax.runtime.build import Build, abstract_batch, lower
from real_jax.runtime.calls import Program
from real_jax.spec.arch import weights
from real_jax.spec.dataflow import Call
from real_jax.spec.plan import Placement

DEPTHS = (2, 4)  # a loop over one layer is compiled as no loop at all, and tells nothing of others
_RUNS, _ENOUGH_SECONDS = 9, 1.5


@dataclasses.dataclass(frozen=True)
class LayerTiming:
    """Median seconds and temporary bytes per device of a call whose model has `layers` layers."""

    layers: int
    seconds: float
    work_bytes: int


def time_layers(build: Build, call: Call, placement: Placement) -> list[LayerTiming]:
    """Times `call` under `placement` at each of DEPTHS.

    The runs of the two depths take turns, so that whatever else the machine does meets both.
    """
    runs: dict[int, Callable[[], float]] = {}
    bytes_: dict[int, int] = {}
    for layers in DEPTHS:
        shallow = _shallow(build, call.model, layers)
        program = lower(shallow, call, placement, abstract_batch(shallow)).compile()
        runs[layers], bytes_[layers] = runner(shallow, program), program.work_bytes
    for run in runs.values():
        run()  # warms up
    taken: dict[int, list[float]] = {layers: [] for layers in DEPTHS}
    while len(taken[DEPTHS[0]]) < _RUNS:
        for layers, run in runs.items():
            taken[layers].append(run())
        if sum(map(sum, taken.values())) > _ENOUGH_SECONDS and len(taken[DEPTHS[0]]) >= 3:
            break
    return [LayerTiming(layers, statistics.median(taken[layers]), bytes_[layers]) for layers in DEPTHS]


def at_depth(timings: list[LayerTiming], layers: int) -> tuple[float, float]:
    """Seconds and temporary bytes with `layers` layers: the line through two depths, never below what is known."""
    low, high = timings
    part = (layers - low.layers) / (high.layers - low.layers)

    def line(a: float, b: float) -> float:
        return max(a + part * max(b - a, 0.0), 0.0)

    return line(low.seconds, high.seconds), line(low.work_bytes, high.work_bytes)


def _shallow(build: Build, model: str, layers: int) -> Build:
    config = build.models[model]
    arch = dataclasses.replace(config.arch, layers=layers)
    return dataclasses.replace(build, models={**build.models, model: dataclasses.replace(config, arch=arch)})


def runner(build: Build, program: Program) -> Callable[[], float]:
    """A function that runs `program` once, by itself and on made-up data, and returns the seconds until all of its
    results are there."""
    config = program.config
    made = initialize(weights(config.arch, config.head), jax.random.key(0))
    params = {name: jax.device_put(x.astype(program.stored_type), program.weights[name]) for name, x in made.items()}
    state = program.initial_optimizer_state(params) if program.call.kind == "train" else None
    batch = jax.device_put(_inputs(build, program), program.batch)

    def run() -> float:
        nonlocal params, state
        start = time.perf_counter()
        if state is None:
            result = program.executable(params, batch)
        else:
            result = program.executable(params, state, batch)
            params, state = result[:2]
        jax.block_until_ready(result)
        return time.perf_counter() - start

    return run


def _inputs(build: Build, program: Program) -> dict:
    """Made-up values of the keys that a call reads: full-length random sequences, small random numbers."""
    shapes, random = abstract_batch(build), np.random.default_rng(0)
    vocab = build.models[program.call.model].arch.vocab

    def make(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        dtype = np.dtype(shape.dtype)
        if dtype == bool:
            return np.ones(shape.shape, dtype)
        if dtype == np.uint32:
            return np.arange(np.prod(shape.shape), dtype=dtype).reshape(shape.shape)
        if np.issubdtype(dtype, np.integer):
            ids = random.integers(0, vocab, shape.shape)
            lengths = np.full(shape.shape, _width(shapes))
            return (lengths if len(shape.shape) == 1 else ids).astype(dtype)
        return (0.1 * random.standard_normal(shape.shape)).astype(dtype)

    made = {}
    for key in program.call.reads:
        known = build.algorithm.initial.get(key)
        made[key] = known if known is not None else jax.tree.map(make, shapes[key])
    if "prompt_lengths" in made:
        made["prompt_lengths"] = np.full_like(made["prompt_lengths"], _width(build.inputs))
    return made


def _width(shapes) -> int:
    """Columns of the token arrays."""
    return max((s.shape[-1] for key, s in shapes.items() if key.endswith("tokens")), default=1)
