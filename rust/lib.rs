//! Adam(W) over host memory for models that outgrow their GPU.
#![warn(missing_docs)]
#![expect(
    clippy::inline_always,
    reason = "a kernel body must be inlined into its ISA's function to be compiled for it"
)]

// The layers, from the bottom: error, sync, simd, host, stream, state, adam, grads, device, tier,
// offload, python. Each uses only layers before it (`tests/layers.rs`).
pub mod adam;
pub mod device;
pub mod error;
pub mod grads;
pub mod host;
pub mod offload;
#[cfg(feature = "python")]
mod python;
pub mod simd;
pub mod state;
pub mod stream;
mod sync;
pub mod tier;

pub use error::{Error, Result};
