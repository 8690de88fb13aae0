//! A JSON reader that takes what Python's `json.loads(bytes)` takes, because that is what vLLM's front end reads
//! requests with. A stricter reader refuses what the engine would serve; a laxer one routes by something else than
//! what runs.
//!
//! It differs from RFC 8259 as Python does: one UTF-8 byte order mark is skipped; `NaN`, `Infinity` and `-Infinity` are
//! numbers; any number may overflow to infinity; `\ud83d` may stand alone and its UTF-8 form (`ed a0 bd`) may too
//! (`surrogatepass`); integers of more than [`MAX_INT_DIGITS`] digits are refused; of equal keys the last one counts.
//!
//! It differs from Python in these bounds and nowhere else:
//!
//! * UTF-16 and UTF-32, which `json.loads` would guess from zero bytes, are refused;
//! * nesting deeper than [`MAX_DEPTH`] is refused (CPython 3.11 stops at about 995 levels, 3.12 at 1,499);
//! * more than [`MAX_FIELDS`] keys in the outermost object are refused.
//!
//! One pass without recursion validates everything and remembers where each top-level value lies; nothing is built.

mod scan;
mod text;
mod value;

pub use self::{
    scan::{Field, Malformed, fields, items, member},
    text::{LoneSurrogate, unescape},
    value::{MAX_VALUE_DEPTH, Unrepresentable, to_value},
};

/// How deep arrays and objects may nest, the outermost one included.
pub const MAX_DEPTH: usize = 1_500;

/// How many keys the outermost object may have, repeated ones counted each time.
pub const MAX_FIELDS: usize = 4_096;

/// How many digits an integer may have: CPython's `sys.int_info.default_max_str_digits`.
pub const MAX_INT_DIGITS: usize = 4_300;

#[cfg(test)]
mod python_tests;
#[cfg(test)]
mod tests;
