//! Ctrl-C and SIGTERM.

use std::future::pending;
use tokio::signal::unix::{SignalKind, signal};

/// The exit code after the first signal that asks to stop: 128 and its number, as shells have it.
pub(crate) async fn stopped() -> u8 {
    tokio::select! {
        () = one(SignalKind::interrupt()) => 130,
        () = one(SignalKind::terminate()) => 143,
    }
}

/// Never comes if the signal cannot be listened to: then it ends the process by itself.
async fn one(kind: SignalKind) {
    match signal(kind) {
        Ok(mut signal) => {
            signal.recv().await;
        }
        Err(_) => pending().await,
    }
}
