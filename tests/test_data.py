"""Prompt files and the datamodule, under a real Trainer where Lightning has a say."""

from __future__ import annotations

import csv
import json
import multiprocessing
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from datasets import Dataset, DatasetDict
from lightning.pytorch.callbacks import ModelCheckpoint

from ppo_lightning.config import ConfigError, PPOConfig
from ppo_lightning.data import AHEAD, PromptDataModule, wait_ahead
from ppo_lightning.prompts import Columns, DataError, read_prompts
from tests.tinymodel import make_tokenizer

ROWS = [{"input": f"question {i}", "answer": str(i), "extra": {"level": i % 3}} for i in range(10)]
WITH_LABEL = Columns(label_key="answer")


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return directory


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "prompts.jsonl", [json.dumps(row) for row in ROWS])


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_data(tokenizer_dir: Path, path: Path, **flat: Any) -> PromptDataModule:
    given = {"hf_checkpoint": str(tokenizer_dir), "prompt_data": str(path), "rollout_batch_size": 4} | flat
    return PromptDataModule(PPOConfig.of(**given))


def problems(path: Path | list[Path], columns: Columns = WITH_LABEL) -> str:
    with pytest.raises(DataError) as caught:
        read_prompts(path, columns)
    return str(caught.value)


# ---- formats -----------------------------------------------------------------------------------------------


