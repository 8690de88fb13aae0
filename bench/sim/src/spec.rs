use rand::{Rng, RngExt};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, ops::Range};

/// The constants of a pod. Times are in seconds.
///
/// A step that computes `n` tokens for prefills and decodes takes
///
/// ```text
/// step_base + max(step_floor, n × per_token)
///   + per_attended × Σ over prefill chunks (new tokens × mean context)
///   + per_decode_context × Σ over decodes (context)
///   + per_decode × decodes
/// ```
///
/// a roofline: reading the weights is the floor, arithmetic takes over when the batch is large enough.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodSpec {
    /// What every step costs.
    pub step_base: f64,
    /// Reading the weights once.
    pub step_floor: f64,
    /// Arithmetic per token, without attention.
    pub per_token: f64,
    /// Attention of a prefill, per new token and token of context.
    pub per_attended: f64,
    /// Reading the KV cache of a decode, per token of context.
    pub per_decode_context: f64,
    /// Per decode in the batch.
    pub per_decode: f64,
    /// HTTP, template and tokenizer, per token of the prompt: before the scheduler sees the request.
    #[serde(default)]
    pub frontend_per_token: f64,
    /// The same, per byte of the prompt.
    #[serde(default)]
    pub frontend_per_byte: f64,
    /// Tokens that a step may compute.
    pub max_num_batched_tokens: u32,
    /// Requests that run at once.
    pub max_num_seqs: u32,
    /// Tokens in a block of the KV cache. Chunks of a prefill and prefix hits are whole blocks.
    pub block_size: u32,
    /// Blocks in the pool.
    pub kv_blocks: u32,
    /// Blocks that a running request holds beside those of its tokens: the recurrent state of hybrid models. The state
    /// at the end of a prompt's last whole block stays in the cache like the block itself.
    #[serde(default)]
    pub extra_blocks: u32,
    /// Whether admission sets room aside for the whole answer too. vLLM does so for the prompt only and preempts when
    /// answers run out of room; the published curve under memory pressure is matched better with it.
    #[serde(default)]
    pub reserve_output: bool,
    /// Pauses of the whole engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hiccups: Option<Hiccups>,
}

/// Pauses that come at random (a Poisson process) and lengthen the step they fall in.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hiccups {
    /// How many come per second.
    pub rate: f64,
    /// How long each is, seconds.
    pub seconds: f64,
}

/// Why a spec was refused.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// It does not read: wrong syntax, a missing or an unknown field.
    #[error("pod kinds: {0}")]
    Syntax(#[from] serde_saphyr::Error),
    /// A field's value makes no sense.
    #[error("pod kind {kind}: {field} must be {what}")]
    Value {
        /// The kind's name.
        kind: String,
        /// The field.
        field: &'static str,
        /// What it must be.
        what: &'static str,
    },
    /// There is no such kind.
    #[error("no pod kind {kind}; there are: {known}")]
    Unknown {
        /// The name that was asked for.
        kind: String,
        /// The names that exist.
        known: String,
    },
}

/// The kinds that come with the crate.
const KINDS: &str = include_str!("../pods.yaml");

// === impl PodSpec ===

impl PodSpec {
    /// A kind that comes with the crate: `l40s`, `a10` or `h100`.
    pub fn kind(name: &str) -> Result<Self, SpecError> {
        let mut kinds = Self::kinds(KINDS)?;
        kinds.remove(name).ok_or_else(|| SpecError::Unknown {
            kind: name.to_owned(),
            known: kinds.keys().cloned().collect::<Vec<_>>().join(", "),
        })
    }

    /// Reads a YAML map from the kinds' names to their constants.
    pub fn kinds(yaml: &str) -> Result<BTreeMap<String, Self>, SpecError> {
        let kinds: BTreeMap<String, Self> = serde_saphyr::from_str(yaml)?;
        for (name, spec) in &kinds {
            spec.check(name)?;
        }
        Ok(kinds)
    }

    /// A pod of the same shape whose times are each multiplied by a factor from `range`, drawn evenly on a log scale.
    /// Sizes stay: they are what an engine announces.
    pub fn perturbed(&self, rng: &mut impl Rng, range: Range<f64>) -> Self {
        let (low, high) = (range.start.ln(), range.end.ln());
        let mut factor = || (low + (high - low) * rng.random::<f64>()).exp();
        let mut spec = self.clone();
        for x in spec.step_times() {
            *x *= factor();
        }
        for x in [&mut spec.frontend_per_token, &mut spec.frontend_per_byte] {
            *x *= factor();
        }
        spec
    }

    /// The same pod with steps that take so many times as long.
    pub fn slowed(&self, times: f64) -> Self {
        let mut spec = self.clone();
        for x in spec.step_times() {
            *x *= times;
        }
        spec
    }

    fn step_times(&mut self) -> [&mut f64; 6] {
        [
            &mut self.step_base,
            &mut self.step_floor,
            &mut self.per_token,
            &mut self.per_attended,
            &mut self.per_decode_context,
            &mut self.per_decode,
        ]
    }

    /// Tokens that the pool holds.
    pub fn kv_tokens(&self) -> u64 {
        u64::from(self.kv_blocks) * u64::from(self.block_size)
    }

    fn check(&self, kind: &str) -> Result<(), SpecError> {
        let times = [
            ("step_base", self.step_base),
            ("step_floor", self.step_floor),
            ("per_token", self.per_token),
            ("per_attended", self.per_attended),
            ("per_decode_context", self.per_decode_context),
            ("per_decode", self.per_decode),
            ("frontend_per_token", self.frontend_per_token),
            ("frontend_per_byte", self.frontend_per_byte),
            ("hiccups.rate", self.hiccups.map_or(0.0, |h| h.rate)),
            ("hiccups.seconds", self.hiccups.map_or(0.0, |h| h.seconds)),
        ];
        let wrong = |field, what| {
            Err(SpecError::Value {
                kind: kind.to_owned(),
                field,
                what,
            })
        };
        for (field, x) in times {
            if !(x.is_finite() && x >= 0.0) {
                return wrong(field, "a number of seconds, not negative");
            }
        }
        // A pod whose steps take no time would never let virtual time advance.
        if self.step_base + self.step_floor <= 0.0 {
            return wrong("step_base", "above 0, or step_floor must be");
        }
        for (field, n) in [
            ("max_num_seqs", self.max_num_seqs),
            ("block_size", self.block_size),
            ("kv_blocks", self.kv_blocks),
        ] {
            if n == 0 {
                return wrong(field, "above 0");
            }
        }
        if self.max_num_batched_tokens < self.block_size {
            return wrong("max_num_batched_tokens", "at least block_size");
        }
        if self.kv_blocks <= self.extra_blocks {
            return wrong("kv_blocks", "above extra_blocks");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
