"""Tests of the cache write many files; flushing each to the disk would take most of their time."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
