//! A model's tokenizer and chat template from a local directory.

mod files;
mod segments;

pub use self::{files::LoadError, segments::SegmentCacheStats};

use self::{files::Config, segments::Segments};
use super::{
    LocalModel, Reason, Rendered, Text,
    chat::{self, Ask, ContentFormat, Kwargs, Ways},
    json::Json,
    template::{Clock, Template},
};
use crate::peek::InferenceRequest;
use fastokens::{AddedTokens, Normalizer, Tokenizer, added_tokens::Segment};
use std::{fmt, path::Path, sync::Arc, time::SystemTime};

/// Efforts that vLLM tries to find out whether a template knows how to turn thinking off.
const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];

/// Parameters of a [`LocalTokenizer`]: how the engines are started, and limits.
#[derive(Clone)]
pub struct LocalParams {
    /// A template instead of the tokenizer's usual one: vLLM's `--chat-template`.
    pub chat_template: Option<ChatTemplate>,
    /// vLLM's `--default-chat-template-kwargs`.
    pub default_chat_template_kwargs: serde_json::Map<String, serde_json::Value>,
    /// vLLM's `--exclude-tools-when-tool-choice-none`.
    pub exclude_tools_when_tool_choice_none: bool,
    /// Bytes that remembered segments may take.
    pub cache_bytes: usize,
    /// The seed of the names of segments; random per process.
    pub seed: u64,
    /// The clock for templates that print the date, in UTC.
    pub now: Arc<dyn Fn() -> SystemTime + Send + Sync>,
}

/// A chat template that is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatTemplate {
    /// Its source.
    Source(String),
    /// The name of one of the tokenizer's templates.
    Named(String),
}

/// A tokenizer (fastokens) and the chat templates that belong to it.
///
/// Segments of 64 KiB and more are tokenized by fastokens' own threads, as many as there are cores, which spin for
/// 50 µs after each job; `FASTOKENS_BPE_THREADS=1` in the environment of the process keeps it to the calling thread.
pub struct LocalTokenizer {
    tokenizer: Tokenizer,
    cuts: Cuts,
    segments: Segments,
    templates: Templates,
    ways: Ways,
    defaults: Kwargs<'static>,
    /// Ids put before and behind a text with special tokens where the tokenizer itself puts none.
    around: (Option<u32>, Option<u32>),
}

/// Where a text is cut into segments that do not depend on each other.
enum Cuts {
    /// At all added tokens in one pass, or nowhere if there are none.
    Added,
    /// At those that are matched in raw text, and then at the others.
    Twice(Box<[Option<AddedTokens>; 2]>),
    /// Nowhere: a normalizer changes the text before some of them are looked for.
    Nowhere,
}

/// Templates by what a request brings.
struct Templates {
    plain: Option<Template>,
    /// Where it differs from the other.
    tools: Option<Template>,
}

/// A piece of a text: an added token or what is between two.
enum Piece<'t> {
    Token(u32),
    Text(&'t str),
}

// === impl LocalParams ===

impl LocalParams {
    /// The defaults of vLLM, 64 MiB, and the system's clock.
    pub fn new(seed: u64) -> Self {
        Self {
            chat_template: None,
            default_chat_template_kwargs: serde_json::Map::new(),
            exclude_tools_when_tool_choice_none: false,
            cache_bytes: 64 << 20,
            seed,
            now: Arc::new(SystemTime::now),
        }
    }
}

impl fmt::Debug for LocalParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalParams")
            .field("chat_template", &self.chat_template.is_some())
            .field(
                "default_chat_template_kwargs",
                &self.default_chat_template_kwargs,
            )
            .field("cache_bytes", &self.cache_bytes)
            .finish_non_exhaustive()
    }
}

// === impl LocalTokenizer ===

