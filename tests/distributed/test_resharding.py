"""A checkpoint of any layout goes on under any other: weights, Adam moments, schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import PP2, SHARDED, TP2, resume, run_and_save
from tests.tinymodel import make_tiny_model

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "cp2": (2, {"context_parallel_size": 2}),
    "tp2 x pp2": (4, TP2 | PP2),
}
QUICK = {"one": {"tp2 x pp2"}, "tp2": {"pp2"}, "pp2": {"one"}}
QUICK_SHARDED = {"dp2": {"tp2"}, "tp2": {"dp2"}}


class Saves:
    """A checkpoint after two updates of each layout, made when it is asked for, and the two that follow."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.made: dict[tuple[str, bool], list[Any]] = {}
        make_tiny_model(directory / "model", num_hidden_layers=4, vocab_size=1500)  # PP 2: layers 3 and 1
        self.model = str(directory / "model")

    def get(self, layout: str, sharded: bool) -> tuple[str, list[Any]]:
        root = str(self.directory / f"{layout} {sharded}")
        if (layout, sharded) not in self.made:
            world, sizes = options(layout, sharded)
            (straight, _), *_ = run_ranks(run_and_save, world, self.model, sizes, root, 2)
            self.made[layout, sharded] = straight
        return root, self.made[layout, sharded]


def options(layout: str, sharded: bool) -> tuple[int, dict[str, Any]]:
    world, sizes = LAYOUTS[layout]
    return world, sizes | (SHARDED if sharded else {})


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(tmp_path_factory.mktemp("saves"))


def pairs(quick: dict[str, set[str]]) -> list[Any]:
    return [
        pytest.param(a, b, id=f"{a} to {b}", marks=[] if b in quick.get(a, ()) else pytest.mark.slow)
        for a in LAYOUTS
        for b in LAYOUTS
        if a != b
    ]


def goes_on_alike(saves: Saves, saved: str, resumed: str, sharded: bool) -> None:
    root, straight = saves.get(saved, sharded)
    world, sizes = options(resumed, sharded)
    for again, _ in run_ranks(resume, world, saves.model, sizes, root, 2):
        for got, want in zip(again, straight, strict=True):
            assert got[:3] == pytest.approx(want[:3], rel=1e-5)  # loss, gradient norm, learning rate


@pytest.mark.parametrize(("saved", "resumed"), pairs(QUICK))
def test_another_layout_goes_on_alike(saves: Saves, saved: str, resumed: str) -> None:
    goes_on_alike(saves, saved, resumed, sharded=False)


@pytest.mark.parametrize(("saved", "resumed"), pairs(QUICK_SHARDED))
def test_another_layout_of_a_distributed_optimizer_goes_on_alike(
    saves: Saves, saved: str, resumed: str
) -> None:
    goes_on_alike(saves, saved, resumed, sharded=True)
