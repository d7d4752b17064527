//! What is asked of gradients before a step: their norm, their largest magnitude, whether all are
//! finite.

pub mod norm;
pub mod stats;