impl LocalTokenizer {
    /// Loads a directory in Hugging Face's layout: `tokenizer.json`, `tokenizer_config.json`, and where they exist
    /// `chat_template.jinja`, `additional_chat_templates/`, `chat_template.json` and `special_tokens_map.json`.
    ///
    /// Takes seconds of computation for a large vocabulary: not for a thread that serves requests.
    ///
    /// # Errors
    /// Which file is missing or wrong, and what to do about it.
    pub fn load(dir: &Path, params: LocalParams) -> Result<Self, LoadError> {
        let config = Config::load(dir)?;
        let tokenizer = tokenizer(dir)?;
        let cuts = Cuts::of(&tokenizer)?;
        let id = |wanted: bool, name: &str| {
            let none = tokenizer.post_processor().is_none();
            let token = config.token(name).filter(|_| wanted && none)?;
            tokenizer.token_to_id(token)
        };
        let around = (
            id(config.add_bos, "bos_token"),
            id(config.add_eos, "eos_token"),
        );
        let templates = Templates::compile(dir, &config, &params)?;
        let defaults =
            serde_json::Value::Object(params.default_chat_template_kwargs.clone()).to_string();
        let defaults = Json::parse(defaults.as_bytes())
            .ok()
            .and_then(|v| Kwargs::of(Some(v.into_owned())).ok())
            .ok_or(LoadError::Parameter {
                name: "default_chat_template_kwargs",
                error: "names a parameter of the renderer itself (such as `tokenize` or `chat_template`): remove it",
            })?;
        let mut this = Self {
            cuts,
            segments: Segments::new(params.cache_bytes, params.seed),
            ways: Ways {
                exclude_tools_when_none: params.exclude_tools_when_tool_choice_none,
                merge_inline_system: Templates::wants_system_first(&config, &params),
                disabled_thinking_is_low: false,
            },
            templates,
            defaults,
            around,
            tokenizer,
        };
        this.ways.disabled_thinking_is_low = this.ignores_no_thinking();
        // Builds the tables that the first use would otherwise build.
        let warm = Text::new("Warm up: 1, 2, 3.\nÄ € 你好\n".repeat(8), true);
        if this.tokenize(&warm).is_err() {
            return Err(LoadError::Unsupported {
                path: dir.join("tokenizer.json"),
                error: "it cannot tokenize a plain text".into(),
            });
        }
        Ok(this)
    }

    /// What the cache of segments did so far.
    pub fn cache_stats(&self) -> SegmentCacheStats {
        self.segments.stats()
    }

    /// Whether there is a chat template: without one only texts and ids are tokenized.
    pub fn has_template(&self) -> bool {
        self.templates.plain.is_some()
    }

