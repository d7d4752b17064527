//! Runs of elements in memory: their dtypes, where they lie, and reading here while writing there.
//!
//! This layer knows nothing of what the elements mean.

pub mod cursor;
pub mod element;
pub mod view;

/// Elements between two prefetches, and the largest unit that a kernel holds in registers. Every
/// chunk is a multiple of it.
pub const BLOCK: usize = 64;
