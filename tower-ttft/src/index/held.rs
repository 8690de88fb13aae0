//! What one endpoint holds in one domain: its names for blocks, and how often it holds them.
//!
//! Most blocks are *plain*: held once, in the endpoint's home group, under the id that all endpoints share. Of those
//! nothing is stored here; the domain's sets and names say it all. Only what is different takes memory of its own: further
//! references ([`Extra`]), further ids of a block (aliases), and all ids of an endpoint whose ids are not like the others'.
use super::{
    bytes::{Budget, Reported, map_bytes},
    chunk::Addr,
    strata::{Shared, Writer},
    table::IdMap,
};
use crate::events::BlockHash;
use smallvec::SmallVec;
use std::collections::HashMap;

/// An endpoint's holdings in a domain.
pub(super) struct Held {
    /// The group that plain references are of: the first full-attention group seen.
    home: u32,
    ids: Ids,
    extras: HashMap<u32, Extra, Hasher>,
    /// Heap bytes of the lists in `extras`.
    listed: usize,
    /// The block stored last: mostly the parent of the next.
    pub(super) last: Option<(BlockHash, Addr)>,
    /// Distinct blocks.
    pub(super) blocks: u64,
    reported: Reported,
}

/// What an endpoint calls its blocks.
enum Ids {
    /// As the domain's names say; further ids of the same blocks are aliases.
    Shared { aliases: IdMap },
    /// Another endpoint means other blocks by the same ids, or calls the same blocks by others.
    Own(IdMap),
}

/// References beyond, or instead of, the plain one.
struct Extra {
    plain: Plain,
    more: SmallVec<[Reference; 1]>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Plain {
    None,
    /// There is one, under an id that [`Ids::Own`] knows to be this block's, and that is none of the others'.
    Unnamed,
    Named(BlockHash),
}

#[derive(Clone, Copy)]
struct Reference {
    id: BlockHash,
    group: u32,
    count: u32,
}

/// What became of a store.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    /// The endpoint now holds the block; the domain must be told.
    New,
    /// It held it before and counts one copy more.
    Again,
    /// There is no room.
    NoRoom,
}

/// What became of a removal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Removed {
    /// It was the last copy; the domain must be told.
    Last(Addr),
    /// One copy less.
    Copy,
    /// The endpoint does not hold that.
    Unknown,
}

type Hasher = std::hash::BuildHasherDefault<Mix>;

/// Addresses are ours, so a fixed hash will do.
#[derive(Default)]
pub(super) struct Mix(u64);

// === impl Held ===

impl Held {
    pub(super) fn new(seed: u64, home: u32) -> Self {
        Self {
            home,
            ids: Ids::Shared {
                aliases: IdMap::new(seed),
            },
            extras: HashMap::default(),
            listed: 0,
            last: None,
            blocks: 0,
            reported: Reported::default(),
        }
    }

    /// Reports the heap bytes.
    pub(super) fn report(&mut self, budget: &Budget) {
        let (Ids::Shared { aliases: ids } | Ids::Own(ids)) = &self.ids;
        let now = ids.bytes() + map_bytes(&self.extras) + self.listed;
        self.reported.update(budget, now);
    }

    /// Forgets everything; the domain is cleared apart.
    pub(super) fn clear(&mut self, seed: u64, budget: &Budget) {
        let home = self.home;
        self.reported.update(budget, 0);
        *self = Self::new(seed, home);
    }

    /// Whether the endpoint's ids are its own. For reports.
    pub(super) fn is_own(&self) -> bool {
        matches!(self.ids, Ids::Own(_))
    }

    /// The block that an id of this endpoint names. Only ids of blocks that it holds name anything.
    pub(super) fn resolve(
        &self,
        w: &Writer,
        shared: &Shared,
        holder: u16,
        id: BlockHash,
    ) -> Option<Addr> {
        match &self.ids {
            Ids::Own(ids) => ids.get(id).map(Addr),
            Ids::Shared { aliases } => {
                let named = w
                    .named(id)
                    .filter(|at| w.holds(shared, *at, holder) && self.plain_id(w, *at) == Some(id));
                named.or_else(|| aliases.get(id).map(Addr))
            }
        }
    }

    /// The id of a held block's plain reference, with shared ids.
    fn plain_id(&self, w: &Writer, at: Addr) -> Option<BlockHash> {
        match self.extras.get(&at.0).map(|x| x.plain) {
            None => w.name_of(at),
            Some(Plain::Named(id)) => Some(id),
            Some(_) => None,
        }
    }

