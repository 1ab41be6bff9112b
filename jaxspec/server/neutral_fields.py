"""Fields of OpenAI's, SGLang's and vLLM's requests for what this server lacks. Each takes null and the value that asks for nothing.

From the published request classes of SGLang 0.5.23 and vLLM 0.33.0 (22 November 2026). Routers write all their defaults into
requests, so a default must pass; any other value is refused by name.
"""

from collections.abc import Callable
from typing import Annotated, Any

from jaxspec.server.fields import Only, RequestModel, adding

type Neutral = dict[str, tuple[Any, ...]]
"""Fields, and the values besides null that each takes."""


def each(names: str, *values: Any) -> Neutral:
    """Fields that all take these values; without values: only null."""
    return dict.fromkeys(names.split(), values)


OPENAI = (
    each("""
        lora_path session_id session_params images_config mm_processor_kwargs
        custom_logit_processor custom_params watermark watermarking rid extra_key data_parallel_rank
        thinking_token_budget truncate_prompt_tokens truncation_side logprob_token_ids prompt_logprobs
        return_tokens_as_token_ids return_mm_kwargs kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
        bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank ngram_corpus_id
    """)
    | each("return_hidden_states return_routed_experts return_cached_tokens_details return_weight_versions", False)
    | each("return_token_offsets use_beam_search", False)
    | each("routed_experts_start_len routed_experts_prompt_start", 0)
    | each("bad_words stop_regex", [])
    | each("length_penalty", 1.0, 1)
    | each("stream_interval", 1)
    | each("spaces_between_special_tokens", True)
    | each("mm_payload", "tensors")
)
"""Completions and chat completions."""
COMPLETION = each("custom_labels prompt_embeds") | each("suffix", "") | each("add_special_tokens", True)
CHAT = (
    each("""
        sampling_logprobs_mode thinking task max_dynamic_patch min_dynamic_patch video_config input_ids documents
        media_io_kwargs return_prompt_text audio prediction web_search_options chat_template
        prompt_cache_retention prompt_cache_options moderation
    """)
    | each("""
        store return_prompt_token_ids return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext
        return_sampling_mask return_flat_raw_output_top_logprobs use_audio_in_video echo
        add_special_tokens
    """, False)
    | each("stream_reasoning return_flat_raw_top_logprobs_b64", True)
    | each("function_call", "none", "auto")
    | each("functions", [])
    | each("modalities", ["text"])
    | each("verbosity", "medium")
    | each("service_tier", "auto", "default")
)  # fmt: skip
RESPONSES = (
    each("""
        previous_response_id conversation prompt response_format background_options context_management image moderation
        access_programs max_tool_calls prompt_cache_options prompt_cache_retention
    """)
    | each("background return_token_ids return_spec_tokens_details", False)
    | each("n", 1)
    | each("truncation", "disabled")
    | each("service_tier", "auto", "default")
)
"""The Responses API: what it keeps between requests, runs itself, or words differently from chat completions."""
MESSAGES = (
    each("container mcp_servers inference_geo diagnostics user_profile_id workspace_id compaction fallback_credit_token")
    | each("billing_policy", {"type": "billing_policy", "bill_to": "self"})
    | each("fallbacks", "default")
    | each("speed", "standard")
    | each("service_tier", "auto", "standard_only")
    | each("context_management", {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
)
"""Anthropic's Messages API, its beta included. The last value keeps all thinking, as is done here."""
GENERATE = (
    each("""
        token_ids_logprob image_data audio_data video_data lora_id session_id session_params input_embeds mm_hashes
        mm_content_hashes video_config watermark return_sampling_mask sampling_logprobs_mode modalities custom_logit_processor
        positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank
        data_parallel_rank disagg_prefill_dp_rank routing_key conversation_id http_worker_ipc max_thinking_tokens extra_key
        custom_labels external_trace_header received_time need_wait_for_mm_inputs num_items_assigned encoder_urls
        max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch images_config mm_processor_kwargs
        multi_item_delimiter_indices token_indices_to_pool kv_hints
    """)
    | each("""
        return_hidden_states use_audio_in_video return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs
        return_flat_raw_top_logprobs_b64 return_routed_experts return_indexer_topk background require_reasoning no_logs
        return_bytes return_entropy return_prompt_token_ids
    """, False)
    | each("log_metrics", True)
    | each("routed_experts_start_len", 0)
    | each("lora_path", "")
)  # fmt: skip
GENERATE_SAMPLING = (
    each("custom_params") | each("spaces_between_special_tokens", True) | each("stop_regex", []) | each("stream_interval", 1)
)
"""`sampling_params` of /generate."""
TOKENIZE = each("chat_template mm_processor_kwargs media_io_kwargs tool_choice reasoning_effort")
"""/tokenize. No endpoint takes a template: it is a program."""


def neutral[Model: RequestModel](fields: Neutral) -> Callable[[type[Model]], type[Model]]:
    """The decorator of a request that has these fields, too."""
    return adding({name: (Annotated[Any, Only(*values)], None) for name, values in fields.items()})
