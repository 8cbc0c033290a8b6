"""What is ruled out before a compile must be ruled out rightly: by estimates that no compiled cost can undercut."""

import dataclasses

import pytest
from planner_instances import PPO, analytic_costs, make_cluster, make_work

from real_jax.planner import memory, prune
from real_jax.planner.enumerate import shapes
from real_jax.planner.search import search
from real_jax.spec.arch import ARCHS, forward_flops
from real_jax.spec.hardware import Reach
from real_jax.spec.plan import Placement

SEVEN = ARCHS["llama-7b"]
P = Placement


def instance(arch=SEVEN, nodes=1, batch=64):
    cluster = make_cluster(nodes, 8)
    work = make_work(PPO, arch, batch, compute_bytes=2, minibatches={"actor_train": 2, "critic_train": 2})
    work = dataclasses.replace(work, prompt_length=128, response_length=128)
    return work, cluster, {c.name: shapes(c.name, PPO, work, cluster) for c in PPO.calls}


def test_least_seconds_by_hand():
    work, cluster, _ = instance()
    call = PPO.call("actor_train")
    # 3 x forward over 8 devices of 100 TFLOP/s; then 2 steps of 7 passes over a float32 eighth at 1000 GB/s; the chip
    # overlaps nothing, so the weights gathered twice in 2 steps come on top, at 100 GB/s; and 9 kernels of 2 us a block.
    weights = memory.model_shard_bytes("actor", work, P(fsdp=8), 1)
    flops = 3 * forward_flops(SEVEN, 64, 256) / 8 / 100e12
    update = 2 * 7 * 4 * weights / 1000e9
    others = 4 * 2 * weights * 7 / 100e9 + 4 * 32 * 9 * 2e-6
    assert prune.least_seconds(call, work, P(fsdp=8), cluster) == pytest.approx(flops + update + others, rel=1e-6)
    again = prune.least_seconds(call, work, P(fsdp=8, remat=True), cluster)
    assert again == pytest.approx(4 / 3 * flops + update + others, rel=1e-6)


def test_a_fully_overlapping_chip_pays_for_the_longer_of_the_two():
    work, cluster, _ = instance()
    call = PPO.call("reward_inference")
    plain = prune.least_seconds(call, work, P(fsdp=8), cluster)
    overlapping = dataclasses.replace(cluster, chip=dataclasses.replace(cluster.chip, overlap=1.0))
    flops = forward_flops(SEVEN, 64, 256, "scalar") / 8 / 100e12
    assert prune.least_seconds(call, work, P(fsdp=8), overlapping) < plain
    assert prune.least_seconds(call, work, P(fsdp=8), overlapping) >= flops


def test_reach_above_one_is_allowed_for():
    work, cluster, _ = instance(batch=8)
    call = PPO.call("actor_generate")
    fast = dataclasses.replace(cluster.chip, memory_reach=(Reach(1e3, 4.0), Reach(1e9, 1.0)))
    slow, quick = (prune.least_seconds(call, work, P(), c) for c in (cluster, dataclasses.replace(cluster, chip=fast)))
    assert quick < slow


def test_cycles_of_ppo():
    inference = {"reward_inference", "reference_inference"}
    found = set(prune.cycles(PPO))
    assert {frozenset({"actor_generate", name, "actor_train"}) for name in inference} <= found
    assert frozenset({"critic_inference", "critic_train"}) in found
    assert all("critic_train" not in cycle or "actor_train" not in cycle for cycle in found)


def test_the_best_plan_survives():
    """Costs that are nowhere below the optimistic ones: the optimum is found among what is left, and something is gone."""
    work, cluster, options = instance(nodes=2)
    least = prune.least_costs(PPO, work, cluster, options)
    costs = analytic_costs(PPO, work, cluster)
    dearer = {
        (c.name, p): dataclasses.replace(
            costs[c.name, p], seconds=max(costs[c.name, p].seconds, least[c.name, p].seconds)
        )
        for c in PPO.calls
        for p in options[c.name]
        if (c.name, p) in costs
    }
    table = type(costs)(dearer)
    best = search(PPO, work, cluster, table, seed=0)
    known = best.top[0][1] * 1.1
    kept = prune.promising(PPO, work, cluster, options, known)
    for call, placement in best.best.placements.items():
        assert dataclasses.replace(placement, first=0, offload=False) in kept[call]
    assert sum(map(len, kept.values())) < sum(map(len, options.values()))


def test_what_cannot_fit_is_left_out():
    """70B: 12 bytes a number for training need sixteen devices of 80 GiB, two bytes for reading need two."""
    work, cluster, options = instance(ARCHS["llama-70b"], nodes=4)
    kept = prune.fitting(PPO, work, cluster, options)
    assert min(p.fsdp * p.tensor for p in kept["actor_train"]) == 16
    assert min(p.fsdp * p.tensor for p in kept["reference_inference"]) == 2


def test_the_first_guess_covers_all_devices():
    work, cluster, options = instance(nodes=2)
    guess = prune.first_guess(PPO, work, cluster, options)
    for call, known in guess.items():
        assert known and all(p.count == 16 for p in known)
        assert set(known) <= set(options[call])
