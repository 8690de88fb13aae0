//! Asks an engine for the tokens of a prompt.
//!
//! The engine's render endpoints (`--enable-scale-out`) take the request as it is and are exact for every API that they
//! know. Where they are switched off, `/tokenize` takes a chat's messages and tools or a completion's text; what else in
//! a request would change its prompt is then a reason not to trust the answer. Each question has a connection of its own,
//! which costs a fraction of a millisecond beside the tens that an engine takes; how many are under way is the caller's
//! to bound.

use super::http::{self, Answer, Ask, HttpError};
use crate::{
    endpoint::Address,
    peek::{Api, InferenceRequest},
    pool::Pool,
    prompt::{RemoteError, RemotePrompt, RemoteTokenizer, Source},
};
use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::{collections::HashMap, fmt, time::Duration};
use tokio::time::Instant;

/// A tokenizer that is whichever engine of a pool is ready.
pub struct EngineTokenizer {
    ready: Box<dyn Fn() -> Vec<Address> + Send + Sync>,
    turn: std::sync::atomic::AtomicUsize,
    /// Engines without render endpoints, and until when that is believed.
    no_render: Mutex<HashMap<Address, Instant>>,
    no_render_for: Duration,
}

/// What of a chat `/tokenize` understands.
const CHAT: [&str; 9] = [
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
];
/// What changes a prompt and `/tokenize` does not know.
const UNKNOWN: [&str; 4] = [
    "documents",
    "reasoning_effort",
    "truncate_prompt_tokens",
    "suffix",
];
/// Prompts of one completion request that are asked for.
const MAX_PROMPTS: usize = 16;
/// Bytes of an answer: a million tokens and their JSON.
const MAX_ANSWER: usize = 16 << 20;
/// For a connection.
const DIAL: Duration = Duration::from_millis(500);
/// For an answer; callers are less patient.
const PATIENCE: Duration = Duration::from_secs(30);
const NO_RENDER_FOR: Duration = Duration::from_secs(60);

#[derive(Deserialize)]
struct Rendered {
    token_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<u32>,
}

/// The error of a route that does not exist, as FastAPI writes it. vLLM's own errors have `error` instead.
#[derive(Deserialize)]
struct NoRoute {
    #[serde(rename = "detail")]
    _detail: serde::de::IgnoredAny,
}

// === impl EngineTokenizer ===

impl EngineTokenizer {
    /// Asks the ready engines of a pool in turn.
    pub fn new(pool: Pool) -> Self {
        Self::among(move || {
            let endpoints = pool.endpoints();
            let ready = endpoints.iter().filter(|endpoint| endpoint.is_ready());
            ready
                .map(|endpoint| endpoint.id().address.clone())
                .collect()
        })
    }

    fn among(ready: impl Fn() -> Vec<Address> + Send + Sync + 'static) -> Self {
        Self {
            ready: Box::new(ready),
            turn: Default::default(),
            no_render: Mutex::default(),
            no_render_for: NO_RENDER_FOR,
        }
    }

    fn engine(&self) -> Option<Address> {
        let ready = (self.ready)();
        let turn = self.turn.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        ready.get(turn.checked_rem(ready.len())?).cloned()
    }

    async fn ask(&self, req: &InferenceRequest) -> Result<RemotePrompt, RemoteError> {
        let engine = self.engine().ok_or(RemoteError::NoEngine)?;
        if let Some(path) = render_path(req.api)
            && self.may_render(&engine)
        {
            let answers = questions(&engine, vec![post(path, req.body.clone())]).await?;
            let answer = answers.first().ok_or(RemoteError::Failed)?;
            if !cannot_render(answer) {
                return rendered(req.api, answer);
            }
            self.cannot(engine.clone());
        }
        let bodies = tokenize_bodies(req)?;
        let asks = bodies
            .into_iter()
            .map(|body| post("/tokenize", body))
            .collect();
        let answers = questions(&engine, asks).await?;
        let prompts = answers.iter().map(|answer| {
            let Tokenized { tokens } = read(answer)?;
            Ok(tokens)
        });
        Ok(RemotePrompt {
            prompts: prompts.collect::<Result<_, RemoteError>>()?,
            source: Source::Tokenize,
        })
    }

    fn may_render(&self, engine: &Address) -> bool {
        let until = self.no_render.lock().get(engine).copied();
        until.is_none_or(|until| Instant::now() >= until)
    }

