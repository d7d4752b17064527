//! Tiers: where the state of chunks is between steps, and where a step of them is written.
//!
//! [`ram`] keeps it in the tensors themselves, [`swap`] in the records of a volume.
//! Volumes, and files of tensors beside them, read and write through [`io`].
//! Slots and their index ([`slots`], [`revocable`]) are for tiers that step out of place.

use crate::{adam::tensor::AdamTensor, error::Result, state::chunk::Chunk, stream::view::Route};

pub mod io;
pub mod ram;
pub mod revocable;
pub mod slots;
pub mod swap;
pub mod volume;

/// When what was stored is what the state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// At once. Nothing can take it back, so its new weights may be used.
    Final,
    /// With the next commit, if that succeeds. Its new weights are not used before.
    WithCommit,
}

/// A run that a step is about to reach.
#[derive(Clone, Copy, Debug)]
pub struct Planned<'a> {
    /// Which of the tier's tensors.
    pub tensor: usize,
    /// The first of the chunks that are stepped.
    pub begin: usize,
    /// Behind the last.
    pub end: usize,
    /// The tensor as it is stepped.
    pub state: &'a AdamTensor,
    /// The number of the update that its state has then, from 1.
    pub count: u64,
}

/// What the engine asks of a tier. A step is one sequence of calls:
///
/// ```text
/// begin                      by one thread: what is stepped, in which order
/// for each chunk, in about that order:
///     fetch                  by the worker that steps it next
///     store                  by the same worker, when it has
/// commit                     by one thread, when all chunks are stored
/// ```
///
/// - TIER-1 The next step begins after the commit.
/// - TIER-2 Where a call fails, the engine ends: no call follows but of workers that are in one,
///   and what was not committed is void, but for what was [`Stored::Final`]. (A volume that commits
///   every few steps goes back further, to its last commit, when it is opened again.)
/// - TIER-3 What a tier needs for this, buffers and all, it has from the beginning. A fetch that
///   finds no buffer free waits for a store.
/// - TIER-4 Workers take chunks in the order of the step, and each stores what it has fetched
///   before it fetches more. So a tier that gives its buffers out in that order has one for every
///   chunk in the end.
///
/// # Safety
/// What the engine writes by these routes is disjoint: [`Tier::fetch`] gives, for a chunk of a
/// tensor, that chunk of the tensor's own layout, in memory that is alive until its store has
/// returned and that no other chunk's route names.
pub unsafe trait Tier: Send + Sync {
    /// A step of these runs begins, and no other is under way.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where the tier cannot be used.
    fn begin(&self, runs: &mut dyn Iterator<Item = Planned<'_>>) -> Result<()>;

    /// Waits until the state of a chunk of `tensor` can be stepped. Where the step reads it, and
    /// where it writes it.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where it cannot be had.
    fn fetch(&self, tensor: &AdamTensor, chunk: Chunk) -> Result<AdamTensor<Route>>;

    /// Takes the new state of a chunk.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where it cannot be kept.
    fn store(&self, tensor: &AdamTensor, chunk: Chunk) -> Result<Stored>;

    /// Whether the state of a tensor is in the tensor itself between steps, always.
    fn is_at_home(&self, tensor: usize) -> bool;

    /// Makes what was stored since the last commit the state, all of it or nothing.
    ///
    /// # Errors
    /// [`crate::Error::Os`] where it cannot.
    fn commit(&self) -> Result<()>;
}
