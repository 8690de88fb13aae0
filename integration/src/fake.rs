//! A stand-in for a vLLM engine that starts at once and dies as the real one was seen to: enough of its HTTP API for a
//! gateway to take it for one. What it shows of the gateway is shown quickly; what vLLM does, only vLLM shows.

use crate::engine::MODEL;
use anyhow::{Context, Result};
use bytes::Bytes;
use futures::{StreamExt, stream, stream::BoxStream};
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpSocket},
    sync::watch,
    task::{AbortHandle, JoinSet},
    time::sleep,
};

/// Bodies over this have a prompt that takes [`LONG_PREFILL`].
const LONG_BODY: usize = 16 << 10;

/// How long a long prompt takes.
const LONG_PREFILL: Duration = Duration::from_secs(2);

/// Between tokens.
const TOKEN: Duration = Duration::from_millis(20);

/// From the death of its core to the end of its API server: vLLM was seen to take 0.65 s.
const LAST_GASP: Duration = Duration::from_millis(650);

/// From SIGTERM to the end of its listener: vLLM was seen to take 0.35 s.
const TERM_DELAY: Duration = Duration::from_millis(350);

/// Engines are numbered, which makes their incarnations.
static BORN: AtomicU64 = AtomicU64::new(1);

/// A fake engine. Dropping it closes its sockets.
pub struct FakeEngine {
    address: SocketAddr,
    authority: String,
    backlog: u32,
    life: Mutex<Life>,
}

/// One life of a fake engine.
struct Life {
    shared: Arc<Shared>,
    listening: AbortHandle,
    serving: AbortHandle,
}

struct Shared {
    phase: watch::Sender<Phase>,
    accepting: watch::Sender<bool>,
    running: AtomicUsize,
    incarnation: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Up,
    /// Its core is gone: it says so.
    Headless,
    /// It says nothing and closes nothing.
    Frozen,
}

/// A request that runs, for as long as its answer is sent.
struct Running(Arc<Shared>);

type Body = StreamBody<BoxStream<'static, Result<Frame<Bytes>, Infallible>>>;

// === impl FakeEngine ===

impl FakeEngine {
    /// Starts one on a port from the kernel.
    pub fn start() -> Result<Self> {
        Self::with_backlog(1024)
    }

    /// Starts one of which only a few connections can wait to be accepted.
    pub fn with_backlog(backlog: u32) -> Result<Self> {
        let listener = listen(([127, 0, 0, 1], 0).into(), backlog)?;
        Self::serve(listener, backlog)
    }

    /// Starts one on a listener.
    pub fn on(listener: TcpListener) -> Result<Self> {
        Self::serve(listener, 1024)
    }

    fn serve(listener: TcpListener, backlog: u32) -> Result<Self> {
        let address = listener.local_addr()?;
        Ok(Self {
            address,
            authority: address.to_string(),
            backlog,
            life: Mutex::new(Life::begin(listener)),
        })
    }

    /// `host:port` of its API.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Requests that run.
    pub fn running(&self) -> usize {
        self.life.lock().shared.running.load(Ordering::SeqCst)
    }

    /// Dies as from SIGKILL: all sockets are closed at once.
    pub fn kill(&self) {
        let life = self.life.lock();
        life.listening.abort();
        life.serving.abort();
    }

    /// Dies as vLLM does when its EngineCore is killed: streams get an error event and a clean end, then the port refuses.
    pub fn kill_core(&self) {
        let life = self.life.lock();
        life.shared.phase.send_replace(Phase::Headless);
        let (listening, serving) = (life.listening.clone(), life.serving.clone());
        tokio::spawn(async move {
            sleep(LAST_GASP).await;
            listening.abort();
            serving.abort();
        });
    }

    /// Ends as vLLM does on SIGTERM: open answers hang, and soon the port refuses.
    pub fn terminate(&self) {
        let life = self.life.lock();
        life.shared.phase.send_replace(Phase::Frozen);
        let listening = life.listening.clone();
        tokio::spawn(async move {
            sleep(TERM_DELAY).await;
            listening.abort();
        });
    }

    /// Stops or goes on to accept connections; the listener stays.
    pub fn accept(&self, accept: bool) {
        self.life.lock().shared.accepting.send_replace(accept);
    }

