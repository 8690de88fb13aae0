//! OpenAI's responses, made into chat messages as vLLM makes them.
use super::{Chat, Kwargs, Ways, field, list, openai};
use crate::{
    peek::InferenceRequest,
    prompt::{Reason, json::Json, read},
};

/// Between a namespace and the name of a tool in it.
const NAMESPACE_SEPARATOR: &str = "__";

/// `/v1/responses`.
pub(super) fn responses(req: &InferenceRequest, ways: Ways) -> Result<Chat<'_>, Reason> {
    // What came before is only in the engine's memory.
    let elsewhere = ["previous_response_id", "prompt"]
        .iter()
        .any(|f| !read::is_null(req, f));
    if elsewhere {
        return Err(Reason::Unsupported);
    }
    let mut messages = Vec::new();
    if let Some(instructions) = field(req, "instructions")?.filter(Json::truthy) {
        messages.push(Json::object([
            ("role", Json::str("system")),
            ("content", instructions),
        ]));
    }
    let mut go_on = false;
    match field(req, "input")? {
        Some(text @ Json::Str(_)) => {
            messages.push(Json::object([
                ("role", Json::str("user")),
                ("content", text),
            ]));
        }
        Some(Json::Array(items)) => {
            go_on = items.last().is_some_and(is_unfinished);
            // Messages before these are no part of the conversation that items join.
            let mut rest = Vec::new();
            for item in items {
                self::item(item, &mut rest)?;
            }
            messages.append(&mut rest);
        }
        _ => return Err(Reason::Unsupported),
    }
    let none = field(req, "tool_choice")?.as_ref().and_then(Json::as_str) == Some("none");
    let tools = match field(req, "tools")? {
        Some(tools) if tools.truthy() && !(none && ways.exclude_tools_when_none) => {
            Some(self::tools(list(tools)?)?)
        }
        _ => None,
    };
    let mut kwargs = Kwargs::of(field(req, "chat_template_kwargs")?)?;
    let effort = field(req, "reasoning")?.and_then(|mut r| r.take("effort"));
    kwargs.effort(effort);
    kwargs.merge("add_generation_prompt", Json::Bool(!go_on));
    kwargs.merge("continue_final_message", Json::Bool(go_on));
    Ok(Chat {
        messages,
        tools,
        kwargs,
        // This API's request model does not turn them off, so a template with its own BOS gets two.
        add_special_tokens: true,
        truncate: None,
    })
}

/// Whether the model is to go on with the last message.
fn is_unfinished(item: &Json<'_>) -> bool {
    let known = matches!(item.text("type"), None | Some("message" | "reasoning"));
    known && matches!(item.text("status"), Some("in_progress" | "incomplete"))
}

/// Adds an item to the messages, or to the last of them if both are the assistant's.
fn item<'a>(mut item: Json<'a>, messages: &mut Vec<Json<'a>>) -> Result<(), Reason> {
    let kind = item.text("type").unwrap_or("").to_owned();
    match &*kind {
        "function_call" | "custom_tool_call" => {
            let call = tool_call(item, &kind)?;
            match assistant(messages) {
                Some(m) => {
                    let mut calls = match m.take("tool_calls") {
                        Some(Json::Array(calls)) => calls,
                        _ => Vec::new(),
                    };
                    calls.push(call);
                    m.set("tool_calls", Json::Array(calls));
                }
                None => messages.push(Json::object([
                    ("role", Json::str("assistant")),
                    ("tool_calls", Json::Array(vec![call])),
                ])),
            }
        }
        "reasoning" => {
            if item.some("encrypted_content").is_some_and(Json::truthy) {
                return Err(Reason::Unsupported);
            }
            let text = first_text(&mut item, "content")
                .or_else(|| first_text(&mut item, "summary"))
                .unwrap_or(Json::str(""));
            join(messages, "reasoning", text);
        }
        "function_call_output" | "custom_tool_call_output" => {
            let output = item.take("output").unwrap_or(Json::Null);
            messages.push(Json::object([
                ("role", Json::str("tool")),
                ("content", output),
                ("tool_call_id", item.take("call_id").unwrap_or(Json::Null)),
            ]));
        }
        _ if item.text("role") == Some("assistant") => {
            let text = match item.get("content") {
                Some(Json::Str(_)) => item.take("content"),
                Some(Json::Array(_)) => first_text(&mut item, "content"),
                _ => None,
            };
            match text {
                Some(text) => join(messages, "content", text),
                None => messages.push(item),
            }
        }
        _ if item.text("role").is_some() => messages.push(item),
        _ => return Err(Reason::Unsupported),
    }
    Ok(())
}

