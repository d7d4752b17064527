//! Adam(W) over host memory for models that outgrow their GPU.
#![warn(missing_docs)]
#![expect(clippy::inline_always, reason = "a kernel body must be inlined into its ISA's function to be compiled for it")]

pub mod adam;
pub mod cursor;
pub mod element;
pub mod error;
pub mod fp_env;
pub mod isa;
pub mod norm;
pub mod simd;
pub mod state;

pub use error::{Error, Result};
