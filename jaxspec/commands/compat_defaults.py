"""SGLang's and vLLM's flags for features that jaxspec lacks: the default, which asks for nothing, is accepted, others refused."""

from collections.abc import Mapping
from types import MappingProxyType

DEFAULTS: Mapping[str, str] = MappingProxyType({
    "LoRA adapters are not supported": """
        --max-loras-per-batch=8 --lora-backend=csgmv|triton --max-lora-chunk-size=16 --lora-eviction-policy=lru
        --lora-drain-wait-threshold=0 --max-loras=1 --max-lora-rank=16 --lora-dtype=auto --lora-extra-vocab-size=256
        --no-enable-lora --no-enable-lora-bias --no-fully-sharded-loras""",
    "models take text only": """
        --mm-max-concurrent-calls=32 --mm-per-request-timeout=10 --mm-process-config={} --limit-mm-per-prompt={}
        --media-io-kwargs={} --mm-processor-cache-gb=4 --mm-processor-cache-type=lru --mm-shm-cache-max-object-size-mb=128
        --mm-encoder-tp-mode=weights --encoder-transfer-backend=zmq_to_scheduler --encoder-urls=[] --allowed-local-media-path=''
        --no-enable-mm-embeds --no-interleave-mm-strings --no-skip-mm-profiling --no-disable-chunked-mm-input""",
    "mixtures of experts are not supported": """
        --ep=1 --ep-size=1 --expert-parallel-size=1 --moe-data-parallel-size=1 --moe-dp-size=1 --moe-a2a-backend=none
        --moe-runner-backend=auto --flashinfer-mxfp4-moe-precision=default --deepep-mode=auto --deepep-dispatcher-output-dtype=auto
        --ep-num-redundant-experts=0 --init-expert-location=trivial --eplb-algorithm=auto --eplb-rebalance-num-iterations=1000
        --eplb-min-rebalancing-utilization-threshold=1 --elastic-ep-backend=none --tbo-token-distribution-threshold=0.48
        --kt-method=AMXINT4 --kt-threadpool-count=2 --expert-placement-strategy=linear --all2all-backend=allgather_reducescatter
        --no-enable-expert-parallel --no-enable-eplb --no-enable-elastic-ep""",
    "prefill and decoding run in one server": """
        --disaggregation-mode=null --disaggregation-transfer-backend=mooncake --disaggregation-bootstrap-port=8998
        --disaggregation-decode-polling-interval=1 --num-reserved-decode-tokens=512 --sm-group-num=8""",
    "weights and cache stay on the device": """
        --hicache-ratio=2 --hicache-size=0 --hicache-write-policy=write_through --hicache-io-backend=kernel
        --hicache-mem-layout=layer_first --hicache-storage-prefetch-policy=best_effort --kv-offloading-backend=native
        --cpu-offload-gb=0 --offload-group-size=-1 --offload-num-in-group=1 --offload-prefetch-step=1 --offload-mode=cpu
        --no-enable-sleep-mode""",
    "there are no layers of this kind": """
        --mamba-ssm-dtype=float32 --mamba-full-memory-ratio=0.9 --mamba-scheduler-strategy=auto --mamba-track-interval=256
        --mamba-cache-dtype=auto --mamba-ssm-cache-dtype=auto --mamba-cache-mode=none --swa-full-tokens-ratio=0.8
        --dsa-prefill-backend=flashmla_sparse --dsa-decode-backend=fa3""",
    "--tp-size devices run the model, in one process on each of --nnodes hosts": """
        --pp-size=1 --pipeline-parallel-size=1 --pp=1 -pp=1 --pp-async-batch-depth=0 --attention-context-parallel-size=1
        --attn-cp-size=1 --decode-context-parallel-size=1 -dcp=1 --prefill-context-parallel-size=1 -pcp=1
        --cp-kv-cache-interleave-size=1 --dcp-kv-cache-interleave-size=1 --dcp-comm-backend=ag_rs --base-gpu-id=0 --gpu-id-step=1
        --api-server-count=1 --tokenizer-worker-num=1 --load-balance-method=auto|round_robin --data-parallel-backend=mp
        --data-parallel-size-local=1 --data-parallel-rank=0 --data-parallel-rpc-port=29550 --master-addr=127.0.0.1
        --master-port=29501 --worker-cls=auto --worker-extension-cls='' --ubatch-size=0 --dbo-decode-token-threshold=32
        --dbo-prefill-token-threshold=512 --no-enable-dbo --no-numa-bind --no-data-parallel-external-lb
        --no-data-parallel-hybrid-lb --no-disable-custom-all-reduce""",
    "the model's own files say it": """
        --model-impl=auto --json-model-override-args={} --hf-overrides={} --override-generation-config={} --runner=auto|generate
        --convert=auto|none --task=auto|generate --config-format=auto --weight-version=default --torchao-config=''
        --tokenizer-mode=auto --tokenizer-backend=auto|huggingface""",
    "the format is read from the files": """
        --load-format=auto|safetensors|pt --speculative-draft-load-format=auto|safetensors|pt --model-loader-extra-config={}
        --safetensors-load-strategy=lazy --pt-load-map-location=cpu --ignore-patterns=original/**/*
        --weight-loader-prefetch-num-threads=4 --remote-instance-weight-loader-backend=nccl""",
    "XLA compiles every program": """
        --fp8-gemm-backend=auto --fp4-gemm-backend=flashinfer_cutlass|auto --piecewise-cuda-graph-compiler=eager
        --piecewise-cuda-graph-max-tokens=4096 --no-enforce-eager --no-disable-cascade-attn""",
    "requests are served by priority and arrival, and preempted when the cache is full": """
        --preemption-mode=recompute --max-num-partial-prefills=1 --max-long-partial-prefills=1 --long-prefill-token-threshold=0
        --num-lookahead-slots=0 --prefill-delayer-max-delay-passes=30 --prefill-delayer-max-delay-ms=5000
        --priority-scheduling-preemption-threshold=10 --radix-eviction-policy=lru --scheduler-recv-interval=1
        --prefix-caching-hash-algo=sha256 --prefix-cache-retention-interval=0 --dynamic-batch-tokenizer-batch-size=32
        --dynamic-batch-tokenizer-batch-timeout=0.002""",
    "the API has no such choice": """
        --response-role=assistant --chat-template-content-format=auto --max-logprobs=20 --logprobs-mode=raw_logprobs
        --fingerprint-mode=full --tool-parser-plugin='' --reasoning-parser-plugin='' --allowed-methods=["*"]
        --allowed-headers=["*"] --ssl-cert-reqs=0 --h11-max-incomplete-event-size=4194304 --h11-max-header-count=256
        --fastapi-root-path='' --file-storage-path=sglang_storage --no-allow-credentials --no-enable-force-include-usage
        --no-return-tokens-as-token-ids --no-trust-remote-code --no-enable-prompt-embeds --no-skip-tokenizer-init""",
    "the log and /metrics have no such choice": """
        --log-requests-format=text --gc-warning-threshold-secs=0 --tokenizer-metrics-custom-labels-header=x-custom-labels
        --otlp-traces-endpoint=localhost:4317 --kv-cache-metrics-sample=0.01 --load-watch-interval=0.1""",
})  # fmt: skip
"""Why only the default is supported, and for which flags, in the notation of `Ignored`."""
