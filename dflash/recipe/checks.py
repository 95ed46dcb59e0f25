"""Settings judged by the code that will use them, before anything is begun.

A command's flags know types; what fits together is known by its configuration. A recipe whose last table is
wrong should not fail behind the hours that the first ones take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from dflash.errors import ConfigError
from dflash.recipe.reading import Recipe, resolved
from dflash.recipe.stages import Stage


def check_settings(recipe: Recipe, stages: Sequence[Stage]) -> None:
    """Build the configuration of each of these stages.

    Raises:
        ConfigError: one of them refuses a value; names the table.
    """
    for stage in stages:
        if check := _CHECKS.get(stage.command):
            try:
                check(resolved(recipe, stage))
            except ConfigError as error:
                raise ConfigError(f"[{stage.table}] {error}") from error


def _known(kind: Any, params: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {key: tuple(v) if isinstance(v, list) else v for key, v in params.items() if key in names}


def _regenerate(params: dict[str, Any]) -> None:
    from dflash.regenerate.config import RegenerateConfig

    RegenerateConfig(**_known(RegenerateConfig, params))


def _extract(params: dict[str, Any]) -> None:
    from dflash.extract.settings import ExtractConfig

    ExtractConfig.from_flags(shard_mb=params["shard_mb"], **_known(ExtractConfig, params))


def _train(params: dict[str, Any]) -> None:
    from dflash.train.settings import train_config

    train_config(**params)


def _eval(params: dict[str, Any]) -> None:
    from dflash.evaluate.config import EvalConfig

    if params["server"] is None:
        EvalConfig(drafter=Path(), **_known(EvalConfig, params))


_CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "regenerate": _regenerate,
    "extract": _extract,
    "train": _train,
    "eval": _eval,
}
