"""One PPO iteration gives a plain PyTorch run's numbers under every layout: metrics, gradient norms, tokens,
parameters; and ranks that hold the same parameter hold it bit by bit.

The table of layouts and variants is tests/matrix.py, the oracle tests/reference.py. `make fidelity` prints
the measured deviations, docs/fidelity.md keeps them.
"""

from __future__ import annotations

import pytest

from tests.matrix import LAYOUTS, VARIANTS
from tests.matrix_run import MARGIN, Workshop, as_reference, compare


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layout_gives_the_plain_runs_numbers(workshop: Workshop, layout: str) -> None:
    runs = workshop.run(LAYOUTS[layout], LAYOUTS[layout].variants)
    for variant, ranks in runs.items():
        try:
            compare(ranks, workshop.reference(variant)).check()
        except AssertionError as error:
            raise AssertionError(f"{layout}, {variant}: {error}") from error


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_rollouts_reach_what_they_are_there_for(workshop: Workshop, variant: str) -> None:
    """Clipping, both models moved, and no token so near a clip boundary that rounding decides."""
    want = workshop.reference(variant)
    assert want.margin > MARGIN
    last = want.rows[-1]
    assert last["critic/grad_norm"] > 1.0
    assert last["train/grad_norm"] > 1.0
    if variant != "tokens":  # the first step of a rollout is on policy
        assert last["train/pg_clipfrac"] > 0.0
        assert last["critic/value_clipfrac"] > 0.0
        assert abs(last["train/ppo_kl"]) > 1e-3
    masks = [len(x) - int((x != 0).sum()) for rollout in want.tokens for x in rollout["returns"]]
    assert max(masks) >= 3
    assert any((x == 0).all() for x in want.tokens[0]["advantages"])


def test_every_way_to_train_is_in_the_table() -> None:
    """What the table claims to cover, counted from the table itself."""
    used = {name for layout in LAYOUTS.values() for name in layout.variants}
    assert used == set(VARIANTS)
    options = [VARIANTS[name].options for name in used]
    flags = "use_distributed_optimizer use_dynamic_batch_size balance_data recompute_granularity"
    for flag in flags.split():
        assert any(o.get(flag) for o in options)
        assert not all(o.get(flag) for o in options)
    assert {o.get("calculate_per_token_loss", False) for o in options} == {True, False}
    assert {o["num_steps_per_rollout"] for o in options} >= {1, 2}
    assert {VARIANTS[name].model for name in used} == {
        "qwen3 tied", "qwen3 untied", "llama untied", "llama tied",
    }  # fmt: skip


@pytest.mark.parametrize(
    "layout", ["one", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tp2 sp", "pp2 dp2"))]
)
def test_bf16_stays_near_the_plain_run(workshop: Workshop, layout: str) -> None:
    """Weights and activations have 8 bits (steps of 2^-8 = 0.4 % and, near 1, of 2^-7 = 0.008), heads and
    losses more: a few such steps everywhere, but copies are equal bit by bit as ever."""
    names = ["bf16", "bf16 sharded"]
    for variant, ranks in workshop.run(LAYOUTS[layout], names).items():
        found = compare(ranks, workshop.reference(variant))
        assert 1e-4 < found.token[0] < 0.1, found
        assert found.metric[0] < 0.05, found
        assert found.grad_norm[0] < 0.05, found
        assert found.parameter[0] < 0.02, found


@pytest.mark.parametrize(
    "layout", ["cp2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cp2 dp2", "pp2 cp2", "tp2"))]
)
def test_terms_of_whole_sequences_agree_with_one_rank(workshop: Workshop, layout: str) -> None:
    """GSPO's ratio and off-policy masking take means over sequences whose tokens lie on several ranks."""
    (one,) = workshop.run(LAYOUTS["one"], ["sequence"])["sequence"]
    assert 0.1 < one.rows[-1]["train/opsm_dropped"] < 0.9
    compare(workshop.run(LAYOUTS[layout], ["sequence"])["sequence"], as_reference(one)).check()
