//! The offload engine: parameters on a device, master and moments in host memory.
//!
//! ```text
//! device    gradients ----.                                  .---> weights
//!                         | download lane                    | upload lane
//! host                    '--> gradient -> chunks, in -------'
//!                              buffer      forward order,
//!                                          on the pool
//! ```
//!
//! - OFF-1 A step is taken whole: everything that can be refused is refused by [`Engine::submit`], before anything is changed.
//! - OFF-2 A chunk is stepped after its gradient has arrived, and after the upload of its last weight has ended.
//! - OFF-3 A segment is uploaded when all its chunks are stepped. Segments are stepped in the order of the call, which is the forward's, so that
//!   the first weights that the next forward reads are up first.
//! - OFF-4 The result does not depend on when anything arrives: a chunk is computed as [`crate::adam::batch`] computes it.
//!
//! Cost per parameter, beside that of the step itself (see [`crate::adam`]): a bf16 gradient and a bf16 weight cross the bus once, 2 B each way, and the
//! host's memory once more each.

mod engine;
mod segment;

pub use engine::{Engine, Timing, Update};
pub use segment::SEGMENT_LEN;
