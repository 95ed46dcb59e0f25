"""The target itself answers, on this machine's device, several prompts of about the same length at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dflash.decode.batched import generate_batch
from dflash.decode.config import DecodeConfig
from dflash.decode.loop import generate
from dflash.dist import device_of
from dflash.extract.chat import ChatRenderer, Rendered, tokenise
from dflash.extract.conversation import Message
from dflash.regenerate.answers import Answer
from dflash.regenerate.config import THINKING, RegenerateConfig
from dflash.target import DTYPES, Target, load_tokenizer
from dflash.world import World


class Prompter:
    """Renders turns with the target's chat template.

    Args:
        config: Names the target.
    """

    def __init__(self, config: RegenerateConfig) -> None:
        assert config.target is not None  # checked by the configuration
        self.tokenizer: Any = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
        thinking = THINKING[config.thinking]
        self._renderer = ChatRenderer(
            self.tokenizer, {} if thinking is None else {"enable_thinking": thinking}
        )

    def ids(self, messages: list[Message]) -> list[int]:
        """Token ids of these turns with the generation prompt behind them.

        Raises:
            Unusable: the template refuses them.
        """
        text = self._renderer.render(messages, generation_prompt=True)
        return tokenise(self.tokenizer, [Rendered(text, ())])[0][0].tolist()  # type: ignore[no-any-return]


class LocalTarget:
    """The target, loaded to answer.

    Args:
        config: Names it, and how it samples.

    Raises:
        TargetError: it cannot be loaded.
    """

    def __init__(self, config: RegenerateConfig) -> None:
        self.config, self.prompter = config, Prompter(config)
        assert config.target is not None
        self._target = Target(
            config.target,
            (0,),  # nothing is read from it
            dtype=DTYPES[config.dtype],
            device=device_of(World()),
            trust_remote_code=config.trust_remote_code,
        )

    def answers(self, prompts: Sequence[list[int]], first: int) -> list[Answer]:
        """Answers to prompts of token ids; the seed of each is that of its number, counted from `first`."""
        c = self.config
        decoding = DecodeConfig(c.max_new_tokens, c.temperature, c.seed + first, top_k=c.top_k, top_p=c.top_p)
        ids = [torch.tensor(prompt) for prompt in prompts]
        if len(ids) == 1:
            found = [generate(self._target, None, ids[0], decoding)]
        else:
            found = generate_batch(self._target, None, ids, decoding)
        return [self._answer(result.tokens) for result in found]

    def _answer(self, tokens: list[int]) -> Answer:
        ended = tokens[-1] in self._target.stop_tokens
        text = self.prompter.tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True)
        return Answer(text, len(tokens), truncated=not ended)