    fn cannot(&self, engine: Address) {
        let now = Instant::now();
        let mut no_render = self.no_render.lock();
        // As many as there are engines.
        no_render.retain(|_, until| now < *until);
        no_render.insert(engine, now + self.no_render_for);
    }
}

impl RemoteTokenizer for EngineTokenizer {
    fn tokenize<'a>(
        &'a self,
        req: &'a InferenceRequest,
    ) -> BoxFuture<'a, Result<RemotePrompt, RemoteError>> {
        self.ask(req).boxed()
    }
}

impl fmt::Debug for EngineTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineTokenizer").finish_non_exhaustive()
    }
}

fn render_path(api: Api) -> Option<&'static str> {
    match api {
        Api::Chat => Some("/v1/chat/completions/render"),
        Api::Completions => Some("/v1/completions/render"),
        Api::Responses => Some("/v1/responses/render"),
        Api::Messages => Some("/v1/messages/render"),
        Api::Embeddings | Api::Score | Api::Rerank | Api::Audio | Api::Other => None,
    }
}

fn post(path: &'static str, body: Bytes) -> Ask {
    Ask {
        path,
        body: Some(body),
        limit: MAX_ANSWER,
    }
}

async fn questions(engine: &Address, asks: Vec<Ask>) -> Result<Vec<Answer>, RemoteError> {
    let failed = |_: HttpError| RemoteError::Failed;
    let stream = http::dial(engine.as_str(), DIAL).await.map_err(failed)?;
    let (answers, result) = http::ask(stream, engine.as_str(), asks, PATIENCE).await;
    result.map_err(failed)?;
    Ok(answers)
}

/// Whether an engine has said that it renders nothing: 403 since the route is guarded by a flag, 404 before there was
/// one, 501 from a server of another kind.
fn cannot_render(answer: &Answer) -> bool {
    match answer.status.as_u16() {
        403 | 405 | 501 => true,
        404 => serde_json::from_slice::<NoRoute>(&answer.body).is_ok(),
        _ => false,
    }
}

fn rendered(api: Api, answer: &Answer) -> Result<RemotePrompt, RemoteError> {
    let prompts: Vec<Rendered> = match api {
        Api::Completions => read(answer)?,
        _ => vec![read(answer)?],
    };
    Ok(RemotePrompt {
        prompts: prompts.into_iter().map(|prompt| prompt.token_ids).collect(),
        source: Source::Render,
    })
}

fn read<'a, T: Deserialize<'a>>(answer: &'a Answer) -> Result<T, RemoteError> {
    match answer.status.as_u16() {
        200 => serde_json::from_slice(&answer.body).map_err(|_| RemoteError::Failed),
        404 if serde_json::from_slice::<NoRoute>(&answer.body).is_ok() => {
            Err(RemoteError::Unsupported)
        }
        400..=499 => Err(RemoteError::Refused),
        _ => Err(RemoteError::Failed),
    }
}

/// The questions that `/tokenize` can answer for a request: one for each of its prompts.
fn tokenize_bodies(req: &InferenceRequest) -> Result<Vec<Bytes>, RemoteError> {
    let field = |name: &str| {
        let (_, range) = req.fields.iter().find(|(key, _)| **key == *name)?;
        req.body.get(range.clone())
    };
    match req.api {
        Api::Chat | Api::Completions => {}
        _ => return Err(RemoteError::Unsupported),
    }
    if UNKNOWN
        .iter()
        .any(|name| field(name).is_some_and(|value| value != b"null"))
    {
        return Err(RemoteError::Refused);
    }
    if req.api == Api::Chat {
        let fields = CHAT.iter().filter_map(|name| Some((*name, field(name)?)));
        return match field("messages") {
            Some(_) => Ok(vec![object(fields)]),
            None => Err(RemoteError::Refused),
        };
    }
    let prompt = field("prompt").ok_or(RemoteError::Refused)?;
    let rest = ["model", "add_special_tokens"];
    let body = |prompt| {
        let rest = rest.iter().filter_map(|name| Some((*name, field(name)?)));
        object(rest.chain([("prompt", prompt)]))
    };
    match prompt.first() {
        Some(b'"') => Ok(vec![body(prompt)]),
        Some(b'[') => {
            let prompts: Vec<&RawValue> =
                serde_json::from_slice(prompt).map_err(|_| RemoteError::Refused)?;
            let texts = prompts.iter().all(|prompt| prompt.get().starts_with('"'));
            if prompts.is_empty() || prompts.len() > MAX_PROMPTS || !texts {
                return Err(RemoteError::Refused);
            }
            Ok(prompts
                .iter()
                .map(|prompt| body(prompt.get().as_bytes()))
                .collect())
        }
        _ => Err(RemoteError::Refused),
    }
}

