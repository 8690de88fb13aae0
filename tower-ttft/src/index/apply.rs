//! Applying events of one endpoint.
use super::{
    Applied, Inner,
    chunk::{Addr, ChunkId},
    held::{Held, Removed, Stored},
    keyed,
    strata::{Position, Strata, Writer},
    table::IdMap,
};
use crate::{
    chain::ATOM_TOKENS,
    events::{BlockHash, BlockRemoved, BlockStored, GroupKind, Medium},
};
use smallvec::SmallVec;
use std::sync::Arc;

/// All that is known of one endpoint.
#[derive(Default)]
pub(super) struct State {
    places: Vec<Place>,
    /// Groups that are not full attention: their removals mean nothing here.
    others: Vec<Plane>,
    /// Blocks without a key, tracked so that their removals and children are known for what they are.
    unkeyed: Vec<(Plane, Unkeyed)>,
}

/// A medium and a group of it.
type Plane = (Medium, u32);

/// An endpoint's part of a domain.
struct Place {
    strata: Arc<Strata>,
    held: Held,
}

#[derive(Default)]
struct Unkeyed {
    copies: IdMap,
    reported: super::bytes::Reported,
}

/// Blocks of one chunk that are held from now on, written at once.
#[derive(Default)]
struct Pending {
    chunk: ChunkId,
    /// What the endpoint holds of the chunk, pending or not.
    held: u32,
    new: u32,
}

/// Planes that are told apart per endpoint; engines have a handful.
const MAX_PLANES: usize = 64;
/// Domains of one endpoint.
const MAX_PLACES: usize = 8;
/// Tokens in a block; more is no block size.
const MAX_BLOCK: u32 = 1 << 16;
/// Room that must be left for what is not asked for one by one: sets and long lists of runs.
const MARGIN: usize = 64 << 10;
/// Chunks that are cleared before others get their turn at writing.
const CLEAR_SLICE: u32 = 256;

// === impl State ===

impl State {
    /// Records stored blocks.
    pub(super) fn store(&mut self, index: &Inner, holder: u16, event: &BlockStored) -> Applied {
        let n = event.hashes.len() as u32;
        let all_unkeyed = Applied {
            unkeyed: n,
            ..Applied::default()
        };
        let plane = (event.medium, event.group);
        if event.kind != GroupKind::Full {
            if !self.others.contains(&plane) && self.others.len() < MAX_PLANES {
                self.others.push(plane);
            }
            return all_unkeyed;
        }
        self.others.retain(|p| *p != plane);
        let block = event.block_size as usize;
        // Connectors announce blocks that they keep without saying what is in them.
        if block == 0 || event.medium == Medium::Other {
            return all_unkeyed;
        }
        if event.hashes.len().checked_mul(block) != Some(event.tokens.len()) {
            return Applied {
                rejected: n,
                ..Applied::default()
            };
        }
        if !block.is_multiple_of(ATOM_TOKENS) || event.block_size > MAX_BLOCK {
            return all_unkeyed;
        }
        let Some(place) = self.place(index, event) else {
            return Applied {
                refused: n,
                ..Applied::default()
            };
        };
        let (keyed, salt) = keyed::keyed(event);
        let mut applied = place.store(index, holder, event, keyed, salt);
        if applied.orphans > 0 {
            let parent = event.parent.is_some_and(|p| self.is_unkeyed(plane, p));
            if parent {
                return self.store_unkeyed(index, plane, &event.hashes);
            }
        } else if applied.refused == 0 {
            applied += self.store_unkeyed(index, plane, &event.hashes[keyed..]);
        }
        applied
    }

    /// The endpoint's place in the event's domain.
    fn place(&mut self, index: &Inner, event: &BlockStored) -> Option<&mut Place> {
        let is = |p: &Place| p.strata.block == event.block_size && p.strata.medium == event.medium;
        if let Some(i) = self.places.iter().position(is) {
            return self.places.get_mut(i);
        }
        if self.places.len() == MAX_PLACES {
            return None;
        }
        let strata = index.domain(event.block_size, event.medium)?;
        self.places.push(Place {
            strata,
            held: Held::new(index.seed, event.group),
        });
        self.places.last_mut()
    }

    fn is_unkeyed(&self, plane: Plane, id: BlockHash) -> bool {
        let mut of = self.unkeyed.iter().filter(|(p, _)| *p == plane);
        of.any(|(_, u)| u.copies.get(id).is_some())
    }

