#!/usr/bin/env python3
"""Token ids as vLLM's own front end computes them, without a server or a GPU.

  transformers_ids.py TOKENIZER_DIR [MODEL_TYPE]

Reads one JSON object a line on stdin: {"api": "chat" | "completions" | "responses" | "messages", "body": {...}} and
answers one line each: {"ids": [[...], ...], "text": [...]} (one list per prompt) or {"error": "..."}. Runs vLLM's
request models, its message parsing, transformers' chat template and tokenizer: everything that a server does with a
request before the engine sees it.

TOKENIZER_DIR holds tokenizer.json and tokenizer_config.json. A config.json is made up beside them in a temporary
directory, because transformers chooses its tokenizer class by the model type (without one, DeepSeek's tokenizer is
loaded as a Llama one and gives other ids).
"""

import asyncio
import json
import os
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

MODEL_TYPES = {"qwen": "qwen3", "llama": "llama", "deepseek": "deepseek_v3"}


def prepare(tokenizer_dir, model_type, out):
    for name in os.listdir(tokenizer_dir):
        if name != "config.json":
            os.symlink(os.path.abspath(os.path.join(tokenizer_dir, name)), os.path.join(out, name))
    architectures = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
    config = {
        "architectures": [architectures[model_type]], "model_type": model_type, "torch_dtype": "bfloat16",
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 131072, "vocab_size": 160000,
        "rms_norm_eps": 1e-6, "hidden_act": "silu",
    }
    if model_type == "deepseek_v3":
        config |= {
            "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
            "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
        }
    with open(os.path.join(out, "config.json"), "w") as f:
        json.dump(config, f)


def load(model_dir):
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.renderers.registry import renderer_from_config

    model = ModelConfig(model=model_dir, tokenizer=model_dir, dtype="bfloat16", max_model_len=131072)
    renderer = renderer_from_config(VllmConfig(model_config=model, device_config=DeviceConfig("cpu")))
    online = OnlineRenderer(
        model, renderer, request_logger=None, chat_template=None, chat_template_content_format="auto",
        enable_auto_tools=True, tool_parser="hermes", trust_request_chat_template=True,
    )
    return online


def handle(online, loop, line):
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    case = json.loads(line)
    body = case["body"]
    if case["api"] == "completions":
        result = loop.run_until_complete(online.render_completion(CompletionRequest.model_validate(body)))
        inputs = result
    elif case["api"] == "responses":
        result = loop.run_until_complete(online.render_responses(ResponsesRequest.model_validate(body)))
        inputs = None if isinstance(result, ErrorResponse) else [result.engine_input]
    else:
        if case["api"] == "messages":
            request = AnthropicMessagesRequest.model_validate(body)
            effort = "none"
            if request.thinking is not None and request.thinking.type == "disabled":
                effort = probe_effort(online, loop)
            merge = AnthropicServingMessages._should_merge_inline_system(online)
            chat = AnthropicServingMessages.to_chat_completion_request(
                request, merge_inline_system=merge, disabled_thinking_effort=effort)
        else:
            chat = ChatCompletionRequest.model_validate(body)
        result = loop.run_until_complete(online.render_chat(chat))
        inputs = None if isinstance(result, ErrorResponse) else result[1]
    if isinstance(result, ErrorResponse):
        return {"error": result.error.message}
    return {
        "ids": [list(i["prompt_token_ids"]) for i in inputs],
        "text": [i.get("prompt") for i in inputs],
    }


def probe_effort(online, loop):
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    serving = AnthropicServingMessages.__new__(AnthropicServingMessages)
    serving.online_renderer = online
    return loop.run_until_complete(serving._probe_disabled_thinking_effort())


def main():
    tokenizer_dir = sys.argv[1].rstrip("/")
    name = os.path.basename(tokenizer_dir).lower()
    guessed = next((t for k, t in MODEL_TYPES.items() if k in name), "qwen3")
    model_type = sys.argv[2] if len(sys.argv) > 2 else guessed
    # vLLM and transformers write notes to stdout: answers go to a copy of it.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as model_dir:
        prepare(tokenizer_dir, model_type, model_dir)
        online = load(model_dir)
        loop = asyncio.new_event_loop()
        for line in sys.stdin:
            try:
                answer = handle(online, loop, line)
            except Exception as e:  # one bad case must not end the others
                answer = {"error": f"{type(e).__name__}: {e}"[:2000]}
            out.write(json.dumps(answer) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
