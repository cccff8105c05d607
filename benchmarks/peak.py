"""The processor's fp32 matmul peak, at one and two threads: what every share of the peak is measured against.

python -m benchmarks.peak [--seconds 3]

Rates are per second of processor time and thread, so that other work on the machine hardly shows; at two
threads the wall-clock rate is printed too.
"""

from __future__ import annotations

import argparse
import os
import time

import torch

SHAPES = (
    (2048, 384, 1536),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (2304, 384, 768),
)  # of the cases, and square


def matmul_peak(threads: int = 1, seconds: float = 2.0) -> tuple[float, float]:
    """GFLOP per processor second *of one thread*, and per wall second of all: the best of many products. Two
    floating point operations are one multiply-add."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    busiest = fastest = 0.0
    try:
        for n, k, m in SHAPES:
            a, b, out = torch.randn(n, k), torch.randn(k, m), torch.empty(n, m)
            flop, until = 2e-9 * n * k * m, time.perf_counter() + seconds / len(SHAPES)
            while time.perf_counter() < until:
                wall, processor = time.perf_counter(), time.process_time()
                torch.mm(a, b, out=out)
                wall, processor = time.perf_counter() - wall, time.process_time() - processor
                busiest, fastest = max(busiest, flop / processor), max(fastest, flop / wall)
    finally:
        torch.set_num_threads(before)
    return busiest, fastest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    seconds = parser.parse_args().seconds
    kind = torch.backends.cpu.get_cpu_capability()
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {kind}")
    for threads in (1, 2):
        busiest, fastest = matmul_peak(threads, seconds)
        print(f"{threads} threads: {busiest:6.1f} GFLOP a processor second, {fastest:6.1f} a wall second")


if __name__ == "__main__":
    main()
