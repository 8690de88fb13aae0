//! What the tests of one run share: engines are expensive (45 s of CPU each), so that one pair of each profile serves
//! all tests, each of which starts its own gateway.

use crate::{
    engine::{Engine, EngineSpec, Profile},
    paths::Paths,
};
use anyhow::Result;
use std::{collections::HashMap, sync::Arc};
use tokio::sync::Mutex;

/// How much to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Minutes.
    Fast,
    /// The full counts.
    Full,
}

/// Two engines of one profile.
pub type Pair = [Engine; 2];

/// What the tests of one run share.
pub struct Lab {
    /// Where things are.
    pub paths: Paths,
    /// How much to do.
    pub tier: Tier,
    /// The seed of all random input. Printed, so that a run can be repeated.
    pub seed: u64,
    pairs: Mutex<HashMap<Profile, Arc<Pair>>>,
}

// === impl Lab ===

impl Lab {
    /// A lab without engines yet.
    pub fn new(paths: Paths, tier: Tier, seed: u64) -> Self {
        Self {
            paths,
            tier,
            seed,
            pairs: Mutex::default(),
        }
    }

    /// `fast` or `full`, by the tier.
    pub fn count(&self, fast: usize, full: usize) -> usize {
        match self.tier {
            Tier::Fast => fast,
            Tier::Full => full,
        }
    }

    /// The pair of engines of a profile, started if need be; one that a test has killed is started again.
    pub async fn pair(&self, profile: Profile) -> Result<Arc<Pair>> {
        let mut pairs = self.pairs.lock().await;
        if let Some(pair) = pairs.get(&profile) {
            for engine in pair.iter() {
                if !engine.alive().await {
                    engine.respawn().await?;
                }
            }
            tokio::try_join!(pair[0].ready(), pair[1].ready())?;
            return Ok(pair.clone());
        }
        let start = |letter: char| {
            let name = format!("{profile:?}{letter}").to_lowercase();
            let spec = match profile {
                Profile::A => EngineSpec::new(profile),
                // As vLLM does by default: tests kill the two processes one by one. One of them renders prompts for others.
                Profile::B if letter == '1' => EngineSpec::new(profile)
                    .separate_core()
                    .arg("--enable-scale-out"),
                Profile::B => EngineSpec::new(profile).separate_core(),
            };
            Engine::start(&self.paths, &name, spec)
        };
        let pair = Arc::new([start('1')?, start('2')?]);
        tokio::try_join!(pair[0].ready(), pair[1].ready())?;
        pairs.insert(profile, pair.clone());
        Ok(pair)
    }

    /// Stops the pair of a profile once no test holds it.
    pub async fn release(&self, profile: Profile) {
        self.pairs.lock().await.remove(&profile);
    }
}
