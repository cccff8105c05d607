"""RewardCallback and what it calls: users' functions, a real HTTP service, a real sequence classifier."""

import asyncio
import sys
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from ppo_lightning.callbacks import RewardCallback
from ppo_lightning.config import PPOConfig
from ppo_lightning.rewards import RewardError, custom
from ppo_lightning.samples import Prompt, Sample, Status

NO_ROLLOUT = SimpleNamespace(rollout=None)


def samples(*responses, label="4", group_size=1):
    return [
        Sample(
            prompt="2+2", label=label, response=text, response_length=1, group_index=i // group_size, index=i
        )
        for i, text in enumerate(responses)
    ]


def scored(callback, given, module=NO_ROLLOUT):
    callback.on_reward(None, module, given)
    return [sample.reward for sample in given]


class Length(RewardCallback):
    def score(self, sample):
        return len(sample.response)


class SlowLength(RewardCallback):
    weight = 2.0

    async def score(self, sample):
        await asyncio.sleep(0.001)
        return len(sample.response)


class Rank(RewardCallback):
    group = True

    def score(self, group):
        return [float(sorted(s.response for s in group).index(s.response)) for s in group]


def test_a_subclass_is_five_lines():
    assert scored(Length(), samples("a", "bcd")) == [1.0, 3.0]
    assert scored(SlowLength(), samples("a", "bcd")) == [2.0, 6.0]


def test_a_subclass_with_its_own_constructor():
    class Brief(RewardCallback):
        def __init__(self, limit):
            self.limit = limit

        def score(self, sample):
            return float(len(sample.response) <= self.limit)

    assert scored(Brief(2), samples("a", "bcd")) == [1.0, 0.0]


def test_groups_are_whole_and_values_return_to_their_samples():
    given = samples("b", "a", "x", "y", "w", "z", group_size=3)
    order = [3, 0, 5, 1, 4, 2]
    shuffled = [given[i] for i in order]
    assert scored(Rank(), shuffled) == [[1, 0, 2, 1, 0, 2][i] for i in order]


def test_names_functions_weights_and_sums():
    given = samples("</think>\\boxed{4}", "\\boxed{4}")
    callbacks = [
        RewardCallback("deepscaler"),
        RewardCallback("math", weight=0.5),
        RewardCallback(len_of, weight=0.0),
    ]
    for callback in callbacks:
        scored(callback, given)
    assert [s.reward for s in given] == [1.5, 0.5]
    assert [c.name for c in callbacks] == ["deepscaler", "math", "len_of"]


def len_of(sample):
    return len(sample.response)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (
            float("nan"),
            ValueError,
            r"bad of sample 0 \(response 'hello'\) returned nan; a reward must be finite",
        ),
        (float("-inf"), ValueError, "returned -inf"),
        (None, TypeError, "returned None; a reward is a number"),
        ("1.0", TypeError, "returned '1.0'"),
        ([1.0, 2.0], TypeError, "returned a list"),
        ({"score": 1.0}, RewardError, r"keys \['score'\]; name one with --reward-key"),
    ],
)
def test_what_is_no_reward_is_an_error(value, error, message):
    def bad(sample):
        return value

    with pytest.raises(error, match=message):
        scored(RewardCallback(bad), samples("hello"))


def test_what_counts_as_a_number():
    values = [torch.tensor(2.5), True, 3, torch.tensor([1.5])]
    given = samples("0", "1", "2", "3")
    assert scored(RewardCallback(lambda s: values[s.index]), given) == [2.5, 1.0, 3.0, 1.5]
    keyed = RewardCallback(lambda s: {"score": 0.25, "why": "x"}, reward_key="score")
    assert scored(keyed, samples("0")) == [0.25]
    with pytest.raises(RewardError, match="returned no 'mark', only"):
        scored(RewardCallback(lambda s: {"score": 1}, reward_key="mark"), samples("0"))


def test_an_error_of_the_function_says_which_sample():
    def fails(sample):
        raise KeyError("answer")

    async def fails_later(sample):
        raise KeyError("answer")

    for function in (fails, fails_later):
        with pytest.raises(KeyError) as caught:
            scored(RewardCallback(function), samples("hello"))
        assert "of sample 0 (response 'hello')" in caught.value.__notes__[0]


def test_a_wrong_number_of_values_is_an_error():
    with pytest.raises(RewardError, match="must return a list of 2 values"):
        scored(RewardCallback(lambda group: [1.0], group=True), samples("a", "b", group_size=2))
    with pytest.raises(TypeError, match="needs a registered name"):
        RewardCallback()


def test_a_missing_label_names_its_row():
    given = samples("\\boxed{4}", label=None)
    prompts = [Prompt(index=17, prompt="2+2")]
    module = SimpleNamespace(rollout=SimpleNamespace(prompts=prompts))
    with pytest.raises(RewardError, match=r"row 17 of the prompt data has none: set --label-key"):
        scored(RewardCallback("math"), given, module)
    assert scored(RewardCallback("random"), given, module)[0] in (0.0, 1.0)


