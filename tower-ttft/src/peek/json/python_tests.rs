//! The reader against Python's own `json`, on a corpus and on mutations of it.

use super::*;
use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};
use std::{
    fmt::Write as _,
    io::Write as _,
    process::{Command, Stdio},
    thread,
};

const MUTATIONS: usize = 40_000;

/// Set to run without Python; the comparison is then not made.
const OPT_OUT: &str = "FOREBAY_NO_PYTHON";

/// Whole documents: what the field has sent, and the edges of the grammar.
const SEEDS: &[&str] = &[
    r#"{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":16}"#,
    r#"{"model":"org\/name","messages":[{"role":"user","content":[{"type":"text","text":"a\nb"}]}],"n":2}"#,
    r#"{"model":"m","prompt":[[1,2,3],[4]],"stream_options":{"include_usage":true},"priority":-5}"#,
    r#"{"model":"a","model":"b","x":1,"x":{"y":1,"y":2},"mod\u0065l":"c"}"#,
    r#"{"model":"m","messages":[{"role":"user","content":"emoji \ud83d"}]}"#,
    r#"{"a":"\ud83d\ude00 \ude00\ud83d \ud83dx \ud83d\ud83d\ude00 \ud83d\n \uDBFF\uDFFF"}"#,
    r#"{"\ud83d":1,"\ud83d":2,"\ud83d\ude00":3}"#,
    r#"{"a":NaN,"b":Infinity,"c":-Infinity,"d":1e400,"e":-1e400,"f":1e-400,"g":-0,"h":-0.0,"i":0e0}"#,
    r#"{"seed":9007199254740993,"big":123456789012345678901234567890,"min":-9223372036854775808,"u":18446744073709551615,"o":18446744073709551616}"#,
    r#"{"f":[0.1,1.0,1e5,1E+5,1e-7,2.2250738585072011e-308,1.7976931348623157e308,123456789.123456789,8.41e21,9007199254740993.0]}"#,
    r#"{"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"zebra":{},"apple":{}}}}}]}"#,
    r#" { "a" : [ ] , "b" : { } , "c" : [ [ ] , { } ] } "#,
    "{\"a\":\"\u{7f}\u{80}\u{2028}é漢😀\",\"é\":1}",
    "{\"a\":\"tab\there\"}",
    "{\"a\":\"line\nhere\"}",
    "\u{feff}{\"model\":\"m\"}",
    "\u{feff}\u{feff}{\"model\":\"m\"}",
    "{\"a\":\u{feff}1}",
    "{\"a\":\u{a0}1}",
    "{\"a\":1\u{c}}",
    r#"{"a":1}x"#,
    r#"{"a":1} {"b":2}"#,
    r#"{"a":01}"#,
    r#"{"a":1.}"#,
    r#"{"a":.5}"#,
    r#"{"a":+1}"#,
    r#"{"a":-}"#,
    r#"{"a":1e}"#,
    r#"{"a":0x10}"#,
    r#"{"a":1_000}"#,
    r#"{"a":-NaN}"#,
    r#"{"a":nan}"#,
    r#"{"a":-Infinit}"#,
    r#"{"a":True}"#,
    r#"{"a":nul}"#,
    r#"{"a":1,}"#,
    r#"{,}"#,
    r#"{"a"}"#,
    r#"{"a":}"#,
    r#"{a:1}"#,
    r#"{'a':1}"#,
    r#"{"a":[1,]}"#,
    r#"{"a":[,1]}"#,
    r#"{"a":[1}"#,
    r#"{"a":{"b":1]}"#,
    r#"{"a":"\x41"}"#,
    r#"{"a":"\u12"}"#,
    r#"{"a":"\u+123"}"#,
    r#"{"a":"\u00e9\u0000\/\b\f\n\r\t\"\\"}"#,
    r#"{"a":"unterminated"#,
    r#"{"a":/*no*/1}"#,
    "[]",
    "[1,2,{\"a\":3}]",
    "null",
    "\"x\"",
    "3",
    "-0",
    "true",
    "",
    " ",
    "{",
    "}",
    "{}",
    "\u{feff}",
];

