//! Batches of KV events, from every encoding that vLLM has used.
//!
//! A payload is the MessagePack array `[ts, events, data_parallel_rank]`. Up to vLLM 0.23 an event is an array that
//! begins with its type; from 0.24 on it is a map whose key `type` says so. Both hold the same fields in the same order,
//! and newer versions add some at the end. Source: `vllm/distributed/kv_events.py` of the wheels 0.12 to 0.33.

use super::msgpack::{MsgpackError, Reader, Value};
use crate::events::{
    BlockHash, BlockRemoved, BlockStored, EventBatch, ExtraKey, GroupKind, KvEvent, Medium,
};
use std::sync::Arc;

/// Most blocks that one event may name. A million-token prompt in blocks of 16 has 65,536.
const MAX_BLOCKS: usize = 1 << 18;

/// A batch, and what could not be used of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoded {
    /// What the engine announced.
    pub batch: EventBatch,
    /// Events left out: of an unknown type, or with fields that contradict each other.
    pub skipped: u32,
}

/// Why a payload is no batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// It is no MessagePack.
    #[error("KV event batch: {0}")]
    Msgpack(#[from] MsgpackError),
    /// It is MessagePack of another shape.
    #[error("KV event batch: {0} is missing or of another type")]
    Shape(&'static str),
}

/// Why one event cannot be used.
enum EventError {
    /// The rest of the batch cannot be found any more.
    Msgpack(MsgpackError),
    /// This event only.
    Unusable,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Tag {
    Stored,
    Removed,
    Cleared,
}

#[derive(Clone, Copy)]
enum Field {
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    Medium,
    LoraName,
    ExtraKeys,
    Group,
    Kind,
    Locality,
    /// Known to mean nothing here, or not known at all.
    Ignored,
}

/// The order of fields after the type, in the array encoding.
const STORED: [Field; 11] = [
    Field::Hashes,
    Field::Parent,
    Field::Tokens,
    Field::BlockSize,
    Field::Ignored, // lora_id
    Field::Medium,
    Field::LoraName,
    Field::ExtraKeys,
    Field::Group,
    Field::Kind,
    Field::Ignored, // sliding window
];
const REMOVED: [Field; 3] = [Field::Hashes, Field::Medium, Field::Group];

/// What an event's fields said.
#[derive(Default)]
struct Fields {
    hashes: Option<Vec<BlockHash>>,
    parent: Option<BlockHash>,
    tokens: Option<Vec<u32>>,
    block_size: Option<u32>,
    medium: Option<Medium>,
    lora_name: Option<Arc<str>>,
    extra_keys: Vec<Vec<ExtraKey>>,
    group: Option<u32>,
    kind: Option<GroupKind>,
    remote: bool,
}

/// Decodes the payload of a message whose sequence is known from its frames.
///
/// # Errors
///
/// If the payload as a whole cannot be read. Single events that cannot be used are counted instead.
pub fn decode(seq: u64, payload: &[u8]) -> Result<Decoded, DecodeError> {
    let mut reader = Reader::new(payload);
    let Value::Array(parts @ 2..) = reader.value()? else {
        return Err(DecodeError::Shape("the array [ts, events, rank]"));
    };
    let ts = match reader.value()? {
        Value::Float(ts) => ts,
        Value::Uint(ts) => ts as f64,
        _ => return Err(DecodeError::Shape("ts")),
    };
    let Value::Array(count) = reader.value()? else {
        return Err(DecodeError::Shape("events"));
    };
    let mut events = Vec::new();
    let mut skipped = 0;
    for _ in 0..count {
        let before = reader.clone();
        match event(&mut reader) {
            Ok(event) => events.push(event),
            Err(EventError::Unusable) => {
                reader = before;
                reader.skip()?;
                skipped += 1;
            }
            Err(EventError::Msgpack(e)) => return Err(e.into()),
        }
    }
    let rank = match parts {
        2 => None,
        _ => match reader.value()? {
            Value::Uint(rank) => u32::try_from(rank).ok(),
            Value::Nil => None,
            _ => return Err(DecodeError::Shape("data_parallel_rank")),
        },
    };
    let batch = EventBatch {
        seq,
        ts,
        rank,
        events,
    };
    Ok(Decoded { batch, skipped })
}

fn event(reader: &mut Reader<'_>) -> Result<KvEvent, EventError> {
    let mut fields = Fields::default();
    match reader.value()? {
        Value::Array(n @ 1..) => {
            let tag = tag(reader.value()?)?;
            let order: &[Field] = match tag {
                Tag::Stored => &STORED,
                Tag::Removed => &REMOVED,
                Tag::Cleared => &[],
            };
            for i in 0..n - 1 {
                fields.read(order.get(i).copied().unwrap_or(Field::Ignored), reader)?;
            }
            fields.finish(tag)
        }
        Value::Map(n) => {
            let mut found = None;
            for _ in 0..n {
                let Value::Str(key) = reader.value()? else {
                    return Err(EventError::Unusable);
                };
                if key == b"type" {
                    found = Some(tag(reader.value()?)?);
                } else {
                    fields.read(named(key), reader)?;
                }
            }
            fields.finish(found.ok_or(EventError::Unusable)?)
        }
        _ => Err(EventError::Unusable),
    }
}

fn tag(value: Value<'_>) -> Result<Tag, EventError> {
    match value {
        Value::Str(b"BlockStored") => Ok(Tag::Stored),
        Value::Str(b"BlockRemoved") => Ok(Tag::Removed),
        Value::Str(b"AllBlocksCleared") => Ok(Tag::Cleared),
        _ => Err(EventError::Unusable),
    }
}

fn named(key: &[u8]) -> Field {
    match key {
        b"block_hashes" => Field::Hashes,
        b"parent_block_hash" => Field::Parent,
        b"token_ids" => Field::Tokens,
        b"block_size" => Field::BlockSize,
        b"medium" => Field::Medium,
        b"lora_name" => Field::LoraName,
        b"extra_keys" => Field::ExtraKeys,
        b"group_idx" => Field::Group,
        b"kv_cache_spec_kind" => Field::Kind,
        b"locality" => Field::Locality,
        _ => Field::Ignored,
    }
}

fn hash(value: Value<'_>) -> Result<BlockHash, EventError> {
    match value {
        Value::Uint(hash) => Ok(hash),
        // Some algorithms give signed integers: the same 64 bits.
        Value::Int(hash) => Ok(hash as u64),
        Value::Bin(bytes) => {
            let low = bytes.get(bytes.len().saturating_sub(8)..).unwrap_or(bytes);
            Ok(low.iter().fold(0, |n, b| (n << 8) | u64::from(*b)))
        }
        _ => Err(EventError::Unusable),
    }
}

fn text<'a>(value: Value<'a>) -> Result<Option<&'a str>, EventError> {
    match value {
        Value::Nil => Ok(None),
        Value::Str(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) => Ok(Some(text)),
            Err(_) => Err(EventError::Unusable),
        },
        _ => Err(EventError::Unusable),
    }
}

