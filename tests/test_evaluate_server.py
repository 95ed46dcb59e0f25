"""`dflash eval --server`: the table from a server's own counters, against a stub that has them."""

from __future__ import annotations

import json
import threading

import pytest
from click.testing import CliRunner
from evaluate_stub import Stub
from support import write_tokenizer

from dflash.cli import cli
from dflash.errors import ConfigError, ServerError, TargetError
from dflash.evaluate.client import Client
from dflash.evaluate.counters import Counters, parse_counters
from dflash.evaluate.figures import length_edge
from dflash.evaluate.server import ServerConfig, evaluate_server
from dflash.extract.prompts import load_prompts
from dflash.target_files import load_tokenizer

QUESTIONS = {"short": ["Hi", "Why?", "Who is it"], "long": ["Tell me " * 9, "And then " * 13, "x" * 70]}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server") / "target"
    folder.mkdir()
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = [
        {"id": f"{kind}{n}", "kind": kind, "messages": [{"role": "user", "content": text}]}
        for kind, texts in QUESTIONS.items()
        for n, text in enumerate(texts)
    ]
    path = tmp_path_factory.mktemp("server") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(autouse=True)
def _settled_sooner(monkeypatch):
    monkeypatch.setattr("dflash.evaluate.client.SETTLE_S", 0.05)


@pytest.fixture
def start():
    """Starts stubs and stops them."""
    running = []

    def begin(*args, **settings):
        stub = Stub(*args, **settings)
        threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        running.append(stub)
        return stub

    yield begin
    for stub in running:
        stub.shutdown()
        stub.server_close()


def prompts_of(data, target):
    return load_prompts((data,), load_tokenizer(target))


