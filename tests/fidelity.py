"""The matrix as a table: `make fidelity` prints every layout's largest deviations from a plain PyTorch run.

    python -m tests.fidelity [--write docs/fidelity.md] [LAYOUT ...]

Exit code 1 where a bound is broken. `--write` puts a table within its bounds into a document, in the place of
the one there.
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path

from transformers.utils import logging as transformers_logging

from tests.distributed.ranks import RankError
from tests.matrix import LAYOUTS
from tests.matrix_run import GRAD_NORM, METRIC, PARAMETER, TOKEN, Deviations, Workshop, compare

HEAD = ["layout", "ranks", "variant", "metric", "gradient norm", "token", "parameter", "beyond"]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def quiet() -> None:
    """Only the table."""
    warnings.filterwarnings("ignore")
    transformers_logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "ppo_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger(name).addHandler(logging.NullHandler())


def line(cells: list[str]) -> str:
    widths = (12, 5, 9, 7, 13, 7, 9, 0)
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths)) + " |"


def row(layout: str, variant: str, found: Deviations | None, problem: str) -> str:
    cells = [layout, str(LAYOUTS[layout].world), variant]
    kinds = (found.metric, found.grad_norm, found.token, found.parameter) if found else ()
    cells += [f"{value:.1e}" if where else "-" for value, where in kinds] or ["-"] * 4
    return line([*cells, problem])


def measure(workshop: Workshop, layout: str) -> tuple[list[str], bool]:
    """The table's rows of one layout, and whether all is within its bounds."""
    rows, good = [], True
    try:
        runs = workshop.run(LAYOUTS[layout], LAYOUTS[layout].variants)
    except RankError as error:
        return [row(layout, "all", None, str(error).strip().splitlines()[-1])], False
    for variant, ranks in runs.items():
        found, problem = None, ""
        try:
            found = compare(ranks, workshop.reference(variant))
            found.check()
        except AssertionError as error:
            problem, good = f"**{error}**", False
        rows.append(row(layout, variant, found, problem))
    return rows, good


def write(document: Path, table: list[str]) -> None:
    before, rest = document.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    document.write_text("\n".join([before + BEGIN, *table, END + after]), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fidelity", description=__doc__.split("\n")[0])
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of: {', '.join(LAYOUTS)}")
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    unknown = [name for name in options.layouts if name not in LAYOUTS]
    if unknown:
        parser.error(f"unknown layout {unknown[0]!r}; there are: {', '.join(LAYOUTS)}")
    quiet()
    started, good = time.monotonic(), True
    bounds = [f"< {x:.0e}" for x in (METRIC, GRAD_NORM, TOKEN, PARAMETER)]
    table = [line(HEAD), "|" + "---|" * len(HEAD), line(["bound", "", "", *bounds, ""])]
    print("\n".join(table), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        workshop = Workshop(Path(directory))
        for layout in options.layouts or LAYOUTS:
            rows, fine = measure(workshop, layout)
            good = good and fine
            table += rows
            print("\n".join(rows), flush=True)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(u.ru_utime + u.ru_stime for u in used)
    took = f"{time.monotonic() - started:.0f} s, {cpu:.0f} s of CPU"
    print(f"{took}; {'all within bounds' if good else 'FAILED'}")
    if options.write and good:
        write(options.write, table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
