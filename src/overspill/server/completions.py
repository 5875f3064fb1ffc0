"""POST /v1/completions"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from overspill.serve.params import DECODER_FIELDS, Piece, Result
from overspill.server.answers import Job
from overspill.server.errors import invalid
from overspill.server.forms import Form
from overspill.server.logprobs import Offsets, TokenTexts
from overspill.server.plan import Plan, check_length
from overspill.server.protocol import CompletionRequest
from overspill.server.sampling import samples_of, sampling_params, schema_of

if TYPE_CHECKING:
    from overspill.serve.llm import LLM

_DEFAULT_TOKENS = 16  # of OpenAI's API


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts of a body as a list of texts and token ids."""
    prompt: Any = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def plan_completion(
    llm: "LLM", body: CompletionRequest, model: str, defaults: Mapping[str, Any]
) -> Plan:
    """Return the plan of a completion. It takes long to tokenize a long prompt. `defaults` are for
    the languages and the decoder prompt."""
    if body.echo and llm.has_encoder:
        raise invalid("echo is not supported: answers of this model continue no prompt", "echo")
    own = {name: getattr(body, name) for name in DECODER_FIELDS}
    given = {name: value for name, value in own.items() if value is not None}
    most = body.max_tokens or _DEFAULT_TOKENS
    schema = schema_of(body.response_format)
    params = sampling_params(body, most, body.logprobs, schema, {**defaults, **given})
    llm.check_params(params)
    src_lang, params = params.src_lang, dataclasses.replace(params, src_lang=None)
    n = body.n or 1
    jobs, echoes = [], []
    for prompt in prompts_of(body):
        if body.src_lang is not None and not isinstance(prompt, str):
            raise invalid("src_lang is for texts: token ids are taken as they are", "src_lang")
        if isinstance(prompt, str):
            check_length(llm.least_tokens(prompt), llm, "prompt", "at least ")
        tokens = llm.encode(prompt, src_lang) if isinstance(prompt, str) else prompt
        if not tokens:
            raise invalid("the prompt is empty; give at least one token", "prompt")
        check_length(len(tokens), llm, "prompt")
        jobs += [Job(tokens, each) for each in samples_of(params, n)]
        echo = ""
        if body.echo:
            echo = prompt if isinstance(prompt, str) else llm.decode(prompt)
        echoes += [echo] * n
    texts = None if body.logprobs is None else TokenTexts(llm.token_bytes)
    form = CompletionForm(model, echoes, texts, body.logprobs or 0, body.includes_usage)
    return Plan(jobs, n, form)


class CompletionForm(Form):
    """Form of completions."""

    def __init__(
        self,
        model: str,
        echoes: Sequence[str],
        texts: TokenTexts | None,
        top: int,
        with_usage: bool,
    ) -> None:
        """`echoes` are put before the answers; `texts` are for log probabilities, if they are asked
        for."""
        super().__init__("text_completion", "cmpl", model, with_usage)
        self._echoes = echoes
        self._texts = texts
        self._top = top
        self._offsets = [Offsets() for _ in echoes]

    def opening(self) -> bytes:
        return b"".join(self._text(index, echo) for index, echo in enumerate(self._echoes) if echo)

    def events(self, index: int, piece: Piece) -> bytes:
        logs = "null"
        if self._texts is not None and piece.logprobs:
            logs = json.dumps(self._logs(index, piece.token_ids, piece.logprobs))
        if not piece.text and logs == "null" and piece.finish_reason is None:
            return b""
        return self._text(index, piece.text, logs, json.dumps(piece.finish_reason))

    def _text(self, index: int, text: str, logs: str = "null", reason: str = "null") -> bytes:
        fields = f'"index":{index},"text":{json.dumps(text)},"logprobs":{logs}'
        return self._event(f'{{{fields},"finish_reason":{reason}}}')

    def _logs(self, index: int, tokens: Sequence[int], logprobs: Any) -> dict[str, Any]:
        assert self._texts is not None
        return self._texts.completion(tokens, logprobs, self._top, self._offsets[index])

    def choice(self, index: int, result: Result) -> dict[str, Any]:
        logs = None
        if self._texts is not None and result.logprobs is not None:
            logs = self._logs(index, result.token_ids, result.logprobs)
        return {
            "index": index,
            "text": self._echoes[index] + result.text,
            "logprobs": logs,
            "finish_reason": result.finish_reason,
        }