/// A JSON object of values as they were written.
fn object<'a>(fields: impl Iterator<Item = (&'static str, &'a [u8])>) -> Bytes {
    let mut out = vec![b'{'];
    for (i, (name, value)) in fields.enumerate() {
        if i > 0 {
            out.push(b',');
        }
        out.extend_from_slice(format!("\"{name}\":").as_bytes());
        out.extend_from_slice(value);
    }
    out.push(b'}');
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        peek::BodyRead,
        vllm::testing::http::{FakeHttp, Reply},
    };

    fn request(api: Api, body: &str) -> InferenceRequest {
        // Every top-level key in these tests is written as `"key": value`, one a line.
        let mut fields = Vec::new();
        for line in body.lines() {
            let Some((key, value)) = line.trim().split_once(": ") else {
                continue;
            };
            let value = value.trim_end_matches(',');
            let start = value.as_ptr() as usize - body.as_ptr() as usize;
            fields.push((key.trim_matches('"').into(), start..start + value.len()));
        }
        InferenceRequest {
            api,
            model: None,
            stream: false,
            include_usage: false,
            max_tokens: None,
            n: 1,
            cache_salt: None,
            priority: None,
            read: BodyRead::Parsed,
            body: Bytes::copy_from_slice(body.as_bytes()),
            fields: fields.into(),
            duplicates: Vec::new(),
        }
    }

    fn tokenizer(http: &FakeHttp) -> EngineTokenizer {
        let address = Address::new(http.address());
        EngineTokenizer::among(move || vec![address.clone()])
    }

    const NOT_FOUND: &[u8] = br#"{"detail":"Not Found"}"#;

    #[tokio::test]
    async fn renders_where_the_engine_can() {
        let http = FakeHttp::start().await;
        http.ok(
            "/v1/chat/completions/render",
            r#"{"request_id":"x","token_ids":[5,6],"sampling_params":{}}"#,
        );
        http.ok(
            "/v1/completions/render",
            r#"[{"token_ids":[1]},{"token_ids":[2,3]}]"#,
        );
        let tokenizer = tokenizer(&http);
        let body = "{\n\"messages\": [{}],\n\"temperature\": 1}";
        let prompt = tokenizer.tokenize(&request(Api::Chat, body)).await.unwrap();
        assert_eq!(
            (&prompt.prompts[..], prompt.source),
            (&[vec![5, 6]][..], Source::Render)
        );
        assert_eq!(
            http.bodies("/v1/chat/completions/render"),
            [body.as_bytes()]
        );
        let prompt = tokenizer
            .tokenize(&request(Api::Completions, "{}"))
            .await
            .unwrap();
        assert_eq!(prompt.prompts, [vec![1], vec![2, 3]]);
    }

    #[tokio::test]
    async fn tokenizes_where_it_cannot_and_remembers_that_for_a_while() {
        let http = FakeHttp::start().await;
        let forbidden = br#"{"error":{"message":"Scale-out endpoints are disabled."}}"#;
        http.reply(
            "/v1/chat/completions/render",
            Reply::Status(403, forbidden.to_vec()),
        );
        http.ok(
            "/tokenize",
            r#"{"count":2,"max_model_len":10,"tokens":[7,8],"token_strs":null}"#,
        );
        let mut tokenizer = tokenizer(&http);
        let body = "{\n\"model\": \"m\",\n\"stream\": true,\n\"messages\": [{\"role\": 1e2}],\n\"tools\": [NaN]\n}";
        for _ in 0..3 {
            let prompt = tokenizer.tokenize(&request(Api::Chat, body)).await.unwrap();
            assert_eq!(
                (&prompt.prompts[..], prompt.source),
                (&[vec![7, 8]][..], Source::Tokenize)
            );
        }
        assert_eq!(http.asked("/v1/chat/completions/render"), 1);
        // Values go out as they were written.
        let sent = r#"{"model":"m","messages":[{"role": 1e2}],"tools":[NaN]}"#;
        assert_eq!(http.bodies("/tokenize"), [sent.as_bytes(); 3]);
        tokenizer.no_render_for = Duration::ZERO;
        tokenizer.no_render.lock().clear();
        tokenizer.tokenize(&request(Api::Chat, body)).await.unwrap();
        tokenizer.tokenize(&request(Api::Chat, body)).await.unwrap();
        assert_eq!(http.asked("/v1/chat/completions/render"), 3);
    }

    #[tokio::test]
    async fn every_prompt_of_a_completion_is_asked_for() {
        let http = FakeHttp::start().await;
        http.ok("/tokenize", r#"{"tokens":[7]}"#);
        let tokenizer = tokenizer(&http);
        let prompt = tokenizer
            .tokenize(&request(
                Api::Completions,
                "{\n\"prompt\": [\"a\", \"b\"]\n}",
            ))
            .await
            .unwrap();
        assert_eq!(prompt.prompts, [[7], [7]]);
        assert_eq!(
            http.bodies("/tokenize"),
            [br#"{"prompt":"a"}"#, br#"{"prompt":"b"}"#]
        );
    }

    #[tokio::test]
    async fn says_why_there_is_no_answer() {
        let http = FakeHttp::start().await;
        let tokenizer = tokenizer(&http);
        let chat = request(Api::Chat, "{\n\"messages\": []\n}");
        // Neither route is there.
        assert_eq!(
            tokenizer.tokenize(&chat).await,
            Err(RemoteError::Unsupported)
        );
        for (reply, expected) in [
            (Reply::Status(400, b"{}".to_vec()), RemoteError::Refused),
            (
                Reply::Status(404, br#"{"error":{"message":"no such model"}}"#.to_vec()),
                RemoteError::Refused,
            ),
            (
                Reply::Status(404, NOT_FOUND.to_vec()),
                RemoteError::Unsupported,
            ),
            (Reply::Status(500, b"{}".to_vec()), RemoteError::Failed),
            (Reply::Status(200, b"<html>".to_vec()), RemoteError::Failed),
            (
                Reply::Status(200, br#"{"tokens":[-1]}"#.to_vec()),
                RemoteError::Failed,
            ),
            (Reply::Reset, RemoteError::Failed),
        ] {
            http.reply("/tokenize", reply.clone());
            assert_eq!(tokenizer.tokenize(&chat).await, Err(expected), "{reply:?}");
        }
        for (api, body, expected) in [
            (Api::Embeddings, "{}", RemoteError::Unsupported),
            (Api::Messages, "{}", RemoteError::Unsupported),
            (Api::Chat, "{}", RemoteError::Refused),
            (
                Api::Chat,
                "{\n\"messages\": [],\n\"documents\": [1]\n}",
                RemoteError::Refused,
            ),
            (Api::Completions, "{}", RemoteError::Refused),
            (
                Api::Completions,
                "{\n\"prompt\": [1, 2]\n}",
                RemoteError::Refused,
            ),
            (
                Api::Completions,
                "{\n\"prompt\": []\n}",
                RemoteError::Refused,
            ),
            (
                Api::Completions,
                "{\n\"prompt\": 7\n}",
                RemoteError::Refused,
            ),
        ] {
            assert_eq!(
                tokenizer.tokenize(&request(api, body)).await,
                Err(expected),
                "{body}"
            );
        }
        http.stop().await;
        assert_eq!(tokenizer.tokenize(&chat).await, Err(RemoteError::Failed));
        let nobody = EngineTokenizer::among(Vec::new);
        assert_eq!(nobody.tokenize(&chat).await, Err(RemoteError::NoEngine));
    }

    #[tokio::test]
    async fn engines_take_turns() {
        let both = [FakeHttp::start().await, FakeHttp::start().await];
        for http in &both {
            http.ok("/tokenize", r#"{"tokens":[7]}"#);
        }
        let addresses = both
            .iter()
            .map(|http| Address::new(http.address()))
            .collect::<Vec<_>>();
        let tokenizer = EngineTokenizer::among(move || addresses.clone());
        for _ in 0..4 {
            tokenizer
                .tokenize(&request(Api::Completions, "{\n\"prompt\": \"a\"\n}"))
                .await
                .unwrap();
        }
        assert_eq!(both.each_ref().map(|http| http.asked("/tokenize")), [2, 2]);
    }
}
