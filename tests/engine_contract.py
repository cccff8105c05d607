"""What every rollout engine must do, whatever runs beneath it; transformers is the oracle.

    class TestMine(EngineContract):
        @pytest.fixture(scope="class")
        def raw_engine(self, checkpoint): ...

`checkpoint` is the directory of a tiny model (below), `raw_engine` an engine that serves it on one rank. An
engine whose servers may die on their own has a `kill_server_at_work` too; one inside the rank dies with it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ppo_lightning.engines.base import Engine, SamplingParams
from ppo_lightning.samples import Sample, Status
from tests.tinymodel import make_tiny_model

LIMIT = 512  # max_position_embeddings of the tiny model
TEXTS = ("Compute 3+5-2", "hello", "The quick brown fox", "a", "one two three four", "x" * 60)
VERSIONS = itertools.count(1)


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """As a trainer sends them: tied weights once."""
    yield from ((name, p.detach()) for name, p in model.named_parameters())


def make_samples(texts: Sequence[str], copies: int = 1) -> list[Sample]:
    """Byte tokens by the model's tokenizer would need its directory; any ids below 256 are as good."""
    rows = [text for text in texts for _ in range(copies)]
    return [
        Sample(prompt=text, tokens=list(text.encode()), group_index=i // copies, index=i)
        for i, text in enumerate(rows)
    ]


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, sample: Sample) -> Tensor:
    """[response, V] logits from which each response token was drawn, in one unbatched pass."""
    logits = model(torch.tensor([sample.tokens])).logits[0].float()
    return logits[len(sample.prompt_tokens) - 1 : -1]


def chosen(sample: Sample) -> Tensor:
    return torch.tensor(sample.tokens[-sample.response_length :])


