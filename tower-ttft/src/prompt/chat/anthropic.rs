//! Anthropic's messages, made into OpenAI's as vLLM makes them.
use super::{Chat, Kwargs, Ways, field, list, openai, parse::BILLING_HEADER};
use crate::{
    peek::InferenceRequest,
    prompt::{Reason, json::Json},
};

/// `/v1/messages`.
pub(super) fn messages(req: &InferenceRequest, ways: Ways) -> Result<Chat<'_>, Reason> {
    let given = list(field(req, "messages")?.ok_or(Reason::Unsupported)?)?;
    let mut system = match field(req, "system")? {
        None => String::new(),
        Some(Json::Str(s)) => s.into_owned(),
        Some(Json::Array(blocks)) => texts(&blocks),
        Some(_) => return Err(Reason::Unsupported),
    };
    let is_system = |m: &Json<'_>| m.text("role") == Some("system");
    if ways.merge_inline_system {
        given
            .iter()
            .filter(|m| is_system(m))
            .for_each(|m| system.push_str(&system_text(m)));
    }
    let mut out = Vec::new();
    if !system.is_empty() {
        out.push(message("system", Json::str(system)));
    }
    for m in given {
        if is_system(&m) {
            let text = system_text(&m);
            if !ways.merge_inline_system && !text.is_empty() {
                out.push(message("system", Json::str(text)));
            }
            continue;
        }
        convert(m, &mut out)?;
    }
    let tools = match field(req, "tools")? {
        None => None,
        Some(tools) => Some(self::tools(list(tools)?)?),
    };
    let tools = match field(req, "tool_choice")? {
        Some(choice) if choice.text("type") == Some("none") && ways.exclude_tools_when_none => None,
        _ => tools,
    };
    let mut kwargs = Kwargs::of(field(req, "chat_template_kwargs")?)?;
    let effort = field(req, "output_config")?.and_then(|mut c| c.take("effort"));
    let thinking = field(req, "thinking")?;
    let disabled = thinking.as_ref().and_then(|t| t.text("type")) == Some("disabled");
    kwargs.effort(match (disabled, ways.disabled_thinking_is_low) {
        (true, true) => Some(Json::str("low")),
        (true, false) => Some(Json::str("none")),
        (false, _) => effort,
    });
    kwargs.merge("add_generation_prompt", Json::Bool(true));
    kwargs.merge("continue_final_message", Json::Bool(false));
    let messages = out
        .into_iter()
        .map(openai::message)
        .collect::<Result<_, _>>()?;
    Ok(Chat {
        messages,
        tools,
        kwargs,
        add_special_tokens: false,
        truncate: None,
    })
}

fn message<'a>(role: &'static str, content: Json<'a>) -> Json<'a> {
    Json::object([("role", Json::str(role)), ("content", content)])
}

/// The texts of blocks without the line that differs in every request.
fn texts(blocks: &[Json<'_>]) -> String {
    blocks
        .iter()
        .filter(|b| b.text("type") == Some("text"))
        .filter_map(|b| b.text("text"))
        .filter(|t| !t.starts_with(BILLING_HEADER))
        .collect()
}

fn system_text(m: &Json<'_>) -> String {
    match m.get("content") {
        Some(Json::Str(s)) if !s.starts_with(BILLING_HEADER) => s.to_string(),
        Some(Json::Array(blocks)) => texts(blocks),
        _ => String::new(),
    }
}

/// One message; results of tools in it become messages of their own before it.
fn convert<'a>(mut m: Json<'a>, out: &mut Vec<Json<'a>>) -> Result<(), Reason> {
    let user = match m.text("role") {
        Some("user") => true,
        Some("assistant") => false,
        _ => return Err(Reason::Unsupported),
    };
    let role = if user { "user" } else { "assistant" };
    let mut new = Json::object([("role", Json::str(role))]);
    let blocks = match m.take("content") {
        Some(text @ Json::Str(_)) => {
            new.set("content", text);
            out.push(new);
            return Ok(());
        }
        Some(Json::Array(blocks)) => blocks,
        _ => return Err(Reason::Unsupported),
    };
    let (mut parts, mut calls) = (Vec::new(), Vec::new());
    let mut reasoning: Option<String> = None;
    for mut b in blocks {
        match b.text("type") {
            Some("text") => {
                if let Some(text) = b.take("text").filter(Json::truthy) {
                    parts.push(Json::object([("type", Json::str("text")), ("text", text)]));
                }
            }
            Some("image") => {
                if b.some("source").is_some_and(Json::truthy) {
                    parts.push(image());
                }
            }
            Some("thinking") => {
                if let Some(text) = b.text("thinking") {
                    reasoning.get_or_insert_default().push_str(text);
                }
            }
            Some("tool_use") => calls.push(tool_use(b)),
            Some("tool_result") if user => tool_result(b, out)?,
            Some("tool_result") => {
                let text = match b.get("content") {
                    None | Some(Json::Null) => "",
                    Some(Json::Str(s)) => s,
                    // Python's own way to print a list.
                    Some(_) => return Err(Reason::Unsupported),
                };
                let text = Json::str(format!("Tool result: {text}"));
                parts.push(Json::object([("type", Json::str("text")), ("text", text)]));
            }
            Some("redacted_thinking" | "tool_reference") => {}
            _ => return Err(Reason::Unsupported),
        }
    }
    if let Some(reasoning) = reasoning {
        new.set("reasoning", Json::str(reasoning));
    }
    if !calls.is_empty() {
        new.set("tool_calls", Json::Array(calls));
    }
    let single = parts.len() == 1 && parts.iter().all(|p| p.text("type") == Some("text"));
    if single {
        let text = parts.pop().and_then(|mut p| p.take("text"));
        new.set("content", text.unwrap_or(Json::str("")));
    } else if !parts.is_empty() {
        new.set("content", Json::Array(parts));
    }
    if !user || new.get("content").is_some() {
        out.push(new);
    }
    Ok(())
}

