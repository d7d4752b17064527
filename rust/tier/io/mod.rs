//! Reads and writes of files, many at once: what volumes and files of tensors have in common.
//!
//! An engine has queues of operations and moves bytes between memory and files. It knows no
//! records and no tensors. [`files`] uses one for files of tensors.

pub mod direct;
pub mod disk;
pub(super) mod engine;
pub mod files;
pub(super) mod queue;
mod uring;

pub use engine::{EngineKind, QUEUE_DEPTH_MAX};
