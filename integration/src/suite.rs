//! Lists of tests against real parts, run one after another, each with a time limit and a line of report.

use crate::{engine::Profile, lab::Lab};
use anyhow::Result;
use futures::future::BoxFuture;
use serde::Serialize;
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, timeout};

/// A test. It returns what it measured, for the report.
#[derive(Clone, Copy)]
pub struct Test {
    /// The suite.
    pub suite: &'static str,
    /// The name; unique.
    pub name: &'static str,
    /// Shared engines that it uses. They are stopped after the last test that does.
    pub needs: &'static [Profile],
    /// It has failed when it takes longer; the start of shared engines does not count.
    pub limit: Duration,
    /// The test itself.
    pub run: fn(Arc<Lab>) -> BoxFuture<'static, Result<String>>,
}

/// A test on real engines may meet a stall of the machine. One that fails is run again, but no more than this many in a
/// run, and the report says which.
const SECOND_CHANCES: usize = 2;

/// What came of a test.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The suite.
    pub suite: &'static str,
    /// The name.
    pub name: &'static str,
    /// Whether it passed.
    pub passed: bool,
    /// Whether it passed only at the second try.
    pub flaky: bool,
    /// How long it took, seconds.
    pub seconds: f64,
    /// What it measured, or why it failed.
    pub details: String,
}

/// Defines a [`Test`] of an `async fn(Arc<Lab>) -> Result<String>`: its name is the function's.
#[macro_export]
macro_rules! test {
    ($suite:literal, $run:path, $name:literal, [$($profile:ident),*], $limit:literal) => {
        $crate::suite::Test {
            suite: $suite,
            name: $name,
            needs: &[$($crate::engine::Profile::$profile),*],
            limit: std::time::Duration::from_secs($limit),
            run: |lab| Box::pin($run(lab)),
        }
    };
}

/// Runs tests in order and reports each one at once.
pub async fn run(lab: Arc<Lab>, tests: &[Test]) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    let mut chances = SECOND_CHANCES;
    for (i, test) in tests.iter().enumerate() {
        let mut outcome = run_one(&lab, test).await;
        if !outcome.passed && chances > 0 {
            chances -= 1;
            println!(
                "   {}::{} failed at the first try ({:.1} s): {}",
                outcome.suite, outcome.name, outcome.seconds, outcome.details
            );
            outcome = run_one(&lab, test).await;
            outcome.flaky = outcome.passed;
        }
        let mark = match (outcome.passed, outcome.flaky) {
            (true, false) => "ok",
            (true, true) => "ok at the second try",
            (false, _) => "FAILED",
        };
        println!(
            "{mark} {}::{} ({:.1} s): {}",
            outcome.suite, outcome.name, outcome.seconds, outcome.details
        );
        outcomes.push(outcome);
        for profile in test.needs {
            let later = tests.get(i + 1..).unwrap_or_default();
            if !later.iter().any(|t| t.needs.contains(profile)) {
                lab.release(*profile).await;
            }
        }
    }
    outcomes
}

async fn run_one(lab: &Arc<Lab>, test: &Test) -> Outcome {
    let mut started = Instant::now();
    let mut result = Ok(String::new());
    for profile in test.needs {
        result = result.and(prepare(lab, *profile).await);
    }
    if result.is_ok() {
        started = Instant::now();
        // A task of its own, so that a panic fails this test alone.
        let mut task = tokio::spawn((test.run)(lab.clone()));
        result = match timeout(test.limit, &mut task).await {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => Err(anyhow::anyhow!("{panic}")),
            Err(_) => {
                task.abort();
                Err(anyhow::anyhow!("not done within {:?}", test.limit))
            }
        };
    }
    let passed = result.is_ok();
    Outcome {
        suite: test.suite,
        name: test.name,
        passed,
        flaky: false,
        seconds: Instant::now()
            .saturating_duration_since(started)
            .as_secs_f64(),
        details: result.unwrap_or_else(|error| format!("{error:#}")),
    }
}

async fn prepare(lab: &Arc<Lab>, profile: Profile) -> Result<String> {
    let started = Instant::now();
    lab.pair(profile).await?;
    let took = Instant::now().saturating_duration_since(started);
    if took > Duration::from_secs(2) {
        println!("   engines of profile {profile:?} are up ({took:.1?})");
    }
    Ok(String::new())
}
