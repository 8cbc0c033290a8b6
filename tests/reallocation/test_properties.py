"""For any two layouts: arrays go there and back bit for bit, no byte moves that need not, each comes from who has it."""

import collections
import math
import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import Case, Layout, there_and_back

from real_jax.reallocation.assembly import Assembly
from real_jax.reallocation.exchange import Exchange
from real_jax.reallocation.move import Mover
from real_jax.reallocation.route import route
from real_jax.reallocation.transfers import plan_transfers
from real_jax.runtime.meshes import make_mesh
from real_jax.runtime.shardings import weight_shardings
from real_jax.spec.arch import EMBED, LAYERS, MLP, VOCAB, Weight
from real_jax.spec.plan import Placement

DEVICES = 8
MESHES = [(a, b, c) for a in range(1, 9) for b in range(1, 9) for c in range(1, 9) if a * b * c <= DEVICES]
TYPES = ("float32", "bfloat16", "int8", "bool", "uint32", "float8_e4m3fn")


@st.composite
def cases(draw, types=TYPES) -> Case:
    """Meshes of any shape over any devices in any order, each axis splitting any dimension of each array."""
    ranks = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    layouts = []
    for _ in range(2):
        mesh = draw(st.sampled_from(MESHES))
        devices = tuple(draw(st.permutations(range(DEVICES))))[: math.prod(mesh)]
        splits = tuple(
            tuple(draw(st.sampled_from([None, *range(rank)])) if size > 1 else None for size in mesh) for rank in ranks
        )
        layouts.append(Layout(devices, mesh, splits))
    shapes = tuple(
        tuple(math.lcm(*(layout.parts(i, dim) for layout in layouts)) * draw(st.integers(1, 3)) for dim in range(rank))
        for i, rank in enumerate(ranks)
    )
    on_host = draw(st.sampled_from([(False, False), (False, False), (True, False), (False, True), (True, True)]))
    return Case(shapes, draw(st.sampled_from(types)), *layouts, draw(st.sampled_from([16, 300, 2**20])), on_host)


