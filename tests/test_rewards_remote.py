"""Rewards from elsewhere: a real HTTP service, a real sequence classifier."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch

from ppo_lightning.callbacks import RewardCallback
from ppo_lightning.config import PPOConfig
from ppo_lightning.rewards import RewardError
from ppo_lightning.rewards.model import RewardModel
from ppo_lightning.rewards.remote_rm import RemoteReward
from ppo_lightning.samples import Sample


def samples(*responses):
    return [Sample(prompt="2+2", label="4", response=text, index=i) for i, text in enumerate(responses)]


def scored(callback, given):
    callback.on_reward(None, SimpleNamespace(rollout=None), given)
    return [sample.reward for sample in given]


@pytest.fixture
def service():
    """An HTTP server whose `answers` are (status, body), or a callable of the request; it keeps the
    requests."""
    state = SimpleNamespace(requests=[], answers=[], lock=threading.Lock())

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with state.lock:
                state.requests.append(request)
                answer = state.answers.pop(0) if len(state.answers) > 1 else state.answers[0]
            status, body = answer(request) if callable(answer) else answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/score"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def remote(service, **options):
    return RemoteReward(service.url, **{"pause": 0.001, "attempts": 3, "seconds": 5.0, **options})


def test_remote_values_keep_their_order(service):
    service.answers = [lambda request: (200, json.dumps(len(request["response"])))]
    texts = ["x" * n for n in range(40)]
    assert scored(RewardCallback(remote(service)), samples(*texts)) == list(range(40))
    assert {"prompt": "2+2", "response": "xx", "label": "4"} in service.requests
    assert scored(RewardCallback(remote(service)), samples("\ud800\x00")) == [2.0]


def test_remote_object_needs_a_key(service):
    service.answers = [(200, '{"score": 0.5}')]
    (callback,) = RewardCallback.from_config(
        PPOConfig.of(rm_type="remote_rm:2", rm_url=service.url, reward_key="score")
    )
    assert scored(callback, samples("a")) == [1.0]
    with pytest.raises(RewardError, match="name one with --reward-key"):
        scored(RewardCallback(remote(service)), samples("a"))


def test_remote_tries_again(service):
    service.answers = [(503, "busy"), (429, "later"), (200, "1")]
    assert scored(RewardCallback(remote(service)), samples("a")) == [1.0]
    assert len(service.requests) == 3


@pytest.mark.parametrize(
    ("answer", "requests", "message"),
    [
        ((500, "on fire"), 3, r"score failed 3 times, last with HTTP 500: 'on fire'"),
        ((404, "where?"), 1, r"answered HTTP 404: 'where\?'; check --rm-url"),
        ((200, "<html>"), 1, r"answered no JSON that can be read: '<html>'"),
        ((200, "[" * 100_000), 1, r"answered no JSON that can be read: '\[\["),
        ((200, '"good"'), 1, r"returned 'good'; a reward is a number"),
        ((200, "NaN"), 1, r"returned nan; a reward must be finite"),
    ],
)
def test_remote_errors(service, answer, requests, message):
    service.answers = [answer]
    with pytest.raises((RewardError, TypeError, ValueError), match=message):
        scored(RewardCallback(remote(service)), samples("a"))
    assert len(service.requests) == requests


def test_remote_silence_and_absence(service):
    release = threading.Event()
    service.answers = [lambda request: (release.wait(10), (200, "1"))[1]]
    with pytest.raises(RewardError, match=r"failed 2 times.*no reply within 0.05 s"):
        scored(RewardCallback(remote(service, seconds=0.05, attempts=2)), samples("a"))
    release.set()
    with pytest.raises(RewardError, match="is the service up"):
        scored(RewardCallback(RemoteReward("http://127.0.0.1:9/", pause=0.001, attempts=2)), samples("a"))
    with pytest.raises(RewardError, match=r"http://\[::1/score is no address of a service .*check --rm-url"):
        scored(RewardCallback(RemoteReward("http://[::1/score")), samples("a"))
    with pytest.raises(ValueError, match="no address of a service"):
        RemoteReward("localhost:80")


# ---- the model ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A directory with a small Llama classifier and a word tokenizer with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    folder = str(tmp_path_factory.mktemp("classifier"))
    words = {
        word: n for n, word in enumerate(["<unk>", "<eos>", "user", "assistant", "2", "+", "4", "5", "x"])
    }
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=9, num_labels=1, max_position_embeddings=24, pad_token_id=1, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_reward_model_matches_one_unpadded_forward_each(classifier):
    from transformers import LlamaForSequenceClassification

    given = samples(" 4", " 5 x x x", " x", " 4 4", *[" x" * n for n in range(1, 40, 7)])
    given[3].prompt = [{"role": "user", "content": "2 + 2"}]
    model = LlamaForSequenceClassification.from_pretrained(classifier).eval()
    words = {"<unk>": 0, "user": 2, "assistant": 3, "2": 4, "+": 5, "4": 6, "5": 7, "x": 8}
    expected = []
    for sample in given:
        chat = f"user 2 + 2 assistant {sample.response}"
        text = chat if isinstance(sample.prompt, list) else "2 + 2" + sample.response
        ids = [words[word] for word in text.split()][-24:]
        with torch.no_grad():
            expected.append(model(torch.tensor([ids])).logits.item())
    flags = {"rm_type": "model", "reward_model_path": classifier, "reward_model_batch_size": 3}
    (callback,) = RewardCallback.from_config(PPOConfig.of(**flags))
    callback.setup(None, None, "fit")
    for sample in given:
        sample.prompt = sample.prompt if isinstance(sample.prompt, list) else "2 + 2"
    torch.testing.assert_close(scored(callback, given), expected, rtol=1e-4, atol=1e-6)
    assert len(set(expected)) > 4


def test_reward_model_refuses_what_is_none(classifier, tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification, LlamaModel

    config = LlamaConfig.from_pretrained(classifier)
    AutoTokenizer.from_pretrained(classifier).save_pretrained(tmp_path)
    LlamaModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no trained sequence classifier: it holds no score.weight"):
        RewardModel(str(tmp_path)).load()
    config.num_labels = 3
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="3 outputs; choose one"):
        RewardModel(str(tmp_path)).load()
    assert len(RewardModel(str(tmp_path), index=2).score(samples("4 x"))) == 1
