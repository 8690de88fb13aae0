//! The files of a tokenizer directory in Hugging Face's layout.
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

/// Tokens that templates and tokenizers know by a name.
const NAMED_TOKENS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// Why a directory is no tokenizer. Names the file and what to do.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file is missing.
    #[error("{} is missing: {remedy}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// What to do.
        remedy: &'static str,
    },
    /// A file cannot be read.
    #[error("{} cannot be read: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A file is not what its name says.
    #[error("{} is not valid: {error}; fetch it again from where the model comes from", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: String,
    },
    /// The tokenizer is of a kind that is not supported.
    #[error("{}: {error}; leave the tokenizer out for this model, its engines are asked for tokens instead", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What is not supported.
        error: String,
    },
    /// A parameter has a value that engines would refuse.
    #[error("{name} {error}")]
    Parameter {
        /// The parameter.
        name: &'static str,
        /// What is wrong with it and what to do.
        error: &'static str,
    },
    /// The tokenizer has no template of this name.
    #[error("{} has no chat template `{name}`, only {known:?}; name one of these, or give the source of another one", path.display())]
    NoTemplate {
        /// The directory.
        path: PathBuf,
        /// The name that was asked for.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// The chat template does not compile.
    #[error("the chat template of {} does not compile: {error}; give another one, as vLLM's --chat-template does", path.display())]
    Template {
        /// The file or directory it comes from.
        path: PathBuf,
        /// Where and why.
        error: String,
    },
}

/// What the small files say.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Config {
    /// Named tokens, such as `bos_token`.
    pub(super) named: Vec<(String, String)>,
    /// The tokenizer's templates by name; a single one is `default`.
    pub(super) templates: BTreeMap<String, String>,
    /// The processor's template, used for requests without tools.
    pub(super) processor: Option<String>,
    pub(super) add_bos: bool,
    pub(super) add_eos: bool,
}

// === impl Config ===

impl Config {
    pub(super) fn load(dir: &Path) -> Result<Self, LoadError> {
        let config =
            json(&dir.join("tokenizer_config.json"))?.ok_or_else(|| LoadError::Missing {
                path: dir.join("tokenizer_config.json"),
                remedy: "copy it from the model's directory, it says what the special tokens are",
            })?;
        let map = json(&dir.join("special_tokens_map.json"))?.unwrap_or_default();
        let named = NAMED_TOKENS
            .iter()
            .filter_map(|name| {
                let token = match config.get(*name) {
                    Some(token) => token,
                    None => map.get(*name)?,
                };
                Some(((*name).to_owned(), content(token)?))
            })
            .collect();
        let mut templates = file_templates(dir)?;
        if templates.is_empty() {
            templates = config_templates(&config, &dir.join("tokenizer_config.json"))?;
        }
        let path = dir.join("chat_template.json");
        let processor = match json(&path)? {
            None => None,
            Some(object) => match object.get("chat_template") {
                Some(serde_json::Value::String(s)) => Some(s.clone()),
                _ => {
                    return Err(LoadError::Invalid {
                        path,
                        error: "it has no string `chat_template`".into(),
                    });
                }
            },
        };
        let is_true = |name: &str| config.get(name) == Some(&serde_json::Value::Bool(true));
        Ok(Self {
            named,
            templates,
            processor,
            add_bos: is_true("add_bos_token"),
            add_eos: is_true("add_eos_token"),
        })
    }

    pub(super) fn token(&self, name: &str) -> Option<&str> {
        self.named
            .iter()
            .find(|(k, _)| k == name)
            .map(|(_, v)| v.as_str())
    }
}

type Object = serde_json::Map<String, serde_json::Value>;

/// The text of a file, none if there is no such file.
pub(super) fn text(path: &Path) -> Result<Option<String>, LoadError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(LoadError::Read {
            path: path.to_owned(),
            error,
        }),
    }
}

fn json(path: &Path) -> Result<Option<Object>, LoadError> {
    let Some(text) = text(path)? else {
        return Ok(None);
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|e| LoadError::Invalid {
            path: path.to_owned(),
            error: e.to_string(),
        })
}

/// A token: its text, or an object with it.
fn content(token: &serde_json::Value) -> Option<String> {
    token
        .as_str()
        .or_else(|| token.get("content")?.as_str())
        .map(ToOwned::to_owned)
}

