"""One process of a job: PPO iterations of the tests' tiny models under a plan, in as many processes as asked.

    process_worker.py PORT PROCESSES RANK DEVICES PLAN FOLDER

Process 0 writes what came out to FOLDER. PLAN is a name in PLANS; DEVICES are those of each process.
"""

import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from real_jax.runtime.joining import Membership, join
from real_jax.runtime.meshes import prepare_devices
from real_jax.spec.experiment import PPOConfig
from real_jax.spec.plan import ExecutionPlan, Placement

ALL = Placement(data=2, fsdp=2, tensor=2)
CALLS = (
    "actor_generate", "reward_inference", "reference_inference", "critic_inference", "actor_train", "critic_train",
)  # fmt: skip
PLANS = {
    # Every call on all devices, in layouts of their own.
    "relaid": dict.fromkeys(CALLS, ALL) | {
        "actor_generate": Placement(data=4, tensor=2),
        "critic_inference": Placement(fsdp=8),
        "critic_train": Placement(fsdp=4, tensor=2, micro_batches=2),
    },
    # Actor and critic in different halves: with two processes, in different processes.
    "apart": {
        "actor_generate": Placement(data=2, tensor=2),
        "reward_inference": Placement(first=4, fsdp=4),
        "reference_inference": Placement(data=2, fsdp=2),
        "critic_inference": Placement(first=4, tensor=4),
        "actor_train": Placement(fsdp=4),
        "critic_train": Placement(first=4, fsdp=2, tensor=2),
    },
    # Meshes across processes beside meshes within one, generation on the devices that do not train.
    "mixed": {
        "actor_generate": Placement(first=2, data=4),
        "reward_inference": Placement(first=6, tensor=2),
        "reference_inference": ALL,
        "critic_inference": Placement(first=0, data=2),
        "actor_train": Placement(fsdp=8),
        "critic_train": Placement(first=2, fsdp=4),
    },
}  # fmt: skip


def main(port: str, processes: int, rank: int, devices: int, plan: str, folder: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    join(Membership(f"127.0.0.1:{port}", processes, rank), devices)
    prepare_devices(devices)
    from real_jax.runtime.checkpoint import Checkpoints
    from support import make_build, make_engine, run

    config = PPOConfig(minibatches=2, kl_adaptive=True, reference_eta=0.25)
    engine = make_engine(make_build(config), ExecutionPlan("test", PLANS[plan]))
    record = run(engine, iterations=2)
    # Through a checkpoint, which every process has a part in.
    checkpoints = Checkpoints(Path(folder) / f"{plan}-{processes}-checkpoints", keep=1)
    checkpoints.save(2, engine, {"told": "back"})
    checkpoints.wait()
    assert checkpoints.restore(2, engine) == {"told": "back"}
    checkpoints.close()
    homes = {m: engine.store.home(m).params for m in ("actor", "reference")}
    weights = {f"{m}/{k}": v for m, params in engine.fetch(homes).items() for k, v in params.items()}
    engine.close()
    if rank == 0:
        ratios = np.asarray([m["actor_train"]["importance_ratio"] for m in record.metrics])
        path = Path(folder) / f"{plan}-{processes}.npz"
        np.savez(
            path, tokens=record.tokens, losses=record.losses, ratios=ratios, **{f"w/{k}": v for k, v in weights.items()}
        )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), *sys.argv[5:7])
