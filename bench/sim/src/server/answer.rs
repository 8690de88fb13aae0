//! Answers, whole and streamed, as vLLM writes them.

use super::{Progress, Ticket, ask::Ask};
use crate::Words;
use bytes::Bytes;
use http_body::{Body, Frame};
use serde_json::{Value, json};
use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

/// What vLLM 0.32 calls itself at the end of an answer.
const FINGERPRINT: &str = "vllm-0.32.0-simulated";

/// What is the same in all parts of an answer.
pub(super) struct Head {
    pub(super) chat: bool,
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: Arc<str>,
    pub(super) block_size: u32,
    pub(super) tokens_per_event: u32,
}

/// The body of a streamed answer.
pub(super) struct Stream {
    head: Head,
    ask: Ask,
    ticket: Option<Ticket>,
    words: Words,
    begun: bool,
    generated: u32,
    /// Tokens whose text is still to be sent.
    held: u32,
    ready: VecDeque<Bytes>,
}

// === impl Head ===

impl Head {
    /// A whole answer.
    pub(super) fn whole(&self, ask: &Ask, text: String, generated: u32, cached: u32) -> String {
        let finish = ask.finish;
        let (object, choice) = if self.chat {
            let message = json!({"role": "assistant", "content": text, "refusal": null, "annotations": null, "audio": null, "function_call": null, "reasoning": null});
            let choice = json!({"index": 0, "message": message, "logprobs": null, "finish_reason": finish, "stop_reason": null, "token_ids": null, "routed_experts": null});
            ("chat.completion", choice)
        } else {
            let choice = json!({"index": 0, "text": text, "logprobs": null, "finish_reason": finish, "stop_reason": null, "token_ids": null, "routed_experts": null, "prompt_logprobs": null, "prompt_token_ids": null});
            ("text_completion", choice)
        };
        let mut details = self.details(ask, cached);
        if self.chat
            && let Some(details) = details.as_object_mut()
        {
            details.insert("multimodal_tokens".into(), Value::Null);
        }
        let mut usage = usage(ask, generated);
        usage["prompt_tokens_details"] = details;
        usage["completion_tokens_details"] = Value::Null;
        json!({"id": self.id, "object": object, "created": self.created, "model": &*self.model, "choices": [choice], "service_tier": null, "system_fingerprint": FINGERPRINT, "usage": usage, "prompt_logprobs": null, "prompt_token_ids": null, "prompt_text": null, "kv_transfer_params": null, "ec_transfer_params": null, "metrics": null})
            .to_string()
    }

    fn details(&self, ask: &Ask, cached: u32) -> Value {
        if !self.chat {
            return json!({"cached_tokens": cached});
        }
        let tokens = ask.prompt.tokens();
        let created = (tokens - tokens % self.block_size).saturating_sub(cached);
        json!({"cached_tokens": cached, "created_cache_tokens": created})
    }

    fn chunk(&self, choices: Value) -> Value {
        let object = if self.chat {
            "chat.completion.chunk"
        } else {
            "text_completion"
        };
        json!({"id": self.id, "object": object, "created": self.created, "model": &*self.model, "choices": choices})
    }
}

fn usage(ask: &Ask, generated: u32) -> Value {
    let prompt = ask.prompt.tokens();
    json!({"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated})
}

fn event(data: &Value) -> Bytes {
    Bytes::from(format!("data: {data}\n\n"))
}

// === impl Stream ===

impl Stream {
    pub(super) fn new(head: Head, ask: Ask, ticket: Ticket, words: Words) -> Self {
        Self {
            head,
            ask,
            ticket: Some(ticket),
            words,
            begun: false,
            generated: 0,
            held: 0,
            ready: VecDeque::new(),
        }
    }

    fn take(&mut self, progress: Progress) {
        match progress {
            Progress::Tokens(n) => {
                if !self.begun && self.head.chat {
                    self.role();
                }
                let first = !std::mem::replace(&mut self.begun, true);
                self.generated += n;
                self.held += n;
                // The last ones wait for the end, which comes with them.
                let last = self.generated >= self.ask.output;
                if !last && (first || self.held >= self.head.tokens_per_event) {
                    self.content(None);
                }
            }
            Progress::Done { cached } => {
                self.content(Some(self.ask.finish));
                if self.ask.include_usage {
                    let mut chunk = self.head.chunk(json!([]));
                    let mut usage = usage(&self.ask, self.generated);
                    usage["prompt_tokens_details"] = self.head.details(&self.ask, cached);
                    chunk["usage"] = usage;
                    chunk["system_fingerprint"] = FINGERPRINT.into();
                    self.ready.push_back(event(&chunk));
                }
                self.end();
            }
            Progress::Refused => {
                let error = super::ask::Refusal::busy().body();
                self.ready
                    .push_back(Bytes::from(format!("data: {error}\n\n")));
                self.end();
            }
        }
    }

    fn end(&mut self) {
        self.ready
            .push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.ticket = None;
    }

    fn role(&mut self) {
        let delta = json!({"role": "assistant", "content": ""});
        let choice = json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": null});
        let mut chunk = self.head.chunk(json!([choice]));
        self.add_usage(&mut chunk, 0);
        chunk["prompt_token_ids"] = Value::Null;
        chunk["prompt_text"] = Value::Null;
        self.ready.push_back(event(&chunk));
    }

    fn content(&mut self, finish: Option<&str>) {
        let text = self.words.text(std::mem::take(&mut self.held) as usize);
        let mut choice = if self.head.chat {
            json!({"index": 0, "delta": {"content": text}, "logprobs": null, "finish_reason": finish})
        } else {
            json!({"index": 0, "text": text, "logprobs": null, "finish_reason": finish, "stop_reason": null, "prompt_token_ids": null})
        };
        if self.head.chat && finish.is_some() {
            choice["stop_reason"] = Value::Null;
        }
        choice["token_ids"] = Value::Null;
        let mut chunk = self.head.chunk(json!([choice]));
        self.add_usage(&mut chunk, self.generated);
        if finish.is_some() && !self.ask.include_usage {
            chunk["system_fingerprint"] = FINGERPRINT.into();
        }
        self.ready.push_back(event(&chunk));
    }

    fn add_usage(&self, chunk: &mut Value, generated: u32) {
        if self.ask.include_usage && self.ask.continuous_usage {
            let mut usage = usage(&self.ask, generated);
            usage["completion_tokens_details"] = Value::Null;
            chunk["usage"] = usage;
        }
    }
}

impl Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            let Some(ticket) = &mut self.ticket else {
                return Poll::Ready(None);
            };
            match ready!(ticket.progress.poll_recv(cx)) {
                Some(progress) => self.take(progress),
                None => self.ticket = None,
            }
        }
    }
}
