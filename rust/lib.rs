//! Adam(W) over host memory for models that outgrow their GPU.
#![warn(missing_docs)]
#![expect(clippy::inline_always, reason = "a kernel body must be inlined into its ISA's function to be compiled for it")]

pub mod adam;
pub mod cursor;
pub mod element;
pub mod error;
pub mod fp_env;
pub mod isa;
pub mod memory;
pub mod norm;
pub mod pool;
pub mod simd;
pub mod state;
pub mod topology;

pub use error::{Error, Result};
