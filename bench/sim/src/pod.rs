use crate::{
    Dice, KvChange, Output, PodSpec, Prompt, Stored,
    blocks::{Blocks, KeyHasher},
    job::Job,
};
use std::{
    collections::{HashSet, VecDeque},
    hash::BuildHasherDefault,
    sync::Arc,
};

/// A simulated engine. Drive it with [`Pod::advance`]; cloning it forks the world.
#[derive(Clone, Debug)]
pub struct Pod {
    spec: Arc<PodSpec>,
    cache: Cache,
    /// In the frontend, with when each leaves it, in that order.
    front: VecDeque<(f64, Job)>,
    waiting: VecDeque<Job>,
    running: Vec<Job>,
    /// When the step that is under way ends.
    step: Option<f64>,
    /// What the step that is under way changed in the cache so far.
    changes: Vec<KvChange>,
    hiccups: Dice,
    next_hiccup: f64,
    load: Load,
    /// In a fork, the one request to tell about.
    only: Option<u64>,
}

/// A request.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// Its name in the outputs; unique among the requests in flight.
    pub id: u64,
    /// What it asks.
    pub prompt: Arc<Prompt>,
    /// Tokens to generate, at least 1.
    pub output: u32,
}

/// What an engine reports of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Requests that run.
    pub running: u32,
    /// Requests that wait for admission. Those in the frontend are not counted, as in vLLM.
    pub waiting: u32,
    /// Share of the KV blocks in use by live requests, 0 to 1.
    pub kv_usage: f64,
    /// Tokens computed for prompts since the start, recomputation after preemptions included.
    pub prefilled_tokens: u64,
    /// Seconds from admission to the first token, over all requests that had one, and their number.
    pub prefill_seconds: (f64, u64),
    /// Seconds of all steps.
    pub busy_seconds: f64,
    /// Steps.
    pub steps: u64,
    /// Requests that lost their blocks to others and started again.
    pub preemptions: u64,
    /// Prompt tokens of admitted requests.
    pub queried_tokens: u64,
    /// Of these, tokens that the prefix cache held.
    pub hit_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
}

#[derive(Clone, Debug)]
enum Cache {
    Paged(Blocks),
    /// No limit, and what others computed counts too.
    Boundless(HashSet<u64, BuildHasherDefault<KeyHasher>>),
}

/// The id of the request that [`Pod::ttft`] adds.
const PROBE: u64 = u64::MAX;

/// Keys of states have this bit, keys of blocks do not.
const STATE: u64 = 1;

/// The key of the n-th block of the state behind the block with this key.
fn state_key(key: u64, n: u32) -> u64 {
    (key ^ u64::from(n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)) | STATE
}

fn is_state(key: u64) -> bool {
    key & STATE != 0
}

// === impl Pod ===

impl Pod {
    /// An idle pod with an empty cache. The seed draws its hiccups.
    pub fn new(spec: Arc<PodSpec>, seed: u64) -> Self {
        let blocks = Blocks::new(spec.kv_blocks);
        Self::with(spec, seed, Cache::Paged(blocks))
    }

    /// A pod for an upper bound: unlimited memory, and [`Pod::learn`] makes it know what others computed.
    pub fn boundless(spec: Arc<PodSpec>, seed: u64) -> Self {
        Self::with(spec, seed, Cache::Boundless(HashSet::default()))
    }

    fn with(spec: Arc<PodSpec>, seed: u64, cache: Cache) -> Self {
        let mut hiccups = Dice::new(seed);
        let next_hiccup = spec
            .hiccups
            .filter(|h| h.rate > 0.0)
            .map_or(f64::INFINITY, |h| hiccups.gap(h.rate));
        Self {
            spec,
            cache,
            front: VecDeque::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            step: None,
            changes: Vec::new(),
            hiccups,
            next_hiccup,
            load: Load::default(),
            only: None,
        }
    }

    /// Its constants.
    pub fn spec(&self) -> &Arc<PodSpec> {
        &self.spec
    }

