"""The schedule equals Megatron-LM's, the optimizers step as torch's own do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ppo_lightning.megatron.optimizer import OptimizerOptions, create_state, lr_at

STYLES = ["constant", "linear", "cosine", "inverse-square-root"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_schedule_equals_megatrons(style: str, warmup: int) -> None:
    options = OptimizerOptions(
        lr=3e-4, min_lr=2e-5, lr_decay_style=style, lr_warmup_iters=warmup, lr_decay_iters=23
    )
    group: dict = {"params": []}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]), init_lr=0.0, max_lr=3e-4, min_lr=2e-5, lr_warmup_steps=warmup,
        lr_decay_steps=23, lr_decay_style=style, start_wd=0.1, end_wd=0.1, wd_incr_steps=1,
        wd_incr_style="constant",
    )  # fmt: skip
    for step in range(30):
        assert lr_at(step, options) == pytest.approx(group["lr"], rel=1e-12), f"step {step}"
        scheduler.step(1)


def test_landmarks_of_the_cosine() -> None:
    """Worked by hand: half way between warm-up and end the cosine is half way down."""
    options = OptimizerOptions(
        lr=1.0, min_lr=0.2, lr_decay_style="cosine", lr_warmup_iters=10, lr_decay_iters=30
    )
    assert [lr_at(s, options) for s in (0, 5, 10)] == [0.0, 0.5, 1.0]
    assert lr_at(20, options) == pytest.approx(0.6)
    assert [lr_at(s, options) for s in (30, 31, 1000)] == pytest.approx([0.2, 0.2, 0.2])


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"lr": 1e-3, "min_lr": 1e-2}, "min_lr"),
        ({"lr_decay_style": "linear"}, "lr_decay_iters"),
        ({"lr_decay_style": "cosine", "lr_decay_iters": 5, "lr_warmup_iters": 5}, "lr_warmup_iters"),
    ],
)
def test_impossible_options_are_refused(wrong: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        OptimizerOptions(**wrong)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_created_state_changes_no_step(kind: str) -> None:
    """An optimizer whose state was made beforehand walks the very same path as torch's lazily started one."""
    paths = []
    for create in (False, True):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(5))
        optimizer = (
            torch.optim.AdamW([p], lr=0.1, weight_decay=0.1)
            if kind == "adam"
            else torch.optim.SGD([p], lr=0.1, momentum=0.9)
        )
        if create:
            create_state(optimizer)
        for step in range(3):
            p.grad = torch.full((5,), float(step + 1))
            optimizer.step()
        paths.append(p.detach().clone())
    assert torch.equal(*paths)