def test_every_format_holds_the_same_prompts(tmp_path: Path, jsonl: Path) -> None:
    data = Dataset.from_list(ROWS)
    data.to_parquet(tmp_path / "prompts.parquet")
    data.save_to_disk(tmp_path / "arrow")
    DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "prompts.json").write_text(json.dumps(ROWS, indent=1))
    write_lines(tmp_path / "lines.json", ["", *[json.dumps(row) for row in ROWS], " "])
    with (tmp_path / "prompts.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows([row | {"extra": json.dumps(row["extra"])} for row in ROWS])
    columns = Columns(label_key="answer", metadata_key="extra")
    expected = read_prompts(jsonl, columns)
    assert [(p.index, p.prompt, p.label, p.metadata) for p in expected] == [
        (i, f"question {i}", str(i), {"level": i % 3}) for i in range(10)
    ]
    for name in ("prompts.parquet", "arrow", "splits", "prompts.json", "lines.json", "prompts.csv"):
        assert read_prompts(tmp_path / name, columns) == expected, name


def test_several_files_and_a_directory_of_files_are_one_set(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    first = write_lines(folder / "a.jsonl", [json.dumps(row) for row in ROWS[:4]])
    second = folder / "deep" / "b.parquet"
    Dataset.from_list(ROWS[4:]).to_parquet(second)
    (folder / "README.md").write_text("not data")
    together = read_prompts([first, second], WITH_LABEL)
    assert [(p.index, p.label) for p in together] == [(i, str(i)) for i in range(10)]
    assert read_prompts(folder, WITH_LABEL) == together


def test_messages_are_taken_as_they_are_and_text_becomes_one(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Calculator."}, {"role": "user", "content": "1+1"}]
    path = tmp_path / "chat.parquet"
    Dataset.from_list([{"input": turns}, {"input": [turns[1] | {"name": "Ann"}]}]).to_parquet(path)
    chat = Columns(chat=True)
    # the table gave the first row's messages a name of None
    assert [p.prompt for p in read_prompts(path, chat)] == [turns, [turns[1] | {"name": "Ann"}]]
    text = write_lines(tmp_path / "text.jsonl", [json.dumps({"input": "1+1"})])
    assert read_prompts(text, chat)[0].prompt == [turns[1]]


# ---- bad data ----------------------------------------------------------------------------------------------


def test_bad_rows_are_all_reported_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(
        b'{"input": "good", "answer": "1"}\n'
        b'{"input": "cut off\n'
        b"[1, 2]\n"
        b'{"input": "caf\xe9", "answer": "1"}\n'
        b"\n"
        b'{"input": "  ", "answer": "1"}\n'
        b'{"answer": "1"}\n'
        b'{"input": 3, "answer": "1"}\n'
        b'{"input": [{"role": "user", "content": "x"}], "answer": "1"}\n'
    )
    text = problems(path)
    for line in (
        f"7 problems in the prompt data:\n  {path}:2: is not JSON (Invalid control character at",
        f"{path}:3: is a list, not an object",
        f"{path}:4: is not UTF-8 (invalid continuation byte at byte 14)",
        f"{path}:6: has an empty prompt",
        f"{path}:7: has no key 'input'; it has answer",
        f"{path}:8: has a prompt that is a int; it must be text or a list of messages",
        f"{path}:9: holds chat messages, which need --apply-chat-template",
    ):
        assert line in text


def test_ten_bad_rows_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl", [json.dumps({"input": "", "answer": "1"})] * 25)
    lines = problems(path).splitlines()
    assert lines[0] == "25 problems in the prompt data:"
    assert lines[10] == f"  {path}:10: has an empty prompt"
    assert lines[11:] == ["  and 15 more"]


def test_a_wrong_key_is_reported_once_with_the_keys_there_are(jsonl: Path) -> None:
    text = problems(jsonl, Columns(input_key="prompt", label_key="label"))
    assert text.splitlines()[1:] == [
        f"  {jsonl} has no key 'prompt'; it has input, answer, extra: name the right one with --input-key",
        f"  {jsonl} has no key 'label'; it has input, answer, extra: name the right one with --label-key",
    ]


@pytest.mark.parametrize("missing", [None, ""])
def test_a_missing_label_matters_to_a_reward_that_needs_one(tmp_path: Path, missing: str | None) -> None:
    path = write_lines(tmp_path / "p.jsonl", [json.dumps({"input": "x", "answer": missing})])
    assert read_prompts(path, WITH_LABEL)[0].label == missing
    text = problems(path, Columns(label_key="answer", label_for="math"))
    assert f"{path}:1: has no label, and --rm-type math compares with one" in text


def test_chat_messages_and_metadata_are_checked(tmp_path: Path) -> None:
    rows = [
        {"input": []},
        {"input": [{"role": "user"}]},
        {"input": "x", "meta": [1]},
        {"input": "x", "meta": "{"},
        {"input": "x", "meta": None},
    ]
    path = write_lines(tmp_path / "p.jsonl", [json.dumps({"meta": {}} | row) for row in rows])
    text = problems(path, Columns(metadata_key="meta", chat=True))
    assert f"{path}:1: has an empty list of messages" in text
    assert f"{path}:2: has a message without role and content: {{'role': 'user'}}" in text
    assert f"{path}:3: has metadata that is a list, not a mapping" in text
    assert f"{path}:4: has metadata that is text but not JSON" in text
    assert f"{path}:5" not in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", "", "is empty: it has no prompts"),
        ("p.jsonl", "\n \n", "is empty: it has no prompts"),
        ("p.json", "[]", "is empty: it has no prompts"),
        ("p.json", "[{", "cannot be read: "),
        ("p.parquet", "no parquet", "cannot be read: "),
        ("p.csv", 'input,answer\n"x', "cannot be read: line 1: unexpected end of data"),
        ("p.csv", "input,answer\nx\n", ":2: has more or fewer fields than the header"),
        ("p.txt", "x", "cannot be read: its name must end in one of .jsonl, .ndjson, .json, .parquet, .csv"),
    ],
)
def test_unreadable_and_empty_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert f"{path}" in problems(path)
    assert message in problems(path)


def test_absent_and_foreign_places(tmp_path: Path) -> None:
    assert f"{tmp_path / 'no'} does not exist" in problems(tmp_path / "no")
    assert "neither a Hugging Face dataset directory nor has it a file of .jsonl" in problems(tmp_path)
    data = Dataset.from_list(ROWS)
    DatasetDict({"easy": data, "hard": data}).save_to_disk(tmp_path / "splits")
    assert "it has the splits easy, hard; name the directory of one of them" in problems(tmp_path / "splits")


# ---- the datamodule ----------------------------------------------------------------------------------------


def test_tokens_of_text_and_of_a_conversation(tokenizer_dir: Path, jsonl: Path) -> None:
    tokenizer = make_tokenizer()
    plain = make_data(tokenizer_dir, jsonl).take(1)[0]
    assert tokenizer.decode(plain.tokens) == "question 0"
    chat = make_data(tokenizer_dir, jsonl, apply_chat_template=True).take(1)[0]
    assert tokenizer.decode(chat.tokens) == "<|im_start|>user\nquestion 0<|im_end|>\n<|im_start|>assistant\n"


def test_chat_template_options_reach_the_template(tokenizer_dir: Path, jsonl: Path, tmp_path: Path) -> None:
    for file in tokenizer_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}|{{ enable_thinking }}")
    data = make_data(
        tmp_path, jsonl, apply_chat_template=True, apply_chat_template_kwargs='{"enable_thinking": false}'
    )
    assert make_tokenizer().decode(data.take(1)[0].tokens) == "question 0|False"
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template: drop --apply-chat-template"):
        make_data(tmp_path, jsonl, apply_chat_template=True).take(1)


