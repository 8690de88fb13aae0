//! Messages as the template gets them: parts joined or wrapped, tool arguments as objects, media marked.
use crate::prompt::{Reason, json::Json};

/// What stands for the first media part in a rendered text: everything before it is known, nothing behind it. Private
/// use characters, which no template trims.
pub(in crate::prompt) const MEDIA_MARK: &str = "\u{f8ff}\u{e000}media part\u{e000}\u{f8ff}";

/// A line that some clients put before their system prompt and that differs in every request.
pub(super) const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// The fields of parts that request models know; others are passed on to templates that take parts.
const PART_FIELDS: [&str; 18] = [
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];

/// Media by the type of a part.
const MEDIA_TYPES: [&str; 10] = [
    "audio_embeds",
    "audio_url",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "input_image",
    "prompt_embeds",
    "video_embeds",
    "video_url",
];

/// How a template takes the content of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::prompt) enum ContentFormat {
    /// As one string: parts are joined with newlines.
    String,
    /// As a list of parts.
    Parts,
}

/// One part of a message.
enum Part<'a> {
    Text(Json<'a>),
    Reference(Json<'a>),
    Media,
    Nothing,
}

/// The messages for the template, and how many media parts there are.
pub(in crate::prompt) fn conversation(
    messages: Vec<Json<'_>>,
    format: ContentFormat,
) -> Result<(Vec<Json<'_>>, u32), Reason> {
    let mut media = 0;
    let messages = messages
        .into_iter()
        .map(|m| message(m, format, &mut media))
        .collect::<Result<_, _>>()?;
    Ok((messages, media))
}

/// For templates that do not know the developer role: it becomes the system role, and all system messages one.
pub(in crate::prompt) fn developer_to_system(mut messages: Vec<Json<'_>>) -> Vec<Json<'_>> {
    if !messages.iter().any(|m| m.text("role") == Some("developer")) {
        return messages;
    }
    let is_system = |m: &Json<'_>| m.text("role") == Some("system");
    for m in &mut messages {
        if m.text("role") == Some("developer") {
            m.set("role", Json::str("system"));
            m.take("tools");
        }
    }
    if !messages.iter().skip(1).any(is_system) {
        return messages;
    }
    let (system, mut rest): (Vec<_>, Vec<_>) = messages.into_iter().partition(is_system);
    let texts: Vec<String> = system
        .iter()
        .filter_map(|m| match m.get("content")? {
            Json::Str(s) => Some(s.to_string()),
            Json::Array(parts) => {
                let texts: Vec<&str> = parts
                    .iter()
                    .filter_map(|p| p.as_str().or_else(|| p.text("text")))
                    .collect();
                Some(texts.join("\n"))
            }
            _ => None,
        })
        .filter(|s| !s.is_empty())
        .collect();
    let merged = Json::object([
        ("role", Json::str("system")),
        ("content", Json::str(texts.join("\n\n"))),
    ]);
    rest.insert(0, merged);
    rest
}

fn message<'a>(
    mut m: Json<'a>,
    format: ContentFormat,
    media: &mut u32,
) -> Result<Json<'a>, Reason> {
    let role = m.take("role").ok_or(Reason::Unsupported)?;
    let name = role.as_str().ok_or(Reason::Unsupported)?.to_owned();
    let before = *media;
    let parts = match m.take("content") {
        None => Vec::new(),
        Some(text @ Json::Str(_)) => vec![text],
        Some(Json::Array(parts)) => parts,
        Some(_) => return Err(Reason::Unsupported),
    };
    let parts = if name == "system" {
        without_billing_header(parts)
    } else {
        parts
    };
    let content = match format {
        ContentFormat::String => joined(parts, media)?,
        ContentFormat::Parts => Json::Array(wrapped(parts, media)?),
    };
    let mut out = Json::object([("role", role), ("content", content)]);
    match &*name {
        "assistant" => {
            if let Some(calls) = m.take("tool_calls") {
                let calls = super::list(calls)?;
                if !calls.is_empty() {
                    let calls = calls.into_iter().map(tool_call).collect::<Result<_, _>>()?;
                    out.set("tool_calls", Json::Array(calls));
                }
            }
            if let Some(reasoning) = m.take("reasoning") {
                out.set("reasoning", reasoning.clone());
                out.set("reasoning_content", reasoning);
            }
        }
        "tool" => {
            if let Some(id) = m.take("tool_call_id") {
                out.set("tool_call_id", id);
            }
            if *media == before {
                tool_content(&mut out);
            }
        }
        _ => {}
    }
    for key in ["name", "task"] {
        if let Some(value @ Json::Str(_)) = m.take(key) {
            out.set(key, value);
        }
    }
    if name == "developer" {
        out.set("tools", m.take("tools").unwrap_or(Json::Null));
    }
    Ok(out)
}

