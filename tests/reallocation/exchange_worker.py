"""One process of two that move trees between layouts, there and back; says how many moves were right.

exchange_worker.py PORT RANK SEED COUNT
"""

import itertools
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from real_jax.reallocation.move import Mover
from real_jax.runtime.joining import Membership, join
from real_jax.runtime.meshes import make_mesh, place
from real_jax.runtime.shardings import weight_shardings
from real_jax.spec.arch import EMBED, LAYERS, MLP, VOCAB, Weight
from real_jax.spec.plan import Placement

TABLE = {
    "stacked": Weight((4, 16, 32), (LAYERS, EMBED, MLP), 16),
    "embedding": Weight((32, 16), (VOCAB, EMBED), 16),
    "norm": Weight((16,), (EMBED,), 0),
}


def placements(seed: int, count: int) -> list[Placement]:
    """Random meshes on random devices."""
    random, drawn = np.random.default_rng(seed), []
    for _ in range(count):
        size = int(random.choice([1, 2, 4, 8]))
        data = int(random.choice([d for d in (1, 2, 4, 8) if size % d == 0]))
        fsdp = int(random.choice([d for d in (1, 2, 4, 8) if (size // data) % d == 0]))
        first = int(random.integers(0, 8 - size + 1))
        drawn.append(Placement(first=first, data=data, fsdp=fsdp, tensor=size // data // fsdp))
    return drawn


def main(port: str, rank: int, seed: int, count: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    join(Membership(f"127.0.0.1:{port}", 2, rank), 4)
    random = np.random.default_rng(seed)
    values = {k: random.normal(size=w.shape).astype(np.float32) for k, w in TABLE.items()}
    mover, right = Mover(chunk_bytes=1000), 0
    ways = placements(seed, count)
    arrays = {k: place(values[k], s) for k, s in weight_shardings(TABLE, ways[0], make_mesh(ways[0])).items()}
    for before, after in itertools.pairwise(ways):
        if "-v" in sys.argv:
            print(rank, before, after, flush=True)
        arrays = mover.move(arrays, weight_shardings(TABLE, after, make_mesh(after)), np.float32)
        for name, x in arrays.items():
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), values[name][shard.index], str((before, after)))
        right += 1
    print(f"right: {right}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