    /// The ids of a text as the tokenizer gives them at once, without segments and cache; to check those.
    pub fn encode_whole(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, Reason> {
        let ids = self
            .tokenizer
            .encode(text)
            .map_err(|_| Reason::Unsupported)?;
        Ok(self.finish(ids, add_special_tokens))
    }

    fn pieces<'t>(&self, text: &'t str) -> Vec<Piece<'t>> {
        let of = |tokens: Option<&AddedTokens>, text: &'t str| match tokens {
            Some(tokens) => tokens.split(text),
            None => vec![Segment::Text(text)],
        };
        let raw = match &self.cuts {
            Cuts::Nowhere => return vec![Piece::Text(text)],
            Cuts::Added => of(self.tokenizer.added_tokens(), text),
            Cuts::Twice(tokens) => of(tokens[0].as_ref(), text)
                .into_iter()
                .flat_map(|piece| match piece {
                    Segment::Text(text) => of(tokens[1].as_ref(), text),
                    token => vec![token],
                })
                .collect(),
        };
        raw.into_iter()
            .filter_map(|piece| match piece {
                Segment::Token(id) => Some(Piece::Token(id)),
                Segment::Text("") => None,
                Segment::Text(text) => Some(Piece::Text(text)),
            })
            .collect()
    }

    fn named<'t>(&self, pieces: &[Piece<'t>]) -> Vec<(u128, &'t str)> {
        pieces
            .iter()
            .filter_map(|p| match p {
                Piece::Text(text) => Some((self.segments.key(text), *text)),
                Piece::Token(_) => None,
            })
            .collect()
    }

    fn segment(&self, text: &str) -> Result<Arc<[u32]>, Reason> {
        let ids = match self.cuts {
            Cuts::Nowhere => self.tokenizer.encode(text),
            Cuts::Added | Cuts::Twice(_) => self.tokenizer.encode_ordinary(text),
        };
        ids.map(Into::into).map_err(|_| Reason::Unsupported)
    }

    /// Puts special tokens around ids.
    fn finish(&self, ids: Vec<u32>, add_special_tokens: bool) -> Vec<u32> {
        let mut ids = self.tokenizer.post_process(ids, add_special_tokens);
        if add_special_tokens {
            if let Some(bos) = self.around.0 {
                ids.insert(0, bos);
            }
            ids.extend(self.around.1);
        }
        ids
    }

    /// Whether telling the template not to think gives the same as an effort, or an error. Engines find that out the
    /// same way before they take Anthropic's `thinking: disabled`.
    fn ignores_no_thinking(&self) -> bool {
        let text = |effort: &str| {
            let mut kwargs = Kwargs::default();
            kwargs.merge("enable_thinking", Json::Bool(effort != "none"));
            kwargs.merge("reasoning_effort", Json::Str(effort.to_owned().into()));
            kwargs.merge("add_generation_prompt", Json::Bool(true));
            let hi = Json::parse(br#"[{"role":"user","content":"Hi"}]"#).ok()?;
            let Json::Array(messages) = hi else {
                return None;
            };
            self.chat(chat::Chat {
                messages,
                tools: None,
                kwargs,
                add_special_tokens: false,
                truncate: None,
            })
            .ok()
        };
        let none = text("none");
        none.is_none() || EFFORTS.iter().any(|effort| text(effort) == none)
    }

    fn chat(&self, mut chat: chat::Chat<'_>) -> Result<Text, Reason> {
        chat.kwargs = chat.kwargs.over(&self.defaults);
        let templates = &self.templates;
        let template = match chat.tools {
            Some(_) => templates.tools.as_ref().or(templates.plain.as_ref()),
            None => templates.plain.as_ref(),
        };
        template.ok_or(Reason::Template)?.chat(chat)
    }
}

impl LocalModel for LocalTokenizer {
    fn render(&self, req: &InferenceRequest) -> Result<Rendered, Reason> {
        match chat::ask(req, self.ways)? {
            Ask::Chat(chat) => {
                let truncate = chat.truncate;
                Ok(Rendered {
                    texts: vec![self.chat(chat)?],
                    truncate,
                })
            }
            Ask::Texts {
                texts,
                add_special_tokens,
                truncate,
            } => Ok(Rendered {
                texts: texts
                    .into_iter()
                    .filter_map(|t| match t {
                        Json::Str(s) => Some(Text::new(s, add_special_tokens)),
                        _ => None,
                    })
                    .collect(),
                truncate,
            }),
        }
    }

    fn uncached(&self, text: &Text) -> usize {
        let named = self.named(&self.pieces(&text.text));
        self.segments
            .missing(named.iter().map(|(key, text)| (*key, text.len())))
    }

    fn tokenize(&self, text: &Text) -> Result<Vec<u32>, Reason> {
        let pieces = self.pieces(&text.text);
        let named = self.named(&pieces);
        let found = self
            .segments
            .get_all(named.iter().map(|(key, text)| (*key, text.len())));
        let mut new = Vec::new();
        let mut ids = Vec::with_capacity(text.text.len() / 3 + 8);
        let mut segments = named.iter().zip(found);
        for piece in &pieces {
            match piece {
                Piece::Token(id) => ids.push(*id),
                Piece::Text(_) => match segments.next() {
                    Some((_, Some(known))) => ids.extend_from_slice(&known),
                    Some(((key, text), None)) => {
                        let segment = self.segment(text)?;
                        ids.extend_from_slice(&segment);
                        new.push((*key, segment));
                    }
                    None => return Err(Reason::Unsupported),
                },
            }
        }
        if !new.is_empty() {
            self.segments.insert_all(new.into_iter());
        }
        Ok(self.finish(ids, text.add_special_tokens))
    }
}

