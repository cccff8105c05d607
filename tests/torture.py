"""Runs that are killed, damaged and starved of space, then started again: `make torture ROUNDS=200`.

    python -m tests.torture [--rounds 200] [--seed 0] [--only damaged,full] [--workers 2] [--home DIR]

Every round is a training of its own, one or two ranks through the command line, with real checkpoints. What
must hold whatever was done to it: no rollout is lost that was saved, the end equals bit for bit that of an
undisturbed run, no process and no temporary file is left, and a failure is a message that says what to do.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests import forked
from tests.torture_round import Reference, Report, Round, can_mount
from tests.torturing import Layout, Material, Run

LAYOUTS = (
    Layout(2, ("--use-distributed-optimizer",)),
    Layout(2, ("--pipeline-model-parallel-size", "2")),
    Layout(2, ("--tensor-model-parallel-size", "2")),
    Layout(1),
)
KINDS = ("killed", "killed", "killed", "killed_later", "damaged", "damaged", "full", "refused", "removed")


class Torture:
    """Rounds from one seed; every round can be repeated alone by its number."""

    def __init__(self, home: Path, seed: int, layouts: tuple[Layout, ...] = LAYOUTS) -> None:
        forked.warm()
        home.chmod(0o755)
        self.home, self.seed, self.mountable = home, seed, can_mount()
        self.material = Material.make(home)
        self.references = {
            layout: Reference.make(home / f"reference_{number}", self.material, layout)
            for number, layout in enumerate(layouts)
        }

    def round(self, number: int, kinds: tuple[str, ...] = KINDS) -> Report:
        """Round `number`; its directory stays if there was anything to complain of."""
        dice, report = random.Random(f"{self.seed}/{number}"), Report()
        kind = kinds[number % len(kinds)]
        if kind in ("full", "refused") and not self.mountable:
            report.tally["skipped: mount is not permitted"] += 1
            return report
        layout = dice.choice(list(self.references))
        flags = [*dice.choice(([], ["--async-save"])), *dice.choice(([], [], ["--save-hf"]))]
        keep = dice.choice((0, 0, 2) if kind in ("damaged", "removed") else (0, 1, 2))
        if keep:
            flags += ["--keep-checkpoints", str(keep)]
        run = Run(self.home / f"round_{number}", self.material, layout, tuple(flags))
        getattr(Round(run, self.reference(layout), dice, report), kind)()
        report.tally |= Counter({"rounds": 1, f"  {kind}": 1})
        head = f"round {number} {kind} {layout.world} {' '.join([*layout.flags, *flags])}"
        report.complaints = [f"{head}: {c}\n    see {run.home}" for c in report.complaints]
        if not report.complaints:
            shutil.rmtree(run.home)
        return report

    def reference(self, layout: Layout) -> Reference:
        return self.references[layout]

    def rounds(self, count: int, kinds: tuple[str, ...], workers: int) -> Report:
        """All rounds, told one by one."""
        whole, started = Report(), time.monotonic()
        jobs = [(self, number, kinds) for number in range(count)]
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            for done, part in enumerate(pool.imap_unordered(_round, jobs), start=1):
                whole.tally.update(part.tally)
                whole.complaints += part.complaints
                print(f"{done}/{count} {time.monotonic() - started:.0f} s", *part.complaints, flush=True)
        return whole


def _round(job: tuple[Torture, int, tuple[str, ...]]) -> Report:
    torture, number, kinds = job
    return torture.round(number, kinds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of rounds, comma between them")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--home", type=Path, help="where the runs lie; default: a temporary directory")
    given = parser.parse_args()
    home = given.home or Path(tempfile.mkdtemp(prefix="torture-"))
    home.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    report = Torture(home, given.seed).rounds(given.rounds, tuple(given.only.split(",")), given.workers)
    print(f"\n{time.monotonic() - started:.0f} s")
    for name in ("lost", "orphans", "hanging", "different", "left over", "unclear", "not resumed"):
        print(f"  {name:24s}{report.tally.pop(name, 0)}")
    for name, count in sorted(report.tally.items()):
        print(f"  {name:24s}{count}")
    print(*report.complaints, sep="\n")
    if not report.complaints and given.home is None:
        shutil.rmtree(home)
    return bool(report.complaints)


if __name__ == "__main__":
    sys.exit(main())
