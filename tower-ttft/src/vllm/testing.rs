//! Helpers of this module's tests: what an engine would send.

use crate::events::{BlockStored, ExtraKey, GroupKind, KvEvent, Medium};
use rmp::encode as mp;

/// Which of vLLM's two encodings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// Up to 0.23.
    Array,
    /// From 0.24 on.
    Map,
}

/// One block of four tokens.
pub(crate) fn stored(hash: u64, parent: Option<u64>) -> KvEvent {
    KvEvent::Stored(BlockStored {
        hashes: vec![hash],
        parent,
        tokens: vec![1, 2, 3, 4],
        block_size: 4,
        lora_name: None,
        extra_keys: vec![vec![]],
        medium: Medium::Gpu,
        group: 0,
        kind: GroupKind::Full,
    })
}

/// The payload of a batch.
pub(crate) fn payload(encoding: Encoding, ts: f64, events: &[KvEvent]) -> Vec<u8> {
    let mut out = Vec::new();
    mp::write_array_len(&mut out, 3).unwrap();
    mp::write_f64(&mut out, ts).unwrap();
    mp::write_array_len(&mut out, events.len() as u32).unwrap();
    for event in events {
        write_event(&mut out, encoding, event);
    }
    mp::write_uint(&mut out, 0).unwrap();
    out
}

fn write_event(out: &mut Vec<u8>, encoding: Encoding, event: &KvEvent) {
    let (tag, fields) = match event {
        KvEvent::Stored(s) => ("BlockStored", stored_fields(s)),
        KvEvent::Removed(r) => (
            "BlockRemoved",
            vec![
                ("block_hashes", hashes(&r.hashes)),
                ("medium", text(Some(word(r.medium)))),
                ("group_idx", uint(r.group.into())),
            ],
        ),
        KvEvent::Cleared => ("AllBlocksCleared", vec![]),
    };
    match encoding {
        Encoding::Array => {
            mp::write_array_len(out, 1 + fields.len() as u32).unwrap();
            mp::write_str(out, tag).unwrap();
            for (_, value) in fields {
                out.extend(value);
            }
        }
        Encoding::Map => {
            mp::write_map_len(out, 1 + fields.len() as u32).unwrap();
            mp::write_str(out, "type").unwrap();
            mp::write_str(out, tag).unwrap();
            for (key, value) in fields {
                mp::write_str(out, key).unwrap();
                out.extend(value);
            }
        }
    }
}

fn stored_fields(s: &BlockStored) -> Vec<(&'static str, Vec<u8>)> {
    let mut tokens = Vec::new();
    mp::write_array_len(&mut tokens, s.tokens.len() as u32).unwrap();
    for token in &s.tokens {
        mp::write_uint(&mut tokens, (*token).into()).unwrap();
    }
    let mut extra = Vec::new();
    mp::write_array_len(&mut extra, s.extra_keys.len() as u32).unwrap();
    for keys in &s.extra_keys {
        if keys.is_empty() {
            mp::write_nil(&mut extra).unwrap();
            continue;
        }
        mp::write_array_len(&mut extra, keys.len() as u32).unwrap();
        for key in keys {
            match key {
                ExtraKey::Text(word) => mp::write_str(&mut extra, word).unwrap(),
                ExtraKey::Opaque => {
                    mp::write_array_len(&mut extra, 2).unwrap();
                    mp::write_str(&mut extra, "media").unwrap();
                    mp::write_uint(&mut extra, 7).unwrap();
                }
            }
        }
    }
    let kind = match s.kind {
        GroupKind::Full => "full_attention",
        GroupKind::Other => "sliding_window",
    };
    vec![
        ("block_hashes", hashes(&s.hashes)),
        (
            "parent_block_hash",
            s.parent.map_or_else(|| text(None), uint),
        ),
        ("token_ids", tokens),
        ("block_size", uint(s.block_size.into())),
        ("lora_id", text(None)),
        ("medium", text(Some(word(s.medium)))),
        ("lora_name", text(s.lora_name.as_deref())),
        ("extra_keys", extra),
        ("group_idx", uint(s.group.into())),
        ("kv_cache_spec_kind", text(Some(kind))),
    ]
}

fn word(medium: Medium) -> &'static str {
    match medium {
        Medium::Gpu => "GPU",
        Medium::Cpu => "cpu",
        Medium::Disk => "STORAGE",
        Medium::Other => "holographic",
    }
}

fn hashes(hashes: &[u64]) -> Vec<u8> {
    let mut out = Vec::new();
    mp::write_array_len(&mut out, hashes.len() as u32).unwrap();
    for hash in hashes {
        mp::write_uint(&mut out, *hash).unwrap();
    }
    out
}

fn uint(n: u64) -> Vec<u8> {
    let mut out = Vec::new();
    mp::write_uint(&mut out, n).unwrap();
    out
}

fn text(word: Option<&str>) -> Vec<u8> {
    let mut out = Vec::new();
    match word {
        Some(word) => mp::write_str(&mut out, word).unwrap(),
        None => mp::write_nil(&mut out).unwrap(),
    }
    out
}