/// What mutations put in.
const TOKENS: &[&[u8]] = &[
    b"\"",
    b"\\",
    b"\\u",
    b"\\ud83d",
    b"\\ude00",
    b"\\\"",
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b" ",
    b"\n",
    b"\r",
    b"\t",
    b"\x0b",
    b"\x00",
    b"0",
    b"-",
    b".",
    b"e",
    b"E+",
    b"1",
    b"9",
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"true",
    b"false",
    b"null",
    b"\xed\xa0\xbd",
    b"\xed\xb8\x80",
    b"\xed",
    b"\xc3\xa9",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\"a\":1,",
    b"\"model\":\"z\",",
    b"[[[",
    b"\x1f",
    b"\x7f",
    b"\x80",
    b"/",
];

#[test]
fn takes_what_python_takes() {
    if std::env::var_os(OPT_OUT).is_some_and(|v| v == "1") {
        println!("{OPT_OUT}=1: not compared with Python");
        return;
    }
    let mut corpus: Vec<Vec<u8>> = SEEDS.iter().map(|s| s.as_bytes().to_vec()).collect();
    corpus.extend(special_cases());
    let mut rng = StdRng::seed_from_u64(20_261_201);
    let whole = corpus.len();
    while corpus.len() < whole + MUTATIONS {
        let mutant = mutated(
            &corpus[rng.random_range(0..whole)],
            &corpus[..whole],
            &mut rng,
        );
        corpus.push(mutant);
    }
    let input: String = corpus.iter().map(|body| case(body)).collect();
    let report = check_with_python(input);
    println!("compared with Python's json: {report}");
    assert_eq!(report["counts"]["cases"], corpus.len());
    assert_eq!(report["wrong"], serde_json::json!([]), "differences");
    // The comparison is worth something only if both sides said yes and no often.
    for kind in ["accepted", "refused", "objects", "values"] {
        let n = report["counts"][kind].as_u64();
        assert!(n.is_some_and(|n| n > 1_000), "{kind}: {n:?}");
    }
    for kind in ["unrepresentable", "utf16"] {
        let n = report["counts"][kind].as_u64();
        assert!(n.is_some_and(|n| n > 10), "{kind}: {n:?}");
    }
}

fn special_cases() -> Vec<Vec<u8>> {
    let nested = |levels: usize| {
        let (open, close) = ("[".repeat(levels), "]".repeat(levels));
        format!("{{\"x\":{open}0{close}}}").into_bytes()
    };
    let utf16 = |text: &str, bytes: fn(u16) -> [u8; 2]| -> Vec<u8> {
        text.encode_utf16().flat_map(bytes).collect()
    };
    let mut cases = vec![
        b"{\"a\":\"\xed\xa0\xbd\",\"b\":1}".to_vec(),
        b"{\"a\":\"\xed\xa0\xbd\xed\xb8\x80\"}".to_vec(),
        b"{\"\xed\xa0\xbd\":1,\"b\":\"\\n\xed\xb8\x80\"}".to_vec(),
        b"{\"a\":\"\xff\"}".to_vec(),
        b"{\"a\":\"\xc0\x80\"}".to_vec(),
        b"{\"a\":\"\xf4\x90\x80\x80\"}".to_vec(),
        b"{\"a\":\"\xe2\x82\"}".to_vec(),
        b"\xed\xa0\xbd{}".to_vec(),
        utf16("{\"a\":1}", u16::to_le_bytes),
        utf16("{\"a\":1}", u16::to_be_bytes),
        utf16("\u{feff}{\"a\":1}", u16::to_le_bytes),
        b"1\0".to_vec(),
        b"\0".to_vec(),
    ];
    cases.extend([1, 2, 63, 64, 65, 126, 127, 128, 500, 900].map(nested));
    for digits in [18, 19, 20, 30, 4_299, 4_300, 4_301, 9_000] {
        cases.push(format!("{{\"n\":{}}}", "9".repeat(digits)).into_bytes());
        cases.push(format!("{{\"n\":-{}}}", "1".repeat(digits)).into_bytes());
        cases.push(format!("{{\"n\":{}.5}}", "7".repeat(digits)).into_bytes());
    }
    // Every place of an eight-byte step for what ends or breaks a string.
    for pad in 0..20 {
        for end in [
            "", "\\n", "\\", "\u{1f}", "\u{7f}", "é", "\u{0}", "\\u00e", "!",
        ] {
            cases.push(
                format!(
                    "{{\"{}{end}\":\"{}{end}\"}}",
                    "k".repeat(pad),
                    " ".repeat(pad)
                )
                .into(),
            );
        }
    }
    cases
}

