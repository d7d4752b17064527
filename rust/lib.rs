//! Adam(W) over host memory for models that outgrow their GPU.
#![warn(missing_docs)]
#![expect(
    clippy::inline_always,
    reason = "a kernel body must be inlined into its ISA's function to be compiled for it"
)]

pub mod adam;
pub mod ceiling;
pub mod cursor;
pub mod device;
pub mod element;
pub mod error;
pub mod fp_env;
pub mod free_memory;
pub mod grad_stats;
pub mod io_uring;
pub mod isa;
pub mod memory;
pub mod norm;
pub mod offload;
pub mod pool;
pub mod prefetch;
#[cfg(feature = "python")]
mod python;
pub mod simd;
pub mod state;
pub mod topology;
pub mod view;

pub use error::{Error, Result};
