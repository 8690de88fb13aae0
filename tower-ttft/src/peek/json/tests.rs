use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn keys_and_values(body: &[u8]) -> Result<Vec<(String, String)>, Malformed> {
    Ok(fields(body)?
        .into_iter()
        .map(|f| {
            let value = String::from_utf8_lossy(&body[f.value]).into_owned();
            (f.key.into_owned(), value)
        })
        .collect())
}

#[test]
fn places_are_exact() {
    let body =
        b"\xef\xbb\xbf \t{ \"a\" : [1, {\"b\":2}] ,\r\n\"c\\u0064\":\"x\\\"}\" , \"e\":-1.5e3}\n";
    let own = |k: &str, v: &str| (k.to_owned(), v.to_owned());
    assert_eq!(
        keys_and_values(body),
        Ok(vec![
            own("a", "[1, {\"b\":2}]"),
            own("cd", "\"x\\\"}\""),
            own("e", "-1.5e3"),
        ])
    );
}

#[test]
fn what_cannot_be_read_says_where() {
    for (body, why) in [
        (&b""[..], Malformed::Syntax(0)),
        (b"{\"a\":01}", Malformed::Syntax(7)),
        (b"{\"a\":1} x", Malformed::Syntax(8)),
        (b"{\"a\":\"\xff\"}", Malformed::Encoding(6)),
        (b"{\"a\":\"\xed\xa0\xbd\xed\xa0\"}", Malformed::Encoding(9)),
        (b"[]", Malformed::NotAnObject),
        (b"[", Malformed::Syntax(1)),
    ] {
        assert_eq!(fields(body), Err(why), "{body:?}");
    }
}

#[test]
fn nesting_is_bounded() {
    let nested = |levels: usize| {
        let (open, close) = ("[".repeat(levels), "]".repeat(levels));
        format!("{{\"x\":{open}{close}}}").into_bytes()
    };
    assert!(fields(&nested(MAX_DEPTH - 1)).is_ok());
    assert!(matches!(
        fields(&nested(MAX_DEPTH)),
        Err(Malformed::TooDeep(_))
    ));
    // Far beyond: no recursion, and the end does not matter.
    for unit in ["[", "{\"a\":", "[{\"a\":"] {
        let body = format!("{{\"x\":{}", unit.repeat(1_000_000));
        assert!(matches!(
            fields(body.as_bytes()),
            Err(Malformed::TooDeep(_))
        ));
        let bare = unit.repeat(1_000_000);
        assert!(fields(bare.as_bytes()).is_err());
        assert_eq!(to_value(bare.as_bytes()), Err(Unrepresentable::TooDeep));
    }
    // Objects and arrays close what they opened, at every level.
    let mixed = |close: &str| format!("{{\"x\":{}{}", "[{\"a\":".repeat(100), close);
    assert!(fields(mixed(&format!("1{}}}", "}]".repeat(100))).as_bytes()).is_ok());
    assert!(fields(mixed(&format!("1{}]}}}}", "}]".repeat(99))).as_bytes()).is_err());
}

#[test]
fn keys_are_bounded() {
    let object = |n: usize| format!("{{{}}}", vec!["\"k\":0"; n].join(","));
    assert_eq!(
        fields(object(MAX_FIELDS).as_bytes()).map(|f| f.len()),
        Ok(MAX_FIELDS)
    );
    assert_eq!(
        fields(object(MAX_FIELDS + 1).as_bytes()),
        Err(Malformed::TooManyFields)
    );
}

