//! The machine: cores, NUMA nodes and workers, host memory and what is left of it, what other
//! processes of the host have claimed of both, what the kernel offers.
//!
//! This layer knows nothing of what runs on the workers or lies in the memory.

pub mod claims;
pub mod environment;
mod fork;
pub mod free_memory;
mod futex;
pub mod gpus;
pub mod io_uring;
pub mod memory;
pub mod pool;
pub mod topology;
