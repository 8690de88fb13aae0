//! KV events as vLLM 0.24 and later encodes them: msgpack, each event a map.

use crate::{KvChange, Stored};
use rmp::encode::{self as mp, ByteBuf};

/// Takes what a pod announces, one batch per step.
pub trait EventSink: Send + 'static {
    /// A batch: its number, counted from 0, the engine's clock in seconds since the epoch, and the changes in order.
    fn publish(&mut self, seq: u64, ts: f64, changes: &[KvChange]);
}

/// The payload of a batch: `[ts, events, rank]`.
pub fn payload(ts: f64, changes: &[KvChange]) -> Vec<u8> {
    let mut out = ByteBuf::new();
    array(&mut out, 3);
    let Ok(()) = mp::write_f64(&mut out, ts);
    array(&mut out, changes.len());
    for change in changes {
        write(&mut out, change);
    }
    uint(&mut out, 0);
    out.into_vec()
}

fn write(out: &mut ByteBuf, change: &KvChange) {
    match change {
        KvChange::Stored(s) => stored(out, s),
        KvChange::Removed(hashes) => {
            map(out, 4);
            entry(out, "type", |out| text(out, "BlockRemoved"));
            entry(out, "block_hashes", |out| uints(out, hashes));
            entry(out, "medium", |out| text(out, "GPU"));
            entry(out, "group_idx", |out| uint(out, 0));
        }
        KvChange::Cleared => {
            map(out, 1);
            entry(out, "type", |out| text(out, "AllBlocksCleared"));
        }
    }
}

fn stored(out: &mut ByteBuf, stored: &Stored) {
    map(out, 11);
    entry(out, "type", |out| text(out, "BlockStored"));
    entry(out, "block_hashes", |out| uints(out, &stored.hashes));
    entry(out, "parent_block_hash", |out| match stored.parent {
        Some(hash) => uint(out, hash),
        None => nil(out),
    });
    entry(out, "token_ids", |out| {
        let ids = stored.tokens();
        array(out, ids.len());
        ids.iter().for_each(|id| uint(out, (*id).into()));
    });
    entry(out, "block_size", |out| uint(out, stored.block_size.into()));
    entry(out, "lora_id", nil);
    entry(out, "medium", |out| text(out, "GPU"));
    entry(out, "lora_name", nil);
    entry(out, "extra_keys", |out| {
        array(out, stored.hashes.len());
        stored.hashes.iter().for_each(|_| nil(out));
    });
    entry(out, "group_idx", |out| uint(out, 0));
    entry(out, "kv_cache_spec_kind", |out| text(out, "full_attention"));
}

fn entry(out: &mut ByteBuf, key: &str, value: impl FnOnce(&mut ByteBuf)) {
    text(out, key);
    value(out);
}

fn uints(out: &mut ByteBuf, numbers: &[u64]) {
    array(out, numbers.len());
    numbers.iter().for_each(|n| uint(out, *n));
}

// Writing to memory cannot fail, which the compiler knows.

fn map(out: &mut ByteBuf, len: u32) {
    let Ok(_) = mp::write_map_len(out, len);
}

fn array(out: &mut ByteBuf, len: usize) {
    let Ok(_) = mp::write_array_len(out, len as u32);
}

fn uint(out: &mut ByteBuf, n: u64) {
    let Ok(_) = mp::write_uint(out, n);
}

fn text(out: &mut ByteBuf, text: &str) {
    let Ok(()) = mp::write_str(out, text);
}

fn nil(out: &mut ByteBuf) {
    let Ok(()) = mp::write_nil(out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Prompt;
    use serde_json::Value;
    use std::sync::Arc;

    fn numbers(value: &Value) -> Vec<u64> {
        let numbers = value.as_array().expect("an array").iter();
        numbers.map(|n| n.as_u64().expect("a number")).collect()
    }

    fn change(event: &Value) -> KvChange {
        match event["type"].as_str().expect("a type") {
            "BlockStored" => {
                let ids: Vec<u32> = numbers(&event["token_ids"])
                    .into_iter()
                    .map(|id| id as u32)
                    .collect();
                KvChange::Stored(Stored {
                    hashes: numbers(&event["block_hashes"]),
                    parent: event["parent_block_hash"].as_u64(),
                    range: 0..ids.len(),
                    prompt: Arc::new(Prompt::new(ids, 0)),
                    block_size: event["block_size"].as_u64().expect("a size") as u32,
                })
            }
            "BlockRemoved" => KvChange::Removed(numbers(&event["block_hashes"])),
            _ => KvChange::Cleared,
        }
    }

    #[test]
    fn batches_are_the_bytes_that_vllm_sends() {
        let captures = include_str!("../../testdata/kv-events.jsonl");
        for line in captures.lines() {
            let capture: Value = serde_json::from_str(line).expect("a capture");
            let events = capture["payload"][1].as_array().expect("events").iter();
            let changes: Vec<_> = events.map(change).collect();
            let expected = capture["hex"].as_str().expect("bytes");
            // The time from the bytes: JSON rounds it. It stands behind the marks of an array and a number.
            let ts = u64::from_str_radix(&expected[4..20], 16).expect("a time");
            let got = payload(f64::from_bits(ts), &changes);
            let hex: String = got.iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(hex, expected, "{line:.120}");
        }
        assert_eq!(captures.lines().count(), 8);
    }
}
