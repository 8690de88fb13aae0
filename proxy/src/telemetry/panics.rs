//! A panic is a defect: it is counted and logged with its place, without what it says. What it says may hold a piece of
//! a request.

use prometheus_client::{metrics::counter::Counter, registry::Registry};
use std::panic::{self, PanicHookInfo};

/// Counts panics of the process.
#[derive(Clone, Debug, Default)]
pub struct Panics(Counter);

// === impl Panics ===

impl Panics {
    /// Counts and logs panics from here on, in place of the standard message.
    pub fn install(&self) {
        let counter = self.0.clone();
        panic::set_hook(Box::new(move |info| {
            counter.inc();
            let place = info.location().map(ToString::to_string).unwrap_or_default();
            tracing::error!(
                thread = std::thread::current().name(),
                message = message(info),
                "panicked at {place}"
            );
        }));
    }

    /// Makes the count visible.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "forebay_panics",
            "Panics; every one is a defect, please report it",
            self.0.clone(),
        );
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.0.get()
    }
}

/// Messages that are part of the program's text. One that was put together at run time is left out.
fn message(info: &PanicHookInfo<'_>) -> &'static str {
    info.payload()
        .downcast_ref::<&'static str>()
        .copied()
        .unwrap_or("(not shown: it was put together at run time)")
}