    /// Whether block and id agree with all that is known: each other's, or both new. `name` is the shared id of the
    /// block, `named` the block of the shared id.
    pub(super) fn is_common(
        &self,
        at: Addr,
        id: BlockHash,
        name: Option<BlockHash>,
        named: Option<Addr>,
    ) -> bool {
        matches!(&self.ids, Ids::Shared { aliases } if aliases.is_empty())
            && match name {
                Some(name) => name == id,
                None => named.is_none_or(|other| other == at),
            }
    }

    /// Bytes by which one more block may grow things.
    pub(super) fn growth(&self, w: &Writer, id: BlockHash) -> usize {
        match &self.ids {
            Ids::Own(ids) => ids.growth(),
            Ids::Shared { .. } => w.name_growth(id),
        }
    }

    /// Bytes by which one more reference may grow things.
    fn extra_growth(&self) -> usize {
        let (Ids::Shared { aliases: ids } | Ids::Own(ids)) = &self.ids;
        let map = if self.extras.len() == self.extras.capacity() {
            map_bytes(&self.extras) * 2 + 1024
        } else {
            0
        };
        ids.growth() + map + 1024
    }

    /// Whether storing this block under this id shows that the endpoint's ids are not the shared ones: another endpoint's
    /// block has that id, or the block has another endpoint's id.
    pub(super) fn differs(&self, w: &Writer, at: Addr, id: BlockHash, held: bool) -> bool {
        if held || matches!(self.ids, Ids::Own(_)) {
            return false;
        }
        match w.name_of(at) {
            Some(name) => name != id,
            None => w.named(id).is_some_and(|other| other != at),
        }
    }

    /// Stops sharing ids. All that the endpoint holds must be in the domain. False if there is no room.
    pub(super) fn differ(
        &mut self,
        w: &Writer,
        shared: &Shared,
        holder: u16,
        budget: &Budget,
        seed: u64,
    ) -> bool {
        let Ids::Shared { aliases } = &mut self.ids else {
            return true;
        };
        // Keys and values, at most four fifths full, beside what it grows out of.
        if !budget.has((self.blocks as usize + aliases.len() + 8) * 32) {
            return false;
        }
        let mut own = std::mem::replace(aliases, IdMap::new(seed));
        w.each_held(shared, holder, |at| {
            if let Some(id) = self.plain_id(w, at) {
                own.insert(id, at.0);
            }
        });
        self.ids = Ids::Own(own);
        true
    }

    /// Counts a copy of a block. `held` says whether the endpoint holds the block already.
    pub(super) fn store(
        &mut self,
        w: &mut Writer,
        at: Addr,
        id: BlockHash,
        group: u32,
        held: bool,
        budget: &Budget,
    ) -> Stored {
        if !held && group == self.home {
            match &mut self.ids {
                Ids::Own(ids) => ids.insert(id, at.0),
                Ids::Shared { .. } if w.name_of(at).is_none() => w.name(at, id),
                Ids::Shared { .. } => {}
            }
            self.blocks += 1;
            return Stored::New;
        }
        if !budget.has(self.extra_growth()) {
            return Stored::NoRoom;
        }
        let plain = if !held {
            Plain::None
        } else {
            match &self.ids {
                // In the plain state one id names the block, so if this one does, it is that.
                Ids::Own(ids) if ids.get(id) == Some(at.0) => Plain::Named(id),
                Ids::Own(_) => Plain::Unnamed,
                Ids::Shared { .. } => w.name_of(at).map_or(Plain::None, Plain::Named),
            }
        };
        let extra = self.extras.entry(at.0).or_insert_with(|| Extra {
            plain,
            more: SmallVec::new(),
        });
        let before = extra.bytes();
        extra.add(id, group, plain);
        self.listed = self.listed + extra.bytes() - before;
        let is_plain = extra.plain == Plain::Named(id);
        match &mut self.ids {
            Ids::Own(ids) => ids.insert(id, at.0),
            Ids::Shared { aliases } if !is_plain => aliases.insert(id, at.0),
            Ids::Shared { .. } => {}
        }
        self.blocks += u64::from(!held);
        if held { Stored::Again } else { Stored::New }
    }

