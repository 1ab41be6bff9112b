"""The responses of /v1/completions."""

from jaxspec.engine.request import GenerationOutput, Update
from jaxspec.server.logprobs import CompletionLogprobs, completion_logprobs, join, prompt_offsets
from jaxspec.server.openai.objects import Choice, OpenAIBuilder, OpenAIEvent, Usage


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class CompletionEvent(OpenAIEvent):
    choices: list[CompletionChoice]


class CompletionResponse(CompletionEvent):
    usage: Usage


class CompletionBuilder(OpenAIBuilder):
    id_prefix = "cmpl"
    whole_type, whole_object = CompletionResponse, "text_completion"
    event_type, event_object = CompletionEvent, "text_completion"

    def choice(self, index: int, output: GenerationOutput) -> Choice:
        echo = self._echo(index)
        logprobs = None if output.logprobs is None else self._logprobs(output, len(echo))
        if logprobs is not None and output.prompt_logprobs is not None and self._batch.echo is not None:
            asked, written = self._batch.prompt_of(index), self._batch.echo[index // self._batch.n]
            offsets = prompt_offsets(self._model, asked.prompt, written, skip_special_tokens=asked.params.skip_special_tokens)
            logprobs = join(completion_logprobs(self._model, asked.prompt, output.prompt_logprobs, offsets), logprobs)
        return CompletionChoice(index=index, text=echo + output.text, logprobs=logprobs, finish_reason=output.finish_reason)

    def pieces(self, index: int, update: Update, is_first: bool) -> list[Choice]:
        text = (self._echo(index) if is_first else "") + update.text
        logprobs = self._logprobs(update, 0) if update.logprobs else None  # echo with logprobs can't be streamed
        if not text and logprobs is None and update.output is None and not self._tells_all:
            return []
        finish_reason = None if update.output is None else update.output.finish_reason
        return [CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)]

    def _echo(self, index: int) -> str:
        """The prompt, if the text begins with it."""
        if self._batch.echo is None:
            return ""
        text = self._batch.echo[index // self._batch.n]
        if text is not None:
            return text
        assert self._model.tokenizer is not None
        asked = self._batch.prompt_of(index)
        return str(self._model.tokenizer.decode(list(asked.prompt), skip_special_tokens=asked.params.skip_special_tokens))

    def _logprobs(self, result: GenerationOutput | Update, before: int) -> CompletionLogprobs:
        """The log probabilities of generated tokens; `before`: how many characters of the choice's text precede the output."""
        assert result.logprobs is not None and result.text_offsets is not None
        return completion_logprobs(
            self._model, result.token_ids, result.logprobs, (before + offset for offset in result.text_offsets)
        )
