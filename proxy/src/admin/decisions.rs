//! `/decisions`: why requests went where they went, and what came of it.

use super::{Body, as_json, text};
use crate::app::Directory;
use bytes::Bytes;
use futures::{StreamExt, stream::SelectAll};
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, broadcast::error::RecvError, mpsc},
    time,
};
use tower_ttft::pool::{DecisionRecord, Pool};

/// Records of a page, unless `?n=` says.
const DEFAULT_RECORDS: usize = 50;

/// Most records of a page.
const MAX_RECORDS: usize = 1000;

/// Readers that follow at once.
const MAX_FOLLOWERS: usize = 8;

/// Lines that a reader may be behind before records are left out for it.
const BEHIND: usize = 64;

/// How often a reader that follows gets an empty line when there is nothing to say, so that a dead one is noticed; and
/// how often new pools are looked for.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// What is asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Query {
    n: Option<usize>,
    request_id: Option<String>,
    model: Option<String>,
    follow: bool,
}

/// Bounds readers that follow.
#[derive(Clone, Debug)]
pub(super) struct Followers(Arc<Semaphore>);

/// A query that cannot be answered.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum QueryError {
    #[error("unknown parameter `{0}`; known are n, request_id, model and follow")]
    Unknown(String),
    #[error("`n={0}`: a number from 0 to {MAX_RECORDS} is expected")]
    Count(String),
    #[error("`follow={0}`: 1 or 0 is expected")]
    Follow(String),
}

// === impl Followers ===

impl Default for Followers {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_FOLLOWERS)))
    }
}

// === impl Query ===

impl Query {
    pub(super) fn parse(query: &str) -> Result<Self, QueryError> {
        let mut out = Self::default();
        for pair in query.split('&').filter(|p| !p.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = crate::app::decode(value).into_owned();
            match key {
                "n" => match value.parse() {
                    Ok(n) if n <= MAX_RECORDS => out.n = Some(n),
                    _ => return Err(QueryError::Count(value)),
                },
                "request_id" => out.request_id = Some(value),
                "model" => out.model = Some(value),
                "follow" => match value.as_str() {
                    "1" | "true" | "" => out.follow = true,
                    "0" | "false" => out.follow = false,
                    _ => return Err(QueryError::Follow(value)),
                },
                _ => return Err(QueryError::Unknown(key.to_owned())),
            }
        }
        Ok(out)
    }

    fn wants(&self, record: &DecisionRecord) -> bool {
        let d = &record.decision;
        self.request_id
            .as_ref()
            .is_none_or(|id| d.request_id.as_deref() == Some(id))
            && self.model.as_ref().is_none_or(|model| *d.model == **model)
    }
}

pub(super) fn page(
    directory: &Arc<Directory>,
    followers: &Followers,
    query: Query,
) -> Response<Body> {
    if query.follow {
        return match followers.0.clone().try_acquire_owned() {
            Ok(permit) => follow(directory.clone(), query, permit),
            Err(_) => text(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("{MAX_FOLLOWERS} readers follow already\n"),
            ),
        };
    }
    as_json(
        &last(directory, &query, query.n.unwrap_or(DEFAULT_RECORDS))
            .into_iter()
            .map(|r| json!(r))
            .collect::<Value>(),
    )
}

/// The last records that are wanted, oldest first.
fn last(directory: &Directory, query: &Query, n: usize) -> Vec<DecisionRecord> {
    let mut records: Vec<_> = directory
        .pools()
        .iter()
        // A filter must see all that is kept to find `n`.
        .flat_map(|pool| pool.decisions().last(usize::MAX))
        .filter(|r| query.wants(r))
        .collect();
    records.sort_by(|a, b| a.decision.unix.total_cmp(&b.decision.unix));
    let skip = records.len().saturating_sub(n);
    records.split_off(skip)
}

fn follow(directory: Arc<Directory>, query: Query, permit: OwnedSemaphorePermit) -> Response<Body> {
    let (tx, lines) = mpsc::channel(BEHIND);
    // Ends when the reader is gone: at the next record or heartbeat.
    tokio::spawn(async move {
        tell(&directory, &query, &tx).await;
        drop(permit);
    });
    let mut response = Response::new(Body::Lines(lines));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/x-ndjson"),
    );
    response
}

/// Sends lines until the reader is gone.
async fn tell(directory: &Directory, query: &Query, tx: &mpsc::Sender<Bytes>) {
    let mut streams = SelectAll::new();
    let mut known = BTreeSet::new();
    let mut subscribe = |streams: &mut SelectAll<_>| {
        let pools = directory.pools();
        known.retain(|name: &Arc<str>| pools.iter().any(|p| p.model() == name));
        for pool in pools {
            if known.insert(pool.model().clone()) {
                streams.push(records(&pool));
            }
        }
    };
    subscribe(&mut streams);
    for record in last(directory, query, query.n.unwrap_or(0)) {
        if tx.send(line(&json!(record))).await.is_err() {
            return;
        }
    }
    let mut heartbeat = time::interval(HEARTBEAT);
    heartbeat.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
    loop {
        let line = tokio::select! {
            Some(told) = streams.next() => match told {
                Ok(record) if query.wants(&record) => line(&json!(record)),
                Ok(_) => continue,
                Err(missed) => line(&json!({"missed": missed})),
            },
            _ = heartbeat.tick() => {
                subscribe(&mut streams);
                Bytes::from_static(b"\n")
            }
        };
        if tx.send(line).await.is_err() {
            return;
        }
    }
}

/// The records of a pool as they come; an error counts those that a slow reader missed.
fn records(pool: &Pool) -> futures::stream::BoxStream<'static, Result<DecisionRecord, u64>> {
    let rx = pool.decisions().subscribe();
    futures::stream::unfold(rx, |mut rx| async move {
        match rx.recv().await {
            Ok(record) => Some((Ok(record), rx)),
            Err(RecvError::Lagged(missed)) => Some((Err(missed), rx)),
            Err(RecvError::Closed) => None,
        }
    })
    .boxed()
}

fn line(value: &Value) -> Bytes {
    format!("{value}\n").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries() {
        assert_eq!(Query::parse("").unwrap(), Query::default());
        assert_eq!(
            Query::parse("n=5&request_id=a%2Fb&model=tiny&follow=1").unwrap(),
            Query {
                n: Some(5),
                request_id: Some("a/b".into()),
                model: Some("tiny".into()),
                follow: true,
            }
        );
        for (query, says) in [
            ("n=x", "`n=x`: a number from 0 to 1000"),
            ("n=1001", "a number from 0 to 1000"),
            ("follow=maybe", "1 or 0"),
            ("requestid=1", "unknown parameter `requestid`"),
        ] {
            let error = Query::parse(query).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