    /// Changes its constants; a step under way ends as it was planned. Sizes of the cache do not change.
    pub fn set_times(&mut self, spec: &PodSpec) {
        self.spec = Arc::new(PodSpec {
            block_size: self.spec.block_size,
            kv_blocks: self.spec.kv_blocks,
            extra_blocks: self.spec.extra_blocks,
            reserve_output: self.spec.reserve_output,
            ..spec.clone()
        });
    }

    /// A request arrives. `at` must not lie before the last [`Pod::advance`].
    pub fn submit(&mut self, at: f64, arrival: Arrival) {
        let Arrival { id, prompt, output } = arrival;
        let ready = at
            + self.spec.frontend_per_token * f64::from(prompt.tokens())
            + self.spec.frontend_per_byte * f64::from(prompt.bytes());
        let job = Job {
            id,
            keys: prompt.keys(self.spec.block_size),
            prompt,
            output: output.max(1),
            generated: 0,
            computed: 0,
            cached: None,
            admitted: 0.0,
            blocks: Default::default(),
            extra: Default::default(),
            committed: 0,
            saved: false,
            step: 0,
            gone: false,
        };
        let place = self.front.partition_point(|(other, _)| *other <= ready);
        self.front.insert(place, (ready, job));
    }

    /// A request's client left. Advance to that moment first. A request in the step under way keeps its place in it.
    pub fn cancel(&mut self, id: u64) {
        self.front.retain(|(_, job)| job.id != id);
        self.waiting.retain(|job| job.id != id);
        for job in &mut self.running {
            job.gone |= job.id == id;
        }
        if self.step.is_none() {
            self.drop_gone();
        }
    }

