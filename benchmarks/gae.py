"""Time of GAE on one core: 1,000 ragged responses of up to 8,192 tokens, against a loop over tokens.

python benchmarks/gae.py [--samples 1000] [--longest 8192] [--repeats 20]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ppo_lightning.gae import gae, length_adaptive_lambda


def loop_over_tokens(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float) -> Tensor:
    """The usual way, all responses at once, one token after the other; float64."""
    values, advantages = values.double(), torch.zeros_like(values, dtype=torch.float64)
    carry, after, reward = torch.zeros(3, len(rewards), dtype=torch.float64).unbind()
    reward = reward + rewards
    for t in reversed(range(values.shape[1])):
        here = mask[:, t]
        new = reward + gamma * after - values[:, t] + gamma * lambd * carry
        advantages[:, t] = torch.where(here, new, 0.0)
        carry, after = torch.where(here, new, carry), torch.where(here, values[:, t], after)
        reward = torch.where(here, 0.0, reward)
    return advantages


def cases(samples: int, longest: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Uniform lengths; lengths of a log-normal; uniform ones with 150 masked tokens after every 550."""
    g = torch.Generator().manual_seed(0)
    values, rewards = torch.randn(samples, longest, generator=g), torch.randn(samples, generator=g)
    uniform = torch.randint(1, longest + 1, (samples,), generator=g)
    normal = torch.randn(samples, generator=g)
    log_normal = (longest / 8 * (0.8 * normal).exp()).long().clamp(1, longest)
    column = torch.arange(longest)
    tools = (column < uniform[:, None]) & (column % 700 < 550)
    return {
        "uniform": (rewards, values, column < uniform[:, None]),
        "log-normal": (rewards, values, column < log_normal[:, None]),
        "tool output": (rewards, values, tools),
    }


def best(work: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Milliseconds: best and median wall time, best processor time."""
    wall, processor, held = [], [], None
    for _ in range(repeats):
        w, p = time.perf_counter(), time.process_time()
        held = work()  # the former result stays until the new one is there, as in a training loop
        wall.append(1e3 * (time.perf_counter() - w))
        processor.append(1e3 * (time.process_time() - p))
    assert held is not None
    return min(wall), sorted(wall)[repeats // 2], min(processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'case':24} {'best ms':>8} {'median':>8} {'cpu ms':>8} {'loop ms':>8} {'largest error':>14}")
    for name, (rewards, values, mask) in cases(options.samples, options.longest).items():
        start = time.perf_counter()
        exact = loop_over_tokens(rewards, values, mask, 1.0, 0.95)
        loop = 1e3 * (time.perf_counter() - start)
        error = (gae(rewards, values, mask, 1.0, 0.95)[0] - exact).abs().max().item()
        fixed = best(lambda r=rewards, v=values, m=mask: gae(r, v, m, 1.0, 0.95), options.repeats)
        print(f"{name:24} " + " ".join(f"{x:8.1f}" for x in (*fixed, loop)) + f" {error:14.1e}")
        lambd = length_adaptive_lambda(mask.sum(1), 0.05)
        own = best(lambda r=rewards, v=values, m=mask, k=lambd: gae(r, v, m, 1.0, k), options.repeats)
        print(f"{name + ', own lambda':24} " + " ".join(f"{x:8.1f}" for x in own))


if __name__ == "__main__":
    main()
