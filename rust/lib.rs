//! Adam(W) over host memory for models that outgrow their GPU.
#![warn(missing_docs)]

pub mod error;

pub use error::{Error, Result};
