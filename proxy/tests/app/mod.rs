//! The whole proxy in this process, in front of scripted engines.

mod admin;
mod lifecycle;
mod models;
mod process;
mod reload;
mod templates;

use crate::support::{self, FakeEngine, Seen, Step};
use forebay_proxy::{
    app::{App, AppParams, LoadTokenizer, StartError},
    config::{Config, ModelConfig},
    server::OpenFiles,
    telemetry::{log::LogHandle, panics::Panics},
};
use serde_json::Value;
use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    runtime::Handle,
};
use tower_ttft::prompt::LocalModel;

/// Long enough for a loaded machine, short enough for a person.
pub const SOON: Duration = Duration::from_secs(10);

/// A pool file that goes away with its test.
pub struct PoolFile(pub PathBuf);

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

// === impl PoolFile ===

impl PoolFile {
    pub fn new(text: &str) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let file = Self(dir.join(format!("pool-{}-{n}.yaml", std::process::id())));
        file.write(text);
        file
    }

    pub fn write(&self, text: &str) {
        std::fs::write(&self.0, text).expect("the pool file is written");
    }
}

impl Drop for PoolFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

// === impl Answer ===

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
}

/// An engine that serves these models (name, parent) and answers chats with one word.
pub async fn engine(models: &'static [(&'static str, Option<&'static str>)]) -> FakeEngine {
    FakeEngine::start(move |seen| vllm(seen, models)).await
}

pub fn vllm(seen: &Seen, models: &[(&str, Option<&str>)]) -> Vec<Step> {
    match seen.target.as_str() {
        "/health" => support::json("200 OK", ""),
        "/version" => support::json("200 OK", r#"{"version":"0.32.0"}"#),
        "/v1/models" => {
            let data: Vec<_> = models
                .iter()
                .map(|(id, parent)| {
                    let len = parent.is_none().then_some(4096);
                    serde_json::json!({"id": id, "object": "model", "root": "dir", "parent": parent, "max_model_len": len})
                })
                .collect();
            support::json(
                "200 OK",
                serde_json::json!({"object": "list", "data": data}).to_string(),
            )
        }
        "/metrics" => support::json(
            "200 OK",
            concat!(
                "process_start_time_seconds 1.0\n",
                "vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 0.0\n",
                "vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 0.0\n",
                "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.0\n",
                "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"1024\",engine=\"0\"} 1.0\n",
            ),
        ),
        "/v1/chat/completions" => support::json("200 OK", support::chat_json("hello")),
        _ => support::json("404 Not Found", r#"{"detail":"Not Found"}"#),
    }
}

/// Starts a proxy with this pool file; ports are the kernel's.
pub async fn start(file: &PoolFile) -> App {
    try_start(file, no_tokenizers())
        .await
        .expect("the proxy starts")
}

pub async fn try_start(file: &PoolFile, loader: LoadTokenizer) -> Result<App, StartError> {
    App::start(AppParams {
        config: Config::load(&file.0).expect("a good pool file"),
        file: Some(file.0.clone()),
        loader,
        admin_runtime: Handle::current(),
        log: LogHandle::detached(),
        panics: Panics::default(),
        files: OpenFiles {
            limit: 1024,
            was: 1024,
        },
        seed: 7,
    })
    .await
}

pub fn no_tokenizers() -> LoadTokenizer {
    Arc::new(
        |_: &ModelConfig| -> Result<Arc<dyn LocalModel>, tower_ttft::Error> {
            Err("there are none in this test".into())
        },
    )
}

/// The start of every pool file here.
pub const PORTS: &str = "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\n";

pub async fn get(addr: SocketAddr, path: &str) -> Answer {
    ask(addr, "GET", path, "").await
}

pub async fn ask(addr: SocketAddr, method: &str, path: &str, body: &str) -> Answer {
    let exchange = async {
        let mut stream = TcpStream::connect(addr).await.expect("connects");
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await.expect("writes");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.expect("reads");
        String::from_utf8(answer).expect("text")
    };
    let answer = tokio::time::timeout(SOON, exchange).await.expect("in time");
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .unwrap_or_else(|| panic!("{answer:?}"));
    Answer {
        status: head
            .split(' ')
            .nth(1)
            .and_then(|s| s.parse().ok())
            .expect("a status"),
        head: head.to_owned(),
        body: body.to_owned(),
    }
}

/// Asks until the answer is as expected.
pub async fn until(
    addr: SocketAddr,
    path: &str,
    what: &str,
    expected: impl Fn(&Answer) -> bool,
) -> Answer {
    let deadline = tokio::time::Instant::now() + SOON;
    loop {
        let answer = get(addr, path).await;
        if expected(&answer) {
            return answer;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "not in time: {what}: {answer:?}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until clients would get answers.
pub async fn healthy(app: &App) {
    until(app.listen(), "/health", "an endpoint is ready", |a| {
        a.status == 200
    })
    .await;
}
