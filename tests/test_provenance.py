"""The run record names what was run and by which versions, and no foreign commit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dflash import __version__, provenance
from dflash.provenance import RECORD_NAME, run_record, source_commit, write_run_record


def test_a_record_says_what_was_run_and_by_what(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dflash", "train", "--lr", "1"])
    write_run_record(tmp_path, "train", {"lr": 1.0})
    record = json.loads((tmp_path / RECORD_NAME).read_text())
    assert record["command"] == "train"
    assert record["argv"] == ["dflash", "train", "--lr", "1"]
    assert record["config"] == {"lr": 1.0}
    assert record["versions"]["dflash"] == __version__
    assert record["versions"]["torch"]
    assert record["time"].endswith("+00:00")


def test_a_later_start_replaces_the_record(tmp_path):
    for lr in (1.0, 2.0):
        write_run_record(tmp_path, "train", {"lr": lr})
    assert json.loads((tmp_path / RECORD_NAME).read_text())["config"] == {"lr": 2.0}


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(provenance, "_RECORDED_PACKAGES", ("no-such-package",))
    assert run_record("x", {})["versions"]["no-such-package"] is None


@pytest.fixture
def checkout(tmp_path):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    return tmp_path, git("rev-parse", "HEAD")


def place_package(folder, monkeypatch) -> None:
    folder.mkdir(parents=True)
    monkeypatch.setattr(provenance, "__file__", str(folder / "provenance.py"))


def test_the_commit_is_that_of_the_packages_own_checkout(checkout, monkeypatch):
    root, commit = checkout
    place_package(root / "dflash", monkeypatch)
    assert source_commit() == commit


def test_a_package_installed_inside_another_checkout_has_no_commit(checkout, monkeypatch):
    root, _ = checkout
    place_package(root / "venv" / "site-packages" / "dflash", monkeypatch)
    assert source_commit() is None


def test_without_git_or_a_checkout_there_is_no_commit(tmp_path, monkeypatch):
    place_package(tmp_path / "dflash", monkeypatch)
    assert source_commit() is None
    monkeypatch.setenv("PATH", "")
    assert source_commit() is None