    fn store_unkeyed(&mut self, index: &Inner, plane: Plane, ids: &[BlockHash]) -> Applied {
        let mut applied = Applied {
            unkeyed: ids.len() as u32,
            ..Applied::default()
        };
        if ids.is_empty() {
            return applied;
        }
        let i = match self.unkeyed.iter().position(|(p, _)| *p == plane) {
            Some(i) => i,
            None if self.unkeyed.len() < MAX_PLANES => {
                let copies = IdMap::new(index.seed);
                let new = Unkeyed {
                    copies,
                    ..Unkeyed::default()
                };
                self.unkeyed.push((plane, new));
                self.unkeyed.len() - 1
            }
            None => return applied,
        };
        if let Some((_, of)) = self.unkeyed.get_mut(i) {
            for id in ids {
                let copies = of.copies.get(*id).unwrap_or(0);
                if copies == 0 && !index.budget.has(of.copies.growth()) {
                    applied.refused += 1;
                } else {
                    of.copies
                        .insert(*id, copies.saturating_add(1).min(u32::MAX - 1));
                }
            }
            of.reported.update(&index.budget, of.copies.bytes());
        }
        applied
    }

    /// Takes removed blocks out. Every block stands for itself: one that is not known does not keep the others.
    pub(super) fn remove(&mut self, index: &Inner, holder: u16, event: &BlockRemoved) -> Applied {
        let mut applied = Applied::default();
        let mut ids: SmallVec<[BlockHash; 16]> = event.hashes.as_slice().into();
        for place in &mut self.places {
            if place.strata.medium == event.medium {
                place.remove(index, holder, event.group, &mut ids, &mut applied);
            }
        }
        let plane = (event.medium, event.group);
        let is_other = self.others.contains(&plane) || event.medium == Medium::Other;
        let mut unkeyed = self.unkeyed.iter_mut().find(|(p, _)| *p == plane);
        for id in &ids {
            let copies = unkeyed.as_mut().and_then(|(_, u)| u.copies.remove(*id));
            match copies {
                Some(n) => {
                    applied.unkeyed += 1;
                    if n > 1
                        && let Some((_, u)) = unkeyed.as_mut()
                    {
                        u.copies.insert(*id, n - 1);
                    }
                }
                None if is_other => applied.unkeyed += 1,
                None => applied.orphans += 1,
            }
        }
        applied
    }

    /// Forgets what is on a medium, or on all. Readers and other writers go on meanwhile. Returns the blocks forgotten.
    pub(super) fn clear(&mut self, index: &Inner, holder: u16, medium: Option<Medium>) -> u64 {
        let mut gone = 0;
        for place in &mut self.places {
            if medium.is_none_or(|m| place.strata.medium == m) {
                gone += place.clear(index, holder);
            }
        }
        self.unkeyed.retain_mut(|((m, _), of)| {
            let keep = medium.is_some_and(|medium| *m != medium);
            if !keep {
                of.reported.update(&index.budget, 0);
            }
            keep
        });
        gone
    }

    /// Forgets everything and gives up the places.
    pub(super) fn leave(&mut self, index: &Inner, holder: u16) -> u64 {
        let gone = self.clear(index, holder, None);
        for place in self.places.drain(..) {
            index.leave(&place.strata);
        }
        gone
    }

    /// Distinct blocks on a medium.
    pub(super) fn blocks(&self, medium: Medium) -> u64 {
        let of = self.places.iter().filter(|p| p.strata.medium == medium);
        of.map(|p| p.held.blocks).sum()
    }

    /// Whether the endpoint's block ids are kept apart from the others' in some domain.
    pub(super) fn has_own_ids(&self) -> bool {
        self.places.iter().any(|p| p.held.is_own())
    }
}

// === impl Place ===

impl Place {
    fn store(
        &mut self,
        index: &Inner,
        holder: u16,
        event: &BlockStored,
        keyed: usize,
        salt: Option<&str>,
    ) -> Applied {
        let mut applied = Applied::default();
        let n = event.hashes.len() as u32;
        let (strata, held) = (&*self.strata, &mut self.held);
        let mut w = strata.writer.lock();
        let mut at = match event.parent {
            None => Position {
                key: keyed::root(&index.keys, &index.model, event, salt).0,
                parent: None,
            },
            Some(id) => {
                let last = held.last.filter(|(last, _)| *last == id);
                let parent = last
                    .map(|(_, at)| at)
                    .or_else(|| held.resolve(&w, &strata.shared, holder, id));
                let key = parent.and_then(|p| w.key(&strata.shared, p));
                let (Some(parent), Some(key)) = (parent, key) else {
                    applied.orphans = n;
                    return applied;
                };
                Position {
                    key,
                    parent: Some(parent),
                }
            }
        };
        let mut pending = Pending::default();
        let blocks = event.tokens.chunks_exact(event.block_size as usize);
        for (id, tokens) in event.hashes.iter().zip(blocks).take(keyed) {
            at.key = keyed::next(&index.keys, at.key, tokens);
            let stored = store_block(
                index,
                strata,
                &mut w,
                held,
                holder,
                &mut pending,
                at,
                (*id, event.group),
            );
            let Some(addr) = stored else {
                applied.refused = n - applied.stored;
                break;
            };
            at.parent = Some(addr);
            held.last = Some((*id, addr));
            applied.stored += 1;
        }
        pending.write(strata, &mut w, holder);
        w.report(&index.budget);
        held.report(&index.budget);
        applied
    }

