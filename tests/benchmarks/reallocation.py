"""Reallocation of a tree of 400 MB on 8 virtual devices, against what jax offers by itself.

    python tests/benchmarks/reallocation.py [--json FILE] [--rounds N]
    python tests/benchmarks/reallocation.py --processes 2 [--json FILE] [--rounds N]

One process: against `jax.device_put` of the whole tree, and a memcpy of the bytes that come out. On a CPU device_put
leaves some shards in the memory of its source, or several devices with one and the same shard, which nothing can then
be donated from or updated in; where it does ("shared"), the time it takes to give each device its own is also shown,
and is what a move is held to. Two processes of four devices: against the usual way out, to gather all arrays in every process and cut out its part there. Each figure is the
median over rounds in which both take their turn, with fresh sources. Bytes: those that a device takes from another, at
the narrower of the two types, against the lower bound; between processes, what the kernel
counted on their connections.
Memory: the most that the move held beside its result.

Exits 1, in one process: where a move is slower than `device_put` to memory of one's own beyond noise (10 %), where fewer than half of those
whose device sets differ are faster, where bytes are not the lower bound's, or where a move held more than the chunk
bound; in two processes: where fewer than 3 times fewer bytes go between them, or it is less than twice as fast, on a
pair whose lower bound leaves room for that.
"""

import argparse
import ctypes
import functools
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from real_jax.reallocation.assembly import Assembly
from real_jax.reallocation.move import Mover
from real_jax.reallocation.route import route
from real_jax.reallocation.transfers import Transfers, plan_transfers
from real_jax.runtime.joining import Membership, join
from real_jax.runtime.meshes import make_mesh, prepare_devices
from real_jax.runtime.shardings import weight_shardings
from real_jax.spec.arch import Arch, weights
from real_jax.spec.plan import Placement

DEVICES, NOISE, FEWER, FASTER = 8, 1.1, 3.0, 2.0
ARCH = Arch(
    layers=6,
    d_model=1024,
    heads=16,
    kv_heads=8,
    head_dim=64,
    d_ff=2816,
    vocab=32000,
    context=2048,
    tied_embeddings=True,
)
FULL, HALF = np.dtype(np.float32), jnp.dtype(jnp.bfloat16)
PAIRS = [
    (Placement(fsdp=8), Placement(tensor=8), FULL),
    (Placement(data=8), Placement(fsdp=8), FULL),
    (Placement(fsdp=8), Placement(data=8), FULL),
    (Placement(data=2, fsdp=2, tensor=2), Placement(tensor=8), FULL),
    (Placement(fsdp=8), Placement(fsdp=4), FULL),
    (Placement(tensor=8), Placement(data=2, tensor=2), FULL),
    (Placement(fsdp=4), Placement(first=4, fsdp=4), FULL),
    (Placement(fsdp=4), Placement(first=4, tensor=4), FULL),
    (Placement(tensor=4), Placement(first=4, fsdp=4), FULL),
    (Placement(fsdp=2), Placement(fsdp=8), FULL),
    (Placement(tensor=2), Placement(data=2, tensor=4), FULL),
    (Placement(data=4), Placement(first=4, fsdp=4), FULL),
    (Placement(data=8), Placement(tensor=8), FULL),
    (Placement(tensor=8), Placement(), FULL),
    (Placement(fsdp=8), Placement(tensor=8), HALF),
    (Placement(fsdp=4), Placement(first=4, tensor=4), HALF),
    (Placement(fsdp=2), Placement(fsdp=8), HALF),
]


def name_of(p: Placement) -> str:
    mesh = " ".join(f"{axis} {size}" for axis, size in p.mesh_shape.items() if size > 1) or "one"
    return f"{mesh} @{p.first}" if p.first else mesh