def test_random_differs_by_place_and_repeats():
    first, again = (scored(RewardCallback("random"), samples(*["same"] * 64)) for _ in range(2))
    assert first == again
    assert 16 < sum(first) < 48


def test_async_functions_run_together_also_beneath_a_loop():
    running, most = 0, 0

    async def slow(sample):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return sample.index

    async def notebook():
        return scored(RewardCallback(slow), samples(*"abcd" * 40))

    assert asyncio.run(notebook()) == list(range(160))
    assert most == 64


# ---- configuration -----------------------------------------------------------------------------------------

MODULE = """
def plain(sample): return 1.0
async def later(sample): return {"score": 2.0}
def group(samples): return [float(len(samples))] * len(samples)
class Box:
    value = 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "users_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "users_rewards"
    sys.modules.pop("users_rewards", None)


def total(given, **flags):
    for callback in RewardCallback.from_config(PPOConfig.of(**flags)):
        scored(callback, given)
    return [sample.reward for sample in given]


def test_from_config(user_module, caplog):
    right = "</think>\\boxed{4}"
    assert RewardCallback.from_config(PPOConfig.of()) == []
    assert total(samples(right), rm_type="deepscaler") == [1.0]
    assert total(samples(right), rm_type="deepscaler,math:0.5") == [1.5]
    assert total(samples(right), custom_rm_path=f"{user_module}:plain") == [1.0]
    assert total(samples(right), custom_rm_path=f"{user_module}:later", reward_key="score") == [2.0]
    groups = samples(*"abcdef", group_size=3)
    assert total(groups, custom_rm_path=f"{user_module}:group", group_rm=True) == [3.0] * 6
    both = {"custom_rm_path": f"{user_module}:plain", "rm_type": "math,custom:0.25"}
    assert total(samples(right), **both) == [1.25]
    assert caplog.text == ""
    assert total(samples(right), custom_rm_path=f"{user_module}:plain", rm_type="f1") == [1.0]
    assert "takes the place of --rm-type f1" in caplog.text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nonsense", "write package.module:function"),
        ("no_such_package.x:f", "No module named 'no_such_package'"),
        ("{}:absent", "has no 'absent'"),
        ("{}:Box.value", "is a int, no function"),
    ],
)
def test_bad_custom_path(user_module, path, message):
    with pytest.raises(ValueError, match=message):
        custom.load(path.format(user_module))


# ---- what is told to the user ------------------------------------------------------------------------------


def told(caplog):
    """What our own loggers said."""
    return "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("ppo_lightning"))


def after_rollouts(callback, *rollouts, rank_counts=(0, 0)):
    """Run the hook as the module does after each rollout; the warnings are in the log."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[callback, Length()], barebones=False)
    for rollout in rollouts:
        module = SimpleNamespace(
            rollout=SimpleNamespace(samples=rollout),
            strategy=SimpleNamespace(gather_objects=lambda mine: [mine, *rank_counts]),
        )
        callback.on_samples_end(trainer, module, rollout)


def constant(*texts, value=0.0, **fields):
    given = samples(*texts)
    for sample in given:
        sample.reward = value
        for name, content in fields.items():
            setattr(sample, name, content)
    return given


def test_constant_rewards_are_reported_once_with_the_cause(caplog):
    after_rollouts(RewardCallback("deepscaler"), *[constant("\\boxed{4}")] * 2)
    assert told(caplog) == ""
    after_rollouts(RewardCallback("deepscaler"), *[constant("\\boxed{4}")] * 9)
    assert told(caplog).count("every reward of the first 3 rollouts is 0") == 1
    assert "no response contains </think>" in told(caplog)


def test_varying_rewards_are_not_reported(caplog):
    mixed = constant("a", "b")
    mixed[0].reward = 1.0
    after_rollouts(RewardCallback("deepscaler"), constant("a"), mixed, constant("a"), constant("a"))
    after_rollouts(RewardCallback("deepscaler"), constant("a"), constant("a", value=1.0), constant("a"))
    assert told(caplog) == ""


@pytest.mark.parametrize(
    ("name", "rollout", "cause"),
    [
        ("math", constant("4"), r"no response contains \\boxed"),
        ("dapo", constant("4"), 'no response contains "Answer:"'),
        ("math", constant("\\boxed{4}", status=Status.TRUNCATED), "--rollout-max-response-len"),
        ("f1", constant(""), "every response is empty"),
        ("f1", constant("4"), "--label-key may name the wrong column"),
    ],
)
def test_likely_causes(caplog, name, rollout, cause):
    after_rollouts(RewardCallback(name), *[rollout] * 3)
    assert cause.replace("\\\\", "\\") in told(caplog)


def test_timeouts_are_counted_over_rewards_and_ranks():
    callback = RewardCallback("math")
    callback.timeouts = 3
    after_rollouts(callback, constant("a"), rank_counts=(2, 0))
    assert callback.metrics == {"rollout/reward_timeouts": 5.0}
    for draw, left in ((1, 3), (0, 0)):  # what a later draw of the same rollout finds counts on
        callback.on_rollout_start(None, SimpleNamespace(rollout=SimpleNamespace(draw=draw)), [])
        assert callback.timeouts == left
