//! What the pool file says of chat templates reaches the tokenizer, at the start and at each change.

use super::{PORTS, PoolFile, SOON, try_start, until};
use crate::support;
use forebay_proxy::{
    app::{App, LoadTokenizer, local_tokenizers},
    config::ModelConfig,
};
use http::HeaderMap;
use parking_lot::Mutex;
use std::{path::PathBuf, sync::Arc};
use tower_ttft::{
    peek::{Api, read},
    prompt::LocalModel,
};

/// A tokenizer of tower-ttft's tests.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tower-ttft/tests/data/tiny");

/// A template that prints all that it is told.
const TEMPLATE: &str =
    "{{ messages[0].content }}|{{ mode | default('unset') }}|{{ tools | length if tools else 0 }}";

/// A loader that keeps what it loaded, to be looked into.
#[derive(Clone, Default)]
struct Loads(Arc<Mutex<Vec<Arc<dyn LocalModel>>>>);

impl Loads {
    fn loader(&self) -> LoadTokenizer {
        let (load, loads) = (local_tokenizers(7), self.0.clone());
        Arc::new(move |model: &ModelConfig| {
            let local = load(model)?;
            loads.lock().push(local.clone());
            Ok(local)
        })
    }

    async fn count(&self, n: usize) {
        support::within(SOON, "the tokenizer is loaded", || self.0.lock().len() == n).await;
    }

    /// A chat as the last one renders it.
    fn rendered(&self) -> String {
        let body = r#"{"messages":[{"role":"user","content":"hi"}],"tool_choice":"none","tools":[{"type":"function","function":{"name":"f"}}]}"#;
        let request = read(Api::Chat, &HeaderMap::new(), body.into());
        let local = self.0.lock().last().expect("one was loaded").clone();
        let rendered = local.render(&request).expect("it is rendered");
        rendered.texts[0].text.clone()
    }
}

fn pool_file(more: &str) -> String {
    format!("{PORTS}models: [{{name: tiny, tokenizer: '{TINY}'{more}}}]\n")
}

/// A file that goes away with its test.
struct Template(PathBuf);

impl Template {
    fn new(name: &str, text: &str) -> Self {
        let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("{name}-{}.jinja", std::process::id()));
        std::fs::write(&file, text).expect("the template is written");
        Self(file)
    }

    /// As the pool file, which stands in the same directory, calls it.
    fn name(&self) -> String {
        let name = self.0.file_name().expect("it has a name");
        name.to_string_lossy().into_owned()
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

async fn shown(app: &App, what: &str) {
    until(app.admin(), "/config", what, |a| a.body.contains(what)).await;
}

#[tokio::test]
async fn templates_and_their_values_follow_the_file() {
    let template = Template::new("mine", TEMPLATE);
    let mine = format!(", chatTemplate: {}", template.name());
    let file = PoolFile::new(&pool_file(&mine));
    let loads = Loads::default();
    let app = try_start(&file, loads.loader()).await.expect("starts");
    loads.count(1).await;
    assert_eq!(loads.rendered(), "hi|unset|1");
    shown(&app, &template.name()).await;

    file.write(&pool_file(&format!(
        "{mine}, chatTemplateKwargs: {{mode: deep}}"
    )));
    loads.count(2).await;
    assert_eq!(loads.rendered(), "hi|deep|1");
    shown(&app, "deep").await;

    file.write(&pool_file(&format!(
        "{mine}, chatTemplateKwargs: {{mode: deep}}, excludeToolsWhenToolChoiceNone: true"
    )));
    loads.count(3).await;
    assert_eq!(loads.rendered(), "hi|deep|0");
    shown(&app, "excludeToolsWhenToolChoiceNone").await;

    // Another name for clients is no other tokenizer.
    file.write(&pool_file(&format!(
        "{mine}, chatTemplateKwargs: {{mode: deep}}, excludeToolsWhenToolChoiceNone: true, aliases: [small]"
    )));
    shown(&app, "small").await;
    loads.count(3).await;

    file.write(&pool_file(", chatTemplate: default"));
    loads.count(4).await;
    assert!(
        loads.rendered().contains("<|im_start|>"),
        "{}",
        loads.rendered()
    );
}

#[tokio::test]
async fn what_engines_would_refuse_is_refused_with_its_key() {
    let broken = Template::new("broken", "{% for %}");
    for (more, expected) in [
        (
            format!(", chatTemplate: {}", broken.name()),
            vec!["chatTemplate ", "broken", "does not compile"],
        ),
        (
            ", chatTemplate: nothing".to_owned(),
            vec!["chatTemplate is neither", "`nothing`", "\"default\""],
        ),
        (
            ", chatTemplateKwargs: {tokenize: true}".to_owned(),
            vec!["chatTemplateKwargs ", "remove"],
        ),
    ] {
        let file = PoolFile::new(&pool_file(&more));
        let Err(error) = try_start(&file, local_tokenizers(7)).await else {
            panic!("it starts with {more}");
        };
        let error = error.to_string();
        for part in expected {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
}
