"""Commands that leave what the real ones leave, in milliseconds, and can be killed on the way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import write_cache

from dflash.cli import cli
from dflash.files import digest_file, digest_json, json_bytes
from dflash.recipe.execute import Outcome

RECIPE = """
[run]
out = "out"
target = "target"
data = "train.jsonl"
holdout = "heldout.jsonl"
[regenerate]
server = "http://localhost:1"
[extract]
[train]
max-steps = 4
[eval]
[export]
to = "zlab"
"""
ORDER = ["regenerate", "plan", "extract", "train", "eval", "export"]


def write_place(folder: Path, recipe: str = RECIPE) -> Path:
    """A recipe with everything that it reads; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text("{}")
    (folder / "target" / "model.safetensors").write_bytes(b"weights")
    for name in ("train.jsonl", "heldout.jsonl"):
        (folder / name).write_text(f'{{"prompt": "{name}"}}\n')
    path = folder / "recipe.toml"
    path.write_text(recipe)
    return path


class Killed(BaseException):
    """The end of a run by `kill -9`, here."""


class Commands:
    """Executes by pretending.

    Args:
        die: Stage and moment of a kill: `before` anything, `during` the work, or `after` it.
        fail: Stage to exit code.
    """

    def __init__(self, die: tuple[str, str] | None = None, fail: dict[str, int] | None = None) -> None:
        self.ran: list[str] = []
        """Names of the stages, repairs included, in their order."""
        self.lines: list[list[str]] = []
        self._die, self._fail = die, fail or {}

    def __call__(self, arguments: Sequence[str], *, lock: int | None, quiet: bool = False) -> Outcome:
        command, *rest = arguments
        name = "plan" if "--plan" in rest else "repair" if command == "cache" else command
        self.ran.append(name)
        self.lines.append(list(arguments))
        self._kill(name, "before")
        if name in self._fail:
            return Outcome(self._fail[name])
        if name == "repair":
            return Outcome(0, ["repaired"])
        with cli.commands[command].make_context(command, rest, help_option_names=[]) as context:
            said = getattr(self, f"_{name}")(**context.params)
        self._kill(name, "after")
        return Outcome(0, said)

    def _kill(self, name: str, moment: str) -> None:
        if self._die == (name, moment):
            raise Killed

    def _regenerate(self, *, out: Path, data: tuple[str, ...], **settings: Any) -> list[str]:
        assert not out.exists(), "`dflash regenerate` refuses a file that is there"
        partial = out.with_name(f"{out.name}.partial")
        partial.write_text("begun")
        self._kill("regenerate", "during")
        out.write_text(Path(data[0]).read_text() + str(settings["max_new_tokens"]))
        partial.unlink()
        return ["answered"]

    def _plan(self, **_: Any) -> list[str]:
        return ["41 TB"]

    def _extract(self, *, out: Path, target: str, data: tuple[str, ...], **settings: Any) -> list[str]:
        if not (out / "manifest.json").exists():
            read = (Path(target) / "model.safetensors").read_bytes() + Path(data[0]).read_bytes()
            seed = sum(read) + settings["max_length"]
            self._kill("extract", "during")
            write_cache(out, [8, 20, 40], seed=seed)
        return ["extracted"]

    def _train(self, *, out: Path, cache: Path, **settings: Any) -> list[str]:
        assert settings["resume"]
        for step in (2, 4):
            write_checkpoint(out, step, [settings["lr"], settings["max_steps"], str(out.name)])
            self._kill("train", "during")
        (out / "metrics.jsonl").write_text("{}\n")
        return ["trained"]

    def _eval(self, *, drafters: tuple[Path, ...], **_: Any) -> list[str]:
        self._kill("eval", "during")
        figures = {"prompts": 2, "tokens": 9, "walk_tau": 1.5, "speedup": 1.25, "equal": 2}
        return json.dumps(figures | {"greedy": True, "kinds": {}}, indent=1).splitlines()

    def _export(self, *, out: Path, source: Path, **_: Any) -> list[str]:
        assert not out.exists(), "`dflash export` refuses a folder that is there"
        out.mkdir()
        self._kill("export", "during")
        (out / "model.safetensors").write_text(source.name)
        return ["exported"]


def write_checkpoint(run: Path, step: int, content: Any) -> None:
    """A checkpoint by its digests, of no real tensors."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    names = ("config.json", "model.safetensors", "trainer/state.safetensors")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps([content, step, name]))
    value = {"step": step, "files": {name: digest_file(folder / name) for name in names}}
    (folder / "trainer" / "state.json").write_bytes(json_bytes({**value, "digest": digest_json(value)}))
