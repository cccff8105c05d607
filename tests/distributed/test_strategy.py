"""A PPO-like update gives what plain transformers and torch give, under every layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from transformers import AutoModelForCausalLM

from ppo_lightning.megatron.optimizer import OptimizerOptions
from ppo_lightning.megatron.strategy import MegatronStrategy
from ppo_lightning.samples import Microbatch, TokenFields, TokenOutputs
from tests.distributed.ranks import RankError, run_ranks
from tests.tinymodel import make_tiny_model

OPTIONS = OptimizerOptions(
    lr=1e-2, weight_decay=0.1, adam_beta2=0.95, adam_eps=1e-4, clip_grad=0.5,
    lr_warmup_iters=2, lr_decay_style="cosine", lr_decay_iters=10,
)  # fmt: skip
SAMPLES = [(9, 4), (14, 9), (6, 1), (11, 5), (17, 8), (8, 3), (5, 2), (12, 7)]  # tokens, response tokens
STEPS = 2
LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2": (2, {}),
    "dp2 distributed optimizer": (2, {"use_distributed_optimizer": True}),
    "pp2 vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
}


# data and losses, the same for both sides -------------------------------------------------------------


def make_samples() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(5)
    made = []
    for length, response in SAMPLES:
        mask = torch.ones(response, dtype=torch.bool)
        mask[1::3] = response < 3
        made.append(
            {
                "tokens": torch.randint(0, 320, (length,), generator=g),
                "mask": mask,
                "advantages": torch.randn(response, generator=g),
                "old_logprobs": -5.5 + torch.randn(response, generator=g) * 0.1,
                "returns": torch.randn(response, generator=g),
            }
        )
    for sample in made:
        sample["weight"] = sample["mask"] / sample["mask"].sum() / len(made)
    return made


def microbatches(samples: list[dict[str, Tensor]], rows_per_batch: int = 2) -> list[Microbatch]:
    cut = [samples[i : i + rows_per_batch] for i in range(0, len(samples), rows_per_batch)]
    return [
        Microbatch(
            rows=list(range(len(part))),
            tokens=[s["tokens"] for s in part],
            response_lengths=[s["mask"].numel() for s in part],
            fields=TokenFields(
                **{
                    k: torch.cat([s[k] for s in part])
                    for k in ("mask", "weight", "advantages", "old_logprobs", "returns")
                }
            ),
        )
        for part in cut
    ]


def policy_loss(outputs: TokenOutputs, fields: TokenFields) -> tuple[Tensor, dict[str, Tensor]]:
    assert outputs.logprobs is not None
    ratio = (outputs.logprobs - fields.old_logprobs).clamp(-20, 20).exp()
    gain = torch.minimum(ratio * fields.advantages, ratio.clamp(0.8, 1.2) * fields.advantages)
    loss = -(gain * fields.weight).sum() - 0.1 * (outputs.entropy * fields.weight).sum()
    return loss, {"entropy": (outputs.entropy * fields.weight).sum(), "tokens": fields.mask.sum()}


def value_loss(outputs: TokenOutputs, fields: TokenFields) -> tuple[Tensor, dict[str, Tensor]]:
    assert outputs.values is not None
    loss = ((outputs.values - fields.returns) ** 2 * fields.weight).sum()
    return loss, {"value": (outputs.values * fields.weight).sum()}


# the reference: transformers and torch ----------------------------------------------------------------


def reference(directory: Path, critic: bool) -> dict[str, Any]:
    from ppo_lightning.megatron.heads import fresh_value_head

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    head = torch.nn.Linear(64, 1)
    if critic:
        head.weight.data, head.bias.data = fresh_value_head(64, 1234), torch.zeros(1)
        named = [(f"model.{n}", p) for n, p in model.model.named_parameters()]
        named += [(f"score.{n}", p) for n, p in head.named_parameters()]
    else:
        named = list(model.named_parameters())
    decayed, plain = [p for _, p in named if p.dim() > 1], [p for _, p in named if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1.0, betas=(0.9, 0.95), eps=1e-4,
    )  # fmt: skip
    losses, norms, metrics, outputs = [], [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total, sums = torch.zeros(()), {}
        for sample in make_samples():
            n = sample["mask"].numel()
            hidden = model.model(sample["tokens"][None]).last_hidden_state[0, -n - 1 : -1]
            fields = TokenFields(**{k: v for k, v in sample.items() if k != "tokens"})
            if critic:
                said = TokenOutputs(values=head(hidden)[:, 0])
                loss, parts = value_loss(said, fields)
            else:
                log = model.lm_head(hidden).log_softmax(-1)
                chosen = log.gather(1, sample["tokens"][-n:, None])[:, 0]
                said = TokenOutputs(chosen, -(log.exp() * log).sum(1))
                loss, parts = policy_loss(said, fields)
            if step == 0:
                outputs.append(said.values if critic else said.logprobs)
            total = total + loss
            sums = {k: sums.get(k, 0.0) + v.detach().item() for k, v in parts.items()}
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in named], 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * step / 2  # the warm-up's line
        optimizer.step()
        losses.append(total.item())
        norms.append(float(norm))
        metrics.append(sums)
    weights = {n: p.detach() for n, p in named}
    told = [x.detach() for x in outputs]
    return {"losses": losses, "norms": norms, "metrics": metrics, "weights": weights, "outputs": told}


# one rank ---------------------------------------------------------------------------------------------


def make_strategy(world: int, **layout: Any) -> MegatronStrategy:
    strategy = MegatronStrategy(**layout)
    strategy.accelerator = CPUAccelerator()
    strategy.parallel_devices = [torch.device("cpu")] * world
    strategy.cluster_environment = LightningEnvironment()
    strategy.setup_environment()
    return strategy


def dummy(like: Microbatch) -> Microbatch:
    return Microbatch([], [], [], like.fields.take(torch.empty(0, dtype=torch.int64)))


def update(rank: int, world: int, directory: str, role: str, layout: dict[str, Any]) -> dict[str, Any]:
    strategy = make_strategy(world, **layout)
    strategy.setup_model(role, directory, optimizer=OPTIONS)
    strategy.load_weights(role, directory)
    t = strategy.topology
    mine = microbatches(make_samples()[t.dp_rank :: t.dp])
    critic = role == "critic"
    outputs = strategy.forward(role, [*mine, dummy(mine[0])], "values" if critic else "logprobs")
    reports, sums = [], []
    for _ in range(STEPS):
        sums.append(
            strategy.forward_backward(role, mine, value_loss if critic else policy_loss, entropy=not critic)
        )
        reports.append(strategy.step(role))
    weights = {name: tensor.clone() for name, tensor in strategy.weights(role)}
    return {
        "outputs": outputs,
        "sums": sums,
        "reports": reports,
        "weights": weights,
        "share": (t.dp_rank, t.dp),
    }


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory, num_hidden_layers=4)
    return str(directory)


@pytest.fixture(scope="module")
def references(model_dir: str) -> dict[str, dict[str, Any]]:
    return {role: reference(Path(model_dir), role == "critic") for role in ("actor", "critic")}


QUICK = {"one": "actor critic", "tp2 sp": "actor critic", "pp2": "actor", "cp2": "actor critic"} | {
    "dp2 distributed optimizer": "actor", "dp2": "critic",
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "role"),
    [
        pytest.param(layout, role, marks=[] if role in QUICK.get(layout, "") else [pytest.mark.slow])
        for layout in LAYOUTS
        for role in ("actor", "critic")
    ],
)
def test_update_equals_transformers_and_torch(
    model_dir: str, references: dict[str, dict[str, Any]], layout: str, role: str
) -> None:
    world, arguments = LAYOUTS[layout]
    want = references[role]
    for got in run_ranks(update, world, model_dir, role, arguments):
        outputs = torch.cat(want["outputs"][got["share"][0] :: got["share"][1]])
        torch.testing.assert_close(torch.cat(got["outputs"]), outputs, rtol=1e-4, atol=1e-5)
        assert got["outputs"][-1].numel() == 0
        assert [s["loss"] for s in got["sums"]] == pytest.approx(want["losses"], rel=1e-5)
        assert [r.grad_norm for r in got["reports"]] == pytest.approx(want["norms"], rel=1e-4)
        assert [r.lr for r in got["reports"]] == pytest.approx([0.0, 5e-3])
        assert not any(r.skipped for r in got["reports"])
        for sums, wanted in zip(got["sums"], want["metrics"]):
            assert {k: v for k, v in sums.items() if k != "loss"} == pytest.approx(wanted, rel=1e-4)
        for name, tensor in want["weights"].items():
            torch.testing.assert_close(
                got["weights"][name], tensor, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


# steps that must not be made --------------------------------------------------------------------------


def spoiled_steps(rank: int, world: int, directory: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Losses or gradients that are no numbers, then a good step; NaN and inf only where one token says so."""
    strategy = make_strategy(world, **layout)
    strategy.setup_model("critic", directory, optimizer=OPTIONS)
    strategy.load_weights("critic", directory)
    strategy.activate("critic")
    role, t = strategy.roles["critic"], strategy.topology
    mine = microbatches(make_samples()[t.dp_rank :: t.dp])
    before = {k: v.clone() for k, v in strategy.weights("critic")}
    reports = []
    for spoil in (float("nan"), float("inf")):
        if t.dp_rank == 0:
            mine[0].fields.returns[0] = spoil
        strategy.forward_backward("critic", mine, value_loss)
        reports.append(strategy.step("critic"))
    mine[0].fields.returns[0] = 1.0
    for loss in (exploding_loss, hollow_loss):
        strategy.forward_backward("critic", mine, loss)
        reports.append(strategy.step("critic"))
    unchanged = all(torch.equal(v, before[k]) for k, v in strategy.weights("critic"))
    steps = role.steps
    strategy.forward_backward("critic", mine, value_loss)
    reports.append(strategy.step("critic"))
    return {"reports": reports, "unchanged": unchanged, "steps": (steps, role.steps)}


