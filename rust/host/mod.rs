//! The machine: cores, NUMA nodes and workers, host memory and what is left of it, what other
//! processes of the host have claimed of both, what the kernel offers. And the threads of this
//! process: all but those that wait for a drive are started here.
//!
//! This layer knows nothing of what runs on its threads or lies in the memory.

pub mod claims;
pub mod environment;
pub mod executor;
mod fork;
pub mod free_memory;
mod futex;
pub mod gpus;
pub mod io_uring;
pub mod memory;
pub mod pool;
pub mod topology;