    fn remove(
        &mut self,
        index: &Inner,
        holder: u16,
        group: u32,
        ids: &mut SmallVec<[BlockHash; 16]>,
        applied: &mut Applied,
    ) {
        let (strata, held) = (&*self.strata, &mut self.held);
        let mut w = strata.writer.lock();
        // What is not known here stays for the next place.
        ids.retain(
            |id| match held.remove(&w, &strata.shared, holder, *id, group) {
                Removed::Last(at) => {
                    w.uncover(&strata.shared, at.chunk(), at.bit(), holder);
                    applied.removed += 1;
                    false
                }
                Removed::Copy => {
                    applied.removed += 1;
                    false
                }
                Removed::Unknown => true,
            },
        );
        w.report(&index.budget);
        held.report(&index.budget);
    }

    fn clear(&mut self, index: &Inner, holder: u16) -> u64 {
        let mut next = Some(0);
        let mut gone = 0;
        while let Some(from) = next {
            let mut w = self.strata.writer.lock();
            let (to, n) = w.clear(&self.strata.shared, holder, from, CLEAR_SLICE);
            w.report(&index.budget);
            (next, gone) = (to, gone + n);
        }
        self.held.clear(index.seed, &index.budget);
        gone
    }
}

/// Records one block; none if there is no room for it.
#[allow(clippy::too_many_arguments)]
fn store_block(
    index: &Inner,
    strata: &Strata,
    w: &mut Writer,
    held: &mut Held,
    holder: u16,
    pending: &mut Pending,
    at: Position,
    (id, group): (BlockHash, u32),
) -> Option<Addr> {
    let shared = &strata.shared;
    let known = w.find(shared, at);
    let mut need = held.growth(w, id);
    if known.is_none() && !w.appends(shared, at) {
        need += w.chunk_growth(shared);
    }
    if need > 0 {
        // What grew since the last report counts too.
        w.report(&index.budget);
        held.report(&index.budget);
    }
    if !index.budget.has(need + MARGIN) {
        return None;
    }
    let addr = match known {
        Some(addr) => addr,
        None => w.create(shared, at)?,
    };
    if addr.chunk() != pending.chunk || pending.held == 0 {
        pending.write(strata, w, holder);
        pending.chunk = addr.chunk();
        pending.look(strata, w, holder);
    }
    let mut renamed = None;
    let name = w.name_of(addr);
    let named = if name == Some(id) {
        Some(addr)
    } else {
        w.named(id)
    };
    if !held.is_common(addr, id, name, named) {
        if named.is_some_and(|other| other != addr) {
            // The other block may be pending, and an id counts only where its block is held.
            pending.write(strata, w, holder);
        }
        let before = held.resolve(w, shared, holder, id);
        let mut fits = true;
        if before.is_some_and(|old| old != addr) {
            renamed = before;
        }
        if renamed.is_some() || held.differs(w, addr, id, pending.has(addr)) {
            pending.write(strata, w, holder);
            if let Some(old) = renamed {
                // The engine means another block by this id now; the old one it cannot name any more.
                renamed = match held.forget(old, id) {
                    Removed::Last(old) => Some(old),
                    _ => None,
                };
            }
            fits = held.differ(w, shared, holder, &index.budget, index.seed);
        }
        if !fits {
            pending.drop_block(strata, w, holder, renamed);
            return None;
        }
    }
    match held.store(w, addr, id, group, pending.has(addr), &index.budget) {
        Stored::New => {
            pending.held |= addr.bit();
            pending.new |= addr.bit();
        }
        Stored::Again => {}
        Stored::NoRoom => {
            pending.drop_block(strata, w, holder, renamed);
            return None;
        }
    }
    if renamed.is_some() {
        pending.drop_block(strata, w, holder, renamed);
    }
    Some(addr)
}

// === impl Pending ===

impl Pending {
    fn has(&self, addr: Addr) -> bool {
        self.held & addr.bit() != 0
    }

    /// Sees what the endpoint holds of the chunk.
    fn look(&mut self, strata: &Strata, w: &Writer, holder: u16) {
        self.held = w.mask(&strata.shared, self.chunk, holder);
    }

    /// Tells the domain.
    fn write(&mut self, strata: &Strata, w: &mut Writer, holder: u16) {
        if self.new != 0 {
            w.cover(&strata.shared, self.chunk, self.new, holder);
            self.new = 0;
        }
    }

    /// Takes a block out of the domain, and whatever nobody holds at the end of this chunk.
    fn drop_block(&mut self, strata: &Strata, w: &mut Writer, holder: u16, block: Option<Addr>) {
        self.write(strata, w, holder);
        if let Some(at) = block {
            w.uncover(&strata.shared, at.chunk(), at.bit(), holder);
        }
        w.uncover(&strata.shared, self.chunk, 0, holder);
        self.look(strata, w, holder);
    }
}
