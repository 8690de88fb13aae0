//! The closed list of answers by which an engine says that another one should be asked.
//!
//! vLLM 0.32: while it drains it answers `500` or, to prompts of token ids, an empty choice with finish reason `abort`;
//! when its engine process died, `500` or an error as the first event; when its queue is full, `503`. All other answers
//! are the client's.

use http::StatusCode;
use prometheus_client::encoding::EncodeLabelValue;
use tower_ttft::observe::{EngineError, EventKind};

/// Why an engine cannot answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue, thiserror::Error)]
#[allow(non_camel_case_types, reason = "label values are lower case")]
pub enum Refusal {
    /// It shuts down.
    #[error("the engine shuts down")]
    draining,
    /// Its engine process died.
    #[error("the engine's core died")]
    core_died,
    /// It gave the request up before it began.
    #[error("the engine aborted the request before it began")]
    aborted,
    /// Its queue is full.
    #[error("the engine is full")]
    busy,
}

const DRAINING: &str = "cannot schedule new futures";
const CORE_DIED: &str = "EngineCore encountered an issue";
const BUSY: &str = "currently busy";

// === impl Refusal ===

impl Refusal {
    /// What the first event of a stream says.
    pub(super) fn of_event(kind: &EventKind) -> Option<Self> {
        match kind {
            EventKind::AbortEmpty => Some(Self::aborted),
            EventKind::Error(e) if e.message.contains(CORE_DIED) => Some(Self::core_died),
            _ => None,
        }
    }

    /// What an answer that does not stream says.
    pub(super) fn of_answer(status: StatusCode, kind: &EventKind) -> Option<Self> {
        match (status, kind) {
            (StatusCode::OK, EventKind::AbortEmpty) => Some(Self::aborted),
            (status, EventKind::Error(error)) => Self::of_error(status, error),
            _ => None,
        }
    }

    fn of_error(status: StatusCode, error: &EngineError) -> Option<Self> {
        match status {
            StatusCode::INTERNAL_SERVER_ERROR if error.message.contains(DRAINING) => {
                Some(Self::draining)
            }
            StatusCode::INTERNAL_SERVER_ERROR if error.message.contains(CORE_DIED) => {
                Some(Self::core_died)
            }
            StatusCode::SERVICE_UNAVAILABLE if error.message.contains(BUSY) => Some(Self::busy),
            _ => None,
        }
    }

    /// Whether an answer with this status may be on the list, so that all of it is looked at.
    pub(super) fn is_possible(status: StatusCode) -> bool {
        matches!(
            status,
            StatusCode::INTERNAL_SERVER_ERROR | StatusCode::SERVICE_UNAVAILABLE
        )
    }
}
