use super::*;
use crate::vllm::testing::{Encoding, payload, stored};
use proptest::prelude::*;
use serde_json::Value as Json;

macro_rules! captures {
    ($($name:literal),*) => {
        [$((
            include_str!(concat!("../../../testdata/vllm/", $name, ".hex")),
            include_str!(concat!("../../../testdata/vllm/", $name, ".jsonl")),
        )),*]
    };
}

/// Messages as recorded, and as msgspec decoded them.
const CAPTURES: [(&str, &str); 5] = captures![
    "lora-removed-cleared",
    "byte-hashes",
    "salt-session",
    "duplicate-stores",
    "rank1"
];

fn hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap())
        .collect()
}

/// Every captured message: its sequence, its payload, and what msgspec made of it.
fn captured() -> Vec<(u64, Vec<u8>, Json)> {
    CAPTURES
        .iter()
        .flat_map(|(raw, decoded)| raw.lines().zip(decoded.lines()))
        .map(|(raw, decoded)| {
            let frames: Vec<_> = raw.split(" | ").map(hex).collect();
            let [_topic, seq, payload] = &frames[..] else {
                panic!("{} frames", frames.len());
            };
            let seq = u64::from_be_bytes(seq[..].try_into().unwrap());
            (seq, payload.clone(), serde_json::from_str(decoded).unwrap())
        })
        .collect()
}

fn expected_hash(hash: &Json) -> u64 {
    match hash.get("hex").and_then(Json::as_str) {
        Some(digest) => u64::from_str_radix(&digest[digest.len() - 16..], 16).unwrap(),
        None => hash.as_u64().unwrap(),
    }
}

fn expected_event(event: &Json) -> KvEvent {
    let hashes = || {
        event["block_hashes"]
            .as_array()
            .unwrap()
            .iter()
            .map(expected_hash)
            .collect()
    };
    assert!(matches!(event["medium"].as_str(), Some("GPU") | None));
    match event["type"].as_str().unwrap() {
        "BlockStored" => KvEvent::Stored(BlockStored {
            hashes: hashes(),
            parent: Some(&event["parent_block_hash"])
                .filter(|h| !h.is_null())
                .map(expected_hash),
            tokens: event["token_ids"]
                .as_array()
                .unwrap()
                .iter()
                .map(|t| t.as_u64().unwrap() as u32)
                .collect(),
            block_size: event["block_size"].as_u64().unwrap() as u32,
            lora_name: event["lora_name"].as_str().map(Arc::from),
            extra_keys: event["extra_keys"]
                .as_array()
                .unwrap()
                .iter()
                .map(|keys| match keys.as_array() {
                    Some(keys) => keys
                        .iter()
                        .map(|k| ExtraKey::Text(k.as_str().unwrap().into()))
                        .collect(),
                    None => vec![],
                })
                .collect(),
            medium: Medium::Gpu,
            group: event["group_idx"].as_u64().unwrap() as u32,
            kind: match event["kv_cache_spec_kind"].as_str().unwrap() {
                "full_attention" => GroupKind::Full,
                other => panic!("{other}"),
            },
        }),
        "BlockRemoved" => KvEvent::Removed(BlockRemoved {
            hashes: hashes(),
            medium: Medium::Gpu,
            group: event["group_idx"].as_u64().unwrap() as u32,
        }),
        "AllBlocksCleared" => KvEvent::Cleared,
        other => panic!("{other}"),
    }
}

#[test]
fn reads_what_real_vllm_sent_as_msgspec_reads_it() {
    let captured = captured();
    assert_eq!(captured.len(), 15);
    for (seq, payload, json) in captured {
        let decoded = decode(seq, &payload).unwrap();
        assert_eq!(decoded.skipped, 0);
        let batch = decoded.batch;
        assert_eq!(batch.seq, json["seq"].as_u64().unwrap());
        // serde_json may be off by a unit in the last place.
        assert!((batch.ts - json["payload"][0].as_f64().unwrap()).abs() < 1e-6);
        assert_eq!(batch.rank.map(u64::from), json["payload"][2].as_u64());
        let expected: Vec<_> = json["payload"][1]
            .as_array()
            .unwrap()
            .iter()
            .map(expected_event)
            .collect();
        assert_eq!(batch.events, expected);
    }
}