    /// Starts again at the same address, as another process.
    pub fn restart(&self) -> Result<()> {
        self.kill();
        let listener = listen(self.address, self.backlog)?;
        *self.life.lock() = Life::begin(listener);
        Ok(())
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        self.kill();
    }
}

fn listen(address: SocketAddr, backlog: u32) -> Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(address).with_context(|| address.to_string())?;
    Ok(socket.listen(backlog)?)
}

// === impl Life ===

impl Life {
    fn begin(listener: TcpListener) -> Self {
        let shared = Arc::new(Shared {
            phase: watch::Sender::new(Phase::Up),
            accepting: watch::Sender::new(true),
            running: AtomicUsize::new(0),
            incarnation: BORN.fetch_add(1, Ordering::Relaxed),
        });
        // Two tasks: the listener can go while connections stay.
        let (sender, mut accepted) = tokio::sync::mpsc::channel(1);
        let accepting = shared.clone();
        let listening = tokio::spawn(async move {
            let mut may = accepting.accepting.subscribe();
            while may.wait_for(|may| *may).await.is_ok() {
                tokio::select! {
                    connection = listener.accept() => match connection {
                        Ok((socket, _)) => if sender.send(socket).await.is_err() { return },
                        Err(_) => sleep(Duration::from_millis(10)).await,
                    },
                    _ = may.changed() => {}
                }
            }
        })
        .abort_handle();
        let served = shared.clone();
        let serving = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            let mut open = true;
            while open || !connections.is_empty() {
                let socket = tokio::select! {
                    socket = accepted.recv(), if open => socket,
                    Some(_) = connections.join_next() => continue,
                };
                let Some(socket) = socket else {
                    open = false;
                    continue;
                };
                let shared = served.clone();
                connections.spawn(async move {
                    let _ = socket.set_nodelay(true);
                    let service = service_fn(|request| answer(shared.clone(), request));
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(socket), service)
                        .await;
                });
            }
        })
        .abort_handle();
        Self {
            shared,
            listening,
            serving,
        }
    }
}

// === impl Running ===

impl Running {
    fn begin(shared: &Arc<Shared>) -> Self {
        shared.running.fetch_add(1, Ordering::SeqCst);
        Self(shared.clone())
    }

