//! Where prompts came from, counted.
use super::{Reason, Source};
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use std::{
    fmt::{self, Write},
    sync::Arc,
};

/// The counters of all encoders of a process.
#[derive(Clone, Debug, Default)]
pub struct PromptFamilies {
    source: Family<SourceLabels, Counter>,
    late_prompts: Family<ModelLabel, Counter>,
}

/// Labels of `forebay_prompt_source_total`: models are those that are configured, so the set is bounded.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct SourceLabels {
    /// The base model.
    model: ModelName,
    /// `ids`, `local`, `render`, `tokenize` or `approximate`.
    source: Word,
    /// Why it is approximate; empty else.
    reason: Word,
}

/// A model's name as a label.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ModelName(Arc<str>);

/// One of a fixed set of words as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Word(&'static str);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabel {
    model: ModelName,
}

/// The counters of one model.
#[derive(Clone, Debug)]
pub(super) struct PromptMetrics {
    model: ModelName,
    families: PromptFamilies,
    late: Counter,
}

// === impl PromptFamilies ===

impl PromptFamilies {
    /// Makes the counters visible.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "forebay_prompt_source",
            "Where the tokens of prompts came from, and why some are only approximate",
            self.source.clone(),
        );
        registry.register(
            "forebay_prompt_late",
            "Prompts whose tokens came after their time budget had run out",
            self.late_prompts.clone(),
        );
    }

    /// How many prompts of a model came from there.
    pub fn count(&self, model: &Arc<str>, source: Source) -> u64 {
        let labels = SourceLabels::new(ModelName(model.clone()), source);
        self.source.get(&labels).map_or(0, |c| c.get())
    }

    pub(super) fn of(&self, model: Arc<str>) -> PromptMetrics {
        let model = ModelName(model);
        PromptMetrics {
            late: self
                .late_prompts
                .get_or_create(&ModelLabel {
                    model: model.clone(),
                })
                .clone(),
            model,
            families: self.clone(),
        }
    }
}

// === impl SourceLabels ===

impl SourceLabels {
    fn new(model: ModelName, source: Source) -> Self {
        let (source, reason) = match source {
            Source::Ids => ("ids", ""),
            Source::Local => ("local", ""),
            Source::Render => ("render", ""),
            Source::Tokenize => ("tokenize", ""),
            Source::Approximate(reason) => ("approximate", reason.as_str()),
        };
        Self {
            model,
            source: Word(source),
            reason: Word(reason),
        }
    }
}

// === impl PromptMetrics ===

impl PromptMetrics {
    pub(super) fn count(&self, source: Source) {
        self.families
            .source
            .get_or_create(&SourceLabels::new(self.model.clone(), source))
            .inc();
    }

    /// For jobs whose result nobody waits for any more.
    pub(super) fn late(&self) -> Counter {
        self.late.clone()
    }
}

// === impl Reason ===

impl Reason {
    /// The reason as a metric label.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::NoTokenizer => "no_tokenizer",
            Self::Unread => "unread",
            Self::Template => "template",
            Self::Unsupported => "unsupported",
            Self::Timeout => "timeout",
            Self::Busy => "busy",
            Self::Remote => "remote",
            Self::Mismatch => "mismatch",
        }
    }
}

// === impl ModelName, Word ===

impl EncodeLabelValue for ModelName {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        encoder.write_str(&self.0)
    }
}

impl EncodeLabelValue for Word {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        encoder.write_str(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_by_source_and_reason() {
        let families = PromptFamilies::default();
        let mut registry = Registry::default();
        families.register(&mut registry);
        let model: Arc<str> = "m".into();
        let metrics = families.of(model.clone());
        metrics.count(Source::Local);
        metrics.count(Source::Approximate(Reason::Busy));
        metrics.count(Source::Approximate(Reason::Busy));
        assert_eq!(families.count(&model, Source::Local), 1);
        assert_eq!(families.count(&model, Source::Approximate(Reason::Busy)), 2);
        assert_eq!(families.count(&model, Source::Ids), 0);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let line =
            "forebay_prompt_source_total{model=\"m\",source=\"approximate\",reason=\"busy\"} 2";
        assert!(text.contains(line), "{text}");
    }
}