/// An image. Which one does not matter: nothing behind it is known.
fn image() -> Json<'static> {
    Json::object([
        ("type", Json::str("image_url")),
        ("image_url", Json::Object(Vec::new())),
    ])
}

fn tool_use(mut b: Json<'_>) -> Json<'_> {
    let input = b.take("input").unwrap_or(Json::Object(Vec::new()));
    Json::object([
        ("id", b.take("id").unwrap_or(Json::str(""))),
        ("type", Json::str("function")),
        (
            "function",
            Json::object([
                ("name", b.take("name").unwrap_or(Json::str(""))),
                ("arguments", input),
            ]),
        ),
    ])
}

fn tool_result<'a>(mut b: Json<'a>, out: &mut Vec<Json<'a>>) -> Result<(), Reason> {
    let id = b.take("tool_use_id").unwrap_or(Json::str(""));
    let tool = |content: Json<'a>| {
        Json::object([
            ("role", Json::str("tool")),
            ("tool_call_id", id.clone()),
            ("content", content),
        ])
    };
    let (mut images, mut references) = (0, Vec::new());
    let text = match b.take("content") {
        None => Json::str(""),
        Some(text @ Json::Str(_)) => text,
        Some(Json::Array(items)) => {
            let mut texts = Vec::new();
            for mut item in items {
                match item.text("type") {
                    Some("text") => texts.push(item.text("text").unwrap_or("").to_owned()),
                    Some("image") => images += 1,
                    Some("tool_reference") => {
                        let name = item.take("tool_name").filter(Json::truthy);
                        if let Some(name) = name.or_else(|| item.take("name")).filter(Json::truthy)
                        {
                            references.push(Json::object([
                                ("type", Json::str("tool_reference")),
                                ("name", name),
                            ]));
                        }
                    }
                    _ => {}
                }
            }
            Json::str(texts.join("\n"))
        }
        Some(_) => return Err(Reason::Unsupported),
    };
    out.push(tool(text));
    if images > 0 {
        let images = (0..images).map(|_| image()).collect();
        out.push(message("user", Json::Array(images)));
    }
    if !references.is_empty() {
        out.push(tool(Json::Array(references)));
    }
    Ok(())
}