def test_the_stream_loses_no_prompt_at_an_epochs_end(tokenizer_dir: Path, jsonl: Path) -> None:
    data = make_data(tokenizer_dir, jsonl)
    assert [[p.index for p in data.take(4)] for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_each_epoch_has_its_own_order_and_every_prompt_once(tokenizer_dir: Path, jsonl: Path) -> None:
    data = make_data(tokenizer_dir, jsonl, rollout_shuffle=True)
    epochs = [[p.index for p in data.take(10)] for _ in range(4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    again = make_data(tokenizer_dir, jsonl, rollout_shuffle=True)
    torch.manual_seed(99)  # the order is not of the global generator
    assert [p.index for p in again.take(40)] == [i for epoch in epochs for i in epoch]
    other = make_data(tokenizer_dir, jsonl, rollout_shuffle=True, rollout_seed=43)
    assert [p.index for p in other.take(10)] != epochs[0]


def test_fetching_commits_nothing(tokenizer_dir: Path, jsonl: Path) -> None:
    data = make_data(tokenizer_dir, jsonl, rollout_shuffle=True)
    batches = [[p.index for p in data.take(4)] for _ in range(6)]
    for _ in range(3):
        data.commit()
    assert data.state_dict() == {"epoch": 1, "offset": 2, "rows": 10}
    assert data.epoch == 1
    resumed = make_data(tokenizer_dir, jsonl, rollout_shuffle=True)
    resumed.load_state_dict(data.state_dict())
    assert [[p.index for p in resumed.take(4)] for _ in range(3)] == batches[3:]


def test_prompts_that_were_not_wanted_come_next(tokenizer_dir: Path, jsonl: Path) -> None:
    """No prompt is lost, and none comes twice, whatever a rollout takes instead of the loader's batch."""
    data = make_data(tokenizer_dir, jsonl)
    used = [[p.index for p in data.resized(data.take(4), count)] for count in (4, 1, 0, 6, 4)]
    assert used == [[0, 1, 2, 3], [4], [], [5, 6, 7, 8, 9, 0], [1, 2, 3, 4]]


def test_a_loader_begins_after_the_last_committed_prompt(tokenizer_dir: Path, jsonl: Path) -> None:
    data = make_data(tokenizer_dir, jsonl, num_rollout=5)
    loader = data.train_dataloader()
    assert len(list(loader)) == 5
    data.commit()
    assert [p.index for p in next(iter(loader))] == [4, 5, 6, 7]


def test_a_data_set_that_grew_begins_its_next_epoch(
    tokenizer_dir: Path, jsonl: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = make_data(tokenizer_dir, jsonl)
    data.load_state_dict({"epoch": 2, "offset": 3, "rows": 7})
    assert "has 10 rows, the run began with 7" in caplog.text
    assert data.position == 30


@pytest.mark.parametrize(("epochs", "size", "rollouts"), [(1, 4, 3), (2, 4, 5), (1, 10, 1), (3, 16, 2)])
def test_rollouts_of_epochs(tokenizer_dir: Path, jsonl: Path, epochs: int, size: int, rollouts: int) -> None:
    data = make_data(tokenizer_dir, jsonl, num_epoch=epochs, rollout_batch_size=size)
    assert data.num_rollout_from_epochs(epochs) == rollouts == len(data.train_dataloader())
    used = Counter(p.index for batch in data.train_dataloader() for p in batch)
    assert min(used[i] for i in range(10)) >= epochs


def test_long_prompts_are_left_out_and_counted(
    tokenizer_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_lines(tmp_path / "p.jsonl", [json.dumps({"input": "x" * n}) for n in (3, 9, 4, 8)])
    data = make_data(tokenizer_dir, path, rollout_max_prompt_len=4)
    assert [(p.index, len(p.tokens)) for p in data.prompts] == [(0, 3), (2, 4)]
    assert "2 of 4 prompts are longer than 4 tokens" in caplog.text
    with pytest.raises(DataError, match=r"all 4 prompts of .* the shortest has 3 tokens"):
        make_data(tokenizer_dir, path, rollout_max_prompt_len=2).setup("fit")


def test_a_reward_that_needs_labels_asks_for_their_column(tokenizer_dir: Path, jsonl: Path) -> None:
    with pytest.raises(ConfigError, match=r"--rm-type gsm8k compares with a label: .* --label-key"):
        make_data(tokenizer_dir, jsonl, rm_type="gsm8k").setup("fit")
    make_data(tokenizer_dir, jsonl, rm_type="gsm8k", label_key="answer").setup("fit")
    make_data(tokenizer_dir, jsonl, rm_type="random").setup("fit")
    make_data(tokenizer_dir, jsonl, custom_rm_path="m:f").setup("fit")
    make_data(tokenizer_dir, jsonl, rm_type="gsm8k", custom_rm_path="m:f").setup("fit")  # takes its place


def test_evaluation_sets_by_name(tokenizer_dir: Path, jsonl: Path, tmp_path: Path) -> None:
    small = write_lines(tmp_path / "small.jsonl", [json.dumps(ROWS[7])])
    data = make_data(tokenizer_dir, jsonl, eval_prompt_data=("all", str(jsonl), "one", str(small)))
    sets = data.eval_prompts()
    assert {name: [p.prompt for p in prompts] for name, prompts in sets.items()} == {
        "all": [row["input"] for row in ROWS],
        "one": ["question 7"],
    }
    assert all(p.tokens for prompts in sets.values() for p in prompts)
    bad = make_data(tokenizer_dir, jsonl, eval_prompt_data=("gone", str(tmp_path / "gone.jsonl")))
    with pytest.raises(DataError, match="does not exist"):
        bad.setup("fit")  # before the first rollout, not at the first evaluation


def test_a_directory_without_a_tokenizer(tokenizer_dir: Path, jsonl: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer can be loaded from"):
        make_data(tmp_path / "nothing", jsonl).take(1)


def ahead(data: PromptDataModule) -> list[int]:
    """Rows that have tokens, when no thread works any more."""
    wait_ahead()
    return [p.index for p in data.prompts if p.tokens]


def test_the_next_prompts_are_tokenised_while_the_trainer_works(tokenizer_dir: Path, jsonl: Path) -> None:
    data = make_data(tokenizer_dir, jsonl)
    data.take(3)
    assert ahead(data) == [0, 1, 2, 3, 4, 5]
    assert (data.position, data.take(1)[0].index) == (0, 3)
    data.commit(4)
    data.take(4)
    assert ahead(data) == list(range(10))  # across the epoch's end
    assert data.take(3)[-1].index == 0
    plain = {p.index: p.tokens for p in read_prompts(jsonl, Columns())}
    tokenizer = make_tokenizer()
    assert {p.index: tokenizer.decode(p.tokens) for p in data.prompts} == {i: f"question {i}" for i in plain}


def test_no_thread_where_every_prompt_has_tokens(tokenizer_dir: Path, jsonl: Path) -> None:
    data = make_data(tokenizer_dir, jsonl, rollout_max_prompt_len=50)
    for _ in range(3):
        data.take(4)
        assert AHEAD not in [t.name for t in threading.enumerate()]


def test_a_prompt_that_cannot_be_tokenised_stops_the_take_that_needs_it(tmp_path: Path, jsonl: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "chat_template.jinja").write_text(
        "{% if '6' in messages[0].content %}{{ raise_exception('no six') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    data = make_data(tmp_path, jsonl, apply_chat_template=True)
    for _ in range(3):  # the thread meets row 6 here
        data.take(2)
    assert ahead(data) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(DataError, match="refuses row 6 of the prompts: no six"):
        data.take(2)


def test_a_rank_forked_while_prompts_are_tokenised(tokenizer_dir: Path, tmp_path: Path) -> None:
    """It finds them done, and a tokenizer that no thread holds; the limit is generous, a hang is for ever."""
    rows = [json.dumps({"input": f"{i} " * 400}) for i in range(300)]
    data = make_data(tokenizer_dir, write_lines(tmp_path / "long.jsonl", rows))
    data.take(150)
    assert AHEAD in [t.name for t in threading.enumerate()]
    child = multiprocessing.get_context("fork").Process(target=take_and_compare, args=(data,))
    child.start()
    child.join(60)
    assert child.exitcode == 0


def take_and_compare(data: PromptDataModule) -> None:
    before = [p.index for p in data.prompts if p.tokens]
    again = make_data(Path(data.config.model.hf_checkpoint), Path(data.config.data.prompt_data))
    again.take(150)
    assert before == list(range(300))
    assert [p.tokens for p in data.take(150)] == [p.tokens for p in again.take(150)]


class Recorder(pl.LightningModule):
    """Counts rollouts as PPOModule does: manual optimization, one optimizer step and one commit per batch."""

    def __init__(self, seen: list[list[int]]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = seen

    def training_step(self, prompts: list[Any], batch_idx: int) -> None:
        self.seen.append([p.index for p in prompts])
        self.optimizers().step()
        self.trainer.datamodule.commit()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tokenizer_dir: Path, path: Path, out: Path, steps: int, checkpoint: Path | None) -> list[list[int]]:
    seen: list[list[int]] = []
    data = make_data(tokenizer_dir, path, rollout_shuffle=True, num_rollout=steps)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(out, filename="{step}", every_n_train_steps=1, save_top_k=-1)],
    )
    trainer.fit(Recorder(seen), data, ckpt_path=checkpoint)
    assert trainer.global_step == steps
    return seen


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_a_resumed_trainer_sees_what_an_unbroken_one_sees(
    tokenizer_dir: Path, jsonl: Path, tmp_path: Path, cut: int, recwarn: pytest.WarningsRecorder
) -> None:
    """Epochs of 10 end within batches of 4; `cut` 5 is also the end of an epoch. One run was to end there,
    and is now to go on; the other was killed there."""
    whole = fit(tokenizer_dir, jsonl, tmp_path / "whole", 9, None)
    first = fit(tokenizer_dir, jsonl, tmp_path / "ended", cut, None)
    after_end = fit(tokenizer_dir, jsonl, tmp_path / "on", 9, tmp_path / "ended" / f"step={cut}.ckpt")
    after_kill = fit(tokenizer_dir, jsonl, tmp_path / "on2", 9, tmp_path / "whole" / f"step={cut}.ckpt")
    assert first + after_end == whole
    assert after_kill == whole[cut:]
    assert not [w for w in recwarn if "not resumable" in str(w.message)]