#[test]
fn both_encodings_say_the_same() {
    for (seq, raw, _) in captured() {
        let events = decode(seq, &raw).unwrap().batch.events;
        for encoding in [Encoding::Array, Encoding::Map] {
            let again = decode(seq, &payload(encoding, 1.5, &events)).unwrap();
            assert_eq!(
                (again.skipped, again.batch.events),
                (0, events.clone()),
                "{encoding:?}"
            );
        }
    }
}

/// An event of the oldest form still met: no medium, no adapter's name.
#[test]
fn reads_short_arrays_of_old_versions() {
    use rmp::encode as mp;
    let mut out = Vec::new();
    mp::write_array_len(&mut out, 2).unwrap();
    mp::write_f64(&mut out, 1.0).unwrap();
    mp::write_array_len(&mut out, 1).unwrap();
    mp::write_array_len(&mut out, 6).unwrap();
    mp::write_str(&mut out, "BlockStored").unwrap();
    mp::write_array_len(&mut out, 1).unwrap();
    mp::write_sint(&mut out, -2).unwrap();
    mp::write_nil(&mut out).unwrap();
    mp::write_array_len(&mut out, 2).unwrap();
    mp::write_uint(&mut out, 70_000).unwrap();
    mp::write_uint(&mut out, 5).unwrap();
    mp::write_uint(&mut out, 2).unwrap();
    mp::write_nil(&mut out).unwrap();
    let Decoded { batch, skipped } = decode(9, &out).unwrap();
    assert_eq!((skipped, batch.rank), (0, None));
    let [KvEvent::Stored(stored)] = &batch.events[..] else {
        panic!("{:?}", batch.events);
    };
    assert_eq!(stored.hashes, [u64::MAX - 1]);
    assert_eq!(stored.tokens, [70_000, 5]);
    assert_eq!(
        (stored.medium, stored.group, stored.kind),
        (Medium::Gpu, 0, GroupKind::Full)
    );
    assert!(stored.extra_keys.is_empty());
}

#[test]
fn words_are_typed() {
    for (word, expected) in [
        ("GPU", Medium::Gpu),
        ("gpu", Medium::Gpu),
        ("CPU", Medium::Cpu),
        ("cpu", Medium::Cpu),
        ("STORAGE", Medium::Disk),
        ("Disk", Medium::Disk),
        ("tape", Medium::Other),
        ("", Medium::Other),
    ] {
        assert_eq!(medium(word), expected, "{word}");
    }
    for (word, expected) in [
        ("full_attention", GroupKind::Full),
        ("mla_attention", GroupKind::Full),
        ("sink_full_attention", GroupKind::Full),
        ("sliding_window", GroupKind::Other),
        ("sliding_window_mla", GroupKind::Other),
        ("mamba", GroupKind::Other),
        ("something_new", GroupKind::Other),
    ] {
        assert_eq!(kind(word), expected, "{word}");
    }
    for (value, expected) in [
        (Value::Bin(&[1; 32]), 0x0101_0101_0101_0101),
        (Value::Bin(&[9, 0, 0, 0, 0, 0, 0, 0, 2]), 2),
        (Value::Bin(&[1, 2]), 258),
        (Value::Bin(&[]), 0),
        (Value::Int(-1), u64::MAX),
    ] {
        assert!(
            matches!(hash(value), Ok(hash) if hash == expected),
            "{value:?}"
        );
    }
}

