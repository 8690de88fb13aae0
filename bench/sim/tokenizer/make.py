#!/usr/bin/env python3
"""Makes tokenizer.json: byte-level BPE in which each word of words.txt, with a space before it, is one token.

Byte pairs are merged by how often they occur in the list until every word is whole. Nothing but Python is needed."""

import json
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
ROLES = ["system", "user", "assistant", "tool"]


def alphabet():
    """Bytes as the printable characters that byte-level tokenizers write for them."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(other)}


def merges(words):
    parts = {word: list(word) for word in words}
    order = []
    while True:
        pairs = Counter()
        for piece in parts.values():
            pairs.update(zip(piece, piece[1:]))
        if not pairs:
            return order
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        order.append(best)
        for piece in parts.values():
            i = 0
            while i + 1 < len(piece):
                if (piece[i], piece[i + 1]) == best:
                    piece[i : i + 2] = ["".join(best)]
                i += 1


def main():
    letters = alphabet()
    words = sorted(set((HERE / "words.txt").read_text().split()))
    listed = ["".join(letters[b] for b in f" {word}".encode()) for word in words] + ROLES
    order = merges(listed)
    tokens = [letters[b] for b in range(256)]
    tokens += dict.fromkeys(a + b for a, b in order)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    added = [
        {
            "id": len(tokens) + i,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, content in enumerate(SPECIAL)
    ]
    split = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in order],
        },
    }
    with open(HERE / "tokenizer.json", "w") as out:
        json.dump(tokenizer, out, ensure_ascii=True, separators=(",", ":"))
        out.write("\n")
    print(f"{len(words)} words, {len(tokens) + len(SPECIAL)} tokens")


main()
