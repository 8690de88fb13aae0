//! What an engine said of itself, as far as it could be read.

use crate::vllm::{
    discover::{self, EventSource, Model},
    http::{Answer, HttpError},
    scrape::Scrape,
};
use hyper::StatusCode;
use std::sync::Arc;

/// What an engine said of itself.
#[derive(Default)]
pub(super) struct About {
    pub(super) version: Option<Arc<str>>,
    pub(super) models: Vec<Model>,
    pub(super) sources: Sources,
    pub(super) problems: Vec<String>,
    pub(super) scrape: Option<Scrape>,
    /// The ranks in the last good scrape.
    pub(super) ranks: Vec<u32>,
    pub(super) scrape_error: Option<String>,
}

/// What is known of an engine's event sources.
#[derive(Clone, Debug, Default)]
pub(super) enum Sources {
    #[default]
    Unknown,
    /// It has no such page, as before vLLM 0.31.
    Silent,
    Known(Vec<EventSource>),
}

// === impl About ===

impl About {
    /// Takes in the answers about what it is and serves.
    pub(super) fn learn(
        &mut self,
        version: Option<Answer>,
        models: Option<Answer>,
        sources: Option<Answer>,
    ) {
        self.problems.clear();
        let ok = |answer: Option<Answer>| answer.filter(|a| a.status == StatusCode::OK);
        if let Some(answer) = ok(version) {
            match discover::version(&answer.body) {
                Ok(version) => self.version = Some(version),
                Err(error) => self.problems.push(error.to_string()),
            }
        }
        match ok(models).map(|answer| discover::models(&answer.body)) {
            Some(Ok(models)) => self.models = models,
            Some(Err(error)) => self.problems.push(error.to_string()),
            None => self.problems.push("/v1/models: no answer".into()),
        }
        self.sources = match sources {
            Some(answer) if answer.status == StatusCode::OK => {
                match discover::event_sources(&answer.body) {
                    Ok(sources) => Sources::Known(sources),
                    Err(error) => {
                        self.problems.push(error.to_string());
                        return;
                    }
                }
            }
            Some(answer) if answer.status == StatusCode::NOT_FOUND => Sources::Silent,
            // Not now: what was known stays.
            _ => return,
        };
    }

    /// Takes in a scrape, or why there is none. True if it can be used.
    pub(super) fn scraped(&mut self, metrics: Option<Answer>, error: Option<HttpError>) -> bool {
        let scrape = match metrics {
            Some(answer) if answer.status == StatusCode::OK => {
                Scrape::parse(&answer.body).ok_or_else(|| "nothing of vLLM's in it".to_owned())
            }
            Some(answer) => Err(format!("status {}", answer.status.as_u16())),
            None => Err(error.map_or_else(|| "no answer".into(), |error| error.to_string())),
        };
        match scrape {
            Ok(scrape) => {
                self.scrape_error = None;
                self.ranks = scrape.ranks();
                self.scrape = Some(scrape);
                true
            }
            Err(error) => {
                self.scrape_error = Some(error);
                self.scrape = None;
                false
            }
        }
    }
}