#[test]
fn media_keys_are_opaque_and_placeholders_pass() {
    let media = KvEvent::Stored(BlockStored {
        extra_keys: vec![vec![ExtraKey::Text("ad".into()), ExtraKey::Opaque]],
        lora_name: Some("ad".into()),
        kind: GroupKind::Other,
        group: 3,
        medium: Medium::Other,
        ..unwrap_stored(stored(1, Some(2)))
    });
    let placeholder = KvEvent::Stored(BlockStored {
        hashes: vec![5, 6],
        tokens: vec![],
        block_size: 0,
        extra_keys: vec![],
        medium: Medium::Cpu,
        ..unwrap_stored(stored(1, None))
    });
    let events = [media, placeholder];
    for encoding in [Encoding::Array, Encoding::Map] {
        let decoded = decode(0, &payload(encoding, 0.0, &events)).unwrap();
        assert_eq!(
            (decoded.skipped, &decoded.batch.events[..]),
            (0, &events[..])
        );
    }
}

#[test]
fn an_event_that_contradicts_itself_costs_only_itself() {
    let wrong_tokens = KvEvent::Stored(BlockStored {
        tokens: vec![1, 2, 3],
        ..unwrap_stored(stored(1, None))
    });
    let wrong_keys = KvEvent::Stored(BlockStored {
        extra_keys: vec![vec![], vec![]],
        ..unwrap_stored(stored(1, None))
    });
    let events = [
        stored(1, None),
        wrong_tokens,
        stored(2, Some(1)),
        wrong_keys,
        KvEvent::Cleared,
    ];
    for encoding in [Encoding::Array, Encoding::Map] {
        let decoded = decode(0, &payload(encoding, 0.0, &events)).unwrap();
        assert_eq!(decoded.skipped, 2);
        assert_eq!(
            decoded.batch.events,
            [stored(1, None), stored(2, Some(1)), KvEvent::Cleared]
        );
    }
    // An unknown type, as an array and as a map, and things that are no events.
    let mut odd = vec![0x93, 0x01, 0x95];
    odd.extend([0x92, 0xa3, b'N', b'e', b'w', 0x92, 1, 2]);
    odd.extend([0x81, 0xa4, b't', b'y', b'p', b'e', 0xa3, b'N', b'e', b'w']);
    odd.extend([0x07, 0x80]);
    odd.extend([0x91, 0xb0]);
    odd.extend(b"AllBlocksCleared");
    odd.push(0xc0);
    let decoded = decode(0, &odd).unwrap();
    assert_eq!(
        (decoded.skipped, &decoded.batch.events[..]),
        (4, &[KvEvent::Cleared][..])
    );
}

#[test]
fn says_what_is_wrong_with_a_payload() {
    for (input, says) in [
        (&b""[..], "ends inside"),
        (&[0xc0][..], "[ts, events, rank]"),
        (&[0x92, 0xc0, 0x90][..], "ts is missing"),
        (&[0x92, 0x01, 0xc0][..], "events is missing"),
        (
            &[0x93, 0x01, 0x90, 0xa0][..],
            "data_parallel_rank is missing",
        ),
    ] {
        let error = decode(0, input).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn every_truncation_is_an_error() {
    for (seq, payload, _) in captured() {
        for end in 0..payload.len() {
            assert!(decode(seq, &payload[..end]).is_err(), "{seq} cut at {end}");
        }
    }
}

fn unwrap_stored(event: KvEvent) -> BlockStored {
    match event {
        KvEvent::Stored(stored) => stored,
        other => panic!("{other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn never_panics_on_mutations(
        which in 0usize..15,
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let (seq, mut payload, _) = captured().swap_remove(which);
        for (at, byte) in edits {
            let at = at.index(payload.len());
            payload[at] = byte;
        }
        if let Ok(decoded) = decode(seq, &payload) {
            for event in &decoded.batch.events {
                if let KvEvent::Stored(s) = event {
                    prop_assert_eq!(s.tokens.len(), s.hashes.len() * s.block_size as usize);
                }
            }
        }
        let _ = decode(seq, &payload[..cut.index(payload.len())]);
    }

    #[test]
    fn never_panics_on_noise(noise in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode(0, &noise);
    }
}