def bounded(examples: int):
    """The same examples in every run, as many as time allows."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )  # fmt: skip


@bounded(100)
@given(cases())
def test_there_and_back_bit_for_bit_reading_where_shards_lie(case):
    there_and_back(case, Mover(case.chunk_bytes, shared_memory=True))


@bounded(25)
@given(cases())
def test_there_and_back_bit_for_bit_by_messages(case):
    there_and_back(case, Mover(case.chunk_bytes, shared_memory=False))


def held(sharding, shape) -> dict[int, np.ndarray]:
    """Device -> which numbers of an array it has."""
    found = {}
    for device, part in sharding.devices_indices_map(shape).items():
        found[device.id] = np.zeros(shape, bool)
        found[device.id][part] = True
    return found


def routed(case: Case):
    """For each array: its route, shape of cells, and which numbers each device has before and wants after."""
    sides = (layout.shardings(case.shapes) for layout in (case.before, case.after))
    for shape, before, after in zip(case.shapes, *sides, strict=True):
        way, cell = route(shape, before, after)
        yield way, cell, held(before, shape), held(after, shape), (before.mesh, after.mesh)


def numbers(cell_number: int, way, cell) -> tuple[slice, ...]:
    """The part of the array that a cell is."""
    place = np.unravel_index(cell_number, way.grid)
    return tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, cell, strict=True))


@bounded(500)
@given(cases(), st.sampled_from([1, 2, 4, 8]))
def test_messages_carry_no_more_than_is_lacking_and_only_what_their_sender_has(case, devices_per_node):
    node = lambda device: device // devices_per_node
    for way, cell, have, want, meshes in routed(case):
        exchange = Exchange(*meshes, 2**20, devices_per_node)
        schedule = exchange.schedule(way)
        union = sorted({d.id for mesh in meshes for d in mesh.devices.flat})
        nothing = np.zeros_like(next(iter(have.values())))
        received, got = collections.Counter(), {d: have.get(d, nothing).copy() for d in want}
        between = 0
        for owners, rounds in ((have, schedule.first), (got, schedule.second)):
            owners = {d: x.copy() for d, x in owners.items()}
            for r in rounds:
                for (sender, receiver), cells in r.messages.items():
                    sender, receiver = union[sender], union[receiver]
                    for c in cells:
                        part = numbers(c, way, cell)
                        assert owners[sender][part].all(), "sent what it had not"
                        assert want[receiver][part].all() and not got[receiver][part].any(), "sent for nothing"
                        got[receiver][part] = True
                        received[receiver] += math.prod(cell)
                        between += math.prod(cell) * (node(sender) != node(receiver))
        for d, wanted in want.items():
            assert (got[d] >= wanted).all()
            assert received[d] == (wanted & ~have.get(d, nothing)).sum()
        lacked = 0
        for n in {node(d) for d in want}:
            wanted = np.any([x for d, x in want.items() if node(d) == n], axis=0)
            lacked += (wanted & ~np.any([nothing, *(x for d, x in have.items() if node(d) == n)], axis=0)).sum()
        assert between == lacked, "a node was sent something twice, or what it had"


@bounded(500)
@given(cases())
def test_shards_are_read_only_from_devices_that_have_them_and_never_without_need(case):
    for way, cell, have, want, (before, after) in routed(case):
        senders = Assembly(before, after).senders(way)
        order = [d.id for d in before.devices.flat]
        for row, device, box in zip(senders, after.devices.flat, way.destination, strict=True):
            cells = np.arange(math.prod(way.grid)).reshape(way.grid)[tuple(slice(*r) for r in box)].ravel()
            for sender, c in zip(row, cells, strict=True):
                part = numbers(c, way, cell)
                assert have[order[sender]][part].all() and want[device.id][part].all()
                if device.id in have and have[device.id][part].all():
                    assert order[sender] == device.id


@st.composite
def placements(draw) -> Placement:
    data, fsdp, tensor = draw(st.sampled_from(MESHES))
    return Placement(draw(st.integers(0, DEVICES - data * fsdp * tensor)), data, fsdp, tensor)


@bounded(500)
@given(placements(), placements(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 4]))
def test_predicted_bytes_are_those_that_are_lacking(before, after, devices_per_node, itemsize):
    """`plan_transfers`, which the planner trusts, against the numbers of each device one by one."""
    parts = math.lcm(before.fsdp, after.fsdp), math.lcm(before.tensor, after.tensor)
    table = {
        "w": Weight((2, 2 * parts[0], 3 * parts[1]), (LAYERS, EMBED, MLP), 1),
        "v": Weight((parts[1], parts[0]), (VOCAB, EMBED), 1),
        "n": Weight((parts[0],), (EMBED,), 0),
    }
    received, between = collections.Counter(), 0
    sides = (weight_shardings(table, p, make_mesh(p)) for p in (before, after))
    before_of, after_of = sides
    for name, weight in table.items():
        have, want = held(before_of[name], weight.shape), held(after_of[name], weight.shape)
        nothing = np.zeros(weight.shape, bool)
        for d, wanted in want.items():
            received[d] += int((wanted & ~have.get(d, nothing)).sum()) * itemsize
        for n in {d // devices_per_node for d in want}:
            wanted = np.any([x for d, x in want.items() if d // devices_per_node == n], axis=0)
            there = np.any([nothing, *(x for d, x in have.items() if d // devices_per_node == n)], axis=0)
            between += int((wanted & ~there).sum()) * itemsize
    moved = plan_transfers(table, before, after, itemsize, devices_per_node)
    assert dict(moved.bytes_received) == dict(received)
    assert moved.bytes_between_nodes == between
    assert moved.total_bytes == sum(received.values()) == moved.bytes_within_node + between
    assert sum(moved.bytes_sent.values()) <= moved.total_bytes + 1e-6


class Pair:
    """Two processes of four devices each that move what they are told to."""

    def __init__(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        worker = str(Path(__file__).parent / "property_worker.py")
        self.jobs = [
            subprocess.Popen(
                [sys.executable, worker, str(port), str(rank)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            )
            for rank in range(2)
        ]  # fmt: skip

    def __call__(self, case: Case) -> list[str]:
        for job in self.jobs:
            job.stdin.write(case.dump() + "\n")
            job.stdin.flush()
        return [self._said(job) for job in self.jobs]

    def _said(self, job) -> str:
        for line in job.stdout:
            if line.startswith(("right", "wrong")):
                return line.strip()
        return f"ended with {job.wait(60)}"

    def close(self):
        for job in self.jobs:
            job.kill()


@pytest.fixture(scope="module")
def pair():
    jobs = Pair()
    yield jobs
    jobs.close()


@pytest.mark.slow
@bounded(40)
@given(case=cases())
def test_there_and_back_bit_for_bit_over_two_processes(pair, case):
    assert pair(case) == ["right", "right"]


def test_a_case_survives_its_way_to_another_process():
    layout = Layout((3, 1), (2, 1, 1), ((0, None, None), (None, None, None)))
    case = Case(((4, 2), (3,)), "bfloat16", layout, layout, 16, (True, False))
    assert Case.load(case.dump()) == case
    assert [x.dtype for x in case.values()] == [jnp.bfloat16] * 2
