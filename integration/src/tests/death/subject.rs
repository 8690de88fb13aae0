//! Engines that can die, real and fake, and the ways in which they do.

use crate::{fake::FakeEngine, lab::Pair};
use anyhow::Result;
use rustix::process::Signal;
use std::sync::Arc;

/// How an engine dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Death {
    /// SIGKILL to the API server.
    Server,
    /// SIGKILL to EngineCore.
    Core,
    /// SIGTERM to the API server: its open answers hang without FIN.
    Term,
}

/// An engine that can die.
#[derive(Clone)]
pub(super) enum Subject {
    Real(Arc<Pair>, usize),
    Fake(Arc<FakeEngine>),
}

// === impl Subject ===

impl Subject {
    pub(super) fn authority(&self) -> &str {
        match self {
            Self::Real(pair, i) => pair[*i].authority(),
            Self::Fake(fake) => fake.authority(),
        }
    }

    pub(super) async fn die(&self, death: Death) -> Result<()> {
        match self {
            Self::Fake(fake) => match death {
                Death::Server => fake.kill(),
                Death::Core => fake.kill_core(),
                Death::Term => fake.terminate(),
            },
            Self::Real(pair, i) => match death {
                Death::Server => pair[*i].signal(Signal::KILL).await?,
                Death::Core => pair[*i].kill_core().await?,
                Death::Term => pair[*i].signal(Signal::TERM).await?,
            },
        }
        Ok(())
    }

    pub(super) async fn restart(&self) -> Result<()> {
        match self {
            Self::Fake(fake) => fake.restart(),
            Self::Real(pair, i) => pair[*i].restart().await,
        }
    }
}