    /// When something happens next; none if it is idle.
    pub fn next_event(&self) -> Option<f64> {
        match (self.front.front().map(|(ready, _)| *ready), self.step) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Lives until `to`, that moment included.
    pub fn advance(&mut self, to: f64, out: &mut Vec<Output>) {
        while let Some(at) = self.next_event().filter(|at| *at <= to) {
            while let Some((_, job)) = self.front.pop_front_if(|(ready, _)| *ready <= at) {
                if self.fits(&job) {
                    self.waiting.push_back(job);
                } else if self.tells(job.id) {
                    out.push(Output::Refused { id: job.id, at });
                }
            }
            if self.step.is_some_and(|end| end <= at) {
                self.step = None;
                self.finish_step(at, out);
            }
            if self.step.is_none() {
                self.start_step(at);
            }
        }
    }

    /// What it reports.
    pub fn load(&self) -> Load {
        Load {
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            kv_usage: match &self.cache {
                Cache::Paged(blocks) => f64::from(blocks.used()) / f64::from(self.spec.kv_blocks),
                Cache::Boundless(_) => 0.0,
            },
            ..self.load
        }
    }

    /// Requests anywhere in it.
    pub fn in_flight(&self) -> usize {
        self.front.len() + self.waiting.len() + self.running.len()
    }

    /// Tokens of a prompt that the cache would give now.
    pub fn cached(&self, prompt: &Prompt) -> u32 {
        self.hits(prompt, &prompt.keys(self.spec.block_size)).0 * self.spec.block_size
    }

    /// A boundless pod now knows what it was told to be computed elsewhere. Others do not change.
    pub fn learn(&mut self, hashes: &[u64]) {
        if let Cache::Boundless(known) = &mut self.cache {
            known.extend(hashes);
        }
    }

    /// Empties the prefix cache. As in vLLM, only an idle pod can; tells whether it did. The event comes with the next
    /// step.
    pub fn clear_cache(&mut self) -> bool {
        if !self.running.is_empty() {
            return false;
        }
        match &mut self.cache {
            Cache::Paged(blocks) => blocks.clear(),
            Cache::Boundless(known) => known.clear(),
        }
        self.changes.push(KvChange::Cleared);
        true
    }

    /// The exact time to first token, seconds, of a request that arrives now, if no other arrives: found by living on in
    /// a fork. Infinite if it would be refused. `now` must be where this pod is.
    pub fn ttft(&self, now: f64, prompt: &Arc<Prompt>, output: u32) -> f64 {
        let mut fork = self.clone();
        fork.only = Some(PROBE);
        fork.submit(
            now,
            Arrival {
                id: PROBE,
                prompt: prompt.clone(),
                output,
            },
        );
        let mut out = Vec::new();
        while let Some(at) = fork.next_event() {
            fork.advance(at, &mut out);
            match out.first() {
                Some(Output::FirstToken { at, .. }) => return at - now,
                Some(Output::Refused { .. }) => return f64::INFINITY,
                _ => {}
            }
        }
        f64::INFINITY
    }

    fn tells(&self, id: u64) -> bool {
        self.only.is_none_or(|only| only == id)
    }

    /// Blocks of the prompt that are cached, and how many of those nobody uses. At least one token is left to compute.
    fn hits(&self, prompt: &Prompt, keys: &[u64]) -> (u32, u32) {
        let most = prompt.tokens().saturating_sub(1) / self.spec.block_size;
        let keys = keys.get(..most as usize).unwrap_or(keys);
        match &self.cache {
            Cache::Paged(blocks) => blocks.hits(keys),
            Cache::Boundless(known) => (
                keys.iter().take_while(|k| known.contains(k)).count() as u32,
                0,
            ),
        }
    }

    fn fits(&self, job: &Job) -> bool {
        let most = u64::from(job.prompt.tokens()) + u64::from(job.output);
        let blocks = most.div_ceil(u64::from(self.spec.block_size));
        match &self.cache {
            Cache::Paged(_) => {
                blocks + u64::from(self.spec.extra_blocks) <= u64::from(self.spec.kv_blocks)
            }
            Cache::Boundless(_) => true,
        }
    }

    fn start_step(&mut self, at: f64) {
        let mut budget = self.spec.max_num_batched_tokens;
        let preempted = self.schedule_running(&mut budget);
        if !preempted {
            self.admit(at, &mut budget);
        }
        let seconds = self.seconds();
        if seconds > 0.0 {
            let end = self.with_hiccups(at, at + seconds);
            self.load.steps += 1;
            self.load.busy_seconds += end - at;
            self.step = Some(end);
        }
    }

    /// Gives tokens of the budget to what runs; tells whether something had to go for it.
    fn schedule_running(&mut self, budget: &mut u32) -> bool {
        let mut preempted = false;
        let mut i = 0;
        while let Some(job) = self.running.get(i) {
            let n = job.chunk(*budget, self.spec.block_size);
            if n == 0 {
                i += 1;
                continue;
            }
            let need = self
                .blocks_for(job.computed + n)
                .saturating_sub(job.blocks.len() as u32);
            if !self.has_free(need) {
                // The latest goes first; it may be this one.
                preempted = true;
                self.preempt_last();
                continue;
            }
            self.give(i, need);
            if let Some(job) = self.running.get_mut(i) {
                job.step = n;
            }
            *budget -= n;
            i += 1;
        }
        preempted
    }

    fn preempt_last(&mut self) {
        let Some(mut job) = self.running.pop() else {
            return;
        };
        self.release(&mut job);
        job.computed = 0;
        job.step = 0;
        self.load.preemptions += 1;
        self.waiting.push_front(job);
    }

    fn admit(&mut self, at: f64, budget: &mut u32) {
        while *budget > 0 && (self.running.len() as u32) < self.spec.max_num_seqs {
            let Some(job) = self.waiting.front() else {
                return;
            };
            let (hits, unused) = self.hits(&job.prompt, &job.keys);
            let computed = hits * self.spec.block_size;
            let mut probe = Job {
                computed,
                ..job.clone()
            };
            let n = probe.chunk(*budget, self.spec.block_size);
            if n == 0 {
                return;
            }
            // The whole prompt must fit, so that a prefill never starves half-way.
            let mut most = job.tokens();
            if self.spec.reserve_output {
                most += job.output - job.generated;
            }
            let need = self.blocks_for(most).saturating_sub(hits);
            if !self.has_free(need + self.spec.extra_blocks + unused) {
                return;
            }
            self.waiting.pop_front();
            if probe.cached.is_none() {
                probe.cached = Some(computed);
                probe.admitted = at;
                self.load.queried_tokens += u64::from(probe.prompt.tokens());
                self.load.hit_tokens += u64::from(computed);
            }
            if let Cache::Paged(blocks) = &mut self.cache {
                let keys = probe.keys.iter().take(hits as usize);
                probe.blocks.extend(keys.filter_map(|k| blocks.share(*k)));
                // The state that the hit goes on from is as recently used as its blocks.
                if let Some(last) = hits.checked_sub(1).and_then(|h| probe.keys.get(h as usize)) {
                    for n in 0..self.spec.extra_blocks {
                        blocks.touch(state_key(*last, n));
                    }
                }
            }
            probe.committed = hits;
            probe.step = n;
            *budget -= n;
            let i = self.running.len();
            self.running.push(probe);
            self.give(i, need);
            self.give_extra(i);
        }
    }

    /// How long the planned step takes, seconds; 0 if nothing is planned.
    fn seconds(&self) -> f64 {
        let spec = &self.spec;
        let (mut tokens, mut attended, mut context, mut decodes) = (0u32, 0.0, 0.0, 0u32);
        for job in self.running.iter().filter(|job| job.step > 0) {
            tokens += job.step;
            if job.prefills() {
                let mean = f64::from(job.computed) + f64::from(job.step) / 2.0;
                attended += f64::from(job.step) * mean;
            } else {
                context += f64::from(job.computed);
                decodes += 1;
            }
        }
        if tokens == 0 {
            return 0.0;
        }
        spec.step_base
            + spec.step_floor.max(f64::from(tokens) * spec.per_token)
            + spec.per_attended * attended
            + spec.per_decode_context * context
            + spec.per_decode * f64::from(decodes)
    }

    /// When a step that would end at `end` ends, with the hiccups that fall in it.
    fn with_hiccups(&mut self, start: f64, mut end: f64) -> f64 {
        let Some(hiccups) = self.spec.hiccups else {
            return end;
        };
        while self.next_hiccup < end {
            // One that began while the engine was idle delays only by what is left of it.
            let left = self.next_hiccup + hiccups.seconds - start.max(self.next_hiccup);
            end += left.max(0.0);
            self.next_hiccup += self.hiccups.gap(hiccups.rate);
        }
        end
    }

    fn finish_step(&mut self, at: f64, out: &mut Vec<Output>) {
        for i in 0..self.running.len() {
            let Some(job) = self.running.get_mut(i) else {
                break;
            };
            let n = std::mem::take(&mut job.step);
            if n == 0 {
                continue;
            }
            if job.computed < job.prompt.tokens() {
                let prompt = job.prompt.tokens() - job.computed;
                self.load.prefilled_tokens += u64::from(prompt.min(n));
            }
            job.computed += n;
            let complete = job.computed == job.tokens();
            self.commit(i);
            if complete {
                self.commit_state(i);
            }
            let Some(job) = self.running.get_mut(i) else {
                break;
            };
            if !complete || job.gone {
                continue;
            }
            job.generated += 1;
            self.load.generated_tokens += 1;
            let (id, first) = (job.id, job.generated == 1);
            if first {
                self.load.prefill_seconds.0 += at - job.admitted;
                self.load.prefill_seconds.1 += 1;
            }
            if self.tells(id) {
                out.push(if first {
                    Output::FirstToken { id, at }
                } else {
                    Output::Tokens { id, at, n: 1 }
                });
            }
        }
        let mut i = 0;
        while let Some(job) = self.running.get(i) {
            if !job.gone && job.generated < job.output {
                i += 1;
                continue;
            }
            let mut job = self.running.remove(i);
            self.release(&mut job);
            if !job.gone && self.tells(job.id) {
                out.push(Output::Done {
                    id: job.id,
                    at,
                    cached: job.cached.unwrap_or(0),
                    prompt: job.prompt.tokens(),
                    output: job.generated,
                });
            }
        }
        let batch = std::mem::take(&mut self.changes);
        if !batch.is_empty() && self.only.is_none() {
            out.push(Output::Kv { at, batch });
        }
    }

    /// Makes the whole blocks that a request has computed known to others. Blocks with generated tokens stay private:
    /// the next turn of a chat does not repeat them token by token.
    fn commit(&mut self, i: usize) {
        let block_size = self.spec.block_size;
        let Some(job) = self.running.get_mut(i) else {
            return;
        };
        let whole = (job.computed.min(job.prompt.tokens()) / block_size) as usize;
        let from = job.committed as usize;
        let Some(hashes) = job.keys.get(from..whole).filter(|h| !h.is_empty()) else {
            return;
        };
        match &mut self.cache {
            Cache::Paged(blocks) => {
                for (key, block) in hashes.iter().zip(job.blocks.iter().skip(from)) {
                    blocks.commit(*block, *key);
                }
            }
            Cache::Boundless(known) => known.extend(hashes),
        }
        job.committed = whole as u32;
        if self.only.is_none() {
            let parent = from.checked_sub(1).and_then(|p| job.keys.get(p)).copied();
            self.changes.push(KvChange::Stored(Stored {
                hashes: hashes.to_vec(),
                parent,
                prompt: job.prompt.clone(),
                range: from * block_size as usize..whole * block_size as usize,
                block_size,
            }));
        }
    }

    /// Keeps the recurrent state at the end of a prompt's last whole block. It takes room like any cached block, once
    /// for each request that left one; hits do not ask for it.
    fn commit_state(&mut self, i: usize) {
        let Some(job) = self.running.get_mut(i) else {
            return;
        };
        let (Cache::Paged(blocks), Some(last)) = (&mut self.cache, job.keys.last()) else {
            return;
        };
        if std::mem::replace(&mut job.saved, true) {
            return;
        }
        for (n, block) in job.extra.iter().enumerate() {
            blocks.commit(*block, state_key(*last, n as u32));
        }
    }

    fn drop_gone(&mut self) {
        let mut i = 0;
        while let Some(job) = self.running.get(i) {
            if job.gone {
                let mut job = self.running.remove(i);
                self.release(&mut job);
            } else {
                i += 1;
            }
        }
    }

    fn blocks_for(&self, tokens: u32) -> u32 {
        match self.cache {
            Cache::Paged(_) => tokens.div_ceil(self.spec.block_size),
            Cache::Boundless(_) => 0,
        }
    }

    fn has_free(&self, n: u32) -> bool {
        match &self.cache {
            Cache::Paged(blocks) => n <= blocks.free(),
            Cache::Boundless(_) => true,
        }
    }

    /// Takes blocks for a request's tokens.
    fn give(&mut self, i: usize, n: u32) {
        for _ in 0..n {
            let block = self.take();
            if let (Some(job), Some(block)) = (self.running.get_mut(i), block) {
                job.blocks.push(block);
            }
        }
    }

    fn give_extra(&mut self, i: usize) {
        if matches!(self.cache, Cache::Boundless(_)) {
            return;
        }
        for _ in 0..self.spec.extra_blocks {
            let block = self.take();
            if let (Some(job), Some(block)) = (self.running.get_mut(i), block) {
                job.extra.push(block);
            }
        }
    }

    fn take(&mut self) -> Option<u32> {
        let Cache::Paged(blocks) = &mut self.cache else {
            return None;
        };
        let (block, evicted) = blocks.take()?;
        if let Some(key) = evicted.filter(|key| self.only.is_none() && !is_state(*key)) {
            self.changes.push(KvChange::Removed(vec![key]));
        }
        Some(block)
    }

    /// Frees a request's blocks, the last first, so that the beginning of its prompt stays longest.
    fn release(&mut self, job: &mut Job) {
        job.committed = 0;
        job.saved = false;
        let Cache::Paged(blocks) = &mut self.cache else {
            return;
        };
        for block in job.extra.drain(..).rev() {
            blocks.release(block);
        }
        for block in job.blocks.drain(..).rev() {
            blocks.release(block);
        }
    }
}

#[cfg(test)]
mod tests;
