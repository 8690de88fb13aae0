#!/usr/bin/env python3
"""make_model.py DIR: adds to a directory with a Qwen3 tokenizer what makes it a model that vLLM serves with random weights.

Two layers with one KV head of 32 in bfloat16: 2 * (K and V) * 32 * 2 bytes = 256 bytes of KV a token, so that
megabytes make caches of thousands of blocks.
"""

import json
import pathlib
import sys

MAX_CONTEXT = 32768


def main():
    directory = pathlib.Path(sys.argv[1])
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    added = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    last = max([*tokenizer["model"]["vocab"].values(), *added.values()])
    end_of_turn, end_of_text = added["<|im_end|>"], added["<|endoftext|>"]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": (last + 64) // 64 * 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": MAX_CONTEXT,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": end_of_turn,
        "pad_token_id": end_of_text,
    }
    generation = {"eos_token_id": [end_of_turn, end_of_text], "pad_token_id": end_of_text, "do_sample": False}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2))


if __name__ == "__main__":
    main()