    /// Counts a copy less.
    pub(super) fn remove(
        &mut self,
        w: &Writer,
        shared: &Shared,
        holder: u16,
        id: BlockHash,
        group: u32,
    ) -> Removed {
        let Some(at) = self.resolve(w, shared, holder, id) else {
            return Removed::Unknown;
        };
        self.last = self.last.filter(|(last, _)| *last != id);
        let Some(extra) = self.extras.get_mut(&at.0) else {
            if group != self.home {
                return Removed::Unknown;
            }
            if let Ids::Own(ids) = &mut self.ids {
                ids.remove(id);
            }
            return self.gone(at);
        };
        let before = extra.bytes();
        let known = extra.take(id, group, group == self.home);
        self.listed = self.listed + extra.bytes() - before;
        if !known {
            return Removed::Unknown;
        }
        self.settle(at, id)
    }

    /// Forgets every copy of a block under an id: the endpoint means another block by it now.
    pub(super) fn forget(&mut self, at: Addr, id: BlockHash) -> Removed {
        self.last = self.last.filter(|(last, _)| *last != id);
        if let Some(extra) = self.extras.get_mut(&at.0) {
            let before = extra.bytes();
            if extra.plain_may_be(id) {
                extra.plain = Plain::None;
            }
            extra.more.retain(|r| r.id != id);
            self.listed = self.listed + extra.bytes() - before;
            return self.settle(at, id);
        }
        if let Ids::Own(ids) = &mut self.ids {
            ids.remove(id);
        }
        self.gone(at)
    }

    /// After a copy under `id` went: sees to the id and to the block.
    fn settle(&mut self, at: Addr, id: BlockHash) -> Removed {
        let Some(extra) = self.extras.get(&at.0) else {
            return Removed::Unknown;
        };
        let listed = extra.more.iter().any(|r| r.id == id);
        let plain = extra.plain == Plain::Named(id);
        match &mut self.ids {
            Ids::Own(ids) if !listed && !plain => {
                ids.remove(id);
            }
            Ids::Shared { aliases } if listed && !plain => aliases.insert(id, at.0),
            Ids::Shared { aliases } if !listed => {
                aliases.remove(id);
            }
            _ => {}
        }
        let (bytes, none, plain_only) = (
            extra.bytes(),
            extra.more.is_empty() && extra.plain == Plain::None,
            extra.more.is_empty() && extra.plain != Plain::None,
        );
        if none || plain_only {
            self.extras.remove(&at.0);
            self.listed -= bytes;
        }
        if none { self.gone(at) } else { Removed::Copy }
    }

    fn gone(&mut self, at: Addr) -> Removed {
        self.blocks = self.blocks.saturating_sub(1);
        if self.last.is_some_and(|(_, last)| last == at) {
            self.last = None;
        }
        Removed::Last(at)
    }
}

// === impl Extra ===

impl Extra {
    /// Heap bytes.
    fn bytes(&self) -> usize {
        if self.more.spilled() {
            self.more.capacity() * size_of::<Reference>()
        } else {
            0
        }
    }

    /// Whether the plain reference is under this id.
    fn plain_may_be(&self, id: BlockHash) -> bool {
        match self.plain {
            Plain::None => false,
            Plain::Named(p) => p == id,
            Plain::Unnamed => self.more.iter().all(|r| r.id != id),
        }
    }

    /// One more. `known` is what is known now of the plain reference.
    fn add(&mut self, id: BlockHash, group: u32, known: Plain) {
        if self.plain == Plain::Unnamed && known == Plain::Named(id) && self.plain_may_be(id) {
            self.plain = known;
        }
        let same = |r: &&mut Reference| r.id == id && r.group == group;
        match self.more.iter_mut().find(same) {
            Some(r) => r.count = r.count.saturating_add(1),
            None => self.more.push(Reference {
                id,
                group,
                count: 1,
            }),
        }
    }

    /// One less; false if there is none.
    fn take(&mut self, id: BlockHash, group: u32, home: bool) -> bool {
        let same = |r: &Reference| r.id == id && r.group == group;
        match self.more.iter().position(same) {
            Some(i) if self.more[i].count > 1 => self.more[i].count -= 1,
            Some(i) => {
                self.more.swap_remove(i);
            }
            None if home && self.plain_may_be(id) => self.plain = Plain::None,
            None => return false,
        }
        true
    }
}

// === impl Mix ===

impl std::hash::Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u32((*b).into());
        }
    }

    fn write_u32(&mut self, n: u32) {
        self.0 = super::table::spread(self.0, n.into());
    }
}