impl fmt::Debug for LocalTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalTokenizer")
            .field("vocabulary", &self.tokenizer.vocab_size())
            .field("template", &self.has_template())
            .field("cache", &self.cache_stats())
            .finish_non_exhaustive()
    }
}

// === impl Cuts ===

impl Cuts {
    fn of(tokenizer: &Tokenizer) -> Result<Self, LoadError> {
        let configs = tokenizer.added_token_configs();
        let (second, first): (Vec<_>, Vec<_>) = configs.iter().cloned().partition(|c| c.normalized);
        if second.is_empty() || tokenizer.normalizer().is_none() {
            return Ok(Self::Added);
        }
        if !tokenizer.normalizer().is_some_and(is_identity) {
            return Ok(Self::Nowhere);
        }
        let compile = |configs: &[_]| {
            AddedTokens::from_configs(configs).map_err(|error| LoadError::Invalid {
                path: "tokenizer.json".into(),
                error,
            })
        };
        Ok(Self::Twice(Box::new([compile(&first)?, compile(&second)?])))
    }
}

fn is_identity(normalizer: &Normalizer) -> bool {
    match normalizer {
        Normalizer::Sequence(steps) => steps.iter().all(is_identity),
        _ => false,
    }
}

// === impl Templates ===

impl Templates {
    fn compile(dir: &Path, config: &Config, params: &LocalParams) -> Result<Self, LoadError> {
        let build = |source: Option<&str>| {
            source
                .map(|source| {
                    Template::new(
                        source,
                        config.named.clone(),
                        None::<ContentFormat>,
                        params.now.clone() as Clock,
                    )
                    .map_err(|e| LoadError::Template {
                        path: dir.to_owned(),
                        error: e.to_string(),
                    })
                })
                .transpose()
        };
        if let Some(ChatTemplate::Named(name)) = &params.chat_template
            && !config.templates.contains_key(name)
        {
            return Err(LoadError::NoTemplate {
                path: dir.to_owned(),
                name: name.clone(),
                known: config.templates.keys().cloned().collect(),
            });
        }
        let (plain, tools) = Self::sources(config, params);
        Ok(Self {
            plain: build(plain)?,
            tools: if tools == plain { None } else { build(tools)? },
        })
    }

    /// The sources for requests without and with tools.
    fn sources<'c>(
        config: &'c Config,
        params: &'c LocalParams,
    ) -> (Option<&'c str>, Option<&'c str>) {
        let named = |name: &str| config.templates.get(name).map(String::as_str);
        match &params.chat_template {
            Some(ChatTemplate::Source(source)) => return (Some(source), Some(source)),
            Some(ChatTemplate::Named(name)) => return (named(name), named(name)),
            None => {}
        }
        let processor = config.processor.as_deref();
        let plain = processor.or(named("default"));
        let tools = named("tool_use").or(named("default")).or(processor);
        (plain, tools)
    }

    fn wants_system_first(config: &Config, params: &LocalParams) -> bool {
        let (plain, tools) = Self::sources(config, params);
        [plain, tools]
            .into_iter()
            .any(|source| source.is_none_or(Template::wants_system_first))
    }
}

fn tokenizer(dir: &Path) -> Result<Tokenizer, LoadError> {
    let path = dir.join("tokenizer.json");
    if !path.exists() {
        return Err(LoadError::Missing {
            path,
            remedy: "copy it from the model's directory, or save the tokenizer with transformers' save_pretrained",
        });
    }
    let mut tokenizer = Tokenizer::from_file(&path).map_err(|e| match e {
        fastokens::Error::Io(error) => LoadError::Read {
            path: path.clone(),
            error,
        },
        fastokens::Error::Json(error) => LoadError::Invalid {
            path: path.clone(),
            error: error.to_string(),
        },
        other => LoadError::Unsupported {
            path: path.clone(),
            error: other.to_string(),
        },
    })?;
    // Engines cut and pad by the request, never by this file.
    tokenizer.set_truncation(None);
    tokenizer.set_padding(None);
    Ok(tokenizer)
}

#[cfg(test)]
mod tests;