fn tools(tools: Vec<Json<'_>>) -> Result<Json<'_>, Reason> {
    let functions = tools
        .into_iter()
        .map(|mut t| {
            let mut schema = t.take("input_schema").ok_or(Reason::Unsupported)?;
            if schema.get("type").is_none() {
                schema.set("type", Json::str("object"));
            }
            let mut function = Json::object([
                ("name", t.take("name").ok_or(Reason::Unsupported)?),
                ("description", t.take("description").unwrap_or(Json::Null)),
                ("parameters", schema),
            ]);
            for key in ["strict", "defer_loading"] {
                if let Some(value) = t.take(key) {
                    function.set(key, value);
                }
            }
            Ok(Json::object([("function", function)]))
        })
        .collect::<Result<_, _>>()?;
    openai::tools(functions)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{peek::Api, prompt::read::tests::request};

    fn ask(
        body: &str,
        ways: Ways,
    ) -> Result<(Json<'static>, Option<Json<'static>>, Kwargs<'static>), Reason> {
        let req = request(Api::Messages, body);
        messages(&req, ways).map(|c| {
            (
                Json::Array(c.messages).into_owned(),
                c.tools.map(Json::into_owned),
                c.kwargs.into_owned(),
            )
        })
    }

    #[test]
    fn blocks_become_messages() {
        let body = r#"{"system":[{"type":"text","text":"x-anthropic-billing-header: 1"},{"type":"text","text":"s"}],"messages":[
            {"role":"user","content":"q"},
            {"role":"assistant","content":[{"type":"thinking","thinking":"t"},{"type":"text","text":"a"},{"type":"tool_use","id":"c","name":"f","input":{"x":1.0}}]},
            {"role":"user","content":[{"type":"tool_result","tool_use_id":"c","content":[{"type":"text","text":"r1"},{"type":"text","text":"r2"}]},{"type":"text","text":"and"},{"type":"text","text":"more"}]},
            {"role":"user","content":[{"type":"tool_result","tool_use_id":"d"}]}]}"#;
        let want = br#"[
            {"role":"system","content":"s"},
            {"role":"user","content":"q"},
            {"role":"assistant","reasoning":"t","content":"a","tool_calls":[{"id":"c","function":{"arguments":{"x":1.0},"name":"f"},"type":"function"}]},
            {"role":"tool","tool_call_id":"c","content":"r1\nr2"},
            {"role":"user","content":[{"type":"text","text":"and"},{"type":"text","text":"more"}]},
            {"role":"tool","tool_call_id":"d","content":""}]"#;
        let (got, ..) = ask(body, Ways::default()).unwrap();
        // The order of a message's fields is set later.
        let sorted = |v: Json<'static>| match v {
            Json::Array(ms) => ms
                .into_iter()
                .map(|m| {
                    m.reordered(&["role", "tool_call_id", "reasoning", "content", "tool_calls"])
                })
                .collect::<Vec<_>>(),
            _ => vec![],
        };
        assert_eq!(sorted(got), sorted(Json::parse(want).unwrap()));
    }

    #[test]
    fn inline_system_messages_merge_where_the_template_wants_it() {
        let body = r#"{"system":"a","messages":[{"role":"user","content":"q"},{"role":"system","content":"b"}]}"#;
        let (apart, ..) = ask(body, Ways::default()).unwrap();
        assert_eq!(apart, Json::parse(br#"[{"role":"system","content":"a"},{"role":"user","content":"q"},{"role":"system","content":"b"}]"#).unwrap());
        let (merged, ..) = ask(
            body,
            Ways {
                merge_inline_system: true,
                ..Ways::default()
            },
        )
        .unwrap();
        assert_eq!(
            merged,
            Json::parse(br#"[{"role":"system","content":"ab"},{"role":"user","content":"q"}]"#)
                .unwrap()
        );
    }

    #[test]
    fn tools_and_thinking() {
        let body = r#"{"messages":[],"tools":[{"name":"f","input_schema":{"properties":{}},"cache_control":{}}],"thinking":{"type":"disabled"},"output_config":{"effort":"high"}}"#;
        let (_, tools, kwargs) = ask(body, Ways::default()).unwrap();
        let want = br#"[{"type":"function","function":{"name":"f","description":null,"parameters":{"properties":{},"type":"object"}}}]"#;
        assert_eq!(tools, Some(Json::parse(want).unwrap()));
        assert_eq!(kwargs.get("enable_thinking"), Some(&Json::Bool(false)));
        let (_, _, kwargs) = ask(
            body,
            Ways {
                disabled_thinking_is_low: true,
                ..Ways::default()
            },
        )
        .unwrap();
        assert_eq!(kwargs.get("reasoning_effort"), Some(&Json::str("low")));
        let (_, _, kwargs) = ask(
            r#"{"messages":[],"output_config":{"effort":"high"}}"#,
            Ways::default(),
        )
        .unwrap();
        assert_eq!(kwargs.get("reasoning_effort"), Some(&Json::str("high")));
    }

    #[test]
    fn what_vllm_refuses_is_refused() {
        for bad in [
            r#"{}"#,
            r#"{"messages":[{"role":"tool","content":"x"}]}"#,
            r#"{"messages":[{"role":"user","content":[{"type":"document"}]}]}"#,
            r#"{"messages":[{"role":"user","content":[{"type":"tool_addition"}]}]}"#,
            r#"{"messages":[],"tools":[{"type":"web_search_20250305","name":"web_search"}]}"#,
        ] {
            assert!(ask(bad, Ways::default()).is_err(), "{bad}");
        }
    }
}
