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
//! - OFF-1 A step is taken whole: everything that can be refused is refused by [`Engine::submit`],
//!   before anything is changed.
//! - OFF-2 A chunk is stepped after its gradient has arrived, and after the upload of its last
//!   weight has ended.
//! - OFF-3 A segment is uploaded when all its chunks are stepped. Segments are stepped in the order
//!   of the call, which is the forward's, so that the first weights that the next forward reads are
//!   up first.
//! - OFF-4 The result does not depend on when anything arrives: a chunk is computed as
//!   [`crate::adam::batch`] computes it.
//! - OFF-5 Whoever has gradients taken only marks his stream, once per call, and queues the copies.
//!   A thread of the engine hands them to the device, in the order of the calls and each after its
//!   own call's mark, and is the only one that a full bus holds up (`downloads.rs`). (DeepSpeed's
//!   partitions on CUDA are copied on a stream of torch's, whose allocator then knows when a
//!   gradient's memory is free; a step only comes after that stream.)
//! - OFF-6 A gradient's memory on the device may be written from [`Engine::release`] on, or by a
//!   stream that has waited for all of its tensor's new weight: that came after the gradient.
//!
//! Why OFF-5 marks on the calling thread: "what the stream holds now" is over once the caller
//! launches more. Why each call has a mark of its own: one mark for all that waits in the queue,
//! recorded anew, would be right as well, since it only orders more strictly, but the first copies
//! of a step would wait for the last of its backward.
//!
//! Why OFF-6 is a call of its own: a stream can be made to wait for an event only once that is
//! recorded, so for the last copy only once that is with the device, and all but the last few have
//! come by then. Within [`Engine::submit`], the step would begin that much later. After it, workers
//! step while the caller waits. When he does so is his choice, but no later moment is right for
//! every caller: whoever writes a gradient (`grad.zero_()` in a training loop) launches that on his
//! stream and tells nobody, and where he is faster than the copy, the step is wrong and nothing
//! shows it. What would let him go on at once is not to be had: a stream can wait for a number in
//! memory, which the engine would write when all has come, but the driver does not know of such an
//! order, may queue later copies behind that stream, and then stands still. So may a host function
//! on the stream, which must not wait for other work.
//!
//! Cost per parameter, beside that of the step itself (see [`crate::adam`]): a bf16 gradient and a
//! bf16 weight cross the bus once, 2 B each way, and the host's memory once more each.

mod downloads;
mod engine;
mod segment;
mod step;
mod thread;

pub use downloads::IN_FLIGHT;
pub use engine::Engine;
pub use segment::SEGMENT_LEN;
pub use step::{Timing, Update};
