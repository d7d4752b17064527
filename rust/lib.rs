//! Adam(W) over host memory for models that outgrow their GPU.
#![warn(missing_docs)]

pub mod error;
pub mod memory;
pub mod pool;
pub mod topology;

pub use error::{Error, Result};
