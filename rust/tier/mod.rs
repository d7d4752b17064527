//! Tiers: where the state of chunks is between steps, and where a step of them is written.
//!
//! [`ram`] keeps it in the tensors themselves. A tier that keeps it elsewhere is a file beside it.
//! Slots and their index ([`slots`], [`revocable`]) are for tiers that step out of place.

use std::ops::Range;

use crate::{adam::tensor::AdamTensor, error::Result, state::chunk::Chunk, stream::view::Route};

pub mod ram;
pub mod revocable;
pub mod slots;
pub mod volume;

/// A run of chunks of one tensor: what is fetched and stored at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Which of the tier's tensors.
    pub tensor: usize,
    /// Which of its chunks.
    pub chunks: Range<usize>,
}

/// When what was stored is what the state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// At once. Nothing can take it back, so its new weights may be used.
    Final,
    /// With the next commit, if that succeeds. Its new weights are not used before.
    WithCommit,
}

/// What the engine asks of a tier. A step is one sequence of calls:
///
/// ```text
/// for each run, in the order of the step:
///     fetch                  by the workers that come first
///     route of each chunk    by any worker; the chunk is then stepped there
///     store                  by the worker that has stepped the run's last chunk
/// commit                     by one thread, when all runs are stored
/// ```
///
/// - TIER-1 The next step begins after the commit.
/// - TIER-2 Where a call fails, the engine ends: no call follows, and what was not committed is
///   void, but for what was [`Stored::Final`].
/// - TIER-3 What a tier needs for this, buffers and all, it has from the beginning. A fetch that
///   finds no buffer free waits for a store.
///
/// # Safety
/// What the engine writes by these routes is disjoint: [`Tier::route`] gives, for a chunk of a
/// tensor, that chunk of the tensor's own layout, in memory that is alive from the run's fetch to
/// the commit and that no other chunk's route names.
pub unsafe trait Tier: Send + Sync {
    /// Waits until the state of a run can be stepped. Several workers may ask for one run, at the
    /// same time and again; none does after its store.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where it cannot be had.
    fn fetch(&self, run: &Run) -> Result<()>;

    /// Where a step of a chunk of `tensor` reads and where it writes.
    fn route(&self, tensor: &AdamTensor, chunk: Chunk) -> AdamTensor<Route>;

    /// Takes the new state of a run, all chunks of which are stepped.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where it cannot be kept.
    fn store(&self, run: &Run) -> Result<Stored>;

    /// Makes what was stored since the last commit the state, all of it or nothing.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where it cannot.
    fn commit(&self) -> Result<()>;
}