def exploding_loss(outputs: TokenOutputs, fields: TokenFields) -> tuple[Tensor, dict[str, Tensor]]:
    """A finite loss whose gradient is not."""
    loss = ((outputs.values - outputs.values.detach()).abs() * 1e-30).sqrt().sum()
    return loss, {}


def hollow_loss(outputs: TokenOutputs, fields: TokenFields) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that is no number, whose gradient is finite."""
    loss, metrics = value_loss(outputs, fields)
    return loss + float("nan"), metrics


@pytest.mark.parametrize("layout", ["one", "dp2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_a_loss_or_gradient_that_is_no_number_changes_nothing(model_dir: str, layout: str) -> None:
    world, arguments = LAYOUTS[layout]
    for got in run_ranks(spoiled_steps, world, model_dir, arguments):
        assert [r.skipped for r in got["reports"]] == [True, True, True, True, False]
        assert got["unchanged"]
        assert got["steps"] == (0, 1)
        assert math.isfinite(got["reports"][-1].grad_norm)


def test_a_frozen_role_has_no_step(model_dir: str) -> None:
    with pytest.raises(RankError, match="reference is frozen"):
        run_ranks(step_frozen, 1, model_dir)


def step_frozen(rank: int, world: int, directory: str) -> None:
    strategy = make_strategy(world)
    strategy.setup_model("reference", directory)
    strategy.load_weights("reference", directory)
    assert not any(p.requires_grad for p in strategy.roles["reference"].models[0].parameters())
    strategy.step("reference")
