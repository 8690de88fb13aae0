//! The command as a user runs it.

use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, SystemTime},
};

/// Far longer than any of these takes.
const BOUND: Duration = Duration::from_secs(90);

fn forebay(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command
        .arg("demo")
        .args(args)
        .env_remove("FOREBAY_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Waits for the end, or ends it.
fn bounded(mut child: Child) -> Output {
    let began = SystemTime::now();
    let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
    let read = |pipe: Option<Box<dyn Read + Send>>| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(mut pipe) = pipe {
                pipe.read_to_end(&mut bytes).expect("a pipe");
            }
            bytes
        })
    };
    let out = read(out.take().map(|p| Box::new(p) as Box<dyn Read + Send>));
    let err = read(err.take().map(|p| Box::new(p) as Box<dyn Read + Send>));
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            break status;
        }
        if began.elapsed().unwrap_or(BOUND) >= BOUND {
            let _ = child.kill();
        }
        thread::sleep(Duration::from_millis(20));
    };
    Output {
        status,
        stdout: out.join().expect("read"),
        stderr: err.join().expect("read"),
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_short_demo_gives_one_json_document() {
    let args = [
        "--seconds",
        "10",
        "--speed",
        "20",
        "--seed",
        "5",
        "-o",
        "json",
    ];
    let child = forebay(&args).spawn().expect("built");
    let output = bounded(child);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("exactly one document");
    assert_eq!((&report["seed"], &report["speed"]), (&5.into(), &20.into()));
    let workloads = report["workloads"].as_array().expect("a list");
    assert_eq!(workloads.len(), 2);
    for w in workloads {
        for arm in ["forebay", "random"] {
            let figures = &w[arm];
            assert!(figures["requests"].as_u64().unwrap() >= 5, "{w}");
            assert_eq!(figures["errors"], 0, "{w}");
        }
        assert!(w["rungs"]["exact"].as_u64().unwrap_or(0) > 0, "{w}");
        // Open arrivals of one seed: both arms get requests at the same times.
        let of = |arm: &str| w[arm]["requests"].as_i64().unwrap();
        assert!((of("forebay") - of("random")).abs() <= 2, "{w}");
    }
    let hits = |arm: &str| workloads[1][arm]["hitShare"].as_f64().expect("a share");
    assert!(hits("forebay") > hits("random"), "{workloads:#?}");
    assert!(!err.contains('\x1b'), "no escapes in a pipe: {err}");
    assert!(
        err.contains("shared 100 %") && err.contains("multiturn 100 %"),
        "{err}"
    );
}

#[test]
fn serves_until_interrupted() {
    let mut child = forebay(&["--serve", "--no-load", "-o", "json"])
        .spawn()
        .expect("built");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut document = String::new();
    while serde_json::from_str::<Value>(&document).is_err() {
        document += &lines.next().expect("a document").expect("text");
    }
    let report: Value = serde_json::from_str(&document).expect("just read");
    let url = report["serving"]["baseUrl"]
        .as_str()
        .expect("a URL")
        .to_owned();
    let host = url.trim_start_matches("http://").trim_end_matches("/v1");
    let body = format!(
        r#"{{"model":{},"messages":[{{"role":"user","content":"Hello"}}],"max_tokens":5}}"#,
        report["serving"]["model"]
    );
    let mut io = TcpStream::connect(host).expect("it listens");
    io.set_read_timeout(Some(BOUND)).expect("a timeout");
    write!(
        io,
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .expect("sent");
    let mut answer = String::new();
    io.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains(r#""completion_tokens":5"#), "{answer}");

    let interrupt = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(interrupt.expect("kill").success());
    let output = bounded(child);
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(TcpStream::connect(host).is_err(), "nothing is left");
    assert_eq!(
        lines.next().map(|l| l.expect("text")),
        None,
        "nothing else is printed"
    );
}

#[test]
fn mistakes_are_told_with_a_remedy() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("bound").port().to_string();
    for (args, code, says) in [
        (&["--no-load"][..], 64, "--serve"),
        (&["--seconds", "soon"], 64, "--seconds"),
        (&["--log-level", "loud=="], 64, "write a level"),
        (&["--port", &port], 1, "--port"),
    ] {
        let output = bounded(forebay(args).spawn().expect("built"));
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {err}");
        assert!(err.contains(says), "{args:?}: {err}");
        assert!(output.stdout.is_empty());
    }
}
