"""What one round of torture does to a run, and what must hold afterwards."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import forked, torturing
from tests.torturing import ROLLOUTS, Action, Layout, Material, Outcome, Run

CAUSES = ("No space left", "Read-only", "Permission denied", "No such file", "is missing", "not empty")


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of a layout."""

    end: dict[str, Any]
    events: list[Counter[str]]  # by rank
    seconds: float
    pair: int  # bytes on disk of one save

    @classmethod
    def make(cls, home: Path, material: Material, layout: Layout) -> Reference:
        run = Run(home, material, layout)
        outcome = run.start(prepare=torturing.count_into(home / "events.x"))
        if outcome.code != 0:
            raise RuntimeError(f"the undisturbed run failed:\n{outcome.output}")
        events = [Counter(json.loads((home / f"events.{r}").read_text())) for r in range(layout.world)]
        last = [root / f"iter_{ROLLOUTS:07d}" for root in run.roots]
        pages = sum(-(-p.stat().st_size // 4096) for d in last for p in d.rglob("*"))
        return cls(run.end_state(), events, outcome.seconds, 4096 * pages)


@dataclass
class Report:
    """What one round, or all of them, came to."""

    tally: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)

    def blame(self, kind: str, what: str, count: int = 1) -> None:
        self.tally[kind] += count
        self.complaints.append(f"{kind}: {what}")


class Round:
    """One run and what is done to it; all choices come from `dice`."""

    def __init__(self, run: Run, reference: Reference, dice: random.Random, report: Report) -> None:
        self.run, self.reference, self.dice, self.report = run, reference, dice, report

    # ---- what is done --------------------------------------------------------------------------------

    def killed(self) -> None:
        """One rank or all of them, at a random time or at one call that makes something last; sometimes the
        run that resumes as well."""
        for _ in range(self.dice.choice((1, 1, 2))):
            if self.dice.random() < 0.25:
                self.ended(self.run.start(meanwhile=self._kill_at_some_time))
            else:
                self.ended(self.run.start(prepare=self._at_some_event(self._a_death())))
        self.resumed()

    def killed_later(self) -> None:
        """After some checkpoints are there: while one is replaced or pruned, or the tracker is written."""
        nth = self.dice.randint(2, 2 * ROLLOUTS - 1)
        where = self.dice.choice(("tracker", "rename"))
        after = self.dice.random() < 0.5
        self.ended(self.run.start(prepare=torturing.at(where, nth, 0, self._a_death(), after=after)))
        again = self.dice.choice(("rmtree", "exchange", "tracker", "rename"))
        first = self.dice.randint(1, 3)
        self.ended(self.run.start(prepare=torturing.at(again, first, 0, self._a_death())))
        self.resumed()

    def damaged(self) -> None:
        """A file of the newest checkpoint is cut, altered, removed: refused, and the one before it taken."""
        newest = self._stopped_after(self.dice.randint(2, ROLLOUTS))
        victim, harm = self._victim(newest)
        harm(victim)
        outcome = self.checked(self.run.start())
        cure = f"--ckpt-step {newest - 1} (or --auto-fallback)"
        if outcome.code != 1 or str(victim) not in outcome.output or cure not in outcome.output:
            self.report.blame("unclear", f"{harm.__name__} {victim}: {outcome.code} {tail(outcome)}")
        self.report.tally["refused by name"] += 1
        self.resumed("--auto-fallback", least=newest - 1)

    def full(self) -> None:
        """A disk on which one save more than some does not fit."""
        fits = self.dice.randint(0, 3)
        size = int(self.reference.pair * (fits + self.dice.uniform(0.05, 0.95)))
        with small_disk(self.run, size) as remount:
            self.failed_clearly(self.run.start())
            remount("size=1g")
            self.resumed()

    def refused(self) -> None:
        """The disk becomes read-only, or a directory loses its permissions, in the midst of something."""
        if self.dice.random() < 0.5:
            with small_disk(self.run, 1 << 30) as remount:
                self.failed_clearly(self.run.start(prepare=self._at_some_event(lambda: frozen(remount))))
                remount("rw")
                self.resumed()
            return
        places, event = list(self.run.roots), self._at_some_event(self._forbid)

        def prepare(rank: int) -> None:
            torturing.obey_permissions()
            event(rank)

        self.failed_clearly(self.run.start(prepare=prepare))
        for place in places:
            place.chmod(0o755)
        self.resumed()

    def removed(self) -> None:
        """Somebody tidies up: the directory being written, or the newest finished one, goes."""
        self.failed_clearly(self.run.start(prepare=self._at_some_event(self._tidy_up)))
        whole = self.run.whole()
        outcome = self.checked(self.run.start())
        if outcome.code != 0:
            if "--auto-fallback" not in outcome.output and "--load" not in outcome.output:
                self.report.blame("unclear", tail(outcome))
            if not whole:  # nothing is left that could be gone on from
                for root in self.run.roots:
                    shutil.rmtree(root, ignore_errors=True)
            self.resumed("--auto-fallback", least=max(whole, default=0))
        else:
            self.report.tally["resumed"] += 1
            self.compared()

    # ---- parts of it ---------------------------------------------------------------------------------

    def _a_death(self) -> Callable[[], None]:
        return self.dice.choice((torturing.die, torturing.die_together))

    def _at_some_event(self, action: Action) -> forked.Prepare:
        rank = self.dice.randrange(self.run.layout.world)
        seen = self.reference.events[rank]
        event = self.dice.choice(sorted(seen))
        after = self.dice.random() < 0.5
        return torturing.at(event, self.dice.randint(1, seen[event]), rank, action, after=after)

    def _kill_at_some_time(self, process: forked.Forked) -> None:
        deadline = time.monotonic() + self.dice.uniform(0.0, self.reference.seconds)
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        alive = forked.members(process.pid)
        if not alive:
            return
        for pid in alive if self.dice.random() < 0.5 else [self.dice.choice(alive)]:
            os.kill(pid, 9)

    def _stopped_after(self, rollout: int) -> int:
        """Run until the save after `rollout` is done, then die."""
        both = 2 * rollout  # the critic's tracker and the actor's
        death = torturing.at("tracker", both, 0, torturing.die_together, after=True)
        self.checked(self.run.start(prepare=death))
        return self.run.acknowledged()

    def _victim(self, newest: int) -> tuple[Path, Callable[[Path], None]]:
        root = self.dice.choice(self.run.roots)
        directory = root / f"iter_{newest:07d}"
        if self.dice.random() < 0.15:
            return directory, shutil.rmtree
        file = self.dice.choice(sorted(p for p in directory.rglob("*") if p.is_file()))
        return file, self.dice.choice((self.cut, self.emptied, self.flipped, Path.unlink))

    def cut(self, file: Path) -> None:
        os.truncate(file, self.dice.randrange(file.stat().st_size))

    def emptied(self, file: Path) -> None:
        os.truncate(file, 0)

    def flipped(self, file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
        file.write_bytes(data)

    def _forbid(self) -> None:
        for root in self.run.roots:
            if root.exists() and self.dice.random() < 0.7:
                root.chmod(0o555)

    def _tidy_up(self) -> None:
        for root in self.run.roots:
            there = [*root.glob(".partial-*"), *sorted(root.glob("iter_*"))[-1:]]
            if there and self.dice.random() < 0.7:
                subprocess.run(["rm", "-rf", str(self.dice.choice(there))], check=False)

    # ---- what must hold ------------------------------------------------------------------------------

    def checked(self, outcome: Outcome) -> Outcome:
        """What holds after every start, however it ended."""
        self.report.tally["starts"] += 1
        if outcome.hung:
            self.report.blame("hanging", tail(outcome))
        if outcome.orphans:
            self.report.blame("orphans", tail(outcome), len(outcome.orphans))
        return outcome

    def ended(self, outcome: Outcome) -> None:
        """Killed, or left alone by a rank that was, or done before that."""
        self.checked(outcome)
        told = outcome.code == 1 and "killed by SIGKILL" in outcome.output
        if outcome.code not in (0, -9) and not told:
            self.report.blame("unclear", f"exit {outcome.code}: {tail(outcome)}")

    def failed_clearly(self, outcome: Outcome) -> None:
        """Done, or failed with one message that gives the place and the cause."""
        self.checked(outcome)
        if outcome.code == 0:
            self.report.tally["unharmed"] += 1
            return
        lines = [line for line in outcome.output.splitlines() if line.startswith("error: ")]
        clear = len(lines) == 1 and str(self.run.home) in lines[0] and any(c in lines[0] for c in CAUSES)
        if clear and outcome.code == 1:
            self.report.tally["failed clearly"] += 1
        else:
            self.report.blame("unclear", f"exit {outcome.code}: {tail(outcome)}")

    def resumed(self, *flags: str, least: int = 0) -> None:
        """The same command ends as if nothing had been, from where it had come to."""
        saved = max(self.run.acknowledged() if not flags else 0, least)
        whole = self.run.whole()
        if saved and saved not in whole:
            self.report.blame("lost", f"rollout {saved} was saved, whole are {whole}")
        outcome = self.checked(self.run.start(*flags))
        if outcome.code != 0:
            self.report.blame("not resumed", f"exit {outcome.code}: {tail(outcome)}")
            return
        if outcome.begun < saved:
            lost = f"went on from {outcome.begun}, {saved} was saved"
            self.report.blame("lost", lost, saved - outcome.begun)
        self.report.tally["resumed"] += 1
        self.compared()

    def compared(self) -> None:
        names = torturing.differing(self.reference.end, self.run.end_state())
        if names:
            self.report.blame("different", ", ".join(names))
        left = self.run.left_over()
        if left:
            self.report.blame("left over", ", ".join(left), len(left))


@contextmanager
def small_disk(run: Run, size: int) -> Iterator[Callable[[str], None]]:
    """The checkpoints of `run` lie on a file system of `size` bytes; gives a function to remount it."""
    place = run.home / "disk"
    place.mkdir()

    def mount(*arguments: str) -> None:
        subprocess.run(["mount", *arguments, str(place)], check=True, capture_output=True)

    mount("-t", "tmpfs", "-o", f"size={size}", "torture")
    run.save = place / "checkpoints"
    try:
        yield lambda options: mount("-o", f"remount,{options}")
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def frozen(remount: Callable[[str], None]) -> bool:
    """Make a disk read-only; False while files on it are being written."""
    try:
        remount("ro")
    except subprocess.CalledProcessError:
        return False
    return True


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(["mount", "-t", "tmpfs", "torture", place], capture_output=True, check=False)
        if done.returncode == 0:
            subprocess.run(["umount", place], check=True)
    return done.returncode == 0


def tail(outcome: Outcome) -> str:
    return outcome.output.strip()[-600:]
