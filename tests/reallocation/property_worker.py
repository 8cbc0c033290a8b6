"""One process of two that move arrays as each line of standard input says (a `layouts.Case`), and say how that went.

property_worker.py PORT RANK
"""

import sys
from pathlib import Path

import jax

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from layouts import Case, there_and_back

from real_jax.reallocation.move import Mover
from real_jax.runtime.joining import Membership, join


def main(port: str, rank: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    join(Membership(f"127.0.0.1:{port}", 2, rank), 4)
    for line in sys.stdin:
        case = Case.load(line)
        try:
            there_and_back(case, Mover(case.chunk_bytes))
            print("right", flush=True)
        except AssertionError as error:
            print("wrong", str(error).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
