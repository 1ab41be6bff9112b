"""Fields of OpenAI's, SGLang's and vLLM's requests for what this server lacks. Each takes null and the value that asks for nothing.

From the published request classes of SGLang 0.5.23 and vLLM 0.33.0 (22 November 2026). Routers write all their defaults into
requests, so a default must pass; any other value is refused by name.
"""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import create_model

from jaxspec.server.fields import RequestModel, only


def only_null(names: str) -> dict[str, tuple[Any, ...]]:
    """Fields that take nothing besides null."""
    return dict.fromkeys(names.split(), ())


OPENAI: dict[str, tuple[Any, ...]] = only_null(
    """
    structured_outputs regex ebnf lora_path session_id session_params images_config mm_processor_kwargs
    custom_logit_processor custom_params watermark watermarking rid extra_key cache_salt data_parallel_rank
    thinking_token_budget truncate_prompt_tokens truncation_side logprob_token_ids prompt_logprobs
    return_tokens_as_token_ids return_mm_kwargs kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
    stream_interval
    """
) | {
    "response_format": ({"type": "text"},),
    "bad_words": ([],),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "routed_experts_prompt_start": (0,),
    "return_cached_tokens_details": (False,),
    "return_weight_versions": (False,),
    "return_token_offsets": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "spaces_between_special_tokens": (True,),
    "mm_payload": ("tensors",),
}
"""Completions and chat completions; values besides null."""
COMPLETION: dict[str, tuple[Any, ...]] = only_null(
    """
    json_schema custom_labels prompt_embeds
    """
) | {
    "suffix": ("",),
    "add_special_tokens": (True,),
}
CHAT: dict[str, tuple[Any, ...]] = only_null(
    """
    sampling_logprobs_mode thinking task max_dynamic_patch min_dynamic_patch video_config input_ids documents
    media_io_kwargs return_prompt_text audio prediction web_search_options chat_template
    prompt_cache_retention prompt_cache_options moderation
    """
) | {
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "return_prompt_token_ids": (False,),
    "return_meta_info": (False,),
    "return_input_ids_in_sglext": (False,),
    "return_output_ids_in_sglext": (False,),
    "return_sampling_mask": (False,),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (True,),
    "continue_final_message": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "include_reasoning": (True,),
    "use_audio_in_video": (False,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
}
GENERATE: dict[str, tuple[Any, ...]] = only_null(
    """
    token_ids_logprob image_data audio_data video_data lora_path lora_id session_id session_params input_embeds mm_hashes
    mm_content_hashes video_config watermark return_sampling_mask sampling_logprobs_mode modalities custom_logit_processor
    positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank
    data_parallel_rank disagg_prefill_dp_rank routing_key conversation_id http_worker_ipc max_thinking_tokens extra_key
    custom_labels external_trace_header received_time need_wait_for_mm_inputs num_items_assigned encoder_urls
    max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch images_config mm_processor_kwargs
    multi_item_delimiter_indices token_indices_to_pool cache_salt kv_hints
    """
) | {
    "return_hidden_states": (False,),
    "use_audio_in_video": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (False,),
    "log_metrics": (True,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "return_indexer_topk": (False,),
    "background": (False,),
    "require_reasoning": (False,),
    "no_logs": (False,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "return_prompt_token_ids": (False,),
}

if TYPE_CHECKING:

    class OpenAINeutralFields(RequestModel): ...

    class CompletionNeutralFields(RequestModel): ...

    class ChatNeutralFields(RequestModel): ...

    class GenerateNeutralFields(RequestModel): ...

else:

    def _fields(neutral: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        return {name: (Annotated[Any, only(*values)], None) for name, values in neutral.items()}

    OpenAINeutralFields = create_model("OpenAINeutralFields", __base__=RequestModel, **_fields(OPENAI))
    CompletionNeutralFields = create_model("CompletionNeutralFields", __base__=RequestModel, **_fields(COMPLETION))
    ChatNeutralFields = create_model("ChatNeutralFields", __base__=RequestModel, **_fields(CHAT))
    GenerateNeutralFields = create_model("GenerateNeutralFields", __base__=RequestModel, **_fields(GENERATE))
