//! What an index says of itself.
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// Metrics of all indexes, by model.
#[derive(Clone, Debug, Default)]
pub struct IndexMetricFamilies {
    bytes: Family<ModelLabels, Gauge>,
    max_bytes: Family<ModelLabels, Gauge>,
    blocks: Family<ModelLabels, Gauge>,
    pairs: Family<ModelLabels, Gauge>,
    chunks: Family<ModelLabels, Gauge>,
    holders: Family<ModelLabels, Gauge>,
    stored: Family<ModelLabels, Counter>,
    removed: Family<ModelLabels, Counter>,
    orphans: Family<ModelLabels, Counter>,
    unkeyed: Family<ModelLabels, Counter>,
    rejected: Family<ModelLabels, Counter>,
    refused: Family<ModelLabels, Counter>,
    clears: Family<ModelLabels, Counter>,
}

/// Metrics of one index.
#[derive(Clone, Debug, Default)]
pub struct IndexMetrics {
    pub(super) bytes: Gauge,
    pub(super) max_bytes: Gauge,
    pub(super) blocks: Gauge,
    pub(super) pairs: Gauge,
    pub(super) chunks: Gauge,
    pub(super) holders: Gauge,
    pub(super) stored: Counter,
    pub(super) removed: Counter,
    pub(super) orphans: Counter,
    pub(super) unkeyed: Counter,
    pub(super) rejected: Counter,
    pub(super) refused: Counter,
    pub(super) clears: Counter,
}

/// The base model whose blocks an index knows.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ModelLabels {
    /// Its name.
    pub model: String,
}

// === impl IndexMetricFamilies ===

impl IndexMetricFamilies {
    /// Registers the families under `index_…`.
    pub fn register(registry: &mut Registry) -> Self {
        let f = Self::default();
        let r = registry.sub_registry_with_prefix("index");
        let gauges = [
            ("bytes", "Memory of the prefix index", &f.bytes),
            (
                "max_bytes",
                "Bound on the memory of the prefix index",
                &f.max_bytes,
            ),
            (
                "blocks",
                "Distinct blocks held by any endpoint, on any medium",
                &f.blocks,
            ),
            (
                "pairs",
                "Blocks held on accelerators, summed over endpoints",
                &f.pairs,
            ),
            ("chunks", "Chunks of up to 32 blocks in use", &f.chunks),
            ("holders", "Endpoints with a place in the index", &f.holders),
        ];
        for (name, help, family) in gauges {
            r.register(name, help, family.clone());
        }
        let counters = [
            ("stored_blocks", "Copies of blocks recorded", &f.stored),
            ("removed_blocks", "Copies of blocks removed", &f.removed),
            (
                "orphan_blocks",
                "Stored blocks whose parent is not known, and removals of unknown blocks",
                &f.orphans,
            ),
            (
                "unkeyed_blocks",
                "Blocks that cannot count as residency: media keys, other attention groups, odd block sizes",
                &f.unkeyed,
            ),
            (
                "rejected_blocks",
                "Blocks of events whose hashes and tokens do not agree",
                &f.rejected,
            ),
            (
                "refused_blocks",
                "Blocks not recorded for want of memory",
                &f.refused,
            ),
            (
                "clears",
                "Times that an endpoint's blocks were forgotten at once",
                &f.clears,
            ),
        ];
        for (name, help, family) in counters {
            r.register(name, help, family.clone());
        }
        f
    }

    /// The handles of one model's index.
    pub fn metrics(&self, model: &str) -> IndexMetrics {
        let l = ModelLabels {
            model: model.to_owned(),
        };
        IndexMetrics {
            bytes: self.bytes.get_or_create_owned(&l),
            max_bytes: self.max_bytes.get_or_create_owned(&l),
            blocks: self.blocks.get_or_create_owned(&l),
            pairs: self.pairs.get_or_create_owned(&l),
            chunks: self.chunks.get_or_create_owned(&l),
            holders: self.holders.get_or_create_owned(&l),
            stored: self.stored.get_or_create_owned(&l),
            removed: self.removed.get_or_create_owned(&l),
            orphans: self.orphans.get_or_create_owned(&l),
            unkeyed: self.unkeyed.get_or_create_owned(&l),
            rejected: self.rejected.get_or_create_owned(&l),
            refused: self.refused.get_or_create_owned(&l),
            clears: self.clears.get_or_create_owned(&l),
        }
    }
}