/// `chat_template.jinja` and the files of `additional_chat_templates`.
fn file_templates(dir: &Path) -> Result<BTreeMap<String, String>, LoadError> {
    let mut templates = BTreeMap::new();
    if let Some(default) = text(&dir.join("chat_template.jinja"))? {
        templates.insert("default".to_owned(), default);
    }
    let more = dir.join("additional_chat_templates");
    let entries = match fs::read_dir(&more) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(templates),
        Err(error) => return Err(LoadError::Read { path: more, error }),
    };
    for entry in entries {
        let path = entry
            .map_err(|error| LoadError::Read {
                path: more.clone(),
                error,
            })?
            .path();
        let name = path
            .file_name()
            .and_then(|n| n.to_str())
            .and_then(|n| n.strip_suffix(".jinja"));
        if let (Some(name), Some(source)) = (name, text(&path)?) {
            templates.insert(name.to_owned(), source);
        }
    }
    Ok(templates)
}

/// `chat_template` of the configuration: a string or a list of named ones.
fn config_templates(config: &Object, path: &Path) -> Result<BTreeMap<String, String>, LoadError> {
    let invalid = || LoadError::Invalid {
        path: path.to_owned(),
        error: "`chat_template` is neither a string nor a list of {name, template}".into(),
    };
    match config.get("chat_template") {
        None | Some(serde_json::Value::Null) => Ok(BTreeMap::new()),
        Some(serde_json::Value::String(s)) => Ok(BTreeMap::from([("default".into(), s.clone())])),
        Some(serde_json::Value::Array(list)) => list
            .iter()
            .map(|t| {
                let field = |name: &str| Some(t.get(name)?.as_str()?.to_owned());
                field("name").zip(field("template")).ok_or_else(invalid)
            })
            .collect(),
        Some(_) => Err(invalid()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::tokenizer::tests::Dir;

    #[test]
    fn named_tokens_and_templates_in_all_their_forms() {
        let dir = Dir::new();
        dir.write(
            "tokenizer_config.json",
            r#"{"bos_token":{"content":"<s>","lstrip":false},"eos_token":"</s>","unk_token":null,"add_bos_token":true,
                "chat_template":[{"name":"default","template":"a"},{"name":"tool_use","template":"b"}]}"#,
        );
        dir.write(
            "special_tokens_map.json",
            r#"{"eos_token":"other","pad_token":{"content":"<pad>"},"unk_token":"<unk>"}"#,
        );
        let c = Config::load(dir.path()).unwrap();
        assert_eq!(c.token("bos_token"), Some("<s>"));
        assert_eq!(c.token("eos_token"), Some("</s>"));
        assert_eq!(c.token("pad_token"), Some("<pad>"));
        assert_eq!(c.token("unk_token"), None);
        assert!(c.add_bos && !c.add_eos);
        assert_eq!(c.templates.get("tool_use").map(String::as_str), Some("b"));
        dir.write("chat_template.jinja", "file");
        dir.write("chat_template.json", r#"{"chat_template":"processor"}"#);
        let c = Config::load(dir.path()).unwrap();
        assert_eq!(
            c.templates,
            BTreeMap::from([("default".into(), "file".into())])
        );
        assert_eq!(c.processor.as_deref(), Some("processor"));
    }

    #[test]
    fn errors_name_the_file_and_the_remedy() {
        let dir = Dir::new();
        let missing = Config::load(dir.path()).unwrap_err().to_string();
        assert!(
            missing.contains("tokenizer_config.json is missing") && missing.contains("copy it"),
            "{missing}"
        );
        for (bad, what) in [
            ("{", "line 1"),
            (r#"{"chat_template":5}"#, "chat_template"),
            (r#"{"chat_template":[{"name":"x"}]}"#, "chat_template"),
            ("[]", "invalid type"),
        ] {
            dir.write("tokenizer_config.json", bad);
            let error = Config::load(dir.path()).unwrap_err().to_string();
            assert!(
                error.contains("tokenizer_config.json") && error.contains(what),
                "{error}"
            );
        }
        dir.write("tokenizer_config.json", "{}");
        dir.write("chat_template.json", "{}");
        let error = Config::load(dir.path()).unwrap_err().to_string();
        assert!(error.contains("chat_template.json"), "{error}");
    }
}
