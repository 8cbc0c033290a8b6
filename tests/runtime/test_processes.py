"""One job in several processes: the same tokens, losses and weights as in one process with as many devices."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "process_worker.py"
HASH_SEEDS = "0", "1", "2", "5"  # {"actor", "critic"} and larger sets come out in both orders


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_job(plan: str, processes: int, folder: Path) -> dict[str, np.ndarray]:
    port = free_port()
    command = [sys.executable, str(WORKER), str(port), str(processes)]
    jobs = [
        subprocess.Popen(
            [*command, str(rank), str(8 // processes), plan, str(folder)],
            # Sets of names have another order in each, as they have when nobody asks: none may decide what comes first.
            env=os.environ | {"PYTHONHASHSEED": HASH_SEEDS[rank]},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        said = [job.communicate(timeout=300)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * processes, "\n".join(text[-3000:] for text in said)
    return dict(np.load(folder / f"{plan}-{processes}.npz"))


@pytest.mark.slow
@pytest.mark.parametrize("plan, processes", [("relaid", 2), ("apart", 2), ("mixed", 2), ("mixed", 4)])
def test_processes_compute_what_one_computes(plan, processes, tmp_path):
    one, many = run_job(plan, 1, tmp_path), run_job(plan, processes, tmp_path)
    np.testing.assert_array_equal(many["tokens"], one["tokens"])
    np.testing.assert_allclose(many["losses"], one["losses"], atol=1e-4)
    np.testing.assert_allclose(many["ratios"], one["ratios"], atol=1e-4)
    assert {k for k in one if k.startswith("w/")} and set(one) == set(many)
    for name in one:
        np.testing.assert_allclose(many[name], one[name], atol=1e-4, err_msg=name)
