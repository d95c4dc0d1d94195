"""transformers' own decision pipeline, as a system that `processor bench` times."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from processor.engine.bench_systems import DISTINCT
from processor.engine.model import LoadedModel

_WORDS = (
    "order amount customer address country account invoice delivery payment review limit first "
    "second night market price letter number travel answer window station river summer paper"
).split()
_QUESTION = "label"


class Unavailable(Exception):
    """Why the decision pipeline is left out."""


class Decision:
    """`DecisionPipeline`: renders a request into one chat prompt, tokenizes it and computes all of
    it at every call, batch of one. `tokens`: length of its prompts."""

    name = "decision"

    def __init__(self, loaded: LoadedModel, stock: PreTrainedModel, tokens: int, seed: int) -> None:
        """Raises `Unavailable` where transformers has no such pipeline, or it cannot serve this
        model."""
        try:
            self._pipeline = _pipeline(loaded, stock)
            self._options = self._pipeline.label_token_ids(("A", "B"))
            draw = random.Random(seed)
            self._requests = [self._request(tokens, draw) for _ in range(DISTINCT)]
            self.tokens = len(self.prompt(0))
        except Unavailable:
            raise
        except Exception as error:  # a template, a tokenizer or a label that it cannot take
            reason = (str(error).splitlines() or [""])[0]
            raise Unavailable(f"{type(error).__name__}: {reason}") from error

    def key(self, place: int) -> str:
        return f"{place % DISTINCT} of the decision pipeline"

    def score(self, places: Sequence[int]) -> list[tuple[float, ...]]:
        return [_log_probs(self._pipeline(self._requests[n % DISTINCT])) for n in places]

    def prompt(self, place: int) -> list[int]:
        """The token ids that it computes for an event."""
        return self._ids(self._requests[place % DISTINCT])

    @property
    def labels(self) -> list[int]:
        return list(self._options)

    def _ids(self, request: dict[str, Any]) -> list[int]:
        [(inputs, _)] = self._pipeline.preprocess(request)["prompts"]
        ids: list[int] = inputs["input_ids"][0].tolist()
        return ids

    def _request(self, tokens: int, draw: random.Random) -> dict[str, Any]:
        """A request whose prompt is about `tokens` long."""
        words = draw.choices(_WORDS, k=2 * tokens)
        count, least = tokens, len(self._ids(_ask([])))
        if least > tokens:
            raise Unavailable(f"its template alone takes {least} tokens")
        for _ in range(12):
            length = len(self._ids(_ask(words[:count])))
            if abs(length - tokens) <= max(2, tokens // 100):
                return _ask(words[:count])
            per_word = max(0.2, (length - least) / count)
            count = max(1, min(len(words), count + round((tokens - length) / per_word)))
        raise Unavailable(f"no text of {tokens} tokens was found")


def _pipeline(loaded: LoadedModel, stock: PreTrainedModel) -> Any:
    try:
        from transformers.decision import DecisionConfig
        from transformers.pipelines.decision import DecisionPipeline
    except ImportError as error:
        raise Unavailable("this version of transformers has none") from error
    build: Any = DecisionPipeline
    return build(
        model=stock,
        tokenizer=copy.deepcopy(loaded.tokenizer),  # the pipeline adds tokens to it
        device=stock.device,
        decision_config=DecisionConfig(),
    )


def _ask(words: Sequence[str]) -> dict[str, Any]:
    question = {
        "type": "choice",
        "instructions": "Which label fits?",
        "criteria": {"approve": None, "decline": None},
    }
    return {"state": " ".join(words), "questions": {_QUESTION: question}}


def _log_probs(answers: Any) -> tuple[float, ...]:
    probabilities = answers[_QUESTION]["probabilities"].values()
    return tuple(math.log(p) if p > 0 else -math.inf for p in probabilities)
