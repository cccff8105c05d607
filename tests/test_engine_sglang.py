"""The SGLang engine against a real SGLang server. Faults of servers: test_engine_sglang_faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from ppo_lightning.engines.base import Engine, EngineError
from ppo_lightning.engines.sglang import SGLangEngine
from ppo_lightning.engines.sglang_checksums import Layout, differing
from ppo_lightning.samples import Sample, Status
from tests import sglang_fixtures as fixtures
from tests.engine_contract import EngineContract
from tests.sglang_fixtures import (
    attach,
    control_of,
    forget_weights,
    largest_difference,
    make_plan,
    model_with,
    prompts,
    run,
    scheduler,
    server,
    url_of,
    wait_until_at_work,
    weights,
)

slow = pytest.mark.slow

sglang_checkpoint, sglang_engine = fixtures.sglang_checkpoint, fixtures.sglang_engine


@pytest.fixture
def checkpoint(sglang_checkpoint: Path) -> Path:
    return sglang_checkpoint


class TestContract(EngineContract):
    @pytest.fixture(scope="class")
    def checkpoint(self, sglang_checkpoint: Path) -> Path:
        return sglang_checkpoint

    @pytest.fixture(scope="class")
    def raw_engine(self, sglang_engine: SGLangEngine) -> SGLangEngine:
        return sglang_engine

    @slow  # a server's start more
    def test_server_death_loses_no_sample(self, engine: Engine, model: PreTrainedModel) -> None:
        super().test_server_death_loses_no_sample(engine, model)

    @slow
    def test_draws_follow_the_distribution(self, engine: Engine, model: PreTrainedModel) -> None:
        super().test_draws_follow_the_distribution(engine, model)

    def kill_server_at_work(self, engine: SGLangEngine, running: Future[list[Sample]]) -> None:
        wait_until_at_work(engine, running)
        scheduler(engine).kill()


@pytest.mark.parametrize("mode", ["tensor", "distributed", "disk"])
def test_each_way_of_transfer_gives_the_server_the_weights(
    mode: str, sglang_engine: SGLangEngine, checkpoint: Path, tmp_path: Path
) -> None:
    changes = {"mode": mode, "check_equal": True, "bucket_size": 40_000}
    with attach(sglang_engine, checkpoint, tmp_path, 3, **changes) as (engine, model):
        samples = run(engine, prompts(4))
        assert largest_difference(samples, model) < 1e-4
        assert [s.weight_versions for s in samples] == [[3]] * 4
        model = model_with(checkpoint, seed=4)
        engine.update_weights(weights(model), 4)  # uses what the first has set up
        assert largest_difference(run(engine, prompts(4)), model) < 1e-4
    assert sglang_engine.health()


@slow
def test_an_update_empties_the_cache(sglang_engine: SGLangEngine, checkpoint: Path) -> None:
    for version in (5, 6):
        model = model_with(checkpoint, seed=version)
        sglang_engine.update_weights(weights(model), version)
        samples = prompts(1)
        samples[0].tokens = list(range(10, 200))
        assert largest_difference(run(sglang_engine, samples), model) < 1e-4


@slow
def test_checksums_name_the_weight_that_differs(sglang_engine: SGLangEngine, checkpoint: Path) -> None:
    model = model_with(checkpoint, seed=7)
    sglang_engine.update_weights(weights(model), 7)
    ranks = control_of(sglang_engine).post("/weights_checker", action="checksum")["ranks"]
    tensors = {name: tensor.detach().clone() for name, tensor in weights(model)}
    layout = Layout(1, 2, torch.float32, cuda=False)
    assert differing(ranks, tensors.__getitem__, layout) == []
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] += 1e-6
    assert differing(ranks, tensors.__getitem__, layout) == [
        "model.layers.1.self_attn.qkv_proj.weight (rank 0)"
    ]


@slow
def test_a_refused_update_leaves_the_old_version_in_use(
    sglang_engine: SGLangEngine, checkpoint: Path, tmp_path: Path
) -> None:
    new = list(weights(model_with(checkpoint, seed=9)))
    new[-3] = (new[-3][0], torch.zeros(3, 5))  # after most of them were taken
    taken: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in new:
            taken.append(name)
            yield name, tensor

    with attach(sglang_engine, checkpoint, tmp_path, 8, mode="distributed", bucket_size=40_000) as (
        engine,
        old,
    ):
        with pytest.raises(
            EngineError, match=r"weights 9 did not reach the engine: .*serves weights 8 again"
        ):
            engine.update_weights(stream(), 9)
        assert taken == [name for name, _ in new]
        samples = run(engine, prompts(4))
        assert largest_difference(samples, old) < 1e-4
        assert [s.weight_versions for s in samples] == [[8]] * 4


def test_weights_that_cannot_be_stored_are_an_error_on_all_ranks(
    sglang_engine: SGLangEngine, checkpoint: Path, tmp_path: Path
) -> None:
    stream = weights(model_with(checkpoint, seed=17))
    with attach(sglang_engine, checkpoint, tmp_path, 16) as (engine, old):
        assert engine._fleet is not None
        (engine._fleet._store.root / "v17.part").write_text("in the way")
        with pytest.raises(EngineError, match=r"weights 17 could not be written to .*weights 16 again"):
            engine.update_weights(stream, 17)
        assert next(stream, None) is None  # drained: other ranks take part in it
        assert largest_difference(run(engine, prompts(2)), old) < 1e-4


def test_a_foreign_server_that_a_killed_trainer_left_paused_goes_on(
    sglang_engine: SGLangEngine, checkpoint: Path, tmp_path: Path
) -> None:
    control_of(sglang_engine).post("/pause_generation", mode="abort")
    with attach(sglang_engine, checkpoint, tmp_path, 15) as (engine, model):
        assert largest_difference(run(engine, prompts(2)), model) < 1e-4


def test_a_foreign_server_of_another_size_is_refused(
    sglang_engine: SGLangEngine, checkpoint: Path, tmp_path: Path
) -> None:
    plan = make_plan(checkpoint, tmp_path, urls=(url_of(sglang_engine),), ranks_per_engine=2)
    with pytest.raises(EngineError, match=r"has 1 tensor parallel ranks.*--rollout-num-gpus-per-engine 1"):
        SGLangEngine(plan)


@slow
def test_an_update_waits_for_a_foreign_server_that_is_started_again(
    sglang_engine: SGLangEngine, checkpoint: Path, tmp_path: Path
) -> None:
    """Its keeper is the engine of the session, which gives it weights that the other does not take."""
    sglang_engine.update_weights(weights(model_with(checkpoint, seed=18)), 18)
    with attach(sglang_engine, checkpoint, tmp_path, 19) as (engine, _):
        server(sglang_engine).kill()
        model = model_with(checkpoint, seed=20)
        engine.update_weights(weights(model), 20)
        samples = run(engine, prompts(4))
        assert [s.weight_versions for s in samples] == [[20]] * 4
        assert largest_difference(samples, model) < 1e-4


@slow
def test_a_foreign_server_that_lost_its_weights_gets_them_again(
    sglang_engine: SGLangEngine, checkpoint: Path, tmp_path: Path
) -> None:
    with attach(sglang_engine, checkpoint, tmp_path, 10, health_interval=0.5) as (engine, model):
        forget_weights(sglang_engine, checkpoint)
        samples = run(engine, prompts(32), max_new_tokens=400)  # more than it takes at a time: never idle
        assert {tuple(s.weight_versions) for s in samples} == {(10,)}
        assert largest_difference(samples, model) < 1e-4


@slow
def test_samples_of_other_weights_are_refused(
    sglang_engine: SGLangEngine, checkpoint: Path, tmp_path: Path
) -> None:
    with attach(sglang_engine, checkpoint, tmp_path, 12, health_interval=1e6) as (engine, _):
        forget_weights(sglang_engine, checkpoint)
        engine._generator.plan = replace(engine._generator.plan, start_limit=2.0)
        with pytest.raises(EngineError, match=r"written by weights \['none'\], the trainer's are 12"):
            run(engine, prompts(2))


@slow
@pytest.mark.parametrize("keep", [True, False])
def test_abort_keeps_or_drops_what_was_written(
    keep: bool, sglang_engine: SGLangEngine, checkpoint: Path, tmp_path: Path
) -> None:
    samples = prompts(3)
    with attach(sglang_engine, checkpoint, tmp_path, 14, keep_aborted=keep) as (engine, model):
        thread = threading.Thread(
            target=run, args=(engine, samples), kwargs={"max_new_tokens": 480}, daemon=True
        )
        thread.start()
        while not control_of(engine).get("/v1/loads")["loads"][0]["num_running_reqs"]:
            time.sleep(0.05)
        engine.abort()
        thread.join(120)
        assert not thread.is_alive()
        assert all(s.response_length for s in run(engine, prompts(2)))  # a later call is no part of it
    stopped = [s for s in samples if s.status is (Status.ABORTED if keep else Status.FAILED)]
    assert stopped
    for sample in stopped:
        assert len(sample.tokens) == 3 + sample.response_length
        assert (sample.response_length > 0) == keep
        assert len(sample.rollout_log_probs) == sample.response_length < 480
    assert largest_difference([s for s in samples if s.response_length], model) < 1e-4


@pytest.mark.parametrize(
    ("tokens", "changes", "message"),
    [
        ([5], {"top_p": 3.0}, r"SGLang refuses the request: top_p must be in"),
        ([], {}, "empty prompt"),
        ([5, 320], {}, "outside of the 320 of the vocabulary"),
        ([5] * 512, {}, "leaves no room for a response in a context of 512"),
    ],
)
def test_requests_that_no_server_takes(
    tokens: list[int], changes: dict[str, Any], message: str, sglang_engine: SGLangEngine
) -> None:
    samples = prompts(2)
    samples[1].tokens = tokens
    with pytest.raises(ValueError, match=message):
        run(sglang_engine, samples, **changes)
    assert sglang_engine.health()  # a token outside of the vocabulary would have killed the server