class Pair:
    """One change of layout of the tree, out of float32, and the means to run it from fresh sources."""

    def __init__(self, before: Placement, after: Placement, dtype):
        self.before, self.after, self.dtype = before, after, dtype
        kind = "" if dtype == FULL else f", {dtype.name}"
        self.name = f"{name_of(before)} to {name_of(after)}{kind}"
        self.same_devices = set(before.devices) == set(after.devices)
        self.table = weights(ARCH, "lm")
        self._rounds = 0

    @functools.cached_property
    def source(self) -> dict[str, NamedSharding]:
        return weight_shardings(self.table, self.before, make_mesh(self.before))

    @functools.cached_property
    def target(self) -> dict[str, NamedSharding]:
        return weight_shardings(self.table, self.after, make_mesh(self.after))

    @functools.cached_property
    def bound(self) -> Transfers:
        itemsize = min(FULL.itemsize, self.dtype.itemsize)
        return plan_transfers(self.table, self.before, self.after, itemsize, DEVICES // jax.process_count())

    @functools.cached_property
    def _make(self):
        fill = lambda seed: {k: jnp.full(w.shape, seed + i, FULL) for i, (k, w) in enumerate(self.table.items())}
        return jax.jit(fill, out_shardings=self.source)

    def fresh(self) -> dict[str, jax.Array]:
        """Sources that nothing has read."""
        if not any(d.process_index == jax.process_index() for d in make_mesh(self.before).devices.flat):
            return {
                k: jax.make_array_from_single_device_arrays(w.shape, self.source[k], [], dtype=FULL)
                for k, w in self.table.items()
            }
        self._rounds += 1
        made = jax.block_until_ready(self._make(float(self._rounds)))
        return {k: made[k] for k in self.table}  # the same order in all processes


def chosen_pairs(text: str) -> list[Pair]:
    return [pair for way in PAIRS if text in (pair := Pair(*way)).name]


def timed(function, pair: Pair) -> float:
    tree = pair.fresh()
    gc.collect()
    start = time.perf_counter()
    moved = jax.block_until_ready(function(tree))
    seconds = time.perf_counter() - start
    del moved
    return seconds


# In one process


def put(pair: Pair):
    def run(tree):
        moved = jax.device_put(tree, pair.target)
        return moved if pair.dtype == FULL else {k: x.astype(pair.dtype) for k, x in moved.items()}

    return run


def put_apart(pair: Pair):
    """`put`, and then a copy of each array that has a shard in memory that is not its device's alone."""
    copy = jax.jit(jnp.copy)

    def run(tree):
        moved = put(pair)(tree)
        return {k: copy(x) if shared_bytes([x], tree.values()) else x for k, x in moved.items()}

    return run


def shared_bytes(moved, source) -> int:
    """Bytes of `moved` in the memory of `source` or of another device."""
    extent = lambda x: [(s.data.unsafe_buffer_pointer(), s.data.nbytes) for s in x.addressable_shards]
    taken, total = [part for x in source for part in extent(x)], 0
    for x in moved:
        for start, size in extent(x):
            total += size * any(start < a + n and a < start + size for a, n in taken)
            taken.append((start, size))
    return total


def memcpy_seconds(pair: Pair) -> float:
    """A copy of as many bytes as come out, over memory that is there already."""
    numbers = sum(s.shard_shape(pair.table[k].shape) and np.prod(s.shard_shape(pair.table[k].shape)) * len(s.device_set)
                  for k, s in pair.target.items())  # fmt: skip
    source, target = (np.ones(int(numbers) * pair.dtype.itemsize, np.uint8) for _ in range(2))
    start = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start


def bytes_taken(pair: Pair, tree) -> int:
    """Bytes that devices take from each other, by the table that the move is compiled from."""
    assembly, total = Assembly(make_mesh(pair.before), make_mesh(pair.after)), 0
    for k, x in tree.items():
        way, cell = route(x.shape, x.sharding, pair.target[k])
        senders = np.asarray([pair.before.devices[0] + i for i in range(pair.before.count)])[assembly.senders(way)]
        foreign = int((senders != np.asarray(pair.after.devices)[:, None]).sum())
        total += foreign * int(np.prod(cell)) * min(4, pair.dtype.itemsize)
    return total


def extra_bytes(pair: Pair, function) -> int:
    """The most memory that this process has taken during a move, beside what came out of it."""
    tree = pair.fresh()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    moved = jax.block_until_ready(function(tree))
    most = resident("VmHWM")
    made = sum(s.data.nbytes for x in moved.values() for s in x.addressable_shards)
    return max(most - before - made, 0)


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def one_process(options) -> tuple[list[dict], list[str]]:
    prepare_devices(DEVICES)
    rows, pairs = [], chosen_pairs(options.only)
    for pair in pairs:
        mover, tree = Mover(), pair.fresh()
        shared = shared_bytes(put(pair)(tree).values(), tree.values())
        ours = lambda t, p=pair, m=mover: m.move(t, p.target, p.dtype)
        ways = {"ours": ours, "put": put(pair)} | ({"apart": put_apart(pair)} if shared else {})
        times = {name: [] for name in ways}
        for turn in range(options.rounds + 1):  # who goes first finds other caches and another allocator
            for name in (*ways,) if turn % 2 else (*ways,)[::-1]:
                times[name].append(timed(ways[name], pair))
        times = {name: found[1:] for name, found in times.items()}
        over = {n: statistics.median(y / x for x, y in zip(times["ours"], times[n], strict=True)) for n in ways}
        rows.append(
            {
                "pair": pair.name, "same_devices": pair.same_devices,
                "seconds": statistics.median(times["ours"]), "device_put_seconds": statistics.median(times["put"]),
                "memcpy_seconds": statistics.median(memcpy_seconds(pair) for _ in range(options.rounds)),
                "shared_bytes": shared, "device_put_over_ours": over["put"],
                "own_memory_over_ours": over.get("apart", over["put"]),
                "bytes": bytes_taken(pair, tree), "bound": pair.bound.total_bytes,
                "extra_bytes": extra_bytes(pair, ours), "device_put_extra_bytes": extra_bytes(pair, put(pair)),
            }
        )  # fmt: skip
        print(f"{len(rows)}/{len(pairs)} {pair.name}: {rows[-1]['own_memory_over_ours']:.1f}x", file=sys.stderr)
    missed = [f"slower than device_put: {r['pair']}" for r in rows if r["own_memory_over_ours"] < 1 / NOISE]
    others = [r for r in rows if not r["same_devices"]]
    if 2 * sum(r["device_put_over_ours"] > 1 for r in others) < len(others):
        missed.append("faster than device_put on fewer than half of the pairs whose devices differ")
    missed += [f"bytes are not the lower bound's: {r['pair']}" for r in rows if r["bytes"] != r["bound"]]
    bound = DEVICES * Mover().chunk_bytes  # all devices are in this process
    missed += [f"held more than the chunk bound: {r['pair']}" for r in rows if r["extra_bytes"] > bound]
    return rows, missed


# In two


def gather_and_slice(pair: Pair):
    """What one does without a mover: all arrays to every process's host, and each device's part from there. As
    `multihost_utils.process_allgather` does it, both for arrays that all processes have a part of and for those that
    are in one alone; but it waits for all devices, since between CPUs a collective must not begin before the one before
    it has ended everywhere."""
    owners = {d.process_index for d in make_mesh(pair.before).devices.flat}
    grid = np.asarray(jax.devices(), dtype=object).reshape(jax.process_count(), -1)
    everything, by_process = Mesh(grid, ("processes", "devices")), PartitionSpec("processes")
    gather = {
        mesh: jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
        for mesh in (everything, make_mesh(pair.before))
    }

    def whole(x) -> np.ndarray:
        if len(owners) == jax.process_count():
            return first(gather[x.sharding.mesh](x))
        own = np.asarray(x) if jax.process_index() in owners else np.zeros(x.shape, FULL)
        return first(
            gather[everything](multihost_utils.host_local_array_to_global_array(own[None], everything, by_process))
        )[min(owners)]

    def first(found: jax.Array) -> np.ndarray:
        return np.asarray(jax.block_until_ready(found).addressable_data(0))

    def run(tree):
        moved = {}
        for k, x in tree.items():
            value, sharding = whole(x), pair.target[k]
            cut = lambda part, v=value: v[part].astype(pair.dtype)
            moved[k] = jax.make_array_from_callback(x.shape, sharding, cut, dtype=pair.dtype)
        return moved

    return run


class Traffic:
    """Bytes that this process has sent to other processes, as the kernel counts them for each of its connections.
    Its own devices talk to each other by such connections too; those do not count."""

    SENT = slice(200, 208)  # tcpi_bytes_sent of struct tcp_info

    def __call__(self) -> int:
        sent = {}  # (own port, other's port) -> bytes
        for link in Path("/proc/self/fd").iterdir():
            try:
                if not link.readlink().name.startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(link.name))) as s:
                    if s.type == socket.SOCK_STREAM and s.family in (socket.AF_INET, socket.AF_INET6):
                        info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        sent[s.getsockname()[1], s.getpeername()[1]] = int.from_bytes(info[self.SENT], sys.byteorder)
            except OSError:  # closed by now, or listening
                continue
        return sum(count for (own, other), count in sent.items() if (other, own) not in sent)


