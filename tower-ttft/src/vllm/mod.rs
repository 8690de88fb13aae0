//! What real vLLM speaks besides the OpenAI API.

mod decode;
mod discover;
mod frames;
mod http;
mod member;
mod msgpack;
mod orca;
mod progress;
mod remote;
mod scrape;
mod source;
mod status;
mod subscribe;
#[cfg(test)]
mod testing;
mod watch;
mod zmtp;

pub use self::decode::{DecodeError, Decoded, decode};
pub use self::discover::Model;
pub use self::msgpack::MsgpackError;
pub use self::orca::AnswerLoad;
pub use self::remote::EngineTokenizer;
pub use self::source::{ParseSourceError, Source, TcpAddress};
pub use self::status::{EngineState, EngineStatus, EventCounts, EventsState, EventsStatus};
pub use self::watch::{Engine, WatchParams, WatchTimes, watch};