def expected(prompts, block=4, tokens=24):
    """Passes and accepted drafts, by the stub's rule."""
    cycles = walked = 0
    for prompt in prompts:
        accepted = len(prompt.input_ids) % block
        passes = -(-(tokens - 1) // (accepted + 1))
        cycles, walked = cycles + passes, walked + passes * (accepted + 1)
    return cycles, walked


def test_acceptance_is_exact_in_all_and_by_kind_and_length(start, target, data):
    stub = start("vllm")
    report = evaluate_server(ServerConfig(stub.url, (data,), target))
    prompts = prompts_of(data, target)
    groups = {
        "kinds": {kind: [p for p in prompts if p.kind == kind] for kind in QUESTIONS},
        "lengths": {
            edge: [p for p in prompts if length_edge(len(p.input_ids)) == edge] for edge in report.lengths
        },
    }
    assert (report.total.cycles, report.total.walked) == expected(prompts)
    assert len(report.lengths) > 1
    for name, members in groups.items():
        found = getattr(report, name)
        assert found.keys() == members.keys()
        for key, some in members.items():
            assert (found[key].cycles, found[key].walked) == expected(some), key
            assert (found[key].prompts, found[key].tokens) == (len(some), 24 * len(some))


def test_places_in_the_block_and_its_size_come_from_the_counters(start, target, data):
    report = evaluate_server(ServerConfig(start("vllm", block=6).url, (data,), target))
    assert report.block_size == 6
    whole = [len(p.input_ids) % 6 for p in prompts_of(data, target)]
    passes = [-(-23 // (accepted + 1)) for accepted in whole]
    shares = [
        sum(n for n, got in zip(passes, whole, strict=True) if got >= place) / sum(passes)
        for place in range(1, 6)
    ]
    assert report.total.by_position(5) == pytest.approx(shares)


def test_earlier_counts_of_the_server_do_not_matter(start, target, data):
    stub = start("vllm")
    first = evaluate_server(ServerConfig(stub.url, (data,), target))
    second = evaluate_server(ServerConfig(stub.url, (data,), target))
    assert first.total.cycles == second.total.cycles


def test_prompts_go_out_as_many_at_once_as_asked_and_never_more(start, target, data):
    stub = start("vllm")
    evaluate_server(ServerConfig(stub.url, (data,), target, concurrency=2))
    assert stub.most_under_way == 2
    assert sorted(body["prompt"] for body in stub.bodies) == sorted(
        p.input_ids.tolist() for p in prompts_of(data, target)
    )


def test_sampling_goes_with_every_prompt(start, target, data):
    stub = start("vllm")
    config = ServerConfig(
        stub.url, (data,), target, max_new_tokens=9, temperature=0.7, top_k=5, top_p=0.9, per_kind=1
    )
    report = evaluate_server(config)
    assert {(b["max_tokens"], b["temperature"], b["top_k"], b["top_p"]) for b in stub.bodies} == {
        (9, 0.7, 5, 0.9)
    }
    assert report.total.prompts == 2
    assert not report.greedy


def test_a_gauge_gives_an_estimate_and_says_so(start, target, data):
    """SGLang's gauge holds what the last batch accepted; with one request at once that is near."""
    stub = start("sglang")
    report = evaluate_server(ServerConfig(stub.url, (data,), target, concurrency=1))
    assert report.estimated
    assert report.total.walked == 6 * 23
    assert 1.0 < report.total.walk_tau <= 4.0
    assert "gauge" in report.table()
    assert "by position" not in report.table()


def test_a_server_without_the_drafter_gives_speed_and_equality(start, target, data):
    stub, plain = start("vllm"), start("plain")
    report = evaluate_server(ServerConfig(f"{stub.url}/v1/", (data,), target, plain_server=plain.url))
    assert (report.total.equal, report.total.prompts) == (6, 6)
    assert report.total.plain_seconds > 0
    assert "6/6" in report.table()


def test_a_text_that_differs_is_counted(start, target, data):
    stub, plain = start("vllm"), start("vllm")
    plain.changed = True
    report = evaluate_server(ServerConfig(stub.url, (data,), target, plain_server=plain.url))
    assert report.total.equal == 0


def test_without_it_the_table_leaves_open_what_was_not_measured(start, target, data):
    stub = start("vllm")
    done = CliRunner().invoke(cli, ["eval", "--server", stub.url, "--target", target, "--data", data])
    assert done.exit_code == 0, done.output
    row = next(line for line in done.stdout.splitlines() if line.startswith("all"))
    assert row.split()[-2:] == ["-", "-"]
    assert "tokens/s with 4 requests at once" in done.stdout


def test_json_has_everything_and_no_equality_that_was_not_measured(start, target, data):
    stub = start("vllm")
    arguments = ["eval", "--server", stub.url, "--target", target, "--data", data, "--json"]
    found = json.loads(CliRunner().invoke(cli, arguments).stdout)
    assert (found["server"], found["concurrency"], found["block_size"]) == (stub.url, 4, 4)
    assert found["equal"] is None
    assert found["speedup"] is None
    assert found["kinds"].keys() == QUESTIONS.keys()


def test_the_tokenizer_is_looked_for_where_the_server_has_its_model(start, target, data):
    evaluate_server(ServerConfig(start("vllm", root=target).url, (data,)))
    with pytest.raises(TargetError, match="'nowhere', where no tokenizer is found; give --target"):
        evaluate_server(ServerConfig(start("vllm", root="nowhere").url, (data,)))


def test_others_on_the_server_are_warned_of(start, target, data, capsys):
    stub = start("vllm")
    stub.others = 3
    evaluate_server(ServerConfig(stub.url, (data,), target))
    assert "3 other requests" in capsys.readouterr().err


def test_a_server_that_does_not_draft_is_refused(start, target, data):
    with pytest.raises(ServerError, match="start the server with a drafter"):
        evaluate_server(ServerConfig(start("plain").url, (data,), target))


def test_what_the_server_says_against_a_prompt_is_shown(start, target, data):
    stub = start("vllm")
    stub.failing = (400, "This model's maximum context length\nis 8 tokens")
    with pytest.raises(ServerError, match="status 400: This model's maximum context length is 8 tokens"):
        evaluate_server(ServerConfig(stub.url, (data,), target))


def test_no_server_at_all(target, data):
    with pytest.raises(ServerError, match="is the server up"):
        evaluate_server(ServerConfig("http://127.0.0.1:9", (data,), target))
    with pytest.raises(ServerError):
        Client("no address", 1, 1.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "t"], "give --target and --drafter, or --server"),
        (["--drafter", "d"], "give --target and --drafter, or --server"),
        (["--server", "http://h", "--adaptive"], "--adaptive does nothing with --server"),
        (["--server", "http://h", "--drafter", "d"], "--drafter does nothing with --server"),
        (["--target", "t", "--drafter", "d", "--concurrency", "3"], "--concurrency needs --server"),
        (["--server", "http://h", "--concurrency", "0"], "--concurrency is 0"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(arguments, said):
    done = CliRunner().invoke(cli, ["eval", "--data", "x", *arguments])
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.parametrize("setting", [{"temperature": -1.0}, {"thinking": "loud"}, {"max_new_tokens": 0}])
def test_settings_out_of_range_are_named(setting):
    with pytest.raises(ConfigError, match=f"--{next(iter(setting)).replace('_', '-')}"):
        ServerConfig("http://h", ("x",), **setting)


def test_counters_read_numbers_and_nothing_else():
    text = (
        '# TYPE vllm:spec_decode_num_drafts_total counter\nvllm:spec_decode_num_drafts_total{a="} 5"} 7.0\n'
        "vllm:spec_decode_num_accepted_tokens_total 1e1\nvllm:num_requests_running NaN\n\x00\n{} 4\n"
    )
    assert parse_counters(text) == Counters(drafts=7, accepted=10)
    assert not parse_counters("").speculative
    assert Counters(drafts=0).block_size is None