fn mutated(body: &[u8], others: &[Vec<u8>], rng: &mut impl Rng) -> Vec<u8> {
    let mut body = body.to_vec();
    // Mostly one change, so that many stay valid.
    for _ in 0..rng.random_range(1..4).min(rng.random_range(1..4)) {
        let at = rng.random_range(0..=body.len());
        let to = rng.random_range(at..=body.len().min(at + 12));
        match rng.random_range(0..7) {
            0 | 1 => {
                let token = TOKENS[rng.random_range(0..TOKENS.len())];
                body.splice(at..at, token.iter().copied());
            }
            2 => {
                body.drain(at..to);
            }
            3 => {
                let again = body[at..to].to_vec();
                body.splice(at..at, again);
            }
            4 if at < body.len() => body[at] ^= 1 << rng.random_range(0..8),
            5 => {
                let token = TOKENS[rng.random_range(0..TOKENS.len())];
                body.splice(at..to, token.iter().copied());
            }
            _ => {
                let other = &others[rng.random_range(0..others.len())];
                let from = rng.random_range(0..=other.len());
                let until = rng.random_range(from..=other.len().min(from + 30));
                body.splice(at..at, other[from..until].iter().copied());
            }
        }
    }
    body
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut hex, b| {
        write!(hex, "{b:02x}").expect("strings take everything");
        hex
    })
}

fn case(body: &[u8]) -> String {
    let found = fields(body);
    let ok = matches!(&found, Ok(_) | Err(Malformed::NotAnObject));
    let limit = matches!(
        &found,
        Err(Malformed::TooDeep(_) | Malformed::TooManyFields)
    );
    let fields = found.ok().map(|fields| {
        let told = fields.iter().map(|f| {
            let (tree, why) = match to_value(&body[f.value.clone()]) {
                Ok(value) => (Some(hex(value.to_string().as_bytes())), None),
                Err(why) => (None, Some(format!("{why:?}"))),
            };
            serde_json::json!([hex(f.key.as_bytes()), f.value.start, f.value.end, tree, why])
        });
        told.collect::<Vec<_>>()
    });
    let case = serde_json::json!({"body": hex(body), "ok": ok, "limit": limit, "fields": fields});
    format!("{case}\n")
}

fn check_with_python(input: String) -> serde_json::Value {
    let mut python = Command::new("python3")
        .args(["-c", include_str!("python_check.py")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|e| panic!("this test needs python3 ({e}); {OPT_OUT}=1 does without"));
    let mut stdin = python.stdin.take().expect("stdin is piped");
    let writer = thread::spawn(move || stdin.write_all(input.as_bytes()));
    // The script ends itself after five minutes.
    let output = python
        .wait_with_output()
        .expect("python3 can be waited for");
    writer
        .join()
        .expect("no panic")
        .expect("python3 reads all cases");
    assert!(output.status.success(), "{:?}", output.status);
    serde_json::from_slice(&output.stdout).expect("python3 prints a report")
}
