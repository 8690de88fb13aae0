//! A bounded cursor over MessagePack (<https://github.com/msgpack/msgpack/blob/master/spec.md>).
//!
//! Nothing here allocates by a length that the input merely claims: strings are borrowed, and a container's length is
//! checked against the bytes that are left, of which every element takes at least one.

use rmp::Marker;

/// How deep containers that nobody reads may be nested.
const MAX_DEPTH: u32 = 32;

/// Why bytes are no value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MsgpackError {
    /// The input ends inside a value, or claims more elements than it has bytes.
    #[error("it ends inside a value")]
    Truncated,
    /// The byte that MessagePack never uses.
    #[error("byte 0xc1 is no MessagePack")]
    Reserved,
    /// Nested deeper than anything an engine sends.
    #[error("nested too deep")]
    TooDeep,
}

/// A value, or the head of a container whose elements follow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value<'a> {
    Nil,
    Bool(bool),
    /// A non-negative integer.
    Uint(u64),
    /// A negative integer.
    Int(i64),
    Float(f64),
    Str(&'a [u8]),
    Bin(&'a [u8]),
    /// This many elements follow.
    Array(usize),
    /// This many keys follow, each with its value.
    Map(usize),
    Ext,
}

/// A position in the input.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

// === impl Reader ===

impl<'a> Reader<'a> {
    pub(crate) fn new(input: &'a [u8]) -> Self {
        Self { rest: input }
    }

    /// Reads a value, of containers only the head.
    pub(crate) fn value(&mut self) -> Result<Value<'a>, MsgpackError> {
        let [marker] = self.array()?;
        Ok(match Marker::from_u8(marker) {
            Marker::Null => Value::Nil,
            Marker::False => Value::Bool(false),
            Marker::True => Value::Bool(true),
            Marker::FixPos(n) => Value::Uint(n.into()),
            Marker::U8 => Value::Uint(self.be(1)?),
            Marker::U16 => Value::Uint(self.be(2)?),
            Marker::U32 => Value::Uint(self.be(4)?),
            Marker::U64 => Value::Uint(self.be(8)?),
            Marker::FixNeg(n) => Value::Int(n.into()),
            Marker::I8 => signed(i8::from_be_bytes(self.array()?).into()),
            Marker::I16 => signed(i16::from_be_bytes(self.array()?).into()),
            Marker::I32 => signed(i32::from_be_bytes(self.array()?).into()),
            Marker::I64 => signed(i64::from_be_bytes(self.array()?)),
            Marker::F32 => Value::Float(f32::from_be_bytes(self.array()?).into()),
            Marker::F64 => Value::Float(f64::from_be_bytes(self.array()?)),
            Marker::FixStr(n) => Value::Str(self.take(n.into())?),
            Marker::Str8 => Value::Str(self.counted(1)?),
            Marker::Str16 => Value::Str(self.counted(2)?),
            Marker::Str32 => Value::Str(self.counted(4)?),
            Marker::Bin8 => Value::Bin(self.counted(1)?),
            Marker::Bin16 => Value::Bin(self.counted(2)?),
            Marker::Bin32 => Value::Bin(self.counted(4)?),
            Marker::FixArray(n) => Value::Array(self.elements(n.into(), 1)?),
            Marker::Array16 => {
                let n = self.be(2)?;
                Value::Array(self.elements(n, 1)?)
            }
            Marker::Array32 => {
                let n = self.be(4)?;
                Value::Array(self.elements(n, 1)?)
            }
            Marker::FixMap(n) => Value::Map(self.elements(n.into(), 2)?),
            Marker::Map16 => {
                let n = self.be(2)?;
                Value::Map(self.elements(n, 2)?)
            }
            Marker::Map32 => {
                let n = self.be(4)?;
                Value::Map(self.elements(n, 2)?)
            }
            // An extension's type byte is one more byte of payload to us.
            Marker::FixExt1 => self.ext(1)?,
            Marker::FixExt2 => self.ext(2)?,
            Marker::FixExt4 => self.ext(4)?,
            Marker::FixExt8 => self.ext(8)?,
            Marker::FixExt16 => self.ext(16)?,
            Marker::Ext8 => {
                let n = self.be(1)?;
                self.ext(n)?
            }
            Marker::Ext16 => {
                let n = self.be(2)?;
                self.ext(n)?
            }
            Marker::Ext32 => {
                let n = self.be(4)?;
                self.ext(n)?
            }
            Marker::Reserved => return Err(MsgpackError::Reserved),
        })
    }

    /// Passes over one whole value.
    pub(crate) fn skip(&mut self) -> Result<(), MsgpackError> {
        let head = self.value()?;
        self.skip_rest(head)
    }

    /// Passes over what follows a value's head.
    pub(crate) fn skip_rest(&mut self, head: Value<'a>) -> Result<(), MsgpackError> {
        self.skip_nested(head, MAX_DEPTH)
    }

    fn skip_nested(&mut self, head: Value<'a>, depth: u32) -> Result<(), MsgpackError> {
        let n = match head {
            Value::Array(n) => n,
            Value::Map(n) => n.saturating_mul(2),
            _ => return Ok(()),
        };
        let depth = depth.checked_sub(1).ok_or(MsgpackError::TooDeep)?;
        for _ in 0..n {
            let head = self.value()?;
            self.skip_nested(head, depth)?;
        }
        Ok(())
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], MsgpackError> {
        let (taken, rest) = self
            .rest
            .split_at_checked(n)
            .ok_or(MsgpackError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MsgpackError> {
        let (taken, rest) = self
            .rest
            .split_first_chunk()
            .ok_or(MsgpackError::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn be(&mut self, bytes: usize) -> Result<u64, MsgpackError> {
        Ok(self
            .take(bytes)?
            .iter()
            .fold(0, |n, b| (n << 8) | u64::from(*b)))
    }

    fn counted(&mut self, bytes: usize) -> Result<&'a [u8], MsgpackError> {
        let n = self.be(bytes)?;
        self.take(usize::try_from(n).map_err(|_| MsgpackError::Truncated)?)
    }

    fn ext(&mut self, n: u64) -> Result<Value<'a>, MsgpackError> {
        let n = usize::try_from(n).map_err(|_| MsgpackError::Truncated)?;
        self.take(n.checked_add(1).ok_or(MsgpackError::Truncated)?)?;
        Ok(Value::Ext)
    }

    fn elements(&self, n: u64, least_bytes: usize) -> Result<usize, MsgpackError> {
        let n = usize::try_from(n).map_err(|_| MsgpackError::Truncated)?;
        if n > self.rest.len() / least_bytes {
            return Err(MsgpackError::Truncated);
        }
        Ok(n)
    }
}

fn signed(n: i64) -> Value<'static> {
    match u64::try_from(n) {
        Ok(n) => Value::Uint(n),
        Err(_) => Value::Int(n),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(input: &[u8]) -> Result<Vec<Value<'_>>, MsgpackError> {
        let mut reader = Reader::new(input);
        let mut out = Vec::new();
        while !reader.rest.is_empty() {
            out.push(reader.value()?);
        }
        Ok(out)
    }

    #[test]
    fn reads_every_scalar_form() {
        let mut buf = Vec::new();
        rmp::encode::write_nil(&mut buf).unwrap();
        rmp::encode::write_bool(&mut buf, true).unwrap();
        for n in [
            0,
            127,
            128,
            255,
            256,
            65_535,
            65_536,
            u64::from(u32::MAX) + 1,
            u64::MAX,
        ] {
            rmp::encode::write_uint(&mut buf, n).unwrap();
        }
        for n in [-1, -32, -33, -129, -32_769, i64::MIN] {
            rmp::encode::write_sint(&mut buf, n).unwrap();
        }
        rmp::encode::write_f64(&mut buf, 1.5).unwrap();
        rmp::encode::write_f32(&mut buf, 0.25).unwrap();
        rmp::encode::write_str(&mut buf, "ab").unwrap();
        rmp::encode::write_bin(&mut buf, &[7, 8]).unwrap();
        // A non-negative number in a signed form.
        buf.extend([0xd1, 0x01, 0x00]);
        use Value::*;
        assert_eq!(
            all(&buf).unwrap(),
            [
                Nil,
                Bool(true),
                Uint(0),
                Uint(127),
                Uint(128),
                Uint(255),
                Uint(256),
                Uint(65_535),
                Uint(65_536),
                Uint(u64::from(u32::MAX) + 1),
                Uint(u64::MAX),
                Int(-1),
                Int(-32),
                Int(-33),
                Int(-129),
                Int(-32_769),
                Int(i64::MIN),
                Float(1.5),
                Float(0.25),
                Str(b"ab"),
                Bin(&[7, 8]),
                Uint(256),
            ]
        );
    }

    #[test]
    fn a_claimed_length_is_checked_against_what_is_there() {
        for input in [
            &[0xdd, 0xff, 0xff, 0xff, 0xff][..],
            &[0xdf, 0xff, 0xff, 0xff, 0xff, 0xc0],
            &[0xdb, 0xff, 0xff, 0xff, 0xff, b'x'],
            &[0xc9, 0xff, 0xff, 0xff, 0xff, 1],
            &[0x92, 0xc0],
            &[0x81, 0xc0],
            &[],
        ] {
            assert_eq!(
                Reader::new(input).skip(),
                Err(MsgpackError::Truncated),
                "{input:x?}"
            );
        }
        // Already at the head, before anyone makes room for the elements.
        for head in [
            &[0xdd, 0xff, 0xff, 0xff, 0xff][..],
            &[0xdc, 0x00, 0x02, 0xc0],
            &[0xdf, 0x00, 0x00, 0x00, 0x02, 0xc0, 0xc0, 0xc0],
        ] {
            let value = Reader::new(head).value();
            assert_eq!(value, Err(MsgpackError::Truncated), "{head:x?}");
        }
        assert_eq!(Reader::new(&[0xc1]).skip(), Err(MsgpackError::Reserved));
    }

    #[test]
    fn skips_containers_and_bounds_their_depth() {
        // {"a": [1, {"b": ext}]}, then 5
        let input = [
            0x81, 0xa1, b'a', 0x92, 0x01, 0x81, 0xa1, b'b', 0xd4, 0x09, 0x00, 0x05,
        ];
        let mut reader = Reader::new(&input);
        reader.skip().unwrap();
        assert_eq!(reader.value(), Ok(Value::Uint(5)));

        let mut deep = vec![0x91; 100_000];
        deep.push(0xc0);
        assert_eq!(Reader::new(&deep).skip(), Err(MsgpackError::TooDeep));
    }
}