fn number(value: Value<'_>) -> Result<Option<u32>, EventError> {
    match value {
        Value::Nil => Ok(None),
        Value::Uint(n) => u32::try_from(n).map(Some).map_err(|_| EventError::Unusable),
        _ => Err(EventError::Unusable),
    }
}

fn medium(word: &str) -> Medium {
    const WORDS: [(&str, Medium); 4] = [
        ("gpu", Medium::Gpu),
        ("cpu", Medium::Cpu),
        ("storage", Medium::Disk),
        ("disk", Medium::Disk),
    ];
    WORDS
        .iter()
        .find(|(known, _)| word.eq_ignore_ascii_case(known))
        .map_or(Medium::Other, |(_, medium)| *medium)
}

fn kind(word: &str) -> GroupKind {
    match word {
        "full_attention" | "mla_attention" | "sink_full_attention" => GroupKind::Full,
        _ => GroupKind::Other,
    }
}

fn blocks(value: Value<'_>) -> Result<usize, EventError> {
    match value {
        Value::Array(n) if n <= MAX_BLOCKS => Ok(n),
        _ => Err(EventError::Unusable),
    }
}

// === impl Fields ===

impl Fields {
    fn read(&mut self, field: Field, reader: &mut Reader<'_>) -> Result<(), EventError> {
        match field {
            Field::Ignored => reader.skip()?,
            Field::Hashes => {
                let n = blocks(reader.value()?)?;
                let mut hashes = Vec::with_capacity(n);
                for _ in 0..n {
                    hashes.push(hash(reader.value()?)?);
                }
                self.hashes = Some(hashes);
            }
            Field::Parent => {
                self.parent = match reader.value()? {
                    Value::Nil => None,
                    value => Some(hash(value)?),
                }
            }
            Field::Tokens => {
                let Value::Array(n) = reader.value()? else {
                    return Err(EventError::Unusable);
                };
                let mut tokens = Vec::with_capacity(n);
                for _ in 0..n {
                    tokens.push(number(reader.value()?)?.ok_or(EventError::Unusable)?);
                }
                self.tokens = Some(tokens);
            }
            Field::BlockSize => self.block_size = number(reader.value()?)?,
            Field::Medium => self.medium = text(reader.value()?)?.map(medium),
            Field::LoraName => self.lora_name = text(reader.value()?)?.map(Arc::from),
            Field::ExtraKeys => self.read_extra_keys(reader)?,
            Field::Group => self.group = number(reader.value()?)?,
            Field::Kind => self.kind = text(reader.value()?)?.map(kind),
            Field::Locality => {
                self.remote =
                    text(reader.value()?)?.is_some_and(|word| word.eq_ignore_ascii_case("remote"))
            }
        }
        Ok(())
    }