#[test]
fn items_and_members() {
    let raw = br#" [ 1 , {"a":[2]},"x" ] "#;
    assert_eq!(items(raw), Ok(vec![&b"1"[..], br#"{"a":[2]}"#, b"\"x\""]));
    assert_eq!(items(b"[]"), Ok(vec![]));
    for raw in [&b"{}"[..], b"[1,]", b"[1", b"[1]]", b""] {
        assert!(items(raw).is_err(), "{raw:?}");
    }
    let object = br#"{"a":1,"b":null,"a":2}"#;
    assert_eq!(member(object, "a"), Some(&b"2"[..]));
    assert_eq!(member(object, "b"), None);
    assert_eq!(member(object, "c"), None);
    assert_eq!(member(b"[]", "a"), None);
}

#[test]
fn values_as_python_holds_them() {
    for (raw, value) in [
        ("-0", json!(0)),
        ("-0.0", json!(-0.0)),
        ("9007199254740993", json!(9007199254740993u64)),
        ("18446744073709551615", json!(u64::MAX)),
        ("-9223372036854775808", json!(i64::MIN)),
        ("2.2250738585072011e-308", json!(2.225_073_858_507_201e-308)),
        (r#""\ud83d\ude00\/""#, json!("😀/")),
        (" [ 1 , {} ] ", json!([1, {}])),
    ] {
        assert_eq!(to_value(raw.as_bytes()), Ok(value), "{raw}");
    }
    let value = to_value(br#"{"a":1,"b":2,"a":3}"#).expect("an object");
    assert_eq!(value.to_string(), r#"{"a":3,"b":2}"#);
    for (raw, why) in [
        (r#"["\ud83d"]"#, Unrepresentable::LoneSurrogate),
        (r#"{"\ude00":1}"#, Unrepresentable::LoneSurrogate),
        ("NaN", Unrepresentable::NotFinite),
        ("-Infinity", Unrepresentable::NotFinite),
        ("1e400", Unrepresentable::NotFinite),
        ("18446744073709551616", Unrepresentable::BigInteger),
        ("-9223372036854775809", Unrepresentable::BigInteger),
        ("", Unrepresentable::Malformed),
        ("1 2", Unrepresentable::Malformed),
        ("[1", Unrepresentable::Malformed),
    ] {
        assert_eq!(to_value(raw.as_bytes()), Err(why), "{raw}");
    }
    assert_eq!(
        to_value(b"\"\xed\xa0\xbd\""),
        Err(Unrepresentable::LoneSurrogate)
    );
    assert_eq!(to_value(b"\"\xff\""), Err(Unrepresentable::Malformed));
    let deep = |n: usize| to_value(format!("{}{}", "[".repeat(n), "]".repeat(n)).as_bytes());
    assert!(deep(MAX_VALUE_DEPTH).is_ok());
    assert_eq!(deep(MAX_VALUE_DEPTH + 1), Err(Unrepresentable::TooDeep));
}

/// Any JSON value, printed in any of the ways that serde_json can read.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        "[\\\\\"/\\x00-\\x1f a-c]{0,24}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((any::<String>(), inner), 0..6)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn agrees_with_serde_json(entries in prop::collection::vec((any::<String>(), any_value()), 0..6), pretty in any::<bool>()) {
        let object = Value::Object(entries.into_iter().collect());
        let text = if pretty { serde_json::to_string_pretty(&object) } else { serde_json::to_string(&object) };
        let text = text.expect("values print");
        let found = fields(text.as_bytes()).expect("valid");
        let expected = object.as_object().expect("an object");
        prop_assert_eq!(found.len(), expected.len());
        for (field, (key, value)) in found.iter().zip(expected) {
            prop_assert_eq!(&*field.key, key);
            let own = to_value(&text.as_bytes()[field.value.clone()]).expect("representable");
            prop_assert_eq!(own.to_string(), value.to_string());
        }
        prop_assert_eq!(to_value(text.as_bytes()).expect("representable").to_string(), object.to_string());
    }

    #[test]
    fn nothing_crashes(body in prop::collection::vec(prop_oneof![any::<u8>(), prop::sample::select(&b"{}[]\":,\\u0d83-.eE \n"[..])], 0..60)) {
        if let Ok(found) = fields(&body) {
            for field in found {
                prop_assert!(to_value(&body[field.value]) != Err(Unrepresentable::Malformed));
            }
        }
        let _ = (to_value(&body), unescape(&body));
    }
}