def worker(rank: int, options) -> None:
    """Times all pairs together with the other processes; the first one prints a row of JSON for each."""
    jax.config.update("jax_platforms", "cpu")
    processes = options.processes
    join(Membership(f"127.0.0.1:{options.worker[1]}", processes, rank), DEVICES // processes)
    client, traffic = jax._src.distributed.global_state.client, Traffic()

    def run(function, pair: Pair, name: str) -> tuple[float, int]:
        tree = pair.fresh()
        gc.collect()
        before = traffic()
        client.wait_at_barrier(f"{name} begins", 600_000)
        start = time.perf_counter()
        moved = jax.block_until_ready(function(tree))
        client.wait_at_barrier(f"{name} ends", 600_000)
        seconds = time.perf_counter() - start
        del moved
        client.key_value_set(f"{name} {rank}", str(traffic() - before))
        return seconds, sum(int(client.blocking_key_value_get(f"{name} {i}", 600_000)) for i in range(processes))

    for pair in chosen_pairs(options.only):
        mover = Mover()
        if not pair.bound.bytes_between_nodes:
            continue
        ways = {"ours": lambda t, p=pair, m=mover: m.move(t, p.target, p.dtype), "gather": gather_and_slice(pair)}
        seen = {kind: [] for kind in ways}
        for turn in range(options.rounds + 1):
            for kind, function in ways.items():
                seen[kind].append(run(function, pair, f"{pair.name}: {kind} {turn}"))
        (a, sent), (b, gathered) = (
            [statistics.median(c) for c in zip(*rows[1:], strict=True)] for rows in seen.values()
        )
        if rank == 0:
            row = {
                "pair": pair.name, "seconds": a, "gather_seconds": b, "gather_over_ours": b / a, "bytes": sent,
                "gather_bytes": gathered, "bound": pair.bound.bytes_between_nodes,
            }  # fmt: skip
            print(json.dumps(row), flush=True)


def several_processes(options) -> tuple[list[dict], list[str]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    jobs = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--worker", str(rank), str(port)],
            stdout=subprocess.DEVNULL if rank else subprocess.PIPE, stderr=subprocess.PIPE if rank else None, text=True,
        )
        for rank in range(options.processes)
    ]  # fmt: skip
    rows = []
    try:
        for line in jobs[0].stdout:
            if line.startswith("{"):
                rows.append(json.loads(line))
                print(f"{rows[-1]['pair']}: {rows[-1]['gather_over_ours']:.1f}x", file=sys.stderr)
        failed = [job.returncode for job in jobs if job.wait(600)]
    finally:
        for job in jobs:
            job.kill()
    missed = [f"a process ended with {code}" for code in failed]
    for r in rows:
        r["room"] = r["gather_bytes"] / r["bound"] >= FEWER
        if r["room"] and r["gather_bytes"] / r["bytes"] < FEWER:
            missed.append(f"fewer than {FEWER:g} times fewer bytes: {r['pair']}")
        if r["room"] and r["gather_over_ours"] < FASTER:
            missed.append(f"less than {FASTER:g} times as fast: {r['pair']}")
    return rows, missed


