//! Where the state of a chunk is, and where a step of it is written.

pub mod revocable;
pub mod slots;
