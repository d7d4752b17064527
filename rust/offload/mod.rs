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
//! It is made of parts that know nothing of each other's insides:
//!
//! | part | file | is |
//! |---|---|---|
//! | job | `job.rs` | one step as states, and the one place that moves it on |
//! | generation | `generation.rs` | the gradients of one step: tickets, events, what was lent |
//! | pending | `pending.rs` | gradients that no step has applied, weights that the device lacks |
//! | schedule | `schedule.rs` | which segments have their turn in a job, and in which order |
//! | tier | [`crate::tier`] | where a chunk's state is: begin, fetch, store, commit |
//! | uploads | `uploads.rs` | when new weights are written on the device; what waits for them |
//! | selected | `selected.rs` | channels whose state is on the device, and its way there and back |
//!
//! The other files:
//!
//! | file | has |
//! |---|---|
//! | `engine.rs` | an engine from its start to its end; what callers wait for |
//! | `shared.rs` | what threads that work for it have in common |
//! | `gradients.rs` | what callers do with gradients: take, discard, release |
//! | `submit.rs` | what callers do with steps: submit, settle |
//! | `next.rs` | the job that comes next, as callers fill it |
//! | `checks.rs` | what can be wrong with a call |
//! | `contents.rs` | whether a program has written weights on the device |
//! | `downloads.rs` | the queue of copies to the host, and how they are handed over |
//! | `step.rs` | what workers do with a chunk |
//! | `handover.rs` | how what lands is handed to the device |
//! | `segment.rs` | the numbers of segments |
//! | `ring.rs` | the memory for gradients that wait for their turns |
//! | `selection.rs` | of which channels some may be selected, and the memory for their state |
//! | `owners.rs` | what callers lend |
//! | `panics.rs` | what becomes of a panic |
//! | `model.rs` | tests of the queue and of the jobs, under a model checker |
//!
//! A step goes through these states:
//!
//! | state | reached by | from then on |
//! |---|---|---|
//! | announced | the first [`Engine::take`] | a generation is being filled |
//! | decided | [`Engine::submit`], or [`Engine::discard`], which ends it | the engine is busy |
//! | stepped | the last chunk | host memory has the new state |
//! | committed | the tier's commit, the last upload enqueued | the generation is free |
//! | uploaded | the end of the last upload | what was lent is returned |
//!
//! - OFF-1 A step is taken whole: everything that can be refused is refused by [`Engine::submit`],
//!   before anything is changed.
//! - OFF-2 A chunk is stepped after its gradient has arrived and its state is fetched, and after
//!   all uploads of the step before have ended.
//! - OFF-3 A segment is uploaded when all its chunks are stepped and its tier calls them final.
//!   Segments are stepped in the order of the call, which is the forward's, so that the first
//!   weights that the next forward reads are up first. A weight whose place is host memory is
//!   written there by its step and goes nowhere; what waits for it waits for that.
//! - OFF-4 The result does not depend on when anything arrives: a chunk is computed as
//!   [`crate::adam::batch`] computes it.
//! - OFF-5 A thread that has gradients taken marks its stream, once per call, and queues the
//!   copies. A thread of the process hands them to the device, in the order of the calls and each
//!   after its own call's mark, and is the only one that a full bus holds up (`downloads.rs`).
//!   (DeepSpeed's partitions on CUDA are copied on a stream of torch's, whose allocator then knows
//!   when a gradient's memory is free; a step only comes after that stream.)
//! - OFF-6 A gradient's memory on the device may be written from [`Engine::release`] on, or by a
//!   stream that has waited for all of its tensor's new weight: that came after the gradient.
//! - OFF-7 Of taking, submitting and discarding, one happens at a time. A call from a second thread
//!   waits for the first; it never sees half of it.
//! - OFF-8 A *deferred* step ([`Engine::submit_deferred`]) keeps its gradients, and one group of
//!   segments has its turn: all gradients that are pending of it are applied in one pass
//!   ([`crate::adam::through`]), one after the other, each with the coefficients of its own step.
//!   What an exact step does within one job is so parted over several: gradients are added to what
//!   is pending by their own job, applied by that of their segment's turn, and the weights land
//!   with the job after it. Every gradient is applied once, at most `interval - 1` jobs after its
//!   own, or the job fails. An exact step, and [`Engine::settle`], apply all that is pending.
//! - OFF-9 Of a segment some rows or columns may be *selected* (`selected.rs`): the device has
//!   their state, and steps them in every job, with the bits that the host would give them. Which
//!   ones changes behind a turn of the segment only.
//! - OFF-10 What a call lends ([`Owners`]) is held until the engine uses its memory no more. No
//!   thread but the caller's drops it, with [`Engine::returned`].
//! - OFF-11 An engine has no thread. Those of the process ([`crate::host::executor`],
//!   [`crate::host::pool`]) move the jobs of all engines on, and hand their copies over. What one
//!   engine waits for, a gradient or a drive, holds no other one up.
//!
//! Why OFF-5 marks on the calling thread: "what the stream holds now" is over once the caller
//! launches more. Why each call has a mark of its own: one mark for all that waits in the queue,
//! recorded anew, would be right as well, since it only orders more strictly, but the first copies
//! of a step would wait for the last of its backward.
//!
//! Why OFF-6 is a call of its own: a stream can be made to wait for an event only once that is
//! recorded, so for the last copy only once that is with the device, and all but the last few have
//! come by then. Within [`Engine::submit`], the step would begin that much later. After it, workers
//! step while the caller waits. The caller chooses when to wait, but no later moment is right for
//! every caller: code that writes a gradient (`grad.zero_()` in a training loop) launches that on
//! its stream and tells the engine nothing, and where it is faster than the copy, the step is wrong
//! and nothing shows it. What would let the caller go on at once is not to be had: a stream can
//! wait for a number in memory, which the engine would write when all has come, but the driver does
//! not know of such an order, may queue later copies behind that stream, and then stands still. So
//! may a host function on the stream, which must not wait for other work.
//!
//! Cost per parameter, beside that of the step itself (see [`crate::adam`]): a bf16 gradient and a
//! bf16 weight cross the bus once, 2 B each way, and the host's memory once more each. Memory, all
//! of it allocated with the engine: about 300 B per segment of 4 Mi elements (and 100 B more for
//! each step between the turns of deferred ones), and 2 kB per tensor. A step allocates nothing
//! that grows with the model (`tests/allocations.rs`). The lists of what callers lend have room for
//! as many calls as a step has had so far.

mod checks;
mod contents;
mod downloads;
mod engine;
mod generation;
mod gradients;
mod groups;
mod handover;
mod job;
#[cfg(all(test, feature = "shuttle"))]
mod model;
mod next;
mod owners;
mod panics;
mod pending;
mod ring;
mod schedule;
mod segment;
mod selected;
mod selection;
mod shared;
mod step;
mod submit;
mod uploads;

pub use contents::Weight;
pub use downloads::IN_FLIGHT;
pub use engine::{Engine, Shape};
pub use groups::INTERVAL_MAX;
pub use handover::LANDINGS_IN_FLIGHT_MAX;
pub use job::{Timing, Update};
pub use next::{Copies, Discarded};
pub use owners::{Lent, Owners};
pub use ring::{Deferral, deferral_nbytes};
pub use segment::SEGMENT_LEN;
pub use selected::{Change, OnDevice};
pub use selection::{Selectable, Selection, selection_nbytes};
