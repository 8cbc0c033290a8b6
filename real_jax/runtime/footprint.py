"""What a plan's calls need of memory, as the target's own compiler plans it.

A search goes by layer programs and a rule for other numbers of rows. The calls of the plan that it found are then compiled
themselves, for the devices that they are planned for and without any of them, and the plan is held against that.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import as_completed

from real_jax.cost import targets
from real_jax.cost.parallel import executor, is_refusal
from real_jax.cost.store import Store
from real_jax.cost.targets import Target
from real_jax.runtime.build import abstract_batch, lower
from real_jax.runtime.prepare import Stage, make_build, make_stages, model_archs
from real_jax.spec.costs import shape
from real_jax.spec.experiment import Experiment
from real_jax.spec.files import to_data
from real_jax.spec.plan import Placement


def footprint_key(stage: Stage, call: str, placement: Placement, target: Target) -> str:
    """Equal for calls whose programs need the same memory."""
    content = [target.key, stage.name, call, to_data(stage.work), dataclasses.asdict(shape(placement))]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def footprints(
    experiment: Experiment,
    stage: Stage,
    placements: Mapping[str, Placement],
    target: Target,
    store: Store,
    progress=lambda done, total, call: None,
) -> dict[str, int]:
    """Temporary bytes per device of each call, compiled now where the store does not know them.

    A call that the compiler refuses is left out.
    """
    keys = {call: footprint_key(stage, call, placement, target) for call, placement in placements.items()}
    found = {call: known for call, key in keys.items() if (known := store.footprint(key)) is not None}
    missing = [call for call in placements if call not in found]
    if not missing:
        return found
    with executor(target, min(2, len(missing))) as pool:
        running = {
            pool.submit(_compile, experiment, stage.name, call, shape(placements[call]), target): call
            for call in missing
        }
        for done, future in enumerate(as_completed(running), 1):
            call = running[future]
            if not is_refusal(future.exception()):
                found[call] = future.result()
                store.record_footprint(keys[call], found[call])
            progress(done, len(missing), call)
    return found


def _compile(experiment: Experiment, stage_name: str, call: str, placement: Placement, target: Target) -> int:
    stage = next(s for s in make_stages(experiment, model_archs(experiment)) if s.name == stage_name)
    build = make_build(experiment, stage, 0, 0)
    models = {m: dataclasses.replace(config, attention=target.attention) for m, config in build.models.items()}
    build = dataclasses.replace(build, models=models)
    among = targets.devices(target)
    return lower(build, stage.graph.call(call), placement, abstract_batch(build), among).compile().work_bytes
