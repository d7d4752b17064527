//! What is asked of gradients before a step: their norm, their largest magnitude, whether all are
//! finite, and which of their channels matter.

pub mod norm;
pub mod stats;
pub mod top_k;
