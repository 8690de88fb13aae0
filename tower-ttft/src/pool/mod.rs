//! The endpoints of one model, and the choice among them.
use crate::{
    chain::KeySpace, endpoint::EndpointId, events::EventBatch, load::LoadReport, observe::Observer,
    policy::PolicySpec, predict::Prediction, prompt::Prompt,
};
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// Parameters of a pool.
#[derive(Clone, Debug)]
pub struct PoolParams {
    /// The base model's name.
    pub model: Arc<str>,
    /// The installation's key space.
    pub keys: KeySpace,
    /// The policy it starts with.
    pub policy: PolicySpec,
    /// A seed for all random choices.
    pub seed: u64,
    /// Bytes that the prefix index may take.
    pub index_bytes: usize,
}

/// The endpoints of one model. Cheap to clone; all clones are the same pool.
#[derive(Clone)]
pub struct Pool {}

/// A member of a pool. Cheap to clone. What engines say comes in here.
#[derive(Clone)]
pub struct Endpoint {}

/// What is known of an endpoint when it joins, or is learned of it later.
#[derive(Clone, Debug, Default)]
pub struct EndpointInfo {
    /// Hardware label; endpoints with the same label lend each other their gain.
    pub gpu: Option<Arc<str>>,
    /// Tokens in a KV block (`cache_config_info`).
    pub block_size: Option<u32>,
    /// KV blocks in all (`cache_config_info`).
    pub blocks: Option<u64>,
    /// Sequences that run at once, where known.
    pub max_seqs: Option<u32>,
    /// Whether KV events are expected: without them residency is guessed (rung 2).
    pub events: bool,
}

/// One request as the pool sees it.
#[derive(Clone, Debug)]
pub struct PickRequest {
    /// The prompt.
    pub prompt: Prompt,
    /// The answer streams; others never train TTFT.
    pub stream: bool,
    /// The output budget, if given.
    pub max_tokens: Option<u64>,
    /// Id for decision records.
    pub request_id: Option<Arc<str>>,
}

/// Endpoints that a request must not go to again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Excluded(pub Vec<EndpointId>);

/// The outcome of a pick.
pub enum Pick {
    /// Go there; it is booked.
    Dispatch(Ticket),
    /// Nothing now; ask again when something changes, or at that time.
    Wait(Option<Instant>),
    /// Never, and why.
    None(NoEndpoint),
}

/// Why there is no endpoint for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoEndpoint {
    /// Every endpoint that there is has already failed this request.
    #[error("every endpoint has already failed this request")]
    AllExcluded,
}

/// The record of one request at one endpoint. What it booked is released when it is dropped. It observes the answer.
pub struct Ticket {}

/// How good the knowledge behind a decision was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
pub enum Rung {
    /// Exact residency from KV events, fresh load.
    Exact,
    /// Residency guessed from own routing.
    Guessed,
    /// Load only.
    Load,
    /// Own in-flight requests only.
    InFlight,
    /// Nothing.
    Random,
}

/// One candidate of a decision.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Which.
    pub endpoint: EndpointId,
    /// Tokens it is thought to have cached, clipped as the engine clips.
    pub cached: u32,
    /// The prediction.
    pub prediction: Prediction,
    /// What the policy made of it; the smallest wins.
    pub score: f64,
}

/// Why a request went where it went; later, what came of it.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Counts up in each pool.
    pub id: u64,
    /// The request's id.
    pub request_id: Option<Arc<str>>,
    /// When.
    pub at: Instant,
    /// What it rests on.
    pub rung: Rung,
    /// Prompt tokens.
    pub tokens: u32,
    /// All that were scored.
    pub candidates: Vec<Candidate>,
    /// Index into `candidates`.
    pub chosen: usize,
}

impl Pool {
    /// An empty pool.
    pub fn new(_params: PoolParams) -> Self {
        unimplemented!()
    }
    /// Adds an endpoint that is not ready yet, or updates what is known of it. A new incarnation of the same address and rank replaces the old one: its tickets are cut and nothing learned of it stays but the peers' gain.
    pub fn insert(&self, _id: EndpointId, _info: EndpointInfo) -> Endpoint {
        unimplemented!()
    }
    /// Removes an endpoint: its tickets are cut, and it is forgotten.
    pub fn remove(&self, _id: &EndpointId) {
        unimplemented!()
    }
    /// The members.
    pub fn endpoints(&self) -> Vec<Endpoint> {
        unimplemented!()
    }
    /// Chooses and books in one step.
    pub fn pick(&self, _req: &PickRequest, _excluded: &Excluded, _now: Instant) -> Pick {
        unimplemented!()
    }
    /// Replaces the policy; endpoints keep what they learned.
    pub fn set_policy(&self, _policy: PolicySpec) {
        unimplemented!()
    }
}

impl Endpoint {
    /// Its name.
    pub fn id(&self) -> &EndpointId {
        unimplemented!()
    }
    /// Ready endpoints are candidates. NotReady keeps what is known.
    pub fn set_ready(&self, _ready: bool) {
        unimplemented!()
    }
    /// Whether it is a candidate.
    pub fn is_ready(&self) -> bool {
        unimplemented!()
    }
    /// Cuts it: not ready, and every ticket's [`Ticket::cut`] resolves.
    pub fn cut(&self) {
        unimplemented!()
    }
    /// Updates what is known of it.
    pub fn set_info(&self, _info: EndpointInfo) {
        unimplemented!()
    }
    /// Applies what it announced. The caller sees to order and gaps.
    pub fn apply(&self, _batch: &EventBatch) {
        unimplemented!()
    }
    /// Events are flowing (true) or were lost (false, residency is no longer exact).
    pub fn set_events_live(&self, _live: bool) {
        unimplemented!()
    }
    /// Forgets what its cache holds.
    pub fn clear(&self) {
        unimplemented!()
    }
    /// Takes what it reports of its load.
    pub fn report(&self, _report: LoadReport) {
        unimplemented!()
    }
}

impl Ticket {
    /// Where to.
    pub fn endpoint(&self) -> &Endpoint {
        unimplemented!()
    }
    /// Why.
    pub fn decision(&self) -> &Arc<Decision> {
        unimplemented!()
    }
    /// The request is on the wire; TTFT counts from here.
    pub fn sent(&mut self, _now: Instant) {
        unimplemented!()
    }
    /// Resolves when the endpoint was cut or removed.
    pub fn cut(&self) -> impl Future<Output = ()> + Send + 'static {
        std::future::pending()
    }
    /// Time since `sent` that was predicted.
    pub fn predicted(&self) -> Duration {
        unimplemented!()
    }
}

impl Observer for Ticket {
    fn first_byte(&mut self, _now: Instant) {}
    fn first_token(&mut self, _now: Instant) {}
    fn usage(&mut self, _usage: crate::observe::Usage) {}
    fn end(&mut self, _now: Instant, _end: crate::observe::End) {}
}
