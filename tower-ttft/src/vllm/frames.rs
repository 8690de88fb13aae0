//! The shapes of KV event messages.
//!
//! Live messages are `[topic, sequence, payload]`. A replay's are `["", sequence, payload]` up to vLLM 0.24 and
//! `["", topic, sequence, payload]` from 0.26 on; in between nobody looked. It ends with sequence −1.

use bytes::Bytes;

/// The sequence that ends a replay: −1 as eight bytes.
const END: [u8; 8] = [0xff; 8];

/// A message that still has to be decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Numbered {
    pub(crate) seq: u64,
    pub(crate) payload: Bytes,
}

/// One message of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Replayed {
    Batch(Numbered),
    End,
}

/// A message of no known shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message of {frames} frames is no KV event message")]
pub(crate) struct ShapeError {
    frames: usize,
}

/// Reads a message of the live stream.
pub(crate) fn live(frames: &[Bytes]) -> Result<Numbered, ShapeError> {
    let [_topic, seq, payload] = frames else {
        return Err(shape(frames));
    };
    let seq = sequence(seq).ok_or(shape(frames))?;
    Ok(Numbered {
        seq: u64::from_be_bytes(seq),
        payload: payload.clone(),
    })
}

/// Reads a message of a replay. The empty delimiter in front may be missing.
pub(crate) fn replayed(frames: &[Bytes]) -> Result<Replayed, ShapeError> {
    let (before, seq, payload) = match frames {
        [before @ .., seq, payload] if before.len() <= 2 => (before, seq, payload),
        _ => return Err(shape(frames)),
    };
    let seq = sequence(seq).ok_or(shape(frames))?;
    if seq == END {
        return Ok(Replayed::End);
    }
    // Two frames in front: a delimiter and a topic. Only the first of them has a fixed form.
    if let [delimiter, _topic] = before
        && !delimiter.is_empty()
    {
        return Err(shape(frames));
    }
    Ok(Replayed::Batch(Numbered {
        seq: u64::from_be_bytes(seq),
        payload: payload.clone(),
    }))
}

/// The request for everything from a sequence on.
pub(crate) fn replay_request(from: u64) -> [Bytes; 2] {
    [Bytes::new(), Bytes::copy_from_slice(&from.to_be_bytes())]
}

fn sequence(frame: &Bytes) -> Option<[u8; 8]> {
    frame.as_ref().try_into().ok()
}

fn shape(frames: &[Bytes]) -> ShapeError {
    ShapeError {
        frames: frames.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(parts: &[&[u8]]) -> Vec<Bytes> {
        parts.iter().map(|p| Bytes::copy_from_slice(p)).collect()
    }

    const SEQ: &[u8] = &[0, 0, 0, 0, 0, 0, 1, 2];

    fn numbered() -> Numbered {
        Numbered {
            seq: 258,
            payload: Bytes::from_static(b"p"),
        }
    }

    #[test]
    fn live_messages_have_three_frames() {
        assert_eq!(live(&frames(&[b"kv@a", SEQ, b"p"])), Ok(numbered()));
        assert_eq!(live(&frames(&[b"", SEQ, b"p"])), Ok(numbered()));
        for bad in [
            &[][..],
            &[b"x" as &[u8]],
            &[SEQ, b"p"],
            &[b"", b"short", b"p"],
            &[b"", b"t", SEQ, b"p"],
        ] {
            assert!(live(&frames(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn replays_come_in_every_known_shape() {
        for good in [
            &[b"" as &[u8], SEQ, b"p"][..],
            &[b"", b"kv@a", SEQ, b"p"],
            &[b"", b"", SEQ, b"p"],
            &[SEQ, b"p"],
        ] {
            assert_eq!(
                replayed(&frames(good)),
                Ok(Replayed::Batch(numbered())),
                "{good:?}"
            );
        }
        for end in [
            &[b"" as &[u8], &END, b""][..],
            &[b"", b"", &END, b""],
            &[&END, b""],
        ] {
            assert_eq!(replayed(&frames(end)), Ok(Replayed::End));
        }
        for bad in [
            &[][..],
            &[b"x" as &[u8]],
            &[b"garbage", b"p"],
            &[b"x", b"t", SEQ, b"p"],
            &[b"", b"", b"", SEQ, b"p"],
        ] {
            assert!(replayed(&frames(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn requests_carry_an_empty_delimiter() {
        let [delimiter, seq] = replay_request(258);
        assert!(delimiter.is_empty());
        assert_eq!(seq.as_ref(), SEQ);
    }
}