/// Parts as one string. vLLM puts placeholders of media before the text.
fn joined<'a>(parts: Vec<Json<'a>>, media: &mut u32) -> Result<Json<'a>, Reason> {
    let first_media = *media == 0;
    let mut texts: Vec<Json<'a>> = Vec::with_capacity(parts.len());
    for p in parts {
        match part(p)? {
            Part::Text(t) | Part::Reference(t) if t.truthy() => texts.push(t),
            Part::Media => *media += 1,
            Part::Text(_) | Part::Reference(_) | Part::Nothing => {}
        }
    }
    if first_media && *media > 0 {
        texts.insert(0, Json::str(MEDIA_MARK));
    }
    if texts.len() == 1 {
        return Ok(texts.swap_remove(0));
    }
    let texts: Vec<&str> = texts.iter().filter_map(Json::as_str).collect();
    Ok(Json::str(texts.join("\n")))
}

/// Parts as a template that takes parts gets them.
fn wrapped<'a>(parts: Vec<Json<'a>>, media: &mut u32) -> Result<Vec<Json<'a>>, Reason> {
    let mut out = Vec::with_capacity(parts.len());
    for p in parts {
        let extra = match &p {
            Json::Object(pairs) => pairs
                .iter()
                .filter(|(k, _)| !PART_FIELDS.contains(&&**k))
                .cloned()
                .collect(),
            _ => Vec::new(),
        };
        let (kind, key, value) = match part(p)? {
            Part::Text(t) => ("text", "text", t),
            Part::Reference(t) => {
                out.push(Json::object([
                    ("type", Json::str("tool_reference")),
                    ("name", t),
                ]));
                continue;
            }
            Part::Media => {
                *media += 1;
                if *media > 1 {
                    continue;
                }
                ("text", "text", Json::str(MEDIA_MARK))
            }
            Part::Nothing => continue,
        };
        let mut wrapped = vec![("type".into(), Json::str(kind)), (key.into(), value)];
        wrapped.extend(extra);
        out.push(Json::Object(wrapped));
    }
    Ok(out)
}

fn part(mut p: Json<'_>) -> Result<Part<'_>, Reason> {
    if matches!(p, Json::Str(_)) {
        return Ok(Part::Text(p));
    }
    let kind = match (p.some("type"), p.some("uuid")) {
        (Some(Json::Str(kind)), None) => Some(kind.to_string()),
        (Some(_), None) => return Err(Reason::Unsupported),
        _ => None,
    };
    let Some(kind) = kind else {
        // Without a type, or with a media id, the fields tell.
        if MEDIA_TYPES.iter().any(|t| p.get(t).is_some()) {
            return Ok(Part::Media);
        }
        return match p.get("tool_reference") {
            Some(_) => Ok(p.take("name").map_or(Part::Nothing, Part::Reference)),
            None => Err(Reason::Unsupported),
        };
    };
    let text = |p: &mut Json<'_>, key: &str| match p.get(key) {
        Some(Json::Str(_)) | Some(Json::Null) | None => Ok(()),
        Some(_) => Err(Reason::Unsupported),
    };
    let key = match &*kind {
        "text" | "input_text" | "output_text" => "text",
        "refusal" => "refusal",
        "thinking" => "thinking",
        "tool_reference" => {
            return Ok(p.take("name").map_or(Part::Nothing, Part::Reference));
        }
        media if MEDIA_TYPES.contains(&media) => return Ok(Part::Media),
        _ => return Err(Reason::Unsupported),
    };
    text(&mut p, key)?;
    Ok(p.take(key).map_or(Part::Nothing, Part::Text))
}

/// What a tool said, as a string unless it refers to tools: most templates know nothing else.
fn tool_content(message: &mut Json<'_>) {
    let Some(Json::Array(parts)) = message.get("content") else {
        return;
    };
    if parts.iter().any(|p| p.text("type") != Some("text")) {
        return;
    }
    let texts: Vec<&str> = parts.iter().filter_map(|p| p.text("text")).collect();
    let text = texts.join("\n");
    message.set("content", Json::str(text));
}

