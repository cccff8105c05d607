"""Peak memory and time of the policy head against the plain way: all logits, then log-softmax.

    python benchmarks/head.py [--vocab 151936 --tokens 4096 --hidden 512] [--chunk-size N ...] [--entropy]

Forward and backward, fp32; each way runs in its own process, and peak resident memory beyond inputs counts.
The plain way at the default sizes needs about 10 GB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.megatron.heads import log_probs_and_entropy

TEMPERATURE = 0.8


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    logp = torch.log_softmax((hidden @ weight.T).float() / TEMPERATURE, -1)
    spread = -(logp.exp() * logp).sum(1) if entropy else None
    return logp.gather(1, targets[:, None]).squeeze(1), spread


def measure(pipe: Connection, chunk_size: int | None, options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, generator=generator).requires_grad_()
    weight = torch.randn(options.vocab, options.hidden, generator=generator).mul_(0.05).requires_grad_()
    targets = torch.randint(0, options.vocab, (options.tokens,), generator=generator)
    slopes = torch.randn(options.tokens, generator=generator)
    before, wall, cpu = _peak_mb(), time.perf_counter(), time.process_time()
    if chunk_size is None:
        logprobs, spread = plain(hidden, weight, targets, options.entropy)
    else:
        logprobs, spread = log_probs_and_entropy(
            hidden,
            weight,
            targets,
            vocab_size=options.vocab,
            temperature=TEMPERATURE,
            chunk_size=chunk_size or None,
            entropy=options.entropy,
        )
    loss = (logprobs * slopes).sum()
    if spread is not None:
        loss = loss + (spread * slopes).sum()
    loss.backward()
    pipe.send(
        {
            "peak_mb": _peak_mb() - before,
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "gradients": [hidden.grad.norm().item(), weight.grad.norm().item()],  # type: ignore[union-attr]
        }
    )


def run(chunk_size: int | None, options: argparse.Namespace) -> dict[str, Any]:
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=measure, args=(writer, chunk_size, options))
    process.start()
    writer.close()
    result = reader.recv()
    process.join()
    return result


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chunk-size", type=int, nargs="+", default=[0], help="0: the default")
    parser.add_argument("--entropy", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    base = run(None, options)
    sizes: list[int | None] = [None, *options.chunk_size]
    for size in sizes:
        result = dict(base) if size is None else run(size, options)
        name = "plain" if size is None else f"chunk {size or 'default'}"
        result |= {
            "memory_ratio": result["peak_mb"] / base["peak_mb"],
            "time_ratio": result["seconds"] / base["seconds"],
        }
        if options.json:
            print(json.dumps({"head": name, **result}), flush=True)
            continue
        memory = f"peak {result['peak_mb']:6.0f} MB ({result['memory_ratio']:6.1%})"
        times = (
            f"{result['seconds']:7.2f} s ({result['time_ratio']:.2f}x), {result['cpu_seconds']:6.2f} s of CPU"
        )
        norms = " ".join(f"{norm:.6g}" for norm in result["gradients"])
        print(f"{name:15s} {memory}   {times}   |grad| {norms}", flush=True)


if __name__ == "__main__":
    main()
