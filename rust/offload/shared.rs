//! What threads that work for an engine have in common: callers', one that moves its jobs on, one
//! that hands copies to the device, and workers.

use super::{
    downloads::Downloads, generation::Generation, job::Jobs, pending::Pending, ring::Ring,
    segment::Segments, selected::Selected, uploads::Uploads,
};
use crate::{
    device::Device,
    host::pool::Pool,
    simd::isa::Isa,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    tier::Tier,
};

/// What threads that work for an engine have in common.
pub(super) struct Shared {
    pub(super) device: Arc<dyn Device>,
    pub(super) pool: Pool,
    pub(super) isa: Isa,
    pub(super) segments: Segments,
    pub(super) tier: Arc<dyn Tier>,
    pub(super) downloads: Arc<Downloads>,
    pub(super) generations: Box<[Generation]>,
    pub(super) uploads: Uploads,
    pub(super) ring: Option<Ring>,
    pub(super) selected: Option<Selected>,
    /// A job that steps has it until it is stepped.
    pub(super) pending: Mutex<Pending>,
    pub(super) jobs: Jobs,
}

impl Shared {
    pub(super) fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
