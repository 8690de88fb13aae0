use super::duration;
use std::time::Duration;

/// The kinds of routing.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize,
)]
pub enum Routing {
    /// Predicted TTFT plus λ × own prefill time.
    #[default]
    PricedTtft,
    /// Predicted TTFT.
    Ttft,
    /// Uncached tokens × batch size.
    LMetric,
    /// Two random endpoints and the longest holders, by predicted TTFT.
    P2c,
    /// Fewest requests in flight.
    LeastLoad,
    /// Uniformly at random.
    Random,
}

/// What a pool's owner decides. Durations are written with their unit (`"600s"`); an unknown field is an error.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct PolicySpec {
    /// The kind of routing.
    pub routing: Routing,
    /// The price of GPU time: seconds of delay that a second of prefill is worth. 0 to 100.
    pub lambda: f64,
    /// How long the first token may take, counted from when the request is on the wire.
    #[serde(with = "duration")]
    pub first_token_timeout: Duration,
    /// How long an answer that has begun may be silent.
    #[serde(with = "duration")]
    pub idle_timeout: Duration,
    /// How long a request may wait while no endpoint is ready.
    #[serde(with = "duration")]
    pub no_endpoint_wait: Duration,
    /// How often a request may be sent to another endpoint before its answer is committed.
    pub retries: u32,
    /// How many requests may wait while no endpoint is ready.
    pub max_queued: usize,
    /// How many body bytes may wait while no endpoint is ready.
    pub max_queued_bytes: usize,
    /// A report of an engine's load older than this does not count.
    #[serde(with = "duration")]
    pub load_max_age: Duration,
}

/// A policy that cannot be followed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// λ out of bounds.
    #[error("lambda is {0}; it must be a number from 0 to 100")]
    Lambda(f64),
    /// A time-out of nothing.
    #[error("{0} is 0; nothing could ever be answered")]
    Zero(&'static str),
}

// === impl PolicySpec ===

impl PolicySpec {
    /// Checks what types cannot.
    pub fn validate(&self) -> Result<(), SpecError> {
        if !(0.0..=100.0).contains(&self.lambda) {
            return Err(SpecError::Lambda(self.lambda));
        }
        for (name, d) in [
            ("firstTokenTimeout", self.first_token_timeout),
            ("idleTimeout", self.idle_timeout),
            ("loadMaxAge", self.load_max_age),
        ] {
            if d.is_zero() {
                return Err(SpecError::Zero(name));
            }
        }
        Ok(())
    }
}

impl Default for PolicySpec {
    fn default() -> Self {
        Self {
            routing: Routing::PricedTtft,
            lambda: 1.0,
            // Slow is not unavailable: a cold long prompt behind a queue takes minutes.
            first_token_timeout: Duration::from_secs(600),
            idle_timeout: Duration::from_secs(120),
            no_endpoint_wait: Duration::from_secs(30),
            retries: 1,
            max_queued: 1024,
            max_queued_bytes: 256 << 20,
            // Three scrapes of 1 s may be missed.
            load_max_age: Duration::from_millis(3500),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_camel_case_and_humane_durations() {
        let spec: PolicySpec = serde_json::from_str(
            r#"{"routing":"LeastLoad","lambda":2,"firstTokenTimeout":"60s","idleTimeout":"1m30s","noEndpointWait":"500ms"}"#,
        )
        .expect("a good policy");
        assert_eq!(spec.routing, Routing::LeastLoad);
        assert_eq!(spec.lambda, 2.0);
        assert_eq!(spec.first_token_timeout, Duration::from_secs(60));
        assert_eq!(spec.idle_timeout, Duration::from_secs(90));
        assert_eq!(spec.no_endpoint_wait, Duration::from_millis(500));
        assert_eq!(spec.retries, PolicySpec::default().retries);
        let text = serde_json::to_string(&spec).expect("serializes");
        assert_eq!(
            serde_json::from_str::<PolicySpec>(&text).expect("reads back"),
            spec
        );
    }

    #[test]
    fn errors_name_the_field_and_the_remedy() {
        let of = |text: &str| {
            serde_json::from_str::<PolicySpec>(text)
                .expect_err(text)
                .to_string()
        };
        let unknown = of(r#"{"lamda":1}"#);
        assert!(
            unknown.contains("`lamda`") && unknown.contains("`lambda`"),
            "{unknown}"
        );
        let unit = of(r#"{"idleTimeout":120}"#);
        assert!(unit.contains("\"120s\""), "{unit}");
        let kind = of(r#"{"routing":"fastest"}"#);
        assert!(kind.contains("PricedTtft"), "{kind}");
    }

    #[test]
    fn validates_what_types_cannot() {
        let with = |lambda| PolicySpec {
            lambda,
            ..Default::default()
        };
        assert_eq!(PolicySpec::default().validate(), Ok(()));
        assert_eq!(with(-1.0).validate(), Err(SpecError::Lambda(-1.0)));
        assert!(with(f64::NAN).validate().is_err());
        let zero = PolicySpec {
            idle_timeout: Duration::ZERO,
            ..Default::default()
        };
        assert_eq!(zero.validate(), Err(SpecError::Zero("idleTimeout")));
    }
}