/// A tool call with its arguments as an object: templates want to walk through them.
fn tool_call(mut call: Json<'_>) -> Result<Json<'_>, Reason> {
    if call
        .get("type")
        .is_some_and(|t| t.as_str() != Some("function"))
    {
        return Err(Reason::Unsupported);
    }
    let Json::Object(pairs) = &mut call else {
        return Err(Reason::Unsupported);
    };
    let function = pairs
        .iter_mut()
        .find_map(|(k, v)| (k == "function").then_some(v))
        .filter(|f| matches!(f, Json::Object(_)))
        .ok_or(Reason::Unsupported)?;
    let object = match function.get("arguments") {
        Some(Json::Object(_)) => return Ok(call),
        Some(Json::Str(text)) => match Json::parse(text.as_bytes()) {
            Ok(object @ Json::Object(_)) => object.into_owned(),
            Err(crate::prompt::json::JsonError::TooDeep) => return Err(Reason::Unsupported),
            // Nothing that a template could walk through: the conversation goes on without.
            Ok(_) | Err(_) => Json::Object(Vec::new()),
        },
        _ => Json::Object(Vec::new()),
    };
    function.set("arguments", object);
    Ok(call)
}

fn without_billing_header(parts: Vec<Json<'_>>) -> Vec<Json<'_>> {
    parts
        .into_iter()
        .filter_map(|mut part| {
            let text = match &part {
                Json::Str(s) => Some(&**s),
                p if p.text("type") == Some("text") => p.text("text"),
                _ => None,
            };
            let Some(text) = text.filter(|t| t.starts_with(BILLING_HEADER)) else {
                return Some(part);
            };
            let rest = text.split_once('\n').map_or("", |(_, rest)| rest);
            if rest.is_empty() {
                return None;
            }
            let rest = Json::str(rest.to_owned());
            if matches!(part, Json::Str(_)) {
                return Some(rest);
            }
            part.set("text", rest);
            Some(part)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, format: ContentFormat) -> Result<(Vec<Json<'_>>, u32), Reason> {
        let Json::Array(messages) = Json::parse(text.as_bytes()).unwrap() else {
            unreachable!()
        };
        conversation(messages, format)
    }

    fn same(given: &str, strings: &str, parts: &str) {
        for (format, want) in [
            (ContentFormat::String, strings),
            (ContentFormat::Parts, parts),
        ] {
            let (got, media) = parse(given, format).unwrap();
            assert_eq!(
                Json::Array(got),
                Json::parse(want.as_bytes()).unwrap(),
                "{given}"
            );
            assert_eq!(media, 0);
        }
    }

    // What vLLM 0.32 makes of these, taken from its own code.
    #[test]
    fn content_becomes_what_vllm_makes_of_it() {
        same(
            r#"[{"role":"user","content":"x","foo":1,"name":"n"}]"#,
            r#"[{"role":"user","content":"x","name":"n"}]"#,
            r#"[{"role":"user","content":[{"type":"text","text":"x"}],"name":"n"}]"#,
        );
        same(
            r#"[{"role":"user","content":[{"text":"a","type":"text","foo":1,"cache_control":{"type":"e"}}]}]"#,
            r#"[{"role":"user","content":"a"}]"#,
            r#"[{"role":"user","content":[{"type":"text","text":"a","foo":1,"cache_control":{"type":"e"}}]}]"#,
        );
        same(
            r#"[{"role":"assistant","refusal":"no","content":[{"type":"refusal","refusal":"zzz"},{"type":"text","text":""}]}]"#,
            r#"[{"role":"assistant","content":"zzz"}]"#,
            r#"[{"role":"assistant","content":[{"type":"text","text":"zzz"},{"type":"text","text":""}]}]"#,
        );
        same(
            r#"[{"role":"user","content":[{"type":"input_text","text":"x"},{"type":"thinking","thinking":"t","closed":true}]}]"#,
            r#"[{"role":"user","content":"x\nt"}]"#,
            r#"[{"role":"user","content":[{"type":"text","text":"x"},{"type":"text","text":"t"}]}]"#,
        );
        same(
            r#"[{"role":"user"}]"#,
            r#"[{"role":"user","content":""}]"#,
            r#"[{"role":"user","content":[]}]"#,
        );
        same(
            r#"[{"role":"tool","content":[{"type":"text","text":"a","e":1},{"type":"text","text":"b"}],"tool_call_id":"1"}]"#,
            r#"[{"role":"tool","content":"a\nb","tool_call_id":"1"}]"#,
            r#"[{"role":"tool","content":"a\nb","tool_call_id":"1"}]"#,
        );
        same(
            r#"[{"role":"developer","content":[{"type":"text","text":"a"}],"name":"d"}]"#,
            r#"[{"role":"developer","content":"a","name":"d","tools":null}]"#,
            r#"[{"role":"developer","content":[{"type":"text","text":"a"}],"name":"d","tools":null}]"#,
        );
        same(
            r#"[{"role":"system","content":"x-anthropic-billing-header: a\nrest"},{"role":"system","content":"x-anthropic-billing-header: a"}]"#,
            r#"[{"role":"system","content":"rest"},{"role":"system","content":""}]"#,
            r#"[{"role":"system","content":[{"type":"text","text":"rest"}]},{"role":"system","content":[]}]"#,
        );
        same(
            r#"[{"role":"user","content":[{"type":"text","text":null},{"type":"text","text":""},{"type":"text","text":"q"}]}]"#,
            r#"[{"role":"user","content":"q"}]"#,
            r#"[{"role":"user","content":[{"type":"text","text":""},{"type":"text","text":"q"}]}]"#,
        );
    }

    #[test]
    fn tool_arguments_become_objects() {
        for (arguments, object) in [
            (r#""{\"n\": 1.0, \"n\": 2}""#, r#"{"n":2}"#),
            (r#""""#, "{}"),
            (r#""null""#, "{}"),
            (r#""[1]""#, "{}"),
            (r#""{bad""#, "{}"),
            (r#"{"b":1}"#, r#"{"b":1}"#),
        ] {
            let given = format!(
                r#"[{{"role":"assistant","content":"x","reasoning":"r","tool_calls":[{{"id":"1","function":{{"arguments":{arguments},"name":"f"}},"type":"function"}}]}}]"#
            );
            let want = format!(
                r#"[{{"role":"assistant","content":"x","tool_calls":[{{"id":"1","function":{{"arguments":{object},"name":"f"}},"type":"function"}}],"reasoning":"r","reasoning_content":"r"}}]"#
            );
            let (got, _) = parse(&given, ContentFormat::String).unwrap();
            assert_eq!(Json::Array(got), Json::parse(want.as_bytes()).unwrap());
        }
        let (empty, _) = parse(
            r#"[{"role":"assistant","tool_calls":[]}]"#,
            ContentFormat::String,
        )
        .unwrap();
        assert_eq!(empty[0].get("tool_calls"), None);
    }

    #[test]
    fn the_first_media_part_is_marked() {
        let given = r#"[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"u"}},{"type":"text","text":"b"},{"image_url":"v"}]}]"#;
        let (got, media) = parse(given, ContentFormat::String).unwrap();
        assert_eq!(media, 2);
        assert_eq!(
            got[0].text("content"),
            Some(&*format!("{MEDIA_MARK}\na\nb"))
        );
        let (got, media) = parse(given, ContentFormat::Parts).unwrap();
        assert_eq!(media, 2);
        let Some(Json::Array(parts)) = got[0].get("content") else {
            unreachable!()
        };
        let texts: Vec<_> = parts.iter().filter_map(|p| p.text("text")).collect();
        assert_eq!(texts, ["a", MEDIA_MARK, "b"]);
    }

    #[test]
    fn what_vllm_refuses_is_refused_or_harmless() {
        for bad in [
            r#"[{"content":"x"}]"#,
            r#"[{"role":5}]"#,
            r#"[{"role":"user","content":5}]"#,
            r#"[{"role":"user","content":[{"type":"file","file":{}}]}]"#,
            r#"[{"role":"user","content":[{"text":"a","type":"text","uuid":"u"}]}]"#,
            r#"[{"role":"user","content":[{"type":7}]}]"#,
            r#"[{"role":"assistant","tool_calls":[{"id":"2","type":"custom","custom":{}}]}]"#,
            r#"[{"role":"assistant","tool_calls":[5]}]"#,
            r#"[5]"#,
        ] {
            assert!(parse(bad, ContentFormat::String).is_err(), "{bad}");
            assert!(parse(bad, ContentFormat::Parts).is_err(), "{bad}");
        }
    }

    #[test]
    fn developers_become_one_system_message() {
        let given = r#"[{"role":"user","content":"q"},{"role":"developer","content":"d","tools":null},{"role":"system","content":[{"type":"text","text":"s"},{"type":"text","text":"t"}]}]"#;
        let Json::Array(messages) = Json::parse(given.as_bytes()).unwrap() else {
            unreachable!()
        };
        let want = br#"[{"role":"system","content":"d\n\ns\nt"},{"role":"user","content":"q"}]"#;
        assert_eq!(
            Json::Array(developer_to_system(messages)),
            Json::parse(want).unwrap()
        );
        let alone =
            br#"[{"role":"developer","content":"d","tools":null},{"role":"user","content":"q"}]"#;
        let Json::Array(messages) = Json::parse(alone).unwrap() else {
            unreachable!()
        };
        let want = br#"[{"role":"system","content":"d"},{"role":"user","content":"q"}]"#;
        assert_eq!(
            Json::Array(developer_to_system(messages)),
            Json::parse(want).unwrap()
        );
    }
}
