//! An engine's HTTP side, by hand.

use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::{JoinHandle, JoinSet},
};

/// What a path does.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Status(u16, Vec<u8>),
    /// Nothing, with the connection open.
    Hang,
    /// The connection breaks.
    Reset,
    /// A body of so many bytes.
    Huge(usize),
}

/// A server whose answers a test chooses. Unknown paths are 404.
pub(crate) struct FakeHttp {
    pub(crate) port: u16,
    shared: Arc<State>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct State {
    replies: Mutex<HashMap<String, Reply>>,
    requests: Mutex<Vec<(String, Vec<u8>)>>,
    open: AtomicUsize,
    refuse: Notify,
}

// === impl FakeHttp ===

impl FakeHttp {
    pub(crate) async fn start() -> Self {
        Self::start_at(0).await
    }

    pub(crate) async fn start_at(port: u16) -> Self {
        let mut listener = TcpListener::bind(("127.0.0.1", port)).await;
        for _ in 0..100 {
            if listener.is_ok() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
            listener = TcpListener::bind(("127.0.0.1", port)).await;
        }
        let listener = listener.unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(State::default());
        let state = shared.clone();
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    () = state.refuse.notified() => break,
                };
                let Ok((stream, _)) = accepted else {
                    continue;
                };
                let state = state.clone();
                connections.spawn(async move {
                    state.open.fetch_add(1, Ordering::SeqCst);
                    serve(stream, &state).await;
                    state.open.fetch_sub(1, Ordering::SeqCst);
                });
                while connections.try_join_next().is_some() {}
            }
            drop(listener);
            while connections.join_next().await.is_some() {}
        });
        Self { port, shared, task }
    }

    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) fn reply(&self, path: &str, reply: Reply) {
        self.shared.replies.lock().insert(path.to_owned(), reply);
    }

    pub(crate) fn ok(&self, path: &str, body: impl Into<Vec<u8>>) {
        self.reply(path, Reply::Status(200, body.into()));
    }

    pub(crate) fn asked(&self, path: &str) -> usize {
        self.shared
            .requests
            .lock()
            .iter()
            .filter(|(p, _)| p == path)
            .count()
    }

    pub(crate) fn bodies(&self, path: &str) -> Vec<Vec<u8>> {
        let requests = self.shared.requests.lock();
        requests
            .iter()
            .filter(|(p, _)| p == path)
            .map(|(_, body)| body.clone())
            .collect()
    }

    pub(crate) fn open(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }

    /// The port refuses from now on, and open connections stay as they are, as when vLLM is told to end.
    pub(crate) fn refuse(&self) {
        self.shared.refuse.notify_one();
    }

    /// The port refuses from now on, and open connections break.
    pub(crate) async fn stop(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

async fn serve(mut stream: TcpStream, state: &State) {
    let mut input = Vec::new();
    loop {
        let head = loop {
            if let Some(end) = input.windows(4).position(|w| w == b"\r\n\r\n") {
                break end + 4;
            }
            match stream.read_buf(&mut input).await {
                Ok(1..) => {}
                _ => return,
            }
        };
        let text = String::from_utf8(input[..head].to_vec()).unwrap();
        let path = text.split(' ').nth(1).unwrap().to_owned();
        let length = text
            .lines()
            .find_map(|line| {
                line.to_ascii_lowercase()
                    .strip_prefix("content-length:")
                    .map(|n| n.trim().parse().unwrap())
            })
            .unwrap_or(0);
        while input.len() < head + length {
            match stream.read_buf(&mut input).await {
                Ok(1..) => {}
                _ => return,
            }
        }
        let body = input[head..head + length].to_vec();
        input.drain(..head + length);
        state.requests.lock().push((path.clone(), body));
        let reply = state.replies.lock().get(&path).cloned();
        let (status, body) =
            match reply.unwrap_or(Reply::Status(404, br#"{"detail":"Not Found"}"#.to_vec())) {
                Reply::Status(status, body) => (status, body),
                Reply::Huge(size) => (200, vec![b'x'; size]),
                Reply::Reset => return,
                Reply::Hang => {
                    // Until the client gives up.
                    let mut rest = [0; 64];
                    while matches!(stream.read(&mut rest).await, Ok(1..)) {}
                    return;
                }
            };
        let head = format!(
            "HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        if stream.write_all(head.as_bytes()).await.is_err()
            || stream.write_all(&body).await.is_err()
        {
            return;
        }
    }
}