/// The last message if it is the assistant's.
fn assistant<'m, 'a>(messages: &'m mut [Json<'a>]) -> Option<&'m mut Json<'a>> {
    messages
        .last_mut()
        .filter(|m| m.text("role") == Some("assistant"))
}

/// Sets a field of the assistant's last message if it has none yet, else makes a new message.
fn join<'a>(messages: &mut Vec<Json<'a>>, key: &'static str, text: Json<'a>) {
    match assistant(messages) {
        Some(m) if m.some(key).is_none() => m.set(key, text),
        _ => messages.push(Json::object([
            ("role", Json::str("assistant")),
            (key, text),
        ])),
    }
}

/// The text of the first part of a list.
fn first_text<'a>(item: &mut Json<'a>, key: &str) -> Option<Json<'a>> {
    match item.take(key)? {
        Json::Array(parts) => parts.into_iter().next()?.take("text"),
        _ => None,
    }
}

fn tool_call<'a>(mut item: Json<'a>, kind: &str) -> Result<Json<'a>, Reason> {
    let mut name = item.take("name").ok_or(Reason::Unsupported)?;
    let arguments = if kind == "custom_tool_call" {
        let input = item.take("input").unwrap_or(Json::str(""));
        Json::object([("input", input)])
    } else {
        let namespace = item.take("namespace").filter(Json::truthy);
        if let (Some(namespace), Some(local)) = (&namespace, name.as_str()) {
            let namespace = namespace.as_str().ok_or(Reason::Unsupported)?;
            name = Json::str(format!("{namespace}{NAMESPACE_SEPARATOR}{local}"));
        }
        item.take("arguments").unwrap_or(Json::Null)
    };
    Ok(Json::object([
        ("id", item.take("call_id").unwrap_or(Json::Null)),
        (
            "function",
            Json::object([("name", name), ("arguments", arguments)]),
        ),
        ("type", Json::str("function")),
    ]))
}