class EngineContract:
    # kills the server of an engine in the middle of a call; None: it has no server
    kill_server_at_work: Callable[[Engine, Future[list[Sample]]], None] | None = None

    @pytest.fixture(scope="class")
    def checkpoint(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("contract") / "model"
        make_tiny_model(directory)
        return directory

    @pytest.fixture(scope="class")
    def model(self, checkpoint: Path) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    @pytest.fixture
    def engine(self, raw_engine: Engine, model: PreTrainedModel) -> Engine:
        """With the checkpoint's weights, whatever the test before has sent."""
        raw_engine.update_weights(named_weights(model), next(VERSIONS))
        return raw_engine

    def run(
        self, engine: Engine, samples: list[Sample], params: SamplingParams, seed: int = 0
    ) -> list[Sample]:
        engine.generate(samples, params, [seed + i for i in range(len(samples))])
        return samples

    def test_fills_every_slot(self, engine: Engine) -> None:
        samples = self.run(engine, make_samples(TEXTS), SamplingParams(9))
        for sample, text in zip(samples, TEXTS):
            assert sample.prompt_tokens == list(text.encode())
            assert len(sample.tokens) == len(text) + sample.response_length
            assert len(sample.rollout_log_probs) == sample.response_length
            assert all(type(x) is float for x in sample.rollout_log_probs)
            assert all(type(x) is int for x in sample.tokens)
            assert sample.status is (Status.TRUNCATED if sample.response_length == 9 else Status.COMPLETED)
            assert sample.reward is None

    def test_each_sample_is_reported_once_when_it_is_filled(self, engine: Engine) -> None:
        """Before those that are still written, in the state in which it is returned."""
        samples = make_samples(TEXTS, 3)
        told: list[tuple[int, str, int]] = []

        def finished(sample: Sample) -> None:
            told.append((sample.index, repr(sample), sum(s.status is Status.PENDING for s in samples)))

        params = SamplingParams(60, stop_token_ids=tuple(range(30)))
        engine.generate(samples, params, list(range(len(samples))), finished)
        assert sorted((index, text) for index, text, _ in told) == [(s.index, repr(s)) for s in samples]
        pending = [left for _, _, left in told]
        assert pending == sorted(pending, reverse=True)
        assert pending[-1] == 0 < pending[0]

    def test_an_error_of_the_listener_ends_the_call(self, engine: Engine) -> None:
        def finished(sample: Sample) -> None:
            raise KeyError(sample.index)

        with pytest.raises(KeyError):
            engine.generate(make_samples(TEXTS), SamplingParams(4), list(range(len(TEXTS))), finished)
        self.test_no_samples_is_no_work(engine)
        self.test_fills_every_slot(engine)

    def test_no_samples_is_no_work(self, engine: Engine) -> None:
        engine.generate([], SamplingParams(4), [])

    @pytest.mark.parametrize(
        ("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.6, 1.0, -1), (1.3, 0.7, 20)]
    )
    def test_log_probs_are_those_of_the_tempered_model(
        self, engine: Engine, model: PreTrainedModel, temperature: float, top_p: float, top_k: int
    ) -> None:
        params = SamplingParams(12, temperature=temperature, top_p=top_p, top_k=top_k)
        for sample in self.run(engine, make_samples(TEXTS), params):
            expected = (reference_logits(model, sample) / temperature).log_softmax(-1)
            expected = expected.gather(-1, chosen(sample)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.rollout_log_probs), expected, atol=2e-4, rtol=0)

    def test_responses_that_end_early_do_not_disturb_the_others(
        self, engine: Engine, model: PreTrainedModel
    ) -> None:
        samples = make_samples(TEXTS, 3)
        self.run(engine, samples, SamplingParams(24, stop_token_ids=tuple(range(30))))
        assert len({s.response_length for s in samples}) > 4
        for sample in samples:
            expected = reference_logits(model, sample).log_softmax(-1).gather(-1, chosen(sample)[:, None])
            got = torch.tensor(sample.rollout_log_probs)
            torch.testing.assert_close(got, expected[:, 0], atol=2e-4, rtol=0)

    def test_temperature_zero_takes_the_likeliest(self, engine: Engine, model: PreTrainedModel) -> None:
        for sample in self.run(engine, make_samples(TEXTS), SamplingParams(12, temperature=0)):
            logits = reference_logits(model, sample)
            margin = logits.amax(-1) - logits.gather(-1, chosen(sample)[:, None])[:, 0]
            assert margin.max() < 1e-3
            logprobs = logits.log_softmax(-1).amax(-1)
            torch.testing.assert_close(torch.tensor(sample.rollout_log_probs), logprobs, atol=1e-3, rtol=0)

    @pytest.mark.parametrize("params", [SamplingParams(8, top_k=1), SamplingParams(8, top_p=1e-4)])
    def test_the_narrowest_filter_is_greedy(self, engine: Engine, params: SamplingParams) -> None:
        greedy = self.run(engine, make_samples(TEXTS), SamplingParams(8, temperature=0))
        narrow = self.run(engine, make_samples(TEXTS), params)
        assert [s.tokens for s in narrow] == [s.tokens for s in greedy]

    def test_top_k_and_top_p_keep_to_their_set(self, engine: Engine, model: PreTrainedModel) -> None:
        for sample in self.run(engine, make_samples(TEXTS, 3), SamplingParams(10, top_k=5)):
            logits = reference_logits(model, sample)
            fifth = logits.topk(5).values[:, -1]
            assert (logits.gather(-1, chosen(sample)[:, None])[:, 0] >= fifth - 1e-3).all()
        for sample in self.run(engine, make_samples(TEXTS, 3), SamplingParams(10, top_p=0.3)):
            probs, order = reference_logits(model, sample).softmax(-1).sort(descending=True)
            before = (probs.cumsum(-1) - probs).gather(
                -1, order.argsort().gather(-1, chosen(sample)[:, None])
            )
            assert (before < 0.3 + 1e-3).all()

    def test_draws_follow_the_distribution(self, engine: Engine, model: PreTrainedModel) -> None:
        """Chi-square over 8 bins of like probability; 40 is beyond the 0.9999 quantile of 7 degrees."""
        draws = 600
        samples = self.run(engine, make_samples(["hello"], draws), SamplingParams(1, temperature=0.8), seed=7)
        probs = (reference_logits(model, samples[0])[0] / 0.8).softmax(-1)
        bins = (probs.cumsum(-1) * 8 - 1e-6).long().clamp(0, 7)
        expected = torch.zeros(8).index_add_(0, bins, probs) * draws
        seen = torch.bincount(bins[torch.tensor([s.tokens[-1] for s in samples])], minlength=8)
        assert expected.min() > 5
        assert ((seen - expected) ** 2 / expected).sum() < 40

    def test_samples_of_one_prompt_differ(self, engine: Engine) -> None:
        samples = self.run(engine, make_samples(["hello"], 6), SamplingParams(12))
        assert len({tuple(s.tokens) for s in samples}) == 6

    def test_a_stop_token_ends_the_response_and_is_kept(self, engine: Engine) -> None:
        whole = self.run(engine, make_samples(["hello"]), SamplingParams(12, temperature=0))[0]
        stop = whole.tokens[-8]
        first = chosen(whole).tolist().index(stop) + 1
        params = SamplingParams(12, temperature=0, stop_token_ids=(stop,))
        cut = self.run(engine, make_samples(["hello"]), params)[0]
        assert cut.status is Status.COMPLETED
        assert cut.response_length == first
        assert cut.tokens == whole.tokens[: len("hello") + first]
        shorter = self.run(engine, make_samples(["hello"]), SamplingParams(first - 1, temperature=0))[0]
        assert cut.response == shorter.response

    def test_end_of_sequence_ends_the_response(self, engine: Engine, checkpoint: Path) -> None:
        end = AutoTokenizer.from_pretrained(checkpoint).eos_token_id
        samples = self.run(engine, make_samples(TEXTS, 40), SamplingParams(60, temperature=1.5))
        ended = [s for s in samples if s.status is Status.COMPLETED]
        assert ended
        for sample in samples:
            places = [i for i, token in enumerate(chosen(sample).tolist()) if token == end]
            assert places == ([sample.response_length - 1] if sample.status is Status.COMPLETED else [])
            assert "<|im_end|>" not in sample.response

    def test_a_stop_string_across_tokens_ends_the_response(self, engine: Engine, checkpoint: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        whole, stop = self._two_letters(engine, tokenizer)
        prompt = whole.prompt
        cut = self.run(
            engine, make_samples([prompt]), SamplingParams(40, temperature=0, stop=("\0never", stop))
        )[0]
        assert cut.status is Status.COMPLETED
        assert cut.response == whole.response[: whole.response.index(stop)]
        assert stop in tokenizer.decode(chosen(cut))  # kept in the tokens
        assert stop not in tokenizer.decode(chosen(cut)[:-1])  # and not one token more than it takes
        assert cut.tokens == whole.tokens[: len(cut.tokens)]

    def _two_letters(self, engine: Engine, tokenizer: object) -> tuple[Sample, str]:
        """A greedy response and two characters in it that are two tokens."""
        for sample in self.run(engine, make_samples(TEXTS), SamplingParams(40, temperature=0)):
            for a, b in itertools.pairwise(tokenizer.convert_ids_to_tokens(chosen(sample).tolist())):
                text = f"{a}{b}"
                if len(text) == 2 and text.isascii() and text in sample.response:
                    return sample, text
        raise AssertionError("the tiny model writes no two letters in a row: change its seed")

    def test_the_models_limit_cuts_a_response(self, engine: Engine) -> None:
        sample = Sample(prompt="", tokens=[65] * (LIMIT - 7))
        self.run(engine, [sample], SamplingParams(100))
        assert sample.status is Status.TRUNCATED or sample.response_length < 6
        assert 1 <= sample.response_length <= 7

    def test_a_prompt_without_room_is_refused(self, engine: Engine) -> None:
        for length in (LIMIT, LIMIT + 30):
            with pytest.raises(ValueError, match=f"(?s){length}.*{LIMIT}"):
                engine.generate([Sample(prompt="", tokens=[65] * length)], SamplingParams(4), [0])

    def test_an_empty_prompt_is_refused(self, engine: Engine) -> None:
        with pytest.raises(ValueError, match="sample 3 has an empty prompt"):
            engine.generate([Sample(prompt="", index=3)], SamplingParams(4), [0])

    def test_new_weights_are_used_and_named(
        self, engine: Engine, model: PreTrainedModel, checkpoint: Path
    ) -> None:
        other = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        stream = named_weights(other)
        engine.update_weights(stream, 12345)
        assert next(stream, None) is None  # drained
        samples = self.run(engine, make_samples(TEXTS), SamplingParams(10))
        for sample in samples:
            assert sample.weight_versions == [12345]
            expected = (
                reference_logits(other, sample).log_softmax(-1).gather(-1, chosen(sample)[:, None])[:, 0]
            )
            torch.testing.assert_close(torch.tensor(sample.rollout_log_probs), expected, atol=5e-4, rtol=0)

    def test_abort_keeps_what_is_there(self, engine: Engine) -> None:
        """Called over and over from another thread, as a supervisor would; at least one sample is cut."""
        samples = make_samples(TEXTS, 4)
        told: list[str] = []
        done = threading.Event()

        def abort() -> None:
            while not done.wait(0.02):
                engine.abort()

        thread = threading.Thread(target=abort)
        thread.start()
        try:
            params = SamplingParams(400, temperature=0.9)
            engine.generate(samples, params, list(range(len(samples))), lambda s: told.append(repr(s)))
        finally:
            done.set()
            thread.join()
        assert any(s.status in (Status.ABORTED, Status.FAILED) for s in samples)
        assert sorted(told) == sorted(map(repr, samples))
        for sample in samples:
            assert (
                len(sample.rollout_log_probs)
                == sample.response_length
                == len(sample.tokens) - len(sample.prompt)
            )
            assert sample.response_length or sample.status is Status.FAILED
        again = self.run(engine, make_samples(TEXTS), SamplingParams(3))
        assert all(s.status in (Status.TRUNCATED, Status.COMPLETED) for s in again)

    def test_server_death_loses_no_sample(self, engine: Engine, model: PreTrainedModel) -> None:
        """Each is written whole, once, and by the weights that were sent last."""
        if self.kill_server_at_work is None:
            pytest.skip("generates inside of the rank: there is no server that could die")
        version = next(VERSIONS)
        engine.update_weights(named_weights(model), version)
        samples = make_samples(TEXTS, 2)
        params = SamplingParams(400, stop_token_ids=(258,))
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self.run, engine, samples, params)
            self.kill_server_at_work(engine, running)
            running.result()
        for sample, text in zip(samples, [text for text in TEXTS for _ in range(2)], strict=True):
            assert sample.prompt_tokens == list(text.encode())
            assert sample.status is Status.COMPLETED or sample.response_length == 400
            assert sample.weight_versions == [version]
            expected = reference_logits(model, sample).log_softmax(-1).gather(-1, chosen(sample)[:, None])
            got = torch.tensor(sample.rollout_log_probs)
            torch.testing.assert_close(got, expected[:, 0], atol=2e-4, rtol=0)
        assert engine.health()

    def test_sleep_and_wake_may_be_repeated(self, engine: Engine, model: PreTrainedModel) -> None:
        engine.sleep()
        engine.sleep()
        engine.wake()
        engine.wake()
        engine.update_weights(named_weights(model), 77)
        sample = self.run(engine, make_samples(["hello"]), SamplingParams(5))[0]
        expected = reference_logits(model, sample).log_softmax(-1).gather(-1, chosen(sample)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.rollout_log_probs), expected, atol=2e-4, rtol=0)

    def test_it_is_healthy(self, engine: Engine) -> None:
        assert engine.health()