    /// One entry per block: nil, or an array of strings (adapter, salt) and of what else the engine hashes.
    fn read_extra_keys(&mut self, reader: &mut Reader<'_>) -> Result<(), EventError> {
        let n = match reader.value()? {
            Value::Nil => return Ok(()),
            value => blocks(value)?,
        };
        // The adapter's name comes with every block: one allocation serves them all.
        let mut last: Option<Arc<str>> = self.lora_name.clone();
        for _ in 0..n {
            let mut keys = Vec::new();
            match reader.value()? {
                Value::Nil => {}
                Value::Array(n) => {
                    for _ in 0..n {
                        keys.push(match reader.value()? {
                            Value::Str(bytes) => {
                                let word =
                                    std::str::from_utf8(bytes).map_err(|_| EventError::Unusable)?;
                                let shared = last
                                    .take()
                                    .filter(|last| &**last == word)
                                    .unwrap_or_else(|| Arc::from(word));
                                last = Some(shared.clone());
                                ExtraKey::Text(shared)
                            }
                            other => {
                                reader.skip_rest(other)?;
                                ExtraKey::Opaque
                            }
                        });
                    }
                }
                other => {
                    reader.skip_rest(other)?;
                    keys.push(ExtraKey::Opaque);
                }
            }
            self.extra_keys.push(keys);
        }
        Ok(())
    }

    fn finish(self, tag: Tag) -> Result<KvEvent, EventError> {
        if tag == Tag::Cleared {
            return Ok(KvEvent::Cleared);
        }
        let hashes = self.hashes.ok_or(EventError::Unusable)?;
        let group = self.group.unwrap_or(0);
        // What another host holds for this engine is as good as a store, whatever medium it has there.
        let medium = match self.remote {
            true => Medium::Disk,
            false => self.medium.unwrap_or(Medium::Gpu),
        };
        if tag == Tag::Removed {
            return Ok(KvEvent::Removed(BlockRemoved {
                hashes,
                medium,
                group,
            }));
        }
        let tokens = self.tokens.ok_or(EventError::Unusable)?;
        let block_size = self.block_size.ok_or(EventError::Unusable)?;
        let placeholder = block_size == 0 && tokens.is_empty();
        let complete = hashes.len().checked_mul(block_size as usize) == Some(tokens.len());
        let keyed = self.extra_keys.is_empty() || self.extra_keys.len() == hashes.len();
        if !(placeholder || complete && block_size > 0) || !keyed {
            return Err(EventError::Unusable);
        }
        Ok(KvEvent::Stored(BlockStored {
            hashes,
            parent: self.parent,
            tokens,
            block_size,
            lora_name: self.lora_name,
            extra_keys: self.extra_keys,
            medium,
            group,
            // Versions that do not say have no other groups than full attention in group 0.
            kind: self.kind.unwrap_or(match group {
                0 => GroupKind::Full,
                _ => GroupKind::Other,
            }),
        }))
    }
}

// === impl EventError ===

impl From<MsgpackError> for EventError {
    fn from(e: MsgpackError) -> Self {
        Self::Msgpack(e)
    }
}

#[cfg(test)]
mod tests;
