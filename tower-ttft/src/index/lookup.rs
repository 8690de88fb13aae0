//! Walking a chain through a domain, beside the writer.
use super::{
    chunk::{Chunk, Look},
    runs::{SLOTS, run_end, run_of},
    sets::{SetId, SetWords},
    strata::Strata,
};

/// What a lookup does with the sets that it meets.
pub(super) trait Probe {
    /// Notes the set of the `run`th run of a chunk. It may be read several times, and be any set until it is committed.
    fn load(&mut self, run: usize, id: SetId, sets: &SetWords);

    /// The blocks `from..` up to the next commit are held by the set noted for `run`. Tells whether anyone is left.
    fn commit(&mut self, run: usize, from: usize) -> bool;
}

/// What a chunk has of a chain.
struct Match {
    /// Blocks.
    len: usize,
    runs: usize,
}

/// Strata whose lines are fetched together: one after the other they would each wait for memory.
const AHEAD: usize = 8;

/// Walks the blocks `0..n`, whose keys `key` gives. Returns how many of them somebody who held all before them held, as
/// far as the probe did not end it earlier.
pub(super) fn walk<P: Probe>(
    strata: &Strata,
    n: usize,
    key: impl Fn(usize) -> u64,
    probe: &mut P,
) -> usize {
    let shared = &strata.shared;
    let heads = shared.heads.load();
    let mut ends = [0u8; SLOTS + 1];
    let (mut i, mut fetched) = (0, 0);
    while i < n {
        if i >= fetched {
            let first = i - i % SLOTS;
            let mut lines = 0;
            let mut found = [None; AHEAD];
            for (k, f) in found.iter_mut().enumerate() {
                let at = (first + k * SLOTS).max(i);
                if at < n {
                    *f = heads.candidates(key(at)).next();
                }
            }
            for c in found.into_iter().flatten() {
                lines ^= shared.chunks.get(c as usize).map_or(0, Chunk::touch);
            }
            std::hint::black_box(lines);
            fetched = first + AHEAD * SLOTS;
        }
        let hit = heads.candidates(key(i)).find_map(|c| {
            let chunk = shared.chunks.get(c as usize)?;
            read(strata, chunk, i, n, &key, probe, &mut ends)
        });
        let Some(hit) = hit else { return i };
        let mut from = i;
        for (run, end) in ends[..hit.runs].iter().enumerate() {
            if !probe.commit(run, from) {
                return from;
            }
            from = i + usize::from(*end);
        }
        i += hit.len;
    }
    i
}

/// What a chunk has of a chain from block `i` on, if it begins with that block; `ends` are the ends of the runs.
fn read<P: Probe>(
    strata: &Strata,
    chunk: &Chunk,
    i: usize,
    n: usize,
    key: &impl Fn(usize) -> u64,
    probe: &mut P,
    ends: &mut [u8; SLOTS + 1],
) -> Option<Match> {
    let shared = &strata.shared;
    let slot = i % SLOTS;
    let mut look = |look: &Look<'_>| {
        let span = look.span;
        if span.start != slot || span.end <= slot {
            return None;
        }
        let most = (span.end - slot).min(n - i);
        let len = if look.key(slot + most - 1) == key(i + most - 1) {
            most
        } else if look.key(slot) == key(i) {
            // Equal up to the point where the chains part: bisect.
            let (mut lo, mut hi) = (1, most - 1);
            while lo < hi {
                let mid = lo + (hi - lo) / 2;
                if look.key(slot + mid) == key(i + mid) {
                    lo = mid + 1;
                } else {
                    hi = mid;
                }
            }
            lo
        } else {
            return None;
        };
        let (mut at, mut runs, mut run) = (slot, 0, run_of(look.cuts, slot));
        while at < slot + len {
            probe.load(runs, look.run(run), &shared.sets);
            at = run_end(look.cuts, at).min(slot + len);
            ends[runs] = (at - slot) as u8;
            runs += 1;
            run += 1;
        }
        Some(Match { len, runs })
    };
    chunk.read(&shared.spills, &mut look).unwrap_or_else(|| {
        // The writer was stopped in the middle of this very chunk. An answer that lacks a prefix which everybody has
        // would be worse than to wait for the end of its turn.
        let _turn = strata.writer.lock();
        chunk.read(&shared.spills, &mut look).flatten()
    })
}
