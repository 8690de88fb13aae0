//! What real vLLM speaks besides the OpenAI API.

mod decode;
mod frames;
mod msgpack;
#[cfg(test)]
mod testing;
mod zmtp;

pub use self::decode::{DecodeError, Decoded, decode};
pub use self::msgpack::MsgpackError;
