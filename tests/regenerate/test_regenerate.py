"""The target's own answers to everything that is asked, whatever happens on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_server import started
from support import write_target

from dflash.decode.config import DecodeConfig
from dflash.decode.loop import generate
from dflash.errors import ConfigError, CorpusError, ServerError
from dflash.extract.corpus import CorpusConfig
from dflash.regenerate.answers import looks_like_refusal
from dflash.regenerate.config import RegenerateConfig
from dflash.regenerate.journal import Journal
from dflash.regenerate.run import regenerate
from dflash.regenerate.tasks import load_tasks

ROWS = 40


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("dflash.regenerate.server.FIRST_DELAY_S", 0.005)


@pytest.fixture
def stub():
    server = started()
    yield server
    server.shutdown()
    server.server_close()


def write_rows(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def data(tmp_path) -> str:
    """Single questions and, every fifth row, a conversation of two."""
    rows = [
        {"id": f"r{n}", "kind": "even" if n % 2 == 0 else "odd", "prompt": f"question {n}"}
        if n % 5
        else {
            "id": f"r{n}",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": f"first {n}"},
                {"role": "assistant", "content": "what the data says"},
                {"role": "user", "content": f"second {n}"},
            ],
        }
        for n in range(ROWS)
    ]
    return write_rows(tmp_path / "data.jsonl", rows)


def config(stub, data, out, **changes) -> RegenerateConfig:
    values = {"concurrency": 8, "retries": 8, "timeout": 20.0} | changes
    return RegenerateConfig((data,), out, server=stub.url, **values)


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_whole(rows) -> None:
    """Every row once, in the order of the data, each turn answered in the context of those before it."""
    assert [row["id"] for row in rows] == [f"r{n}" for n in range(ROWS)]
    for n, row in enumerate(rows):
        answers = [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"]
        if n % 5:
            assert answers == [f"echo 0 of question {n}"]
            assert row["kind"] == ("even" if n % 2 == 0 else "odd")
        else:
            assert answers == [f"echo 0 of first {n}", f"echo 1 of second {n}"]
            assert row["messages"][0] == {"role": "system", "content": "be brief"}


def test_every_turn_is_answered_in_context_and_order_is_kept(stub, data, tmp_path):
    report = regenerate(config(stub, data, tmp_path / "out.jsonl"))
    check_whole(rows_of(tmp_path / "out.jsonl"))
    assert (report.rows, report.tokens) == (ROWS, 4 * sum(stub.seen.values()))
    assert 1 < stub.most_under_way <= 8
    assert not (tmp_path / "out.jsonl.partial").exists()


FAULTS = {"429": 0.1, "500": 0.05, "503": 0.05, "reset": 0.05, "truncated": 0.05, "malformed": 0.05}


def test_faults_that_pass_change_nothing(data, tmp_path):
    stub = started(FAULTS)
    try:
        regenerate(config(stub, data, tmp_path / "out.jsonl", retries=12))
    finally:
        stub.shutdown()
        stub.server_close()
    check_whole(rows_of(tmp_path / "out.jsonl"))
    assert sum(stub.met.values()) > 5


def test_an_answer_that_does_not_come_is_asked_for_again(data, tmp_path):
    stub = started({"slow": 0.05})
    try:
        regenerate(config(stub, data, tmp_path / "out.jsonl", timeout=0.3))
    finally:
        stub.shutdown()
        stub.server_close()
    check_whole(rows_of(tmp_path / "out.jsonl"))
    assert stub.met["slow"] > 0


def test_a_server_that_stays_away_is_said_and_nothing_answered_is_lost(stub, data, tmp_path):
    stub.faults = {"503": 0.0}
    settings_ = config(stub, data, tmp_path / "out.jsonl", retries=1, concurrency=2)
    stub.special = {f"question {n}": {"status": 503} for n in range(20, ROWS)}
    with pytest.raises(ServerError, match="run the same command again"):
        regenerate(settings_)
    before = sum(stub.seen.values())
    assert not (tmp_path / "out.jsonl").exists()
    stub.special = {}
    regenerate(settings_)
    check_whole(rows_of(tmp_path / "out.jsonl"))
    assert before > 0
    again = [asked for asked, count in stub.seen.items() if asked.endswith((" 1", " 2")) and count > 1]
    assert not again


def test_an_unknown_model_ends_the_run_at_once(stub, data, tmp_path):
    stub.special = {f"question {n}": {"status": 404} for n in range(ROWS)}
    with pytest.raises(ServerError, match="status 404"):
        regenerate(config(stub, data, tmp_path / "out.jsonl", model="other"))


def test_no_server_at_all_is_one_clear_error(data, tmp_path):
    with pytest.raises(ServerError, match="check the address"):
        regenerate(RegenerateConfig((data,), tmp_path / "o.jsonl", server="http://127.0.0.1:9", retries=0))


def test_a_prompt_that_the_server_refuses_is_left_out_and_counted(stub, data, tmp_path):
    stub.special = {"question 3": {"status": 400}}
    report = regenerate(config(stub, data, tmp_path / "out.jsonl"))
    assert report.dropped == {"refused_by_server": 1}
    assert len(rows_of(tmp_path / "out.jsonl")) == ROWS - 1


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"message": {"content": "  "}}, "empty"),
        ({"message": {"content": None}}, "empty"),
        ({"finish_reason": "length"}, "truncated"),
        ({"finish_reason": "content_filter"}, "filtered"),
    ],
)
def test_answers_that_would_teach_nothing_are_left_out_by_reason(stub, data, tmp_path, choice, reason):
    stub.special = {"question 7": choice, "first 5": choice}
    report = regenerate(config(stub, data, tmp_path / "out.jsonl"))
    assert report.dropped == {reason: 2}
    assert {row["id"] for row in rows_of(tmp_path / "out.jsonl")}.isdisjoint({"r7", "r5"})


def test_truncated_answers_are_kept_where_asked_for(stub, data, tmp_path):
    stub.special = {"question 7": {"finish_reason": "length"}}
    regenerate(config(stub, data, tmp_path / "out.jsonl", keep_truncated=True))
    check_whole(rows_of(tmp_path / "out.jsonl"))


def test_thinking_that_the_server_splits_off_is_kept_beside_the_answer(stub, data, tmp_path):
    stub.special = {"question 1": {"message": {"content": "yes", "reasoning_content": "hm"}}}
    regenerate(config(stub, data, tmp_path / "out.jsonl", thinking="on"))
    turn = rows_of(tmp_path / "out.jsonl")[1]["messages"][-1]
    assert turn == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert all(body["chat_template_kwargs"] == {"enable_thinking": True} for body in stub.bodies)


def test_sampling_reaches_the_server(stub, data, tmp_path):
    changes = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "seed": 7, "max_new_tokens": 33}
    regenerate(config(stub, data, tmp_path / "out.jsonl", **changes))
    wanted = {"max_tokens": 33, "model": "stub-model"} | {k: changes[k] for k in list(changes)[:4]}
    assert all(wanted.items() <= body.items() for body in stub.bodies)


def test_the_completions_interface_gets_the_rendered_prompt(stub, data, tmp_path):
    target = str(write_target(tmp_path / "target"))
    regenerate(config(stub, data, tmp_path / "out.jsonl", api="completions", target=target))
    assert all(isinstance(body["prompt"][0], int) for body in stub.bodies)
    assert len(rows_of(tmp_path / "out.jsonl")) == ROWS


def test_no_more_requests_a_second_than_allowed(stub, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": f"q{n}"} for n in range(10)])
    began = time.monotonic()
    regenerate(config(stub, data, tmp_path / "out.jsonl", rate_limit=20.0))
    assert time.monotonic() - began > 0.9 * 10 / 20


def test_refusals_are_counted_and_kept(stub, data, tmp_path):
    stub.special = {"question 1": {"message": {"content": "I'm sorry, but I can't help with that."}}}
    report = regenerate(config(stub, data, tmp_path / "out.jsonl"))
    assert report.refusals == 1
    assert report.rows == ROWS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I cannot do that.", True),
        ("<think>easy</think>\n\nSorry, no.", True),
        ("As an AI language model, I", True),
        ("Sorting is easy.", False),
        ("I can do that.", False),
        ("The sorry state of affairs", False),
    ],
)
def test_what_begins_like_a_refusal(text, expected):
    assert looks_like_refusal(text) is expected


@given(cut=st.integers(1, 4000), settled=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_a_journal_cut_anywhere_keeps_its_whole_lines(tmp_path_factory, cut, settled):
    out = tmp_path_factory.mktemp("journal") / "out.jsonl"
    with Journal(out, {"seed": 0}) as journal:
        for number in range(settled):
            if number % 3:
                journal.keep(number, {"id": f"r{number}", "text": "ä" * number}, 2)
            else:
                journal.drop(number, f"r{number}", "empty")
    size = journal.path.stat().st_size
    os.truncate(journal.path, max(size - cut, 0))
    with Journal(out, {"seed": 0}) as again:
        assert list(again.settled) == list(range(len(again.settled)))
        assert all(name == f"r{number}" for number, name in again.settled.items())
        for number in range(len(again.settled), settled):
            again.keep(number, {"id": f"r{number}"}, 2)
        count = again.finish()
    rows = rows_of(out)
    assert [row["id"] for row in rows] == sorted((row["id"] for row in rows), key=lambda name: int(name[1:]))
    assert count == len(rows) == settled - sum(again.dropped.values())


def test_other_settings_or_data_do_not_go_on_with_a_partial_file(stub, data, tmp_path):
    out = tmp_path / "out.jsonl"
    Journal(out, config(stub, data, out).identity()).__exit__()
    with pytest.raises(ConfigError, match=r"temperature: was 0\.0, now 0\.5"):
        regenerate(config(stub, data, out, temperature=0.5))
    with Journal(out, config(stub, data, out).identity()) as journal:
        journal.keep(0, {"id": "another"}, 1)
    with pytest.raises(CorpusError, match="'another', which is not conversation 0"):
        regenerate(config(stub, data, out))


def test_a_finished_file_is_not_written_again(stub, data, tmp_path):
    (tmp_path / "out.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="is there already"):
        regenerate(config(stub, data, tmp_path / "out.jsonl"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "plain"}, "no_turns"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no_user_turn"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]}, "tools"),
    ],
)
def test_rows_that_ask_nothing_are_counted(tmp_path, row, reason):
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": "x"}, row])
    tasks, dropped = load_tasks([data])
    assert (len(tasks), dropped) == (1, Counter({reason: 1}))


def test_rows_of_the_same_name_or_text_stay_apart(tmp_path):
    data = write_rows(
        tmp_path / "d.jsonl", [{"prompt": "x"}, {"prompt": "x"}, {"prompt": "y", "id": "a"}] * 2
    )
    tasks, _ = load_tasks([data])
    assert len({task.id for task in tasks}) == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"server": None}, "nobody to answer"),
        ({"api": "chats"}, "--api 'chats'"),
        ({"api": "completions"}, "needs --target"),
        ({"thinking": "maybe"}, "--thinking 'maybe'"),
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"retries": -1}, "--retries is -1"),
        ({"rate_limit": 0.0}, "--rate-limit is 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, change, words):
    with pytest.raises(ConfigError, match=words):
        RegenerateConfig(("d",), tmp_path / "o", **({"server": "http://x"} | change))


def test_the_target_here_gives_its_own_greedy_answers(data, tmp_path):
    from dflash.regenerate.local import LocalTarget

    target = str(write_target(tmp_path / "target"))
    wanted = RegenerateConfig(
        (data,), tmp_path / "out.jsonl", target=target, max_new_tokens=6, dtype="float32", keep_truncated=True
    )
    report = regenerate(wanted)
    rows = rows_of(tmp_path / "out.jsonl")
    assert report.rows + sum(report.dropped.values()) == ROWS
    assert [int(row["id"][1:]) for row in rows] == sorted(int(row["id"][1:]) for row in rows)
    local = LocalTarget(wanted)
    by_id = {task.id: task for task in load_tasks([data])[0]}
    import torch

    for row in rows[:6]:
        ids = local.prompter.ids(by_id[row["id"]].prompt([]))
        alone = generate(local._target, None, torch.tensor(ids), DecodeConfig(6)).tokens
        first = next(turn["content"] for turn in row["messages"] if turn["role"] == "assistant")
        assert first == local._answer(alone).text


def test_kills_at_any_moment_lose_nothing_and_ask_nothing_twice(stub, data, tmp_path):
    """Real processes: SIGKILL, then SIGTERM (which says how to go on), then to the end."""
    stub.delay = 0.05
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "dflash", "regenerate", "--data", data, "--out", str(out)]
    command += ["--server", stub.url, "--concurrency", "2"]

    def start() -> subprocess.Popen:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def wait_for(count: int) -> None:
        deadline = time.monotonic() + 60
        while sum(stub.seen.values()) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with start() as process:
        wait_for(8)
        process.kill()
        process.communicate()
    with start() as process:
        wait_for(20)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    assert "run the same command again to go on" in said
    assert not out.exists()
    with start() as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    check_whole(rows_of(out))
    # what was under way when a process ended was asked again, and nothing else
    assert sum(stub.seen.values()) <= sum(1 + (n % 5 == 0) for n in range(ROWS)) + 2 * 2 * 2


def test_what_is_written_is_what_extraction_reads(stub, data, tmp_path):
    from dflash.extract.corpus import load_corpus
    from dflash.target import load_tokenizer

    regenerate(config(stub, data, tmp_path / "out.jsonl"))
    tokenizer = load_tokenizer(str(write_target(tmp_path / "target")))
    corpus = load_corpus(CorpusConfig((str(tmp_path / "out.jsonl"),), 256, 2), tokenizer, show=False)
    assert len(corpus) == ROWS


def test_a_stop_does_not_wait_for_answers_under_way(stub, data, tmp_path):
    stub.delay = 30.0
    command = [
        sys.executable,
        "-m",
        "dflash",
        "regenerate",
        "--data",
        data,
        "--out",
        str(tmp_path / "o.jsonl"),
    ]
    with subprocess.Popen([*command, "--server", stub.url], stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not stub.under_way and time.monotonic() < deadline:
            time.sleep(0.02)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - began < 15