/// Function tools, tools in namespaces and free-form tools (as functions with one string); others are the server's own.
fn tools(tools: Vec<Json<'_>>) -> Result<Json<'_>, Reason> {
    let mut functions = Vec::new();
    for mut tool in tools {
        match tool.text("type") {
            Some("function") => functions.push(tool),
            Some("namespace") => {
                let namespace = tool.take("name").ok_or(Reason::Unsupported)?;
                let namespace = namespace.as_str().ok_or(Reason::Unsupported)?;
                for mut inner in list(tool.take("tools").ok_or(Reason::Unsupported)?)? {
                    if inner.text("type") != Some("function") {
                        continue;
                    }
                    let local = inner.text("name").ok_or(Reason::Unsupported)?;
                    let name = format!("{namespace}{NAMESPACE_SEPARATOR}{local}");
                    inner.set("name", Json::str(name));
                    functions.push(inner);
                }
            }
            Some("custom") => {
                let description = tool.take("description").unwrap_or(Json::Null);
                let name = tool.take("name").ok_or(Reason::Unsupported)?;
                functions.push(Json::object([
                    ("name", name),
                    ("description", description),
                    ("parameters", free_form()),
                ]));
            }
            _ => {}
        }
    }
    let dumped = functions
        .into_iter()
        .map(|f| {
            Ok(Json::object([
                ("type", Json::str("function")),
                ("function", openai::function(f)?),
            ]))
        })
        .collect::<Result<_, _>>()?;
    Ok(Json::Array(dumped))
}

/// The schema of a free-form tool's one argument.
fn free_form() -> Json<'static> {
    let input = Json::object([
        ("type", Json::str("string")),
        (
            "description",
            Json::str("The freeform text payload for this tool."),
        ),
    ]);
    Json::object([
        ("type", Json::str("object")),
        ("properties", Json::object([("input", input)])),
        ("required", Json::Array(vec![Json::str("input")])),
        ("additionalProperties", Json::Bool(false)),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{peek::Api, prompt::read::tests::request};

    fn messages(input: &str) -> Result<Json<'static>, Reason> {
        let req = request(Api::Responses, &format!("{{\"input\":{input}}}"));
        responses(&req, Ways::default()).map(|c| Json::Array(c.messages).into_owned())
    }

    #[test]
    fn items_become_messages() {
        let input = r#"[
            {"role":"user","content":[{"type":"input_text","text":"q"}]},
            {"type":"reasoning","summary":[{"type":"summary_text","text":"s"}],"content":[{"type":"reasoning_text","text":"t"}]},
            {"type":"message","role":"assistant","content":[{"type":"output_text","text":"a"},{"type":"output_text","text":"never"}]},
            {"type":"function_call","call_id":"c1","name":"f","arguments":"{\"x\":1}"},
            {"type":"function_call","call_id":"c2","name":"g","namespace":"n","arguments":"{}"},
            {"type":"function_call_output","call_id":"c1","output":"r"},
            {"role":"assistant","content":"b"},
            {"role":"assistant","content":"c"}]"#;
        let want = br#"[
            {"role":"user","content":[{"type":"input_text","text":"q"}]},
            {"role":"assistant","reasoning":"t","content":"a","tool_calls":[
                {"id":"c1","function":{"name":"f","arguments":"{\"x\":1}"},"type":"function"},
                {"id":"c2","function":{"name":"n__g","arguments":"{}"},"type":"function"}]},
            {"role":"tool","content":"r","tool_call_id":"c1"},
            {"role":"assistant","content":"b"},
            {"role":"assistant","content":"c"}]"#;
        assert_eq!(messages(input), Ok(Json::parse(want).unwrap()));
        for bad in [
            r#"[{"type":"item_reference","id":"x"}]"#,
            r#"[{"type":"reasoning","encrypted_content":"x","summary":[]}]"#,
            "5",
            "null",
        ] {
            assert!(messages(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_unfinished_message_is_continued() {
        let of = |status: &str| {
            let body = format!(
                r#"{{"input":[{{"type":"message","role":"assistant","status":"{status}","content":[]}}]}}"#
            );
            let req = request(Api::Responses, &body);
            let c = responses(&req, Ways::default()).unwrap();
            (
                c.kwargs.is_true("continue_final_message"),
                c.kwargs.is_true("add_generation_prompt"),
            )
        };
        assert_eq!(of("incomplete"), (true, false));
        assert_eq!(of("completed"), (false, true));
    }

    #[test]
    fn tools_of_all_kinds_become_functions() {
        let body = r#"{"input":"x","tools":[
            {"type":"function","name":"f","parameters":{"a":1},"strict":false},
            {"type":"namespace","name":"n","tools":[{"type":"function","name":"g"},{"type":"custom","name":"no"}]},
            {"type":"custom","name":"c","description":"d"},
            {"type":"web_search"}]}"#;
        let req = request(Api::Responses, body);
        let got = responses(&req, Ways::default()).unwrap().tools.unwrap();
        let want = br#"[
            {"type":"function","function":{"name":"f","description":null,"parameters":{"a":1},"strict":false}},
            {"type":"function","function":{"name":"n__g","description":null,"parameters":null}},
            {"type":"function","function":{"name":"c","description":"d","parameters":{"type":"object","properties":{"input":{"type":"string","description":"The freeform text payload for this tool."}},"required":["input"],"additionalProperties":false}}}]"#;
        assert_eq!(got, Json::parse(want).unwrap());
    }

    #[test]
    fn what_only_the_engine_remembers_is_not_guessed() {
        let req = request(
            Api::Responses,
            r#"{"input":"x","previous_response_id":"r"}"#,
        );
        assert_eq!(responses(&req, Ways::default()), Err(Reason::Unsupported));
    }
}
