//! The command itself, as a process.

use super::{PORTS, PoolFile, SOON, get, until};
use rustix::process::{Pid, Signal, kill_process};
use std::{net::SocketAddr, path::PathBuf, process::Stdio};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader},
    process::{Child, Command},
    time::timeout,
};

fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay-proxy"));
    command
        .env_remove("FOREBAY_LOG")
        .env_remove("FOREBAY_WORKERS")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command
}

/// Runs to the end: the exit code, standard output, standard error.
async fn run(args: &[&str]) -> (i32, String, String) {
    let output = timeout(SOON, command().args(args).output())
        .await
        .expect("ends")
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap_or(-1),
        text(output.stdout),
        text(output.stderr),
    )
}

fn signal(child: &Child, signal: Signal) {
    let pid = child
        .id()
        .and_then(|id| Pid::from_raw(id as i32))
        .expect("it runs");
    kill_process(pid, signal).unwrap();
}

#[tokio::test]
async fn what_cannot_be_used_is_64() {
    let bad = PoolFile::new("endpoint: []\npolicy: {lambda: x}\n");
    let file = bad.0.to_str().unwrap();
    let (code, out, err) = run(&["--pool", file]).await;
    assert_eq!((code, out.as_str()), (64, ""), "{err}");
    assert!(
        err.contains(":1: endpoint: unknown key; did you mean `endpoints`?"),
        "{err}"
    );
    assert!(
        err.contains(":2: policy.lambda: expected a number"),
        "{err}"
    );
    for args in [
        &[][..],
        &["--pol", file],
        &["--pool", "/no/such"],
        &["--pool", file, "--log-level", "x=loud"],
    ] {
        let (code, out, err) = run(args).await;
        assert_eq!((code, out.as_str()), (64, ""), "{args:?}: {err}");
        assert!(!err.is_empty(), "{args:?}");
    }
}

#[tokio::test]
async fn a_file_can_be_checked() {
    let file = PoolFile::new(&format!("{PORTS}models: [tiny]\n"));
    let (code, out, err) = run(&["--check", "--pool", file.0.to_str().unwrap()]).await;
    assert_eq!(code, 0, "{err}");
    assert!(out.ends_with(": ok\n"), "{out}");
    // A directory that is no tokenizer.
    file.write(&format!("{PORTS}models: [{{name: tiny, tokenizer: .}}]\n"));
    let (code, _, err) = run(&["--check", "--pool", file.0.to_str().unwrap()]).await;
    assert_eq!(code, 64, "{err}");
    assert!(
        err.contains("model `tiny`: ") && err.contains("tokenizer_config.json is missing"),
        "{err}"
    );
    // And it is no start either.
    let (code, out, err) = run(&["--pool", file.0.to_str().unwrap()]).await;
    assert_eq!((code, out.as_str()), (64, ""), "{err}");
    assert!(err.contains("tokenizer_config.json is missing"), "{err}");
}

#[tokio::test]
async fn it_says_where_it_listens_and_stops_when_told() {
    let file = PoolFile::new(&format!("{PORTS}models: [tiny]\n"));
    let ready: PathBuf = file.0.with_extension("ready");
    let mut child = command()
        .arg("--pool")
        .arg(&file.0)
        .arg("--ready-file")
        .arg(&ready)
        .args(["--workers", "1", "--log-format", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut line = async || {
        timeout(SOON, lines.next_line())
            .await
            .expect("in time")
            .unwrap()
            .expect("a line")
    };
    let listen = line().await;
    let listen: SocketAddr = listen
        .strip_prefix("listening on http://")
        .expect(&listen)
        .parse()
        .unwrap();
    let admin = line().await;
    let admin: SocketAddr = admin
        .strip_prefix("admin on http://")
        .expect(&admin)
        .parse()
        .unwrap();
    crate::support::within(SOON, "the ready file", || ready.exists()).await;
    let said: serde_json::Value = serde_json::from_slice(&std::fs::read(&ready).unwrap()).unwrap();
    let _ = std::fs::remove_file(&ready);
    assert_eq!(
        said,
        serde_json::json!({"listen": format!("http://{listen}"), "admin": format!("http://{admin}")})
    );
    until(admin, "/ready", "ready", |a| a.status == 200).await;
    assert!(get(listen, "/v1/models").await.body.contains("tiny"));

    // SIGHUP looks at the file at once.
    file.write(&format!("{PORTS}models: [tiny, more]\n"));
    signal(&child, Signal::HUP);
    until(listen, "/v1/models", "the new model", |a| {
        a.body.contains("more")
    })
    .await;

    signal(&child, Signal::TERM);
    let status = timeout(SOON, child.wait()).await.expect("stops").unwrap();
    assert_eq!(status.code(), Some(0));
    let mut log = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut log)
        .await
        .unwrap();
    for line in log.lines() {
        let line: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert_eq!(line["level"], "INFO", "{line}");
    }
    assert!(log.contains("Stopped"), "{log}");
}
