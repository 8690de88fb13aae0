//! Which pool an endpoint belongs to, from what the file says and what its engine says.

use crate::config::EndpointConfig;
use std::sync::Arc;
use tower_ttft::vllm::Model;

/// Where an endpoint belongs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Placement {
    /// The base model of its pool; none while that is not known, or if it must not take requests.
    pub(super) pool: Option<Arc<str>>,
    /// What an operator should know about it.
    pub(super) condition: Option<String>,
}

/// Most names that a condition lists.
const LISTED: usize = 5;

// === impl Placement ===

impl Placement {
    /// Where an endpoint belongs before its engine has said anything.
    pub(super) fn initial(config: &EndpointConfig) -> Self {
        Self {
            pool: config.model.clone(),
            condition: None,
        }
    }

    /// Where it belongs now that its engine serves `served` (empty: not known, nothing changes).
    pub(super) fn next(
        &self,
        config: &EndpointConfig,
        declared: &[Arc<str>],
        served: &[Model],
    ) -> Self {
        let mut bases = served
            .iter()
            .filter(|m| m.parent.is_none())
            .map(|m| &m.id)
            .peekable();
        if bases.peek().is_none() {
            return self.clone();
        }
        match &config.model {
            Some(model) if bases.any(|id| id == model) => Self {
                pool: Some(model.clone()),
                condition: None,
            },
            Some(model) => Self {
                pool: None,
                condition: Some(format!(
                    "gets no requests: its engine serves {}, not `{model}`; correct `model` in the pool file, or start the engine with `--served-model-name {model}`",
                    list(served),
                )),
            },
            None => Self {
                pool: declared
                    .iter()
                    .find(|name| served.iter().any(|m| m.parent.is_none() && m.id == **name))
                    .or_else(|| bases.next())
                    .cloned(),
                condition: None,
            },
        }
    }
}

fn list(served: &[Model]) -> String {
    let mut names: Vec<_> = served
        .iter()
        .take(LISTED)
        .map(|m| format!("`{}`", m.id))
        .collect();
    if served.len() > LISTED {
        names.push(format!("{} more", served.len() - LISTED));
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tower_ttft::vllm::Source;

    fn endpoint(model: Option<&str>) -> EndpointConfig {
        EndpointConfig {
            address: "a:1".into(),
            model: model.map(Into::into),
            kv_events: Source::Auto,
            replay: Source::Auto,
            gpu: None,
        }
    }

    fn served(names: &[(&str, Option<&str>)]) -> Vec<Model> {
        names
            .iter()
            .map(|(id, parent)| Model {
                id: (*id).into(),
                root: None,
                parent: parent.map(Into::into),
                max_model_len: None,
            })
            .collect()
    }

    #[test]
    fn places() {
        let declared = [Arc::from("big"), Arc::from("tiny")];
        for (model, names, pool) in [
            (None, &[][..], None),
            (Some("tiny"), &[], Some("tiny")),
            (
                Some("tiny"),
                &[("other", None), ("tiny", None)],
                Some("tiny"),
            ),
            (Some("tiny"), &[("other", None)], None),
            // An adapter of that name is not that model.
            (
                Some("tiny"),
                &[("other", None), ("tiny", Some("other"))],
                None,
            ),
            (None, &[("x", None), ("tiny", None)], Some("tiny")),
            (None, &[("x", None), ("y", None)], Some("x")),
            (None, &[("ad", Some("x")), ("x", None)], Some("x")),
        ] {
            let config = endpoint(model);
            let placement = Placement::initial(&config).next(&config, &declared, &served(names));
            assert_eq!(placement.pool.as_deref(), pool, "{model:?} {names:?}");
            assert_eq!(
                placement.condition.is_some(),
                model.is_some() && pool.is_none()
            );
        }
    }

    #[test]
    fn silence_changes_nothing_and_agreement_heals() {
        let config = endpoint(Some("tiny"));
        let wrong = Placement::default().next(&config, &[], &served(&[("other", None)]));
        assert!(
            wrong
                .condition
                .as_deref()
                .unwrap()
                .contains("serves `other`, not `tiny`")
        );
        assert_eq!(wrong.next(&config, &[], &[]), wrong);
        let right = wrong.next(&config, &[], &served(&[("tiny", None)]));
        assert_eq!(right, Placement::initial(&config));
    }
}
