"""The space of placements, counted by hand and against every combination that `placement_error` accepts."""

import itertools

from planner_instances import PPO, make_cluster, make_work

from real_jax.planner.enumerate import may_offload, moved, placements, shapes, slice_sizes, slice_starts
from real_jax.spec.dataflow import Call, Graph
from real_jax.spec.plan import Placement, placement_error


def test_slices_of_nodes_that_are_no_power_of_two():
    cluster = make_cluster(nodes=2, per_node=6)
    assert slice_sizes(cluster) == [1, 2, 4, 6, 12]
    assert slice_starts(4, cluster) == [0, 8]  # 4-7 would cross the nodes
    assert slice_starts(6, cluster) == [0, 6]
    assert slice_starts(12, cluster) == [0]


def test_whole_nodes_come_in_powers_of_two_and_all_together():
    cluster = make_cluster(nodes=3, per_node=2)
    assert slice_sizes(cluster) == [1, 2, 4, 6]
    assert slice_starts(4, cluster) == [0]  # 2-5 is not aligned to its own size
    assert slice_sizes(make_cluster(nodes=8, per_node=4)) == [1, 2, 4, 8, 16, 32]


def test_parts_of_a_node_are_taken_from_every_eighth_of_a_large_cluster():
    cluster = make_cluster(nodes=32, per_node=4)
    assert slice_starts(2, cluster) == [16 * i + f for i in range(8) for f in (0, 2)]
    assert slice_starts(4, cluster) == list(range(0, 128, 4))


def test_tensor_stays_within_a_node():
    work, cluster = make_work(PPO), make_cluster(nodes=4, per_node=2)
    assert max(p.tensor for p in shapes("actor_train", PPO, work, cluster)) == 2


def test_counts_by_hand():
    work, cluster = make_work(PPO), make_cluster(1, 4)
    # 1 device: 1 mesh, 2 devices: 3 meshes, 4 devices: 6 meshes; on 4, 2 and 1 slices.
    assert len(shapes("actor_generate", PPO, work, cluster)) == 1 + 3 + 6
    assert len(placements("actor_generate", PPO, work, cluster)) == 4 * 1 + 2 * 3 + 6
    # A batch of 8 is cut into batch_split x micro_batches parts: with up to 8 micro-batches, 4 cuts less log2(split).
    cuts = [4] + [4, 3, 3] + [4, 3, 3, 2, 2, 2]
    assert len(shapes("reward_inference", PPO, work, cluster)) == sum(cuts)
    assert len(shapes("actor_train", PPO, work, cluster)) == 2 * sum(cuts)
    assert all(p.first == 0 for p in shapes("actor_train", PPO, work, cluster))


def test_all_and_only_what_placement_error_accepts():
    work, cluster = make_work(PPO, batch=4, minibatches={"actor_train": 2}), make_cluster(2, 2)
    for call in ("actor_generate", "reward_inference", "actor_train"):
        kind = PPO.call(call).kind
        accepted = [
            Placement(*fields)
            for fields in itertools.product(
                range(4), (1, 2, 4), (1, 2, 4), (1, 2), (1,) if kind == "generate" else (1, 2, 4),
                (False, True) if kind == "train" else (False,), (False, True) if call == "reward_inference" else (False,),
            )
            if placement_error(call, Placement(*fields), PPO, work, cluster) is None
        ]  # fmt: skip
        assert placements(call, PPO, work, cluster, max_micro_batches=4) == sorted(accepted)


def test_shapes_moved_to_every_slice_are_the_placements():
    work, cluster = make_work(PPO), make_cluster(2, 4)
    for call, offload in (("actor_train", False), ("reward_inference", True), ("critic_inference", False)):
        assert may_offload(call, PPO) == offload
        spread = [p for shape in shapes(call, PPO, work, cluster) for p in moved(shape, cluster, offload)]
        assert sorted(spread) == placements(call, PPO, work, cluster)
        assert len(set(spread)) == len(spread)


def test_a_host_call_has_one_placement():
    graph = Graph("host", (Call("reward", "host", "", ("tokens",), ("scores",)),), ("tokens",))
    assert placements("reward", graph, make_work(graph), make_cluster()) == [Placement()]
