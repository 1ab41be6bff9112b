"""The request of SGLang's native API, field by field; each field's meaning is SGLang's."""

from typing import Annotated, Any

from pydantic import Field

from jaxspec.server.fields import (
    MAX_INT,
    NAME_OR_NAMES,
    ListsOfTokenIds,
    Logprobs,
    Priority,
    RequestName,
    RequestNames,
    Strict,
    StringOrStrings,
    TokenIds,
    Tokens,
    TokensOrNone,
    described_as,
    only,
)
from jaxspec.server.sampling_fields import SamplingFields
from jaxspec.server.speculation import SpeculativeField

InputIds = Annotated[TokenIds | ListsOfTokenIds | None, described_as("a list of token ids or a list of lists of token ids")]


class NativeSampling(SamplingFields):
    """`sampling_params` of /generate."""

    max_new_tokens: Tokens | None = None
    """None: 128, or what is left of the context."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """None: 1.0."""
    sampling_seed: int | None = None
    """Completion i of a prompt has the seed + i."""
    min_new_tokens: TokensOrNone | None = None

    # Not supported yet.
    json_schema: Annotated[Any, only()] = None
    regex: Annotated[Any, only()] = None
    ebnf: Annotated[Any, only()] = None
    structural_tag: Annotated[Any, only()] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None


class GenerateRequest(Strict):
    """POST /generate. Either text or input_ids; lists of them get a list of answers."""

    text: StringOrStrings = None
    input_ids: InputIds = None
    sampling_params: NativeSampling = NativeSampling()
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Logprobs | None = None
    """With return_logprob: so many likeliest tokens too."""
    logprob_start_len: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    """With return_logprob: the first token of the prompt that is reported; -1: only the output is. When streaming, the prompt's
    come with the last event."""
    return_text_in_logprobs: bool | None = None
    priority: Priority | None = None
    """Larger is more urgent."""
    speculative: SpeculativeField | None = None
    """Our own: how this request is speculated on."""
    rid: Annotated[RequestName | RequestNames | None, described_as(NAME_OR_NAMES)] = None
    """The request's name for /abort_request and meta_info.id; a list names each prompt."""

    # Not supported yet.
    token_ids_logprob: Annotated[Any, only()] = None
    return_hidden_states: Annotated[Any, only(False)] = None
    image_data: Annotated[Any, only()] = None
    audio_data: Annotated[Any, only()] = None
    video_data: Annotated[Any, only()] = None
    lora_path: Annotated[Any, only()] = None
    session_params: Annotated[Any, only()] = None

    @property
    def prompt_start(self) -> int | None:
        """The first token of the prompt whose log probability is wanted; None if none is."""
        start = self.logprob_start_len
        return None if not self.return_logprob or start is None or start < 0 else start