    /// Waits, unless the engine dies first: then says whether its core is gone.
    async fn wait(&self, time: Duration) -> bool {
        let mut phase = self.0.phase.subscribe();
        let phase = tokio::select! {
            biased;
            phase = phase.wait_for(|p| *p != Phase::Up) => phase.map_or(Phase::Frozen, |p| *p),
            () = sleep(time) => Phase::Up,
        };
        if phase == Phase::Frozen {
            std::future::pending::<()>().await;
        }
        phase == Phase::Headless
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn answer(
    shared: Arc<Shared>,
    request: Request<Incoming>,
) -> Result<Response<Body>, hyper::Error> {
    let phase = *shared.phase.borrow();
    if phase == Phase::Frozen {
        std::future::pending::<()>().await;
    }
    let path = request.uri().path().to_owned();
    let body = request.into_body().collect().await?.to_bytes();
    Ok(match path.as_str() {
        "/health" if phase == Phase::Headless => whole(StatusCode::SERVICE_UNAVAILABLE, ""),
        "/health" => whole(StatusCode::OK, ""),
        "/version" => whole(StatusCode::OK, json!({"version": "0.32.0"}).to_string()),
        "/v1/models" => {
            let model = json!({"id": MODEL, "object": "model", "root": MODEL, "parent": null, "max_model_len": 32768});
            whole(
                StatusCode::OK,
                json!({"object": "list", "data": [model]}).to_string(),
            )
        }
        "/metrics" => whole(StatusCode::OK, metrics(&shared)),
        "/v1/chat/completions" | "/v1/completions" | "/v1/messages" | "/v1/responses" => {
            generate(shared, &path, &body).await
        }
        _ => whole(StatusCode::NOT_FOUND, r#"{"detail":"Not Found"}"#),
    })
}

fn metrics(shared: &Shared) -> String {
    format!(
        "process_start_time_seconds {}\nvllm:num_requests_running{{engine=\"0\",model_name=\"{MODEL}\"}} {}\nvllm:num_requests_waiting{{engine=\"0\",model_name=\"{MODEL}\"}} 0\nvllm:kv_cache_usage_perc{{engine=\"0\",model_name=\"{MODEL}\"}} 0\nvllm:cache_config_info{{block_size=\"32\",num_gpu_blocks=\"1024\",engine=\"0\"}} 1\n",
        shared.incarnation,
        shared.running.load(Ordering::SeqCst)
    )
}

async fn generate(shared: Arc<Shared>, path: &str, body: &[u8]) -> Response<Body> {
    let request: Value = serde_json::from_slice(body).unwrap_or_default();
    let tokens = ["max_tokens", "max_output_tokens"]
        .iter()
        .find_map(|key| request[*key].as_u64())
        .unwrap_or(16);
    let prefill = match body.len() {
        0..LONG_BODY => TOKEN,
        _ => LONG_PREFILL,
    };
    let running = Running::begin(&shared);
    if request["stream"] == true {
        return streamed(running, Dialect::of(path), tokens, prefill);
    }
    if running.wait(prefill + TOKEN * tokens as u32).await {
        return whole(StatusCode::INTERNAL_SERVER_ERROR, core_died());
    }
    let text = "x ".repeat(tokens as usize);
    whole(
        StatusCode::OK,
        json!({
            "id": "fake", "object": "chat.completion", "model": MODEL,
            "choices": [{"index": 0, "text": text, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}],
            "usage": {"prompt_tokens": body.len() / 4, "completion_tokens": tokens, "total_tokens": body.len() as u64 / 4 + tokens},
        })
        .to_string(),
    )
}

fn streamed(running: Running, dialect: Dialect, tokens: u64, prefill: Duration) -> Response<Body> {
    let events = stream::unfold(
        (running, 0_u64, false),
        move |(running, i, ended)| async move {
            if ended {
                return None;
            }
            let wait = if i == 0 { prefill } else { TOKEN };
            let event = if running.wait(wait).await {
                return Some((
                    format!("data: {}\n\ndata: [DONE]\n\n", core_died()),
                    (running, i, true),
                ));
            } else if i < tokens {
                dialect.token()
            } else {
                dialect.end().to_owned()
            };
            Some((event, (running, i + 1, i >= tokens)))
        },
    );
    let mut response = Response::new(body(events.boxed()));
    response.headers_mut().insert(
        http::header::CONTENT_TYPE,
        http::HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    response
}

/// What vLLM was seen to say.
fn core_died() -> String {
    json!({"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", "type": "InternalServerError", "param": null, "code": 500}}).to_string()
}

fn whole(status: StatusCode, text: impl Into<String>) -> Response<Body> {
    let text = text.into();
    let mut response = Response::new(body(stream::once(async { text }).boxed()));
    *response.status_mut() = status;
    response.headers_mut().insert(
        http::header::CONTENT_TYPE,
        http::HeaderValue::from_static("application/json"),
    );
    response
}

fn body(parts: BoxStream<'static, String>) -> Body {
    StreamBody::new(parts.map(|part| Ok(Frame::data(part.into()))).boxed())
}

/// How an API streams.
#[derive(Clone, Copy)]
enum Dialect {
    Chat,
    Completions,
    Messages,
    Responses,
}

// === impl Dialect ===

impl Dialect {
    fn of(path: &str) -> Self {
        match path {
            "/v1/completions" => Self::Completions,
            "/v1/messages" => Self::Messages,
            "/v1/responses" => Self::Responses,
            _ => Self::Chat,
        }
    }

    fn token(self) -> String {
        match self {
            Self::Chat => format!(
                "data: {}\n\n",
                json!({"id": "fake", "object": "chat.completion.chunk", "model": MODEL, "choices": [{"index": 0, "delta": {"content": "x "}, "finish_reason": null}]})
            ),
            Self::Completions => format!(
                "data: {}\n\n",
                json!({"id": "fake", "object": "text_completion", "model": MODEL, "choices": [{"index": 0, "text": "x ", "finish_reason": null}]})
            ),
            Self::Messages => format!(
                "event: content_block_delta\ndata: {}\n\n",
                json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x "}})
            ),
            Self::Responses => format!(
                "event: response.output_text.delta\ndata: {}\n\n",
                json!({"type": "response.output_text.delta", "sequence_number": 1, "delta": "x "})
            ),
        }
    }

    fn end(self) -> &'static str {
        match self {
            Self::Chat | Self::Completions => "data: [DONE]\n\n",
            Self::Messages => "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
            Self::Responses => {
                "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"status\":\"completed\"}}\n\n"
            }
        }
    }
}
