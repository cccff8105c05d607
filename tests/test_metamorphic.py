"""What must not matter does not: the order of samples, the cut into micro-batches, padding, the data rank a
sample lands on, samples and tokens that are masked.

Each relation compares gradients and metrics of one optimizer batch, worked out twice by the product's module
and strategy from the same weights. Hypothesis runs inside the forked rank: groups are formed there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_lightning import experience
from ppo_lightning.loop import Rollout
from ppo_lightning.megatron.topology import Topology
from ppo_lightning.megatron.weights import global_parameters
from ppo_lightning.samples import Experience, Sample, Status
from tests.distributed.ranks import run_ranks
from tests.matrix import VARIANTS, VOCAB, Layout, make_rollouts
from tests.matrix_run import Workshop, fit_variant

ROUNDING = 5e-6  # of the largest gradient of a parameter, or of a metric: another order of fp32 sums
SLOTS = ("old_values", "old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "returns")
GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e38)
Spoil = Callable[[Experience], None]
few = settings(
    max_examples=4,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # an example costs a second: the first failing one will do
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Measured:
    sums: dict[str, float]
    gradients: dict[str, Tensor]

    def same_as(self, other: Measured) -> None:
        """Equal but for rounding."""
        assert self.sums == pytest.approx(other.sums, rel=ROUNDING, abs=1e-6)
        for name, gradient in other.gradients.items():
            scale = max(gradient.abs().max().item(), 1e-4)
            gap = (self.gradients[name] - gradient).abs().max().item()
            assert gap <= ROUNDING * scale, f"{name}: {gap / scale:.1e}"

    def equals(self, other: Measured) -> None:
        """Bit by bit."""
        assert self.sums == other.sums
        for name, gradient in other.gradients.items():
            assert torch.equal(self.gradients[name], gradient), name


class Bench(pl.Callback):
    """Runs an experiment where a fit would begin, and ends it there: weights stay as they are."""

    def __init__(self, experiment: Callable[[Bench], None]) -> None:
        self.experiment = experiment

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.module, self.strategy, self.config = module, module.strategy, module.config
        self.experiment(self)
        trainer.should_stop = True

    def on_train_batch_start(self, *args: Any) -> int:
        return -1

    def measure(
        self,
        samples: Sequence[Sample],
        *,
        before: Spoil | None = None,
        after: Spoil | None = None,
        **options: Any,
    ) -> Measured:
        """As the training step does it; `before` and `after` the advantages may spoil the experience."""
        module, rank = self.module, self.strategy.topology.dp_rank
        cut = {"num_steps_per_rollout": 1, "micro_batch_size": 4}
        module.config = self.config.replace(**cut | options)
        module.rollout, samples = Rollout(0, []), list(samples)
        plan = module.plan(samples)
        share = module.share(samples, plan)
        share.old_values = drifted(share, module.infer("critic", "values", share, plan))
        share.ref_logprobs = module.infer("reference", "logprobs", share, plan)
        share.old_logprobs = drifted(share, module.infer("actor", "logprobs", share, plan))
        if before is not None:
            before(share)
        share.advantages, share.returns = module.advantages(share)
        if after is not None:
            after(share)
        measured = Measured({}, {})
        (rows,) = plan.rows_of(rank)
        for role in ("critic", "actor"):
            batches = experience.microbatches(share, rows)
            loss, entropy = module.objective(role), role == "actor"
            sums = self.strategy.forward_backward(role, batches, loss, entropy=entropy)
            measured.sums |= {f"{role}/{name}": x for name, x in sums.items()}
            for name, p in global_parameters(self.strategy.roles[role].models).items():
                measured.gradients[f"{role}/{name}"] = p.main_grad.clone()
        return measured


def drifted(share: Experience, x: Tensor) -> Tensor:
    """As if the policy had moved since: by the sample and the token, not by the place in the batch."""
    index = torch.tensor([s.metadata["name"] for s in share.samples], dtype=torch.float32)
    return x + 0.2 * torch.sin(7 * index[:, None] + torch.arange(x.size(1)))


def named(samples: Sequence[Sample]) -> list[Sample]:
    return [replace(s, metadata={"name": s.index}) for s in samples]


def hollow(sample: Sample) -> Sample:
    """The same with nothing to train on."""
    return replace(sample, loss_mask=[0] * sample.response_length)


SAMPLES = named(make_rollouts()[0])


# on one rank ---------------------------------------------------------------------------------------------


def order_and_cut(bench: Bench) -> None:
    base = bench.measure(SAMPLES)
    sizes = st.builds(lambda n: {"micro_batch_size": n}, st.integers(1, 9))
    budgets = st.builds(
        lambda n, b: {"use_dynamic_batch_size": True, "max_tokens_per_gpu": n, "balance_data": b},
        st.integers(10, 120),
        st.booleans(),
    )

    @few
    @given(st.permutations(SAMPLES), st.one_of(sizes, budgets))
    def holds(samples: list[Sample], cut: dict[str, Any]) -> None:
        bench.measure(samples, **cut).same_as(base)

    holds()
    other = bench.measure(SAMPLES[1:])
    with pytest.raises(AssertionError):  # the comparison can fail
        other.same_as(base)


def masked_samples(bench: Bench) -> None:
    base = {kind: bench.measure(SAMPLES, calculate_per_token_loss=kind) for kind in (False, True)}
    response = st.integers(1, 20)

    @few
    @given(st.integers(0, len(SAMPLES)), st.integers(1, 9), response, st.booleans(), st.booleans())
    def holds(place: int, prompt: int, length: int, failed: bool, per_token: bool) -> None:
        tokens = [(prompt * 31 + 7 * t) % VOCAB for t in range(prompt + length)]
        nothing = Sample(
            prompt="",
            tokens=tokens,
            response_length=length,
            loss_mask=None if failed else [0] * length,
            reward=1e30,
            status=Status.FAILED if failed else Status.TRUNCATED,
            rollout_log_probs=[float("nan")] * length,
            metadata={"name": 99},
        )
        more = [*SAMPLES[:place], nothing, *SAMPLES[place:]]
        bench.measure(more, calculate_per_token_loss=per_token).same_as(base[per_token])

    holds()


def padding(bench: Bench) -> None:
    base = bench.measure(SAMPLES)

    @few
    @given(st.integers(1, 17), st.integers(0, 9), st.sampled_from(GARBAGE))
    def holds(multiple: int, columns: int, garbage: float) -> None:
        def widen(share: Experience) -> None:
            for slot in fields(share):
                x = getattr(share, slot.name)
                if isinstance(x, Tensor) and x.dim() == 2:
                    value = 0.0 if slot.name in ("mask", "weights") else garbage
                    setattr(share, slot.name, torch.nn.functional.pad(x, (0, columns), value=value))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Topology, "sequence_multiple", multiple)
            bench.measure(SAMPLES, before=widen).same_as(base)

    holds()


def masked_tokens(bench: Bench) -> None:
    base = bench.measure(SAMPLES)

    @few
    @given(st.sets(st.sampled_from(SLOTS), min_size=1), st.sampled_from(GARBAGE))
    def holds(slots: set[str], garbage: float) -> None:
        def spoil(share: Experience) -> None:
            for slot in slots:
                x = getattr(share, slot)
                if x is not None:
                    setattr(share, slot, torch.where(share.mask, x, garbage))

        bench.measure(SAMPLES, before=spoil, after=spoil).equals(base)

    holds()

    def unknown(sample: Sample) -> Sample:
        told = zip(sample.rollout_log_probs or [], sample.trainable)
        return replace(sample, rollout_log_probs=[x if m else float("nan") for x, m in told])

    bench.measure([unknown(s) for s in SAMPLES]).equals(base)


def nothing_to_learn(bench: Bench) -> None:
    """A batch without one trainable token: zeros, not NaN."""
    measured = bench.measure([hollow(s) for s in SAMPLES])
    assert set(measured.sums.values()) == {0.0}
    assert all(not g.any() for g in measured.gradients.values())


# on two ranks --------------------------------------------------------------------------------------------


def other_data_ranks(bench: Bench) -> None:
    """Contiguous shares: a permutation moves samples between the ranks. The same examples on both."""
    base = bench.measure(SAMPLES)
    rng = random.Random(0)
    orders = [rng.sample(SAMPLES, len(SAMPLES)) for _ in range(3)]
    balanced = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 30, "balance_data": True}
    for order in orders:
        bench.measure(order).same_as(base)
    bench.measure(SAMPLES, **balanced).same_as(base)
    bench.measure([*SAMPLES, *map(hollow, SAMPLES)]).same_as(
        base
    )  # the second rank has nothing to learn from


def empty_slice(bench: Bench) -> None:
    """One sample for two ranks: the second has none, and takes part in every collective."""
    alone = bench.measure(SAMPLES[:1])
    nothing = hollow(SAMPLES[1])
    bench.measure([SAMPLES[0], nothing]).same_as(alone)
    bench.measure([nothing, SAMPLES[0]]).same_as(alone)
    assert all(g.isfinite().all() for g in alone.gradients.values())
    assert any(g.any() for g in alone.gradients.values())


# the tests -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    workshop = Workshop(tmp_path_factory.mktemp("metamorphic"))
    workshop.models("static")
    return workshop


def laboratory(rank: int, world: int, directory: str, experiment: Callable[[Bench], None]) -> None:
    layout, bench = Layout(world, {}, ()), Bench(experiment)
    fit_variant(Path(directory), world, layout, VARIANTS["static"], callbacks=[bench])


ON_ONE_RANK = [order_and_cut, masked_samples, padding, masked_tokens, nothing_to_learn]


@pytest.mark.parametrize("experiment", ON_ONE_RANK)
def test_on_one_rank(workshop: Workshop, experiment: Callable[[Bench], None]) -> None:
    run_ranks(laboratory, 1, str(workshop.directory), experiment, group=False, timeout=240)


@pytest.mark.parametrize("experiment", [other_data_ranks, empty_slice])
def test_on_two_data_ranks(workshop: Workshop, experiment: Callable[[Bench], None]) -> None:
    run_ranks(laboratory, 2, str(workshop.directory), experiment, group=False, timeout=240)
