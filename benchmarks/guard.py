"""A guard against slower steps that no noise can fool: tensor operations, numbers touched and products,
counted.

    python -m benchmarks.guard [--update] [FLAGS ...]

Counts every tensor operation and every compiled loop of one PPO step of the smallest case, phase by phase, in
calls, in millions of numbers read or written, and in GFLOP of matrix products (not those inside of compiled
loops), and compares with `guard.json`. The counts are the same on every machine and in every run; one that
has grown by more than 2 % fails. `--update` writes the file anew, after a change that was meant; the
difference then shows in its review. Time itself: `benchmarks.step`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks._cases import CASES
from benchmarks.step import PHASES, run
from ppo_lightning.compiled import spread
from ppo_lightning.engines import dense, sampling  # noqa: F401

FILE = Path(__file__).with_name("guard.json")
KINDS = ("calls", "million numbers", "GFLOP")
ALLOWED = 1.02


class Counter(TorchDispatchMode):
    """Counts what passes through the dispatcher, backward passes included; views cost nothing but the
    call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.numbers = self.flop = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        if not func.is_view:
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            self.numbers += sum(x.numel() for x in tensors)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flop += count(*args, **(kwargs or {}), out_val=out)
        elif func._overloadpacket is torch.ops.aten.linear:  # stays whole without gradients
            self.flop += 2 * args[0].numel() * args[1].shape[0]
        return out

    def read(self) -> tuple[float, ...]:
        return float(self.calls), self.numbers / 1e6, self.flop / 1e9

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Compiled loops take arrays, which the dispatcher does not see: count what they are given."""

        def counting(function: Any, rows: int, *arguments: Any, **options: Any) -> Any:
            self.calls += 1
            self.numbers += sum(x.size for x in tree_leaves(arguments) if isinstance(x, np.ndarray))
            return spread(function, rows, *arguments, **options)

        ours = [m for name, m in sys.modules.items() if name.startswith("ppo_lightning")]
        homes = [m for m in ours if vars(m).get("spread") is spread]
        for module in homes:
            module.spread = counting  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for module in homes:
                module.spread = spread  # type: ignore[attr-defined]


def counted(flags: list[str]) -> dict[str, dict[str, float]]:
    with Counter() as counter, counter.compiled():
        (step,) = run(CASES["S"], 1, flags, clock=counter.read)["steps"]
    return {
        phase: {kind: round(x, 4) for kind, x in zip(KINDS, step[phase])} for phase in PHASES if phase in step
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--update", action="store_true")
    given, flags = parser.parse_known_args()
    torch.set_num_threads(1)
    found = counted(flags)
    if given.update:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
    known = json.loads(FILE.read_text())
    grown = 0
    print(f"{'phase':14}" + "".join(f"{kind:>24}" for kind in KINDS))
    for phase, counts in found.items():
        cells = []
        for kind, count in counts.items():
            before = known.get(phase, {}).get(kind, 0.0)
            worse = count > before * ALLOWED
            grown += worse
            cells.append(f"{count:12.4g} ({before:8.4g}{'!' if worse else ' '})")
        print(f"{phase:14}" + "".join(f"{cell:>24}" for cell in cells))
    if grown:
        print(f"{grown} counts have grown by more than {ALLOWED - 1:.0%} (known values in brackets)")
    return int(grown > 0)


if __name__ == "__main__":
    sys.exit(main())
