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

/// Blocks of one event on their way into a domain.
struct Storing<'a> {
    index: &'a Inner,
    strata: &'a Strata,
    w: &'a mut Writer,
    held: &'a mut Held,
    holder: u16,
    group: u32,
    pending: Pending,
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
        let mut storing = Storing {
            index,
            strata,
            w: &mut w,
            held,
            holder,
            group: event.group,
            pending: Pending::default(),
        };
        let blocks = event.tokens.chunks_exact(event.block_size as usize);
        for (id, tokens) in event.hashes.iter().zip(blocks).take(keyed) {
            at.key = keyed::next(&index.keys, at.key, tokens);
            let Some(addr) = storing.block(at, *id) else {
                applied.refused = n - applied.stored;
                break;
            };
            at.parent = Some(addr);
            applied.stored += 1;
        }
        storing.flush();
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

// === impl Storing ===

impl Storing<'_> {
    /// Records one block; none if there is no room for it.
    fn block(&mut self, at: Position, id: BlockHash) -> Option<Addr> {
        let shared = &self.strata.shared;
        let known = self.w.find(shared, at);
        if !self.has_room(at, id, known.is_some()) {
            return None;
        }
        let addr = match known {
            Some(addr) => addr,
            None => self.w.create(shared, at)?,
        };
        if addr.chunk() != self.pending.chunk || self.pending.held == 0 {
            self.flush();
            self.pending.chunk = addr.chunk();
            self.look();
        }
        let name = self.w.name_of(addr);
        let named = if name == Some(id) {
            Some(addr)
        } else {
            self.w.named(id)
        };
        let mut gone = None;
        if !self.held.is_common(addr, id, name, named) {
            let fits;
            (fits, gone) = self.disagreement(addr, id, named);
            if !fits {
                self.drop_block(gone);
                return None;
            }
        }
        let (budget, group, has) = (&self.index.budget, self.group, self.pending.has(addr));
        match self.held.store(self.w, addr, id, group, has, budget) {
            Stored::New => {
                self.pending.held |= addr.bit();
                self.pending.new |= addr.bit();
            }
            Stored::Again => {}
            Stored::NoRoom => {
                self.drop_block(gone);
                return None;
            }
        }
        if gone.is_some() {
            self.drop_block(gone);
        }
        self.held.last = Some((id, addr));
        Some(addr)
    }

    fn has_room(&mut self, at: Position, id: BlockHash, known: bool) -> bool {
        let shared = &self.strata.shared;
        let mut need = self.held.growth(self.w, id);
        if !known && !self.w.appends(shared, at) {
            need += self.w.chunk_growth(shared);
        }
        if need > 0 {
            // What grew since the last report counts too.
            self.w.report(&self.index.budget);
            self.held.report(&self.index.budget);
        }
        self.index.budget.has(need + MARGIN)
    }

    /// Sorts out an id that means another block here or elsewhere, or a block with another id. Tells whether there was
    /// room for that, and which block this endpoint holds no more.
    fn disagreement(
        &mut self,
        addr: Addr,
        id: BlockHash,
        named: Option<Addr>,
    ) -> (bool, Option<Addr>) {
        let shared = &self.strata.shared;
        if named.is_some_and(|other| other != addr) {
            // The other block may be pending, and an id counts only where its block is held.
            self.flush();
        }
        let before = self.held.resolve(self.w, shared, self.holder, id);
        let renamed = before.filter(|old| *old != addr);
        let has = self.pending.has(addr);
        if renamed.is_none() && !self.held.differs(self.w, addr, id, has) {
            return (true, None);
        }
        self.flush();
        // The engine means another block by this id now; the old one it cannot name any more.
        let gone = renamed.and_then(|old| match self.held.forget(old, id) {
            Removed::Last(old) => Some(old),
            _ => None,
        });
        let (index, holder) = (self.index, self.holder);
        let fits = self
            .held
            .differ(self.w, shared, holder, &index.budget, index.seed);
        (fits, gone)
    }

    /// Sees what the endpoint holds of the pending chunk.
    fn look(&mut self) {
        let shared = &self.strata.shared;
        self.pending.held = self.w.mask(shared, self.pending.chunk, self.holder);
    }

    /// Tells the domain what is pending.
    fn flush(&mut self) {
        let new = std::mem::take(&mut self.pending.new);
        if new != 0 {
            let shared = &self.strata.shared;
            self.w.cover(shared, self.pending.chunk, new, self.holder);
        }
    }

    /// Takes a block out of the domain, and whatever nobody holds at the end of the pending chunk.
    fn drop_block(&mut self, block: Option<Addr>) {
        self.flush();
        let shared = &self.strata.shared;
        if let Some(at) = block {
            self.w.uncover(shared, at.chunk(), at.bit(), self.holder);
        }
        self.w.uncover(shared, self.pending.chunk, 0, self.holder);
        self.look();
    }
}

// === impl Pending ===

impl Pending {
    fn has(&self, addr: Addr) -> bool {
        self.held & addr.bit() != 0
    }
}