def show(rows: list[dict], processes: int) -> Table:
    mib = 2**20
    if processes == 1:
        table = Table(title=f"One process, {DEVICES} devices, {size_mb():.0f} MB of float32")
        columns = (
            "ms",
            "device_put ms",
            "memcpy ms",
            "device_put / ours",
            "shared MiB",
            "own memory / ours",
            "MiB moved",
            "lower bound",
            "extra MiB",
            "device_put's",
        )
        cells = lambda r: (
            f"{1e3 * r['seconds']:.0f}", f"{1e3 * r['device_put_seconds']:.0f}", f"{1e3 * r['memcpy_seconds']:.0f}",
            f"{r['device_put_over_ours']:.2f}", f"{r['shared_bytes'] / mib:.0f}",
            f"{r['own_memory_over_ours']:.2f}", f"{r['bytes'] / mib:.1f}", f"{r['bound'] / mib:.1f}",
            f"{r['extra_bytes'] / mib:.0f}", f"{r['device_put_extra_bytes'] / mib:.0f}",
        )  # fmt: skip
    else:
        table = Table(title=f"{processes} processes of {DEVICES // processes} devices, {size_mb():.0f} MB of float32")
        columns = ("ms", "gather ms", "gather / ours", "MiB between", "lower bound", "gather's", "gather's / ours")
        cells = lambda r: (
            f"{1e3 * r['seconds']:.0f}", f"{1e3 * r['gather_seconds']:.0f}", f"{r['gather_over_ours']:.2f}",
            f"{r['bytes'] / mib:.1f}", f"{r['bound'] / mib:.1f}", f"{r['gather_bytes'] / mib:.1f}",
            f"{r['gather_bytes'] / r['bytes']:.1f}",
        )  # fmt: skip
    table.add_column("from one layout to another", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(r["pair"], *cells(r))
    return table


def size_mb() -> float:
    return sum(w.size for w in weights(ARCH, "lm").values()) * 4 / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, choices=(1, 2, 4, 8), default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="pairs whose names hold this text")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], options)
        return 0
    rows, missed = one_process(options) if options.processes == 1 else several_processes(options)
    console = Console(width=170)
    console.print(show(rows, options.processes))
    for text in missed:
        console.print(f"Missed: {text}", highlight=False)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "missed": missed}, indent=1) + "\n")
        console.print(f"Files written: {options.json}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
