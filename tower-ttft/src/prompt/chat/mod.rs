//! What vLLM does with a request before the template and the tokenizer see it: the steps of its request models and
//! renderers (version 0.32: `entrypoints/openai/*/protocol.py`, `entrypoints/anthropic/serving.py`,
//! `renderers/chat_utils.py`), so that the same words come out.
//!
//! A request that vLLM would refuse may come out as anything: its answer is an error whoever gets it.

mod anthropic;
mod json_ext;
mod kwargs;
mod openai;
mod parse;
mod responses;

pub(super) use self::{
    kwargs::Kwargs,
    parse::{ContentFormat, MEDIA_MARK, conversation, developer_to_system},
};

use super::{Reason, json::Json, read};
use crate::peek::{Api, InferenceRequest};

/// What a request asks to be tokenized.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Ask<'a> {
    /// Messages for the template.
    Chat(Chat<'a>),
    /// Texts as they are.
    Texts {
        texts: Vec<Json<'a>>,
        add_special_tokens: bool,
        truncate: Option<u32>,
    },
}

/// Messages and what else the template is given.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chat<'a> {
    /// Messages as OpenAI's API has them.
    pub(super) messages: Vec<Json<'a>>,
    /// Tools as vLLM dumps them, none if the template is to be told of none.
    pub(super) tools: Option<Json<'a>>,
    pub(super) kwargs: Kwargs<'a>,
    pub(super) add_special_tokens: bool,
    pub(super) truncate: Option<u32>,
}

/// What is known of the server and its template and changes how requests are read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ways {
    /// The server runs with `--exclude-tools-when-tool-choice-none`.
    pub(super) exclude_tools_when_none: bool,
    /// The template takes a system message in the first place only (vLLM tries it out at its start).
    pub(super) merge_inline_system: bool,
    /// The template does not know how to turn thinking off, so "off" becomes "low".
    pub(super) disabled_thinking_is_low: bool,
}

/// Reads a request of any API that a template or tokenizer serves.
pub(super) fn ask(req: &InferenceRequest, ways: Ways) -> Result<Ask<'_>, Reason> {
    match req.api {
        Api::Chat => openai::chat(req, ways).map(Ask::Chat),
        Api::Completions => openai::completions(req),
        Api::Embeddings => openai::embeddings(req),
        Api::Responses => responses::responses(req, ways).map(Ask::Chat),
        Api::Messages => anthropic::messages(req, ways).map(Ask::Chat),
        // Cross encoders join query and document in their own ways.
        Api::Score | Api::Rerank | Api::Audio | Api::Other => Err(Reason::Unsupported),
    }
}

/// A field's value; none if it is missing or null.
fn field<'a>(req: &'a InferenceRequest, name: &str) -> Result<Option<Json<'a>>, Reason> {
    if read::is_null(req, name) {
        return Ok(None);
    }
    req.field(name)
        .map(|raw| Json::parse(raw).map_err(|_| Reason::Unread))
        .transpose()
}

/// A switch as pydantic reads one in lax mode, as far as anybody uses that.
fn switch(req: &InferenceRequest, name: &str, default: bool) -> Result<bool, Reason> {
    match field(req, name)? {
        None => Ok(default),
        Some(Json::Bool(b)) => Ok(b),
        Some(Json::Int(0)) => Ok(false),
        Some(Json::Int(1)) => Ok(true),
        Some(_) => Err(Reason::Unsupported),
    }
}

/// `truncate_prompt_tokens`: −1 means the model's limit, which only an answer of 400 is behind.
fn truncate(req: &InferenceRequest) -> Result<Option<u32>, Reason> {
    match field(req, "truncate_prompt_tokens")? {
        None | Some(Json::Int(-1)) => Ok(None),
        Some(n) => n.as_token().map(Some).ok_or(Reason::Unsupported),
    }
}

fn list(value: Json<'_>) -> Result<Vec<Json<'_>>, Reason> {
    match value {
        Json::Array(items) => Ok(items),
        _ => Err(Reason::Unsupported),
    }
}
